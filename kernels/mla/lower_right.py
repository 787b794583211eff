"""Causal attention whose queries are the last of a sequence, by kernels whose causal form wants as many queries as keys."""

from collections.abc import Callable
from functools import partial

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn import functional as F

from ..checks import check_shape


aten = torch.ops.aten
# (q, k, v, causal, scale) -> (o [B, H, n, V], its log-sum-exp [B, H, n] or [B, H, n, 1]), and the function of the backward
# pass: (do, q, k, v, o, log-sum-exp) -> dq, dk, dv, of as many queries and keys or fewer.
Kernel = Callable[..., tuple[tuple[torch.Tensor, torch.Tensor], Callable]]
# Queries from which the backward pass of keys that all of them see goes by triangles: FlashAttention gains nothing.
TRIANGLES = 8192


def lower_right_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax attention of the last n queries of a sequence of S keys; memory grows with n + S, without a mask.

    What the queries find in the keys before them and in their own is put together by its log-sum-exp, in FP32, and rounded
    once more, as in ring attention (Liu et al., arXiv 2310.01889). On CUDA cuDNN's kernels, or FlashAttention where those
    cannot run, which pads the values to the width of the keys, as the kernel for CPUs does.

    Args:
        q: [B, H, n, K], BF16 or FP16 on CUDA.
        k, v: [B, H, S, K] and [B, H, S, V], S >= n, V <= K: query i sees the keys up to S - n + i.

    Returns:
        [B, H, n, V], differentiable once.

    Raises:
        ValueError: a shape that does not fit.
    """
    dims: dict[str, int] = {}
    check_shape("q", q, "B H n K", dims)
    check_shape("k", k, "B H S K", dims)
    check_shape("v", v, "B H S V", dims)
    if dims["S"] < dims["n"] or dims["K"] < dims["V"]:
        raise ValueError(f"k, v: expected at least {dims['n']} keys, at least as wide as values, got {dims}")
    if not dims["B"] * dims["H"] * dims["n"]:
        raise ValueError(f"q: expected at least one row, head and query, got {list(q.shape)}")
    return _LowerRight.apply(q, k, v, scale)


class _LowerRight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale):
        seen, kernel = k.shape[2] - q.shape[2], _kernel(q, k, v)
        found, ctx.backward_own = kernel(q, k[:, :, seen:], v[:, :, seen:], True, scale)
        ctx.by_triangles = kernel is not _flash and q.shape[2] >= TRIANGLES
        if seen:
            past, ctx.backward_past = kernel(q, k[:, :, :seen], v[:, :, :seen], False, scale)
            found = _together(found, past)
        ctx.save_for_backward(q, k, v, *found)
        return found[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        n, seen = q.shape[2], k.shape[2] - q.shape[2]
        squares = seen // n if ctx.by_triangles else 0
        rest = seen - squares * n
        parts = [(0, rest, ctx.backward_past)] if rest else []
        parts += [(rest + i * n, n, partial(_by_triangles, ctx.backward_own)) for i in range(squares)]
        parts.append((seen, n, ctx.backward_own))
        dq = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        for first, length, backward in parts:
            keys = slice(first, first + length)
            more, dk[:, :, keys], dv[:, :, keys] = backward(do, q, k[:, :, keys], v[:, :, keys], o, lse)
            dq += more
        return dq.to(q.dtype), dk, dv, None


def _by_triangles(causal, do, q, k, v, o, lse):
    """Of n queries that see n keys each: those up to the diagonal, then, both in reverse order, those above it.

    cuDNN's backward pass of a causal product is the faster one by more than half: kernels/mla/README.md.
    """
    dq, dk, dv = causal(do, q, k, v, o, lse)
    dq = dq.to(torch.promote_types(dq.dtype, torch.float32))  # of many keys: it is summed up further
    do, q, o, lse = (x[:, :, :-1].flip(2) for x in (do, q, o, lse))
    above = causal(do, q, k[:, :, 1:].flip(2), v[:, :, 1:].flip(2), o, lse)
    for x, more, place in zip((dq, dk, dv), above, (slice(None, -1), slice(1, None), slice(1, None)), strict=True):
        x[:, :, place] += more.flip(2)
    return dq, dk, dv


def _together(one, other):
    """Outputs and log-sum-exps over two sets of keys: over both."""
    (o, lse), (more, lse_more) = one, other
    both = torch.logaddexp(lse, lse_more)
    shares = [(part - both).exp().view(*o.shape[:-1], 1) for part in (lse, lse_more)]
    return (shares[0] * o + shares[1] * more).to(o.dtype), both


def _kernel(q, k, v) -> Kernel:
    if not q.is_cuda:
        return _flash_on_cpu
    # cuDNN refuses one query with one key.
    is_cudnn = q.shape[2] > 1 and can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, False, False))
    return _cudnn if is_cudnn else _flash


def _cudnn(q, k, v, causal, scale):
    o, lse, *lengths, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )

    def backward(do, q, k, v, o, lse):
        return aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse, seed, offset, None, *lengths, q.shape[2], k.shape[2], 0.0, causal, scale=scale
        )

    return (o, lse), backward


def _flash(q, k, v, causal, scale):
    width = v.shape[-1]
    o, lse, *lengths, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, _padded(v, q), 0.0, causal, False, scale=scale
    )

    def backward(do, q, k, v, o, lse):
        do, v, o = (_padded(x, q) for x in (do, v, o))
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, o, lse, *lengths, q.shape[2], k.shape[2], 0.0, causal, seed, offset, scale=scale
        )
        return dq, dk, dv[..., :width]

    return (o[..., :width], lse), backward


def _flash_on_cpu(q, k, v, causal, scale):
    width = v.shape[-1]
    o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, _padded(v, q), 0.0, causal, scale=scale)

    def backward(do, q, k, v, o, lse):
        do, v, o = (_padded(x, q) for x in (do, v, o))
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, o, lse, 0.0, causal, scale=scale
        )
        return dq, dk, dv[..., :width]

    return (o[..., :width], lse), backward


def _padded(x, q):
    return F.pad(x, (0, q.shape[-1] - x.shape[-1]))
