"""A few tokens, forward alone: three launches that read the weights of the experts that were hit, each once.

A tile holds all the tokens, so that nothing is sorted: the program of the first pair of an expert multiplies every token by its
weights, and keeps the rows of the tokens that chose it. Products are nearly free beside reading the weights.
"""

import torch
import triton
import triton.language as tl

from ..launch import launched
from .fused_rows import glu, split_pairs


TOKENS = 64
# Programs that keep the memory of a GPU busy: two for each multiprocessor.
PROGRAMS = 264


@triton.jit
def expert_of(indices, pairs, E, T, K: tl.constexpr, KP: tl.constexpr, PAIRS: tl.constexpr, BT: tl.constexpr):
    """The expert of this program's pair, -1 if it is not the first of one; and each token's first slot with it, K without."""
    pair, other = tl.program_id(0), tl.arange(0, PAIRS)
    expert = tl.load(indices + pair)
    same = tl.load(indices + other, mask=other < pairs, other=-1) == expert
    taken = tl.sum((same & (other < pair)).to(tl.int32), axis=0)
    mine = tl.where((expert >= 0) & (expert < E) & (taken == 0), expert, -1)
    t, slot = tl.arange(0, BT)[:, None], tl.arange(0, KP)[None, :]
    chosen = tl.load(indices + t * K + slot, mask=(t < T) & (slot < K), other=-1)
    return mine, tl.min(tl.where(chosen == expert, slot, K), axis=1)


