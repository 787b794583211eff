"""The router on a GPU: one launch forward, one more for a histogram, one backward.

A program of the first is one warp with all the experts of one token in registers. Each lane makes a list of its three
best, and the best head of all lists is taken top_k + 1 times; once a list has run out, all are made anew from the experts
that are left (at 896 experts and top-17 for one random token in fifteen). Values are compared as integers in the order of
the floats, so that every choice is exact and ties go to the lowest expert.
"""

import math

import torch
import triton
import triton.language as tl

from ..dispatch import on_device_of
from ..launch import Launched, launched


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_EXPERTS = 1024
MOST_CHOSEN = 32
LANES = 32
# Elements of d_logits that a program of the backward pass writes.
BACKWARD_TILE = 4096
# A program that fills the histogram has this many counters in shared memory, with which three fit on a multiprocessor; at
# most a row of 128 bytes of FP32 logits; a tile of at least one logit for each thread, or else two would count one; and at
# least so many tokens, to be worth the clearing and adding of its counters.
COUNTERS = 8192
RESERVE = tl.constexpr(f"{{ .shared .align 16 .b32 router_counters[{COUNTERS}]; mov.u32 $0, router_counters; }}")
MOST_TOGETHER = 32
HISTOGRAM_THREADS, HISTOGRAM_TILE = 512, 2048
LEAST_SHARE = 1024
HISTOGRAM_PROGRAMS = 132 * 3  # run at once on an H200
LOG2E = tl.constexpr(1.4426950408889634)
# Keys outside those of the floats from -inf (-0x7F800001) to NOT_A_NUMBER, which torch ranks above +inf.
RUN_OUT = tl.constexpr(0x7FFFFFFF)
NOT_A_NUMBER = tl.constexpr(0x7FFFFFFE)
NO_EXPERT = tl.constexpr(-0x80000000)


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(-z)): the square of an inverse root, improved by a step of Newton's, is half the price of a division.

    The power stays below 2^126 (z > -87) so that the step never multiplies infinity by zero.
    """
    power = tl.exp2(tl.minimum(-z * LOG2E, 126.0, propagate_nan=tl.PropagateNan.ALL))
    root = tl.rsqrt(1.0 + power)
    score = root * root
    return tl.fma(score, tl.fma(-1.0 - power, score, 1.0), score)


@triton.jit
def ordered(x):
    """Integers in the order of the floats x, which are never -0.0: a score is not, nor is its sum with anything."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), NOT_A_NUMBER)  # noqa: PLR0124


@triton.jit
def float_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best(keys, place, J: tl.constexpr, L: tl.constexpr, C: tl.constexpr):
    """Best key of every lane and its expert, both [L], and the keys without it. In a lane, places ascend as experts do."""
    key = tl.max(tl.max(keys, axis=2), axis=0)
    at = tl.where(keys == key[None, :, None], place, J * C)
    at = tl.min(tl.min(at, axis=2), axis=0)
    left = tl.where(place == at[None, :, None], NO_EXPERT, keys)
    return key, at // C * (L * C) + tl.arange(0, L) * C + at % C, left


@triton.jit
def lists(keys, place, J: tl.constexpr, L: tl.constexpr, C: tl.constexpr):
    """The best three keys of every lane and their experts, all [L]."""
    key_1, expert_1, left = best(keys, place, J, L, C)
    key_2, expert_2, left = best(left, place, J, L, C)
    key_3, expert_3, left = best(left, place, J, L, C)
    return key_1, key_2, key_3, expert_1, expert_2, expert_3


