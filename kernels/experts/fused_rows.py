"""The products over rows in expert order: forward, the gradients of the activations, and the sums over a token's slots.

A program has one tile of at most BM rows of one expert and BN columns. The gate and the up row of a channel are
neighbouring columns of a tile, so that one product makes both and a thread holds both: "paired" columns are g_0 u_0 g_1 u_1 ...
Weights, and rows that lie in order, come through tensor descriptors: the copy engine fetches a tile without the threads, zeros
where there is nothing, and a descriptor [E, I, 2, D] makes neighbours of the two rows of a channel. Every program runs over the whole inner dimension in steps of BK: a row's bits do not depend on its neighbours.
That this dimension is not empty is said to the compiler: it would set the sums to zero on a way around the loop, and then wait
for each product of a step before it starts the next one ("wgmma serialized").
"""

import triton
import triton.language as tl

from ..launch import launched
from ..mxfp4.fused_tile import dequantized
from .fused_sort import GROUP


LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(z):
    """The square of an inverse root: a division costs three more instructions."""
    root = tl.rsqrt(1.0 + tl.exp2(-z * LOG2E))
    return root * root


@triton.jit
def capped(x, CAP: tl.constexpr):
    """CAP tanh(x / CAP), or x, and the derivative."""
    if CAP is None:
        value, slope = x, tl.full(x.shape, 1.0, tl.float32)
    else:
        tanh = sigmoid(x * (2.0 / CAP)) * 2.0 - 1.0
        value, slope = tanh * CAP, 1.0 - tanh * tanh
    return value, slope


