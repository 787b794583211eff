"""The products over rows with tall tiles: an upper part of 128 rows and a lower one, multiplied by the same tile of weights.

The weights are what is read most, and the parts share them. A tile whose rows fit into the upper part, or into half of it,
multiplies that alone: the rows of an expert are padded to 64, not to BM. A row's sum is that of `fused_rows.py`, step by step.
"""

import triton
import triton.language as tl

from ..launch import launched
from .fused_rows import down_tile, gathered, glu, paired_tile, split_pairs, store_rows, tile_of


# Rows of an upper part, and of the smallest one: BF16 products of Triton 3.6 need 64 in each direction.
UPPER = tl.constexpr(128)
LEAST = tl.constexpr(64)


@triton.jit
def pointers(x, order, first, rows, D, K: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """[BM, BK] at the first columns of the rows. Rows that are not there repeat the last one: no mask in the loop."""
    token = tl.load(order + first + tl.minimum(tl.arange(0, BM), rows - 1)) // K
    return x + token.to(tl.int64)[:, None] * D + tl.arange(0, BK)[None, :]


@triton.jit
def store_channels(
    acc, h, kept, first, rows, block, I, begin, last,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, WRITE: tl.constexpr, KEEP: tl.constexpr,
    DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, BM)[:, None]
    place = first.to(tl.int64) + m
    # Rounded first, as the reference does: what is kept, and what is computed again, gives the same activations.
    pre = acc.to(DTYPE)
    if WRITE:
        gate, up = split_pairs(pre, BM, BN // 2)
        c = block * (BN // 2) + tl.arange(0, BN // 2)[None, :]
        value = glu(gate.to(tl.float32), up.to(tl.float32), BETA, LINEAR_BETA).to(DTYPE)
        tl.store(h + place * I + c, value, mask=(m < rows) & (c < I))
    if KEEP:
        n, width = block * BN + tl.arange(0, BN)[None, :], 2 * (last - begin)
        tl.store(kept + place * width + n, pre, mask=(m < rows) & (n < width))


@triton.jit
def gate_up_parts(
    x, gate_up_proj, scales, order, h, kept, expert, first, rows, block, D, I, begin, last,
    K: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, WRITE: tl.constexpr, KEEP: tl.constexpr,
    HIGH: tl.constexpr, LOW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x.dtype.element_ty
    k = tl.arange(0, BK)
    left, acc = pointers(x, order, first, rows, D, K, HIGH, BK), tl.zeros((HIGH, BN), dtype=tl.float32)
    if LOW > 0:
        left_low = pointers(x, order, first + HIGH, rows - HIGH, D, K, LOW, BK)
        acc_low = tl.zeros((LOW, BN), dtype=tl.float32)
    tl.assume(D > 0)
    for done in tl.range(0, D, BK, num_stages=STAGES):
        right = paired_tile(gate_up_proj, scales, expert, begin + block * (BN // 2), done, BN, BK, DTYPE).T
        acc = tl.dot(gathered(left, k, D, done, BK, EVEN_K), right, acc, input_precision=PRECISION)
        if LOW > 0:
            acc_low = tl.dot(gathered(left_low, k, D, done, BK, EVEN_K), right, acc_low, input_precision=PRECISION)
    store_channels(
        acc, h, kept, first, rows, block, I, begin, last, BETA, LINEAR_BETA, WRITE, KEEP, DTYPE, HIGH, BN
    )  # fmt: skip
    if LOW > 0:
        store_channels(
            acc_low, h, kept, first + HIGH, rows - HIGH, block, I, begin, last,
            BETA, LINEAR_BETA, WRITE, KEEP, DTYPE, LOW, BN,
        )  # fmt: skip


@launched
@triton.jit(do_not_specialize=("tiles",))
def experts_fwd_kernel_gate_up_tall(
    x, gate_up_proj, scales, order, table, h, kept,  # as in `experts_fwd_kernel_gate_up`
    tiles, D, I, begin, last,
    K: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, WRITE: tl.constexpr, KEEP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, first, rows, block = tile_of(table, tiles, tl.cdiv(last - begin, BN // 2))
    if rows > UPPER:
        gate_up_parts(
            x, gate_up_proj, scales, order, h, kept, expert, first, rows, block, D, I, begin, last,
            K, BETA, LINEAR_BETA, WRITE, KEEP, UPPER, BM - UPPER, BN, BK, EVEN_K, PRECISION, STAGES,
        )  # fmt: skip
    elif rows > LEAST:
        gate_up_parts(
            x, gate_up_proj, scales, order, h, kept, expert, first, rows, block, D, I, begin, last,
            K, BETA, LINEAR_BETA, WRITE, KEEP, UPPER, 0, BN, BK, EVEN_K, PRECISION, STAGES,
        )  # fmt: skip
    elif rows > 0:
        gate_up_parts(
            x, gate_up_proj, scales, order, h, kept, expert, first, rows, block, D, I, begin, last,
            K, BETA, LINEAR_BETA, WRITE, KEEP, LEAST, 0, BN, BK, EVEN_K, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit
def ordered_parts(
    left, left_low, weights, scales, out, expert, first, rows, block, depth, begin, column, width,
    PAIRED: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows through descriptors of HIGH and LOW of them, times W_gate_up of the channels from `begin` on (PAIRED), or W_down^T."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    acc, at = tl.zeros((HIGH, BN), dtype=tl.float32), column + block * BN
    if LOW > 0:
        acc_low = tl.zeros((LOW, BN), dtype=tl.float32)
    tl.assume(depth > 0)
    for done in tl.range(0, depth, BK, num_stages=STAGES):
        if PAIRED:
            right = paired_tile(weights, scales, expert, begin + done // 2, at, BK, BN, DTYPE)
        else:
            right = down_tile(weights, scales, expert, at, done, BN, BK, DTYPE).T
        acc = tl.dot(left.load([first, done]), right, acc, input_precision=PRECISION)
        if LOW > 0:
            acc_low = tl.dot(left_low.load([first + HIGH, done]), right, acc_low, input_precision=PRECISION)
    store_rows(out, acc, first, rows, block, width, HIGH, BN)
    if LOW > 0:
        store_rows(out, acc_low, first + HIGH, rows - HIGH, block, width, LOW, BN)


@triton.jit
def ordered_tile(
    left, left_least, weights, scales, table, out, tiles, depth, begin, column, width,
    PAIRED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, first, rows, block = tile_of(table, tiles, tl.cdiv(width, BN))
    if rows > UPPER:
        ordered_parts(
            left, left_least, weights, scales, out, expert, first, rows, block,
            depth, begin, column, width, PAIRED, UPPER, BM - UPPER, BN, BK, PRECISION, STAGES,
        )  # fmt: skip
    elif rows > LEAST:
        ordered_parts(
            left, left_least, weights, scales, out, expert, first, rows, block,
            depth, begin, column, width, PAIRED, UPPER, 0, BN, BK, PRECISION, STAGES,
        )  # fmt: skip
    elif rows > 0:
        ordered_parts(
            left_least, left_least, weights, scales, out, expert, first, rows, block,
            depth, begin, column, width, PAIRED, LEAST, 0, BN, BK, PRECISION, STAGES,
        )  # fmt: skip


@launched
@triton.jit(do_not_specialize=("tiles",))
def experts_fwd_kernel_outputs_tall(
    h, h_least,  # descriptors [pairs, I] of UPPER and of LEAST rows
    down_proj, scales, table, out,  # as in `experts_fwd_kernel_outputs`
    tiles, I, column, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    ordered_tile(
        h, h_least, down_proj, scales, table, out, tiles, I, 0, column, width, False, BM, BN, BK, PRECISION, STAGES
    )  # fmt: skip


@launched
@triton.jit(do_not_specialize=("tiles",))
def experts_bwd_kernel_inputs_tall(
    paired, paired_least,  # descriptors [pairs, depth] of UPPER and of LEAST rows
    gate_up_proj, scales, table, out,  # as in `experts_bwd_kernel_inputs`
    tiles, depth, begin, column, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    ordered_tile(
        paired, paired_least, gate_up_proj, scales, table, out, tiles, depth, begin, column, width,
        True, BM, BN, BK, PRECISION, STAGES,
    )  # fmt: skip


@triton.jit
def inner_parts(
    dy, down_proj, scales, order, out, expert, first, rows, block, D, begin, width,
    K: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = out.dtype.element_ty
    k = tl.arange(0, BK)
    left, acc = pointers(dy, order, first, rows, D, K, HIGH, BK), tl.zeros((HIGH, BN), dtype=tl.float32)
    if LOW > 0:
        left_low = pointers(dy, order, first + HIGH, rows - HIGH, D, K, LOW, BK)
        acc_low = tl.zeros((LOW, BN), dtype=tl.float32)
    tl.assume(D > 0)
    for done in tl.range(0, D, BK, num_stages=STAGES):
        right = down_tile(down_proj, scales, expert, done, begin + block * BN, BK, BN, DTYPE)
        acc = tl.dot(gathered(left, k, D, done, BK, EVEN_K), right, acc, input_precision=PRECISION)
        if LOW > 0:
            acc_low = tl.dot(gathered(left_low, k, D, done, BK, EVEN_K), right, acc_low, input_precision=PRECISION)
    store_rows(out, acc, first, rows, block, width, HIGH, BN)
    if LOW > 0:
        store_rows(out, acc_low, first + HIGH, rows - HIGH, block, width, LOW, BN)


@launched
@triton.jit(do_not_specialize=("tiles",))
def experts_bwd_kernel_inner_tall(
    dy, down_proj, scales, order, table, out,  # as in `experts_bwd_kernel_inner`
    tiles, D, begin, width,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, first, rows, block = tile_of(table, tiles, tl.cdiv(width, BN))
    if rows > UPPER:
        inner_parts(
            dy, down_proj, scales, order, out, expert, first, rows, block, D, begin, width,
            K, UPPER, BM - UPPER, BN, BK, EVEN_K, PRECISION, STAGES,
        )  # fmt: skip
    elif rows > LEAST:
        inner_parts(
            dy, down_proj, scales, order, out, expert, first, rows, block, D, begin, width,
            K, UPPER, 0, BN, BK, EVEN_K, PRECISION, STAGES,
        )  # fmt: skip
    elif rows > 0:
        inner_parts(
            dy, down_proj, scales, order, out, expert, first, rows, block, D, begin, width,
            K, LEAST, 0, BN, BK, EVEN_K, PRECISION, STAGES,
        )  # fmt: skip