@triton.jit
def choose_experts(
    keys, place, expert,  # [J, L, C]
    J: tl.constexpr, L: tl.constexpr, C: tl.constexpr, TAKE: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """The TAKE best experts in descending order, [KP], and the key of the last of them."""
    chosen = tl.zeros((KP,), dtype=tl.int32)
    key, taken = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    key_1, key_2, key_3, expert_1, expert_2, expert_3 = lists(keys, place, J, L, C)
    for i in range(TAKE):
        head = tl.max(key_1, axis=0)
        if head == RUN_OUT:
            left = tl.where((keys < key) | ((keys == key) & (expert > taken)), keys, NO_EXPERT)
            key_1, key_2, key_3, expert_1, expert_2, expert_3 = lists(left, place, J, L, C)
            head = tl.max(key_1, axis=0)
        key = head
        taken = tl.min(tl.where(key_1 == head, expert_1, J * L * C), axis=0)
        chosen = tl.where(tl.arange(0, KP) == i, taken, chosen)
        won = expert_1 == taken
        key_1, expert_1 = tl.where(won, key_2, key_1), tl.where(won, expert_2, expert_1)
        key_2, expert_2 = tl.where(won, key_3, key_2), tl.where(won, expert_3, expert_2)
        key_3 = tl.where(won, RUN_OUT, key_3)
    return chosen, key


@triton.jit
def bin_range(bias, e, E: tl.constexpr, inverse_bins):
    """`balance.histogram_range`: lower edge and width of the bins."""
    inside = e < E
    lowest = tl.min(tl.load(bias + e, mask=inside, other=float("inf")), axis=0)
    highest = tl.max(tl.load(bias + e, mask=inside, other=float("-inf")), axis=0)
    return lowest - 1.0, (highest - lowest + 2.0) * inverse_bins


@launched
@triton.jit
def router_fwd_kernel(
    logits,  # [N, E]
    bias,  # [E] FP32
    token_mask,  # [N] (MASKED)
    indices, weights, scores,  # [N, K] int64, FP32, FP32
    counts,  # [E] int64
    cutoffs,  # [N] FP32
    scaling,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, J: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
    RENORMALIZE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    logits += token * E
    # Loaded as a row: a load of three dimensions would give a lane other experts than [J, L, C] says.
    e = tl.arange(0, J * L * C)
    score = sigmoid(tl.load(logits + e, mask=e < E, other=0.0).to(tl.float32))
    biased = tl.reshape(score + tl.load(bias + e, mask=e < E, other=0.0), (J, L, C))
    j, c = tl.arange(0, J)[:, None, None], tl.arange(0, C)[None, None, :]
    expert = j * (L * C) + tl.arange(0, L)[None, :, None] * C + c
    keys = tl.where(expert < E, ordered(biased), NO_EXPERT)
    chosen, last = choose_experts(keys, j * C + c, expert, J, L, C, K + 1 if K < E else K, KP)

    slot = tl.arange(0, KP)
    used = slot < K
    p = sigmoid(tl.load(logits + chosen, mask=used, other=0.0).to(tl.float32))  # the very scores of the first load
    p = tl.where(used, p, 0.0)
    w = p
    if RENORMALIZE:
        w = tl.div_rn(p, tl.broadcast_to(tl.sum(p, axis=0) + 1e-20, (KP,)))
    tl.store(indices + token * K + slot, chosen.to(tl.int64), mask=used)
    tl.store(weights + token * K + slot, w * scaling, mask=used)
    tl.store(scores + token * K + slot, p, mask=used)
    tl.store(cutoffs + token, float_of(last) if K < E else float("-inf"))

    counted = 1
    if MASKED:
        counted = tl.load(token_mask + token).to(tl.int32)
    tl.atomic_add(counts + chosen, tl.full((KP,), 1, tl.int64), mask=slot < K * counted, sem="relaxed")


@triton.jit
def reserved_counters(anything):
    """Address of COUNTERS integers of shared memory beside what Triton reserves for itself.

    Triton can address no shared memory, and its histogram counts bits: 32 instructions for 32 values and 1,024 bins.
    """
    return tl.inline_asm_elementwise(
        RESERVE, "=r,r", [anything], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def clear_four(at):
    return tl.inline_asm_elementwise(
        "st.shared.v4.b32 [$1], {0, 0, 0, 0}; mov.u32 $0, 0;",
        "=r,r", [at], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def add_one(at, counted):
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p red.shared.add.u32 [$1], 1; mov.u32 $0, 0; }",
        "=r,r,r", [at, counted], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def read_one(at):
    return tl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];",
        "=r,r", [at], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@launched
@triton.jit(do_not_specialize=("N", "share", "bins"))
def router_histogram_kernel(
    logits,  # [N, E]
    bias,  # [E] FP32
    token_mask,  # [N] (MASKED)
    cutoffs,  # [N] FP32
    histogram,  # [E, bins] int64
    N, share, bins, inverse_bins, stride_e, stride_bin,
    E: tl.constexpr, EP: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr, THREADS: tl.constexpr,
    MASKED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Adds the required biases of BE experts in `share` tokens, counted in shared memory first (SHARED).

    The scores are those of the first launch: the same instructions give the same bits.
    """
    low, width = bin_range(bias, tl.arange(0, EP), E, inverse_bins)
    e, row = tl.arange(0, BE)[None, :], tl.arange(0, BT)[:, None]
    experts = tl.minimum(E - tl.program_id(0) * BE, BE)
    first = tl.program_id(1).to(tl.int64) * share
    tokens = tl.minimum(N - first, share).to(tl.int32)
    logits += first * E + tl.program_id(0) * BE
    cutoffs += first
    token_mask += first
    histogram += tl.program_id(0).to(tl.int64) * BE * stride_e
    if SHARED:
        counters = reserved_counters(experts)
        for i in range(0, BE * bins, 4 * THREADS):
            clear_four(counters + 4 * (i + 4 * tl.arange(0, THREADS)))
        tl.debug_barrier()
    for i in range(0, tokens, BT):
        counted = row < tokens - i  # [BT, 1]
        here = counted & (e < experts)
        cutoff = tl.load(cutoffs + i + row, mask=counted, other=0.0)
        score = sigmoid(tl.load(logits + row * E + e, mask=here, other=0.0).to(tl.float32))
        if MASKED:
            here = here & (tl.load(token_mask + i + row, mask=counted, other=0) != 0)
        at = tl.div_rn(cutoff - score - low, tl.broadcast_to(width, (BT, BE)))
        # Truncation does as well as floor: what is below 0 becomes 0.
        at = tl.minimum(tl.maximum(at.to(tl.int32), 0), bins - 1)
        if SHARED:
            add_one(counters + 4 * (e * bins + at), here.to(tl.int32))
        else:
            place = histogram + e.to(tl.int64) * stride_e + at.to(tl.int64) * stride_bin
            tl.atomic_add(place, tl.full((BT, BE), 1, tl.int64), mask=here, sem="relaxed")
        logits += BT * E
    if SHARED:
        tl.debug_barrier()
        for i in range(0, experts * bins, THREADS):
            counter = i + tl.arange(0, THREADS)
            found = read_one(counters + 4 * counter)
            place = histogram + (counter // bins).to(tl.int64) * stride_e + (counter % bins).to(tl.int64) * stride_bin
            tl.atomic_add(place, found.to(tl.int64), mask=(counter < experts * bins) & (found != 0), sem="relaxed")


@launched
@triton.jit(do_not_specialize=("N",))
def router_bwd_kernel(
    indices, scores, d_weights,  # [N, K]
    d_logits,  # [N, E]
    N, scaling,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BT: tl.constexpr, WIDTH: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BT
    i = tl.arange(0, WIDTH)
    zero = tl.zeros((WIDTH,), dtype=tl.float32).to(d_logits.dtype.element_ty)
    tl.store(d_logits + first * E + i, zero, mask=i < tl.minimum(N - first, BT) * E)
    token, slot = first + tl.arange(0, BT)[:, None], tl.arange(0, KP)[None, :]
    place, used = token * K + slot, (token < N) & (slot < K)
    expert = tl.load(indices + place, mask=used, other=0)
    p = tl.load(scores + place, mask=used, other=0.0)  # [BT, KP]
    d = tl.load(d_weights + place, mask=used, other=0.0)
    if RENORMALIZE:
        total = tl.sum(p, axis=1)[:, None] + 1e-20
        d = (d - tl.sum(d * p, axis=1)[:, None] / total) / total
    d *= scaling * p * (1.0 - p)
    # The zeros of another thread must not come after these.
    tl.debug_barrier()
    tl.store(d_logits + token * E + expert, d.to(d_logits.dtype.element_ty), mask=used)


def supports(logits, bias, top_k, num_groups, topk_group) -> str | None:
    """Why the kernels cannot take these inputs, or None when they can."""
    if logits.dtype not in DTYPES:
        return f"logits: expected bfloat16, float16 or float32, got {logits.dtype}"
    if bias.dtype != torch.float32:
        return f"bias: expected float32, got {bias.dtype}"
    if logits.shape[1] > MOST_EXPERTS:
        return f"logits: expected at most {MOST_EXPERTS} experts, got {logits.shape[1]}"
    if top_k > MOST_CHOSEN:
        return f"top_k: expected at most {MOST_CHOSEN}, got {top_k}"
    if topk_group < num_groups:
        return f"topk_group: expected all {num_groups} groups, got {topk_group}"
    return None


def _tile(E: int, element_size: int) -> dict[str, int]:
    """How a warp holds its experts: [J, L lanes, C neighbours], where C are one load of at most 16 bytes."""
    padded = max(LANES, triton.next_power_of_2(E))
    C = min(math.gcd(E, 16 // element_size), padded // LANES)
    return {"J": padded // (LANES * C), "L": LANES, "C": C}


def histogram_grid(N: int, E: int, bins: int) -> tuple[tuple[int, int], int, int, int]:
    """The grid, blocks of experts by shares of tokens; tokens of a share; experts of a block; tokens at a time.

    As many experts as there is room for their counters, or any number where one expert's find none; as many programs as
    run at once.
    """
    room = COUNTERS // bins or MOST_TOGETHER
    BE = min(1 << (room.bit_length() - 1), MOST_TOGETHER, triton.next_power_of_2(E))
    BT = HISTOGRAM_TILE // BE
    blocks = triton.cdiv(E, BE)
    shares = min(max(1, HISTOGRAM_PROGRAMS // blocks), triton.cdiv(N, LEAST_SHARE))
    share = BT * triton.cdiv(N, shares * BT)
    return (blocks, triton.cdiv(N, share)), share, BE, BT


def launch_forward(logits, bias, top_k, renormalize, scaling, token_mask, histogram):
    """indices, weights, counts, cutoff as in `api.route`, and the scores [N, top_k] that the backward pass needs."""
    N, E = logits.shape
    indices = logits.new_empty(N, top_k, dtype=torch.int64)
    weights, scores = (logits.new_empty(N, top_k, dtype=torch.float32) for _ in range(2))
    counts = torch.zeros(E, dtype=torch.int64, device=logits.device)
    cutoff = logits.new_empty(N, dtype=torch.float32)
    if N:
        # Fused multiply-adds off: score + bias would otherwise add the bias to a score that is not yet rounded.
        router_fwd_kernel[(N,)](
            logits, bias, logits if token_mask is None else token_mask, indices, weights, scores, counts, cutoff,
            scaling, E=E, K=top_k, KP=triton.next_power_of_2(top_k + 1), **_tile(E, logits.element_size()),
            RENORMALIZE=renormalize, MASKED=token_mask is not None, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        if histogram is not None:
            launch_histogram(logits, bias, token_mask, cutoff, histogram)
    return indices, weights, counts, cutoff, scores


def launch_histogram(logits, bias, token_mask, cutoff, histogram):
    """Adds the required biases of the counted tokens to `histogram` [E, bins]."""
    (N, E), bins = logits.shape, histogram.shape[1]
    grid, share, BE, BT = histogram_grid(N, E, bins)
    compiled = isinstance(router_histogram_kernel, Launched)  # the interpreter knows no assembly
    # The inverse of `bins` is what torch multiplies by on a GPU where it divides by a number.
    router_histogram_kernel[grid](
        logits, bias, logits if token_mask is None else token_mask, cutoff, histogram,
        N, share, bins, 1 / bins, *histogram.stride(), E=E, EP=triton.next_power_of_2(E), BE=BE, BT=BT,
        THREADS=HISTOGRAM_THREADS, MASKED=token_mask is not None,
        SHARED=bins <= COUNTERS and compiled and torch.version.hip is None,
        num_warps=HISTOGRAM_THREADS // LANES, enable_fp_fusion=False,
    )  # fmt: skip


def launch_backward(indices, scores, d_weights, num_experts, dtype, renormalize, scaling):
    """The gradient of the logits, [N, num_experts] of `dtype`."""
    N, top_k = indices.shape
    d_logits = d_weights.new_empty(N, num_experts, dtype=dtype)
    BT = max(1, BACKWARD_TILE // triton.next_power_of_2(num_experts))
    if N:
        router_bwd_kernel[(triton.cdiv(N, BT),)](
            indices, scores, d_weights, d_logits, N, scaling, E=num_experts, K=top_k,
            KP=triton.next_power_of_2(top_k), BT=BT, WIDTH=triton.next_power_of_2(BT * num_experts),
            RENORMALIZE=renormalize, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return d_logits


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, bias, top_k, renormalize, scaling, token_mask, histogram):
        logits, bias = logits.contiguous(), bias.contiguous()
        token_mask = None if token_mask is None else token_mask.contiguous()
        *results, scores = launch_forward(logits, bias, top_k, renormalize, scaling, token_mask, histogram)
        indices, _, counts, cutoff = results
        ctx.save_for_backward(indices, scores)
        ctx.rule = logits.shape[1], logits.dtype, renormalize, scaling
        ctx.mark_non_differentiable(indices, counts, cutoff)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_indices, d_weights, d_counts, d_cutoff):
        if d_weights is None:
            return (None,) * 7
        indices, scores = ctx.saved_tensors
        return launch_backward(indices, scores, d_weights.contiguous(), *ctx.rule), *(None,) * 6


def route_fused(
    logits,
    bias,
    top_k,
    *,
    num_groups=1,
    topk_group=1,
    renormalize=True,
    scaling=1.0,
    token_mask=None,
    histogram=None,
):
    """Arguments and results as in `api.route`, without groups that hide experts."""
    with on_device_of(logits):
        return _Route.apply(logits, bias.detach(), top_k, renormalize, float(scaling), token_mask, histogram)