@triton.jit
def glu(gate, up, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    return capped(gate, BETA)[0] * sigmoid(gate) * capped(up, LINEAR_BETA)[0]


@triton.jit
def glu_gradients(gate, up, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """The value, and its derivatives by gate and up."""
    s = sigmoid(gate)
    linear, linear_slope = capped(gate, BETA)
    value, slope = capped(up, LINEAR_BETA)
    situ = linear * s
    return situ * value, (linear_slope * s + situ * (1.0 - s)) * value, situ * slope


@triton.jit
def split_pairs(paired, BM: tl.constexpr, BC: tl.constexpr):
    return tl.split(tl.reshape(paired, (BM, BC, 2)))


@triton.jit
def tile_of(table, tiles, columns):
    """Expert, first row and number of rows of this program's tile, and its block of columns.

    GROUP tiles stand next to each other with the same columns, of mostly one expert: they share its weights in L2.
    """
    program, group = tl.program_id(0), GROUP * columns
    tile = program // group * GROUP + program % GROUP
    expert = tl.load(table + tile)
    first = tl.load(table + tiles + tile)
    return expert, first, tl.load(table + 2 * tiles + tile), program % group // GROUP


@triton.jit
def gathered(rows, k, depth, done, BK: tl.constexpr, EVEN_K: tl.constexpr):
    """[BM, BK] of the rows at the pointers [BM, BK], a step that begins at `done`. EVEN_K: depth is a multiple of BK."""
    if EVEN_K:
        return tl.load(rows + done)
    return tl.load(rows + done, mask=k[None, :] < depth - done, other=0.0)


@triton.jit
def paired_tile(
    gate_up_proj, scales, expert, channel, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr
):
    """[ROWS, COLUMNS] of paired rows from `channel` on, through descriptors; `scales` of MXFP4, None of plain weights."""
    if scales is None:
        return tl.reshape(gate_up_proj.load([expert, channel, 0, column]), (ROWS, COLUMNS))
    else:
        codes = tl.reshape(gate_up_proj.load([expert, channel, 0, column // 2]), (ROWS, COLUMNS // 2))
        of_blocks = tl.reshape(scales.load([expert, column // 32, 0, channel]), (COLUMNS // 32, 2, ROWS // 2))
        of_rows = tl.reshape(tl.permute(of_blocks, (2, 1, 0)), (ROWS, COLUMNS // 32))
        return dequantized(codes, of_rows, ROWS, COLUMNS, DTYPE)


@triton.jit
def down_tile(down_proj, scales, expert, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """As `paired_tile`, of rows in their order."""
    if scales is None:
        return tl.reshape(down_proj.load([expert, row, column]), (ROWS, COLUMNS))
    else:
        codes = tl.reshape(down_proj.load([expert, row, column // 2]), (ROWS, COLUMNS // 2))
        of_blocks = tl.reshape(scales.load([expert, column // 32, row]), (COLUMNS // 32, ROWS))
        return dequantized(codes, tl.permute(of_blocks, (1, 0)), ROWS, COLUMNS, DTYPE)


@launched
@triton.jit(do_not_specialize=("tiles",))
def experts_fwd_kernel_gate_up(
    x,  # [T, D]
    gate_up_proj,  # descriptor [E, I, 2, D], of bytes [E, I, 2, D / 2]: gate and up row of a channel are neighbours
    scales,  # descriptor [E, D / 32, 2, I] of bytes, or None
    order, table,
    h,  # [pairs, I] (WRITE)
    kept,  # [pairs, 2 (last - begin)], paired (KEEP)
    tiles, D, I, begin, last,
    K: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, WRITE: tl.constexpr, KEEP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The channels begin ... last - 1; these are all where h is written."""
    BC: tl.constexpr = BN // 2
    expert, first, rows, block = tile_of(table, tiles, tl.cdiv(last - begin, BC))
    if rows > 0:
        m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
        # Rows that are not there repeat the last one: no mask in the loop.
        token = tl.load(order + first + tl.minimum(m, rows - 1)) // K
        left = x + token.to(tl.int64)[:, None] * D + k[None, :]
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        tl.assume(D > 0)
        for done in tl.range(0, D, BK, num_stages=STAGES):
            right = paired_tile(gate_up_proj, scales, expert, begin + block * BC, done, BN, BK, x.dtype.element_ty)
            acc = tl.dot(gathered(left, k, D, done, BK, EVEN_K), right.T, acc, input_precision=PRECISION)
        place = first.to(tl.int64) + m[:, None]
        # Rounded first, as the reference does: what is kept, and what is computed again, gives the same activations.
        pre = acc.to(x.dtype.element_ty)
        if WRITE:
            gate, up = split_pairs(pre, BM, BC)
            c = block * BC + tl.arange(0, BC)
            value = glu(gate.to(tl.float32), up.to(tl.float32), BETA, LINEAR_BETA).to(h.dtype.element_ty)
            tl.store(h + place * I + c[None, :], value, mask=(m[:, None] < rows) & (c[None, :] < I))
        if KEEP:
            n += 2 * block * BC
            width = 2 * (last - begin)
            inside = (m[:, None] < rows) & (n[None, :] < width)
            tl.store(kept + place * width + n[None, :], pre, mask=inside)


@triton.jit
def store_rows(out, acc, first, rows, block, width, BM: tl.constexpr, BN: tl.constexpr):
    m, n = tl.arange(0, BM)[:, None], block * BN + tl.arange(0, BN)[None, :]
    place = out + (first.to(tl.int64) + m) * width + n
    tl.store(place, acc.to(out.dtype.element_ty), mask=(m < rows) & (n < width))


@launched
@triton.jit(do_not_specialize=("tiles",))
def experts_fwd_kernel_outputs(
    h,  # descriptor [pairs, I]
    down_proj,  # descriptor [E, D, I], of bytes [E, D, I / 2]
    scales,  # descriptor [E, I / 32, D] of bytes, or None
    table,
    out,  # [pairs, width]: the columns from `column` on of h W_down^T
    tiles, I, column, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, first, rows, block = tile_of(table, tiles, tl.cdiv(width, BN))
    if rows > 0:
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        tl.assume(I > 0)
        for done in tl.range(0, I, BK, num_stages=STAGES):
            right = down_tile(down_proj, scales, expert, column + block * BN, done, BN, BK, out.dtype.element_ty)
            acc = tl.dot(h.load([first, done]), right.T, acc, input_precision=PRECISION)
        store_rows(out, acc, first, rows, block, width, BM, BN)


@launched
@triton.jit(do_not_specialize=("tiles",))
def experts_bwd_kernel_inner(
    dy,  # [T, D]
    down_proj, scales,  # as above
    order, table,
    out,  # [pairs, width]: the channels from `begin` on of dy W_down
    tiles, D, begin, width,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, first, rows, block = tile_of(table, tiles, tl.cdiv(width, BN))
    if rows > 0:
        m, k = tl.arange(0, BM), tl.arange(0, BK)
        token = tl.load(order + first + tl.minimum(m, rows - 1)) // K
        left = dy + token.to(tl.int64)[:, None] * D + k[None, :]
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        tl.assume(D > 0)
        for done in tl.range(0, D, BK, num_stages=STAGES):
            right = down_tile(down_proj, scales, expert, done, begin + block * BN, BK, BN, out.dtype.element_ty)
            acc = tl.dot(gathered(left, k, D, done, BK, EVEN_K), right, acc, input_precision=PRECISION)
        store_rows(out, acc, first, rows, block, width, BM, BN)


@launched
@triton.jit(do_not_specialize=("tiles",))
def experts_bwd_kernel_inputs(
    paired,  # descriptor [pairs, depth]: gradients of the channels from `begin` on
    gate_up_proj, scales,  # as above
    table,
    out,  # [pairs, width]: the columns from `column` on of paired W_gate_up
    tiles, depth, begin, column, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, first, rows, block = tile_of(table, tiles, tl.cdiv(width, BN))
    if rows > 0:
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        tl.assume(depth > 0)
        for done in tl.range(0, depth, BK, num_stages=STAGES):
            channel, at = begin + done // 2, column + block * BN
            right = paired_tile(gate_up_proj, scales, expert, channel, at, BK, BN, out.dtype.element_ty)
            acc = tl.dot(paired.load([first, done]), right, acc, input_precision=PRECISION)
        store_rows(out, acc, first, rows, block, width, BM, BN)


@launched
@triton.jit(do_not_specialize=("first_pair",))
def experts_fwd_kernel_glu(
    paired,  # [pairs, 2C], of all tokens
    inverse,  # [pairs]: their places
    order, offsets,  # of a part of the tokens, whose pairs start at first_pair
    h,  # [pairs of the part, I]: channels from `begin` on
    first_pair, E, C, I, begin,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row, pairs = tl.program_id(0) * BM + tl.arange(0, BM), tl.load(offsets + E)
    if tl.program_id(0) * BM < pairs:
        there = (row < pairs)[:, None]
        pair = first_pair + tl.load(order + row, mask=row < pairs, other=0)
        source = tl.load(inverse + pair, mask=row < pairs, other=0).to(tl.int64)[:, None]
        c, n = tl.arange(0, BC)[None, :], tl.arange(0, 2 * BC)[None, :]
        for first in tl.range(0, C, BC):
            pre = tl.load(paired + source * 2 * C + 2 * first + n, mask=there & (n < 2 * (C - first)), other=0.0)
            gate, up = split_pairs(pre.to(tl.float32), BM, BC)
            value = glu(gate, up, BETA, LINEAR_BETA).to(h.dtype.element_ty)
            place = h + row.to(tl.int64)[:, None] * I + begin + first + c
            tl.store(place, value, mask=there & (c < C - first))


@launched
@triton.jit
def experts_bwd_kernel_glu(
    paired,  # [pairs, 2C]: in, gate and up; out, their gradients
    h,  # [pairs, C]: in, dy W_down; out, the activation times the router's weight
    weights,  # [T, K]
    order, offsets,
    d_weights,  # [pairs] FP32, by place
    E, C,
    BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """In place: each element is read and written by one program. The rows' products <h, dy W_down> are on the way."""
    row, pairs = tl.program_id(0) * BM + tl.arange(0, BM), tl.load(offsets + E)
    if tl.program_id(0) * BM < pairs:
        there = (row < pairs)[:, None]
        p = tl.load(weights + tl.load(order + row, mask=row < pairs, other=0)).to(tl.float32)[:, None]
        place, c, n = row.to(tl.int64)[:, None], tl.arange(0, BC)[None, :], tl.arange(0, 2 * BC)[None, :]
        total = tl.zeros((BM, BC), dtype=tl.float32)
        for first in tl.range(0, C, BC):
            pointers = paired + place * 2 * C + 2 * first + n
            inside, inside_h = there & (n < 2 * (C - first)), there & (c < C - first)
            gate, up = split_pairs(tl.load(pointers, mask=inside, other=0.0).to(tl.float32), BM, BC)
            pointers_h = h + place * C + first + c
            dh = tl.load(pointers_h, mask=inside_h, other=0.0).to(tl.float32)
            value, by_gate, by_up = glu_gradients(gate, up, BETA, LINEAR_BETA)
            total += value * dh
            dh *= p
            gradients = tl.reshape(tl.join(dh * by_gate, dh * by_up), (BM, 2 * BC))
            tl.store(pointers, gradients.to(paired.dtype.element_ty), mask=inside)
            tl.store(pointers_h, (value * p).to(h.dtype.element_ty), mask=inside_h)
        tl.store(d_weights + row, tl.sum(total, axis=1), mask=row < pairs)


@launched
@triton.jit(do_not_specialize=("T",))
def experts_kernel_combine(
    rows,  # [pairs, width]
    inverse,  # [T, K]
    weights,  # [T, K] (WEIGHTED)
    y,  # [T, D]: columns first_column ... are written, or added to (ADD)
    T, D, first_column, width,
    K: tl.constexpr, WEIGHTED: tl.constexpr, ADD: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)[:, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    there, inside = t < T, (t < T) & (c < width)
    place = y + t * D + first_column + c
    if ADD:
        total = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    else:
        total = tl.zeros((BT, BC), dtype=tl.float32)
    for slot in tl.static_range(K):
        at = tl.load(inverse + t * K + slot, mask=there, other=-1)  # [BT, 1]
        row = tl.load(rows + at.to(tl.int64) * width + c, mask=inside & (at >= 0), other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights + t * K + slot, mask=there & (at >= 0), other=0.0).to(tl.float32)
        total += row
    tl.store(place, total.to(y.dtype.element_ty), mask=inside)


@launched
@triton.jit(do_not_specialize=("pairs", "parts"))
def experts_bwd_kernel_router(
    partial,  # [parts, pairs] FP32, by place
    inverse, d_weights,  # [pairs]
    pairs, parts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(inverse + pair, mask=pair < pairs, other=-1)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.range(0, parts):
        total += tl.load(partial + tl.cast(part, tl.int64) * pairs + at, mask=at >= 0, other=0.0)
    tl.store(d_weights + pair, total.to(d_weights.dtype.element_ty), mask=pair < pairs)
