"""The router on a GPU: one launch forward, one backward; the logits are read once and their gradients written once.

A program is one warp with all the experts of one token in registers. Each lane makes a list of its three best, and the
best head of all lists is taken top_k + 1 times; once a list has run out, all are made anew from the experts that are left
(at 896 experts and top-17 for one random token in fifteen). Values are compared as integers in the order of the floats,
so that every choice is exact and ties go to the lowest expert.
"""

import math

import torch
import triton
import triton.language as tl

from ..dispatch import on_device_of


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_EXPERTS = 1024
MOST_CHOSEN = 32
LANES = 32
# Elements of d_logits that a program of the backward pass writes.
BACKWARD_TILE = 4096
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


@triton.jit
def add_required_bias(
    logits, cutoff, low, width, histogram, bins, stride_e, stride_bin, experts, BE: tl.constexpr
):  # fmt: skip
    """Adds one token to the histogram: a few experts at a time, whose scores are computed again and take few registers."""
    for first in range(0, experts, BE):
        e = first + tl.arange(0, BE)
        score = sigmoid(tl.load(logits + e, mask=e < experts, other=0.0).to(tl.float32))
        at = tl.div_rn(cutoff - score - low, tl.broadcast_to(width, (BE,)))
        # Truncation does as well as floor: what is below 0 becomes 0.
        at = tl.minimum(tl.maximum(at.to(tl.int32), 0), bins - 1)
        place = histogram + e.to(tl.int64) * stride_e + at * stride_bin
        tl.atomic_add(place, tl.full((BE,), 1, tl.int64), mask=e < experts, sem="relaxed")


@triton.jit(do_not_specialize=("bins",))
def router_fwd_kernel(
    logits,  # [N, E]
    bias,  # [E] FP32
    token_mask,  # [N] (MASKED)
    indices, weights, scores,  # [N, K] int64, FP32, FP32
    counts,  # [E] int64
    cutoffs,  # [N] FP32
    histogram,  # [E, bins] int64 (HISTOGRAM)
    scaling, bins, inverse_bins, stride_e, stride_bin,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, J: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
    RENORMALIZE: tl.constexpr, MASKED: tl.constexpr, HISTOGRAM: tl.constexpr,
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
    cutoff = float_of(last) if K < E else float("-inf")
    tl.store(cutoffs + token, cutoff)

    counted = 1
    if MASKED:
        counted = tl.load(token_mask + token).to(tl.int32)
    tl.atomic_add(counts + chosen, tl.full((KP,), 1, tl.int64), mask=slot < K * counted, sem="relaxed")
    if HISTOGRAM:
        low, width = bin_range(bias, e, E, inverse_bins)
        add_required_bias(logits, cutoff, low, width, histogram, bins, stride_e, stride_bin, E * counted, L * C)


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


def launch_forward(logits, bias, top_k, renormalize, scaling, token_mask, histogram):
    """indices, weights, counts, cutoff as in `api.route`, and the scores [N, top_k] that the backward pass needs."""
    N, E = logits.shape
    indices = logits.new_empty(N, top_k, dtype=torch.int64)
    weights, scores = (logits.new_empty(N, top_k, dtype=torch.float32) for _ in range(2))
    counts = torch.zeros(E, dtype=torch.int64, device=logits.device)
    cutoff = logits.new_empty(N, dtype=torch.float32)
    bins, strides = (1, (1, 1)) if histogram is None else (histogram.shape[1], histogram.stride())
    if N:
        # Fused multiply-adds off: score + bias would otherwise add the bias to a score that is not yet rounded. The inverse
        # of `bins` is what torch multiplies by on a GPU where it divides by a number.
        router_fwd_kernel[(N,)](
            logits, bias, logits if token_mask is None else token_mask, indices, weights, scores, counts, cutoff,
            counts if histogram is None else histogram, scaling, bins, 1 / bins, *strides,
            E=E, K=top_k, KP=triton.next_power_of_2(top_k + 1), **_tile(E, logits.element_size()),
            RENORMALIZE=renormalize, MASKED=token_mask is not None, HISTOGRAM=histogram is not None,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return indices, weights, counts, cutoff, scores


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