@launched
@triton.jit(do_not_specialize=("T",))
def experts_fwd_kernel_decode_gate_up(
    x,  # [T, D]
    indices,  # [T, K]
    gate_up_proj,  # [E, 2I, D]
    h,  # [T, K, I]: in the first slot of every token and expert
    T, D, I, E,
    K: tl.constexpr, KP: tl.constexpr, PAIRS: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, slot = expert_of(indices, T * K, E, T, K, KP, PAIRS, BT)
    if expert >= 0:
        BC: tl.constexpr = BN // 2
        t, n, k = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BK)
        channel = tl.minimum(tl.program_id(1) * BC + n // 2, I - 1)
        left = x + t[:, None] * D + k[None, :]
        right = gate_up_proj + expert * 2 * D * I + ((n % 2) * I + channel).to(tl.int64)[None, :] * D + k[:, None]
        acc = tl.zeros((BT, BN), dtype=tl.float32)
        for done in tl.range(0, D, BK, num_stages=STAGES):
            tokens = tl.load(left, mask=(t[:, None] < T) & (k[None, :] < D - done), other=0.0)
            weights = tl.load(right, mask=k[:, None] < D - done, other=0.0).to(tokens.dtype)
            acc = tl.dot(tokens, weights, acc, input_precision=PRECISION)
            left += BK
            right += BK
        gate, up = split_pairs(acc.to(h.dtype.element_ty), BT, BC)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        place = h + (t * K + slot)[:, None] * I + c[None, :]
        value = glu(gate.to(tl.float32), up.to(tl.float32), BETA, LINEAR_BETA).to(h.dtype.element_ty)
        tl.store(place, value, mask=(slot[:, None] < K) & (c[None, :] < I))


@launched
@triton.jit(do_not_specialize=("T",))
def experts_fwd_kernel_decode_down(
    h,  # [T, K, I]
    indices,  # [T, K]
    down_proj,  # [E, D, I]
    rows,  # [parts, T, K, D] FP32: each part sums over `depth` of the I channels
    T, D, I, E, depth,
    K: tl.constexpr, KP: tl.constexpr, PAIRS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, slot = expert_of(indices, T * K, E, T, K, KP, PAIRS, BT)
    if expert >= 0:
        part = tl.program_id(2)
        t, n, k = tl.arange(0, BT), tl.program_id(1) * BN + tl.arange(0, BN), part * depth + tl.arange(0, BK)
        there = slot[:, None] < K
        left = h + (t * K + slot)[:, None] * I + k[None, :]
        right = down_proj + expert * D * I + tl.minimum(n, D - 1).to(tl.int64)[None, :] * I + k[:, None]
        acc = tl.zeros((BT, BN), dtype=tl.float32)
        for done in tl.range(0, depth, BK, num_stages=STAGES):
            tokens = tl.load(left, mask=there & (k[None, :] < I - done), other=0.0)
            weights = tl.load(right, mask=k[:, None] < I - done, other=0.0).to(tokens.dtype)
            acc = tl.dot(tokens, weights, acc, input_precision=PRECISION)
            left += BK
            right += BK
        place = rows + ((part * T + t) * K + slot).to(tl.int64)[:, None] * D + n[None, :]
        tl.store(place, acc, mask=there & (n[None, :] < D))


@launched
@triton.jit(do_not_specialize=("T",))
def experts_fwd_kernel_decode_combine(
    rows,  # [parts, T, K, D] FP32
    indices, weights,  # [T, K]
    y,  # [T, D]
    T, D, E,
    K: tl.constexpr, KP: tl.constexpr, PARTS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    t, c = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    slots = tl.arange(0, KP)
    all_experts = tl.load(indices + t * K + slots, mask=slots < K, other=-1)
    total = tl.zeros((BC,), dtype=tl.float32)
    for slot in tl.static_range(K):
        expert = tl.load(indices + t * K + slot)
        present = (expert >= 0) & (expert < E)
        source = tl.min(
            tl.where(all_experts == expert, slots, K), axis=0
        )  # of several slots with it, the first has the row
        inside = c < tl.where(present, D, 0)
        row = tl.zeros((BC,), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            row += tl.load(rows + ((part * T + t) * K + source).to(tl.int64) * D + c, mask=inside, other=0.0)
        p = tl.load(weights + t * K + slot, mask=present, other=0.0).to(tl.float32)
        total += row.to(y.dtype.element_ty).to(tl.float32) * p
    tl.store(y + t.to(tl.int64) * D + c, total.to(y.dtype.element_ty), mask=c < D)


def tiles(pairs: int, D: int, I: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Columns of a program in the first and in the second product, steps of both, and parts of the second sum."""
    if dtype == torch.float32:
        return 64, 64, 32, 1
    wide = pairs * triton.cdiv(2 * I, 128) >= PROGRAMS, pairs * triton.cdiv(D, 128) >= PROGRAMS
    first, second = (128 if it_is else 64 for it_is in wide)
    parts = 1
    while parts < 8 and pairs * triton.cdiv(D, second) * parts < PROGRAMS and 2 * parts * 64 <= I:
        parts *= 2
    return first, second, 64, parts


def launch_decode(tensors: list[torch.Tensor], beta, linear_beta, precision: str) -> torch.Tensor:
    """x, indices, weights and the projections, contiguous; the projections in any dtype, cast as they are read."""
    x, indices, weights, gate_up_proj, down_proj = tensors
    (T, D), k, (E, _, I) = x.shape, indices.shape[1], down_proj.shape
    first, second, BK, parts = tiles(T * k, D, I, x.dtype)
    depth = triton.cdiv(triton.cdiv(I, parts), BK) * BK
    h, y = x.new_empty(T, k, I), torch.empty_like(x)
    rows = x.new_empty(parts, T, k, D, dtype=torch.float32)
    KP = triton.next_power_of_2(k)
    whom = {"K": k, "KP": KP, "PAIRS": triton.next_power_of_2(T * k)}
    tile = {
        "BT": TOKENS,
        "BK": BK,
        "PRECISION": precision,
        "STAGES": 1 if x.dtype == torch.float32 else 4,
        "num_warps": 4,
    }
    experts_fwd_kernel_decode_gate_up[(T * k, triton.cdiv(2 * I, first))](
        x, indices, gate_up_proj, h, T, D, I, E, BETA=beta, LINEAR_BETA=linear_beta, BN=first, **whom, **tile
    )  # fmt: skip
    experts_fwd_kernel_decode_down[(T * k, triton.cdiv(D, second), parts)](
        h, indices, down_proj, rows, T, D, I, E, depth, BN=second, **whom, **tile
    )  # fmt: skip
    BC = min(1024, triton.next_power_of_2(D))
    experts_fwd_kernel_decode_combine[(T, triton.cdiv(D, BC))](
        rows, indices, weights, y, T, D, E, K=k, KP=KP, PARTS=parts, BC=BC, num_warps=4
    )  # fmt: skip
    return y
