"""Softmax attention of a sequence that ranks share, in equal parts.

The last tokens see most. So the sequence is cut into two chunks for each rank, and rank r computes for number r from the
front and for number r from the back: their queries go there, and what they found comes back.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import distributed as dist
from torch.nn import functional as F


aten = torch.ops.aten


def chunk_bounds(lengths: Sequence[int]) -> list[int]:
    """2 N + 1 bounds of the chunks of N ranks, which hold `lengths` tokens: the first and the second half of each."""
    halves = (half for length in lengths for half in (length - length // 2, length // 2))
    return [0, *itertools.accumulate(halves)]


def own_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """Which chunks a rank computes."""
    return rank, 2 * ranks - 1 - rank


def to_turns(x: torch.Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The tokens of this rank [t, ...] to those that compute them: returns the tokens of `own_chunks`, one behind the other."""
    rank, sent, received, swapped = _plan(lengths, group)
    first = chunk_bounds(lengths[rank : rank + 1])[1]
    x = torch.cat([x[first:], x[:first]]) if swapped else x
    return _AllToAll.apply(x, sent, received, group)


def from_turns(x: torch.Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The way back: the tokens of `own_chunks` [t', ...] to the ranks that hold them, returns those of this rank."""
    rank, sent, received, swapped = _plan(lengths, group)
    x = _AllToAll.apply(x, received, sent, group)
    second = len(x) - chunk_bounds(lengths[rank : rank + 1])[1]
    return torch.cat([x[second:], x[:second]]) if swapped else x


def _plan(lengths: Sequence[int], group: dist.ProcessGroup) -> tuple[int, list[int], list[int], bool]:
    """This rank; how many of its tokens each rank computes; of each rank's tokens it computes; whether the second half of
    its tokens goes to a rank before that of the first half."""
    rank, ranks, bounds = dist.get_rank(group), len(lengths), chunk_bounds(lengths)

    def shared(holder: int, computer: int) -> int:
        both = {2 * holder, 2 * holder + 1} & set(own_chunks(computer, ranks))
        return sum(bounds[chunk + 1] - bounds[chunk] for chunk in both)

    sent = [shared(rank, other) for other in range(ranks)]
    received = [shared(other, rank) for other in range(ranks)]
    return rank, sent, received, 2 * rank >= ranks


class _AllToAll(torch.autograd.Function):
    """[t, ...]: the first sent[0] rows to rank 0, and so on; returns received[0] rows of rank 0, and so on."""

    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.way_back = received, sent, group
        return _all_to_all(x, sent, received, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dx):
        return _all_to_all(dx, *ctx.way_back), None, None, None


def _all_to_all(x, sent, received, group):
    y = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(y, x.contiguous(), received, sent, group=group)
    return y


def lower_right_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last queries of a sequence, on the fastest kernels, which take as many queries as keys alone.

    Args:
        q: [B, H, n, K].
        k, v: [B, H, S, K] and [B, H, S, V], S >= n: query i sees the keys up to S - n + i.

    Returns:
        [B, H, n, V]. What the queries find in the keys before them and in their own is put together by its log-sum-exp, in
        FP32, and rounded once more.
    """
    return _LowerRight.apply(q, k, v, scale)


class _LowerRight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale):
        seen = k.shape[2] - q.shape[2]
        kernel = _cudnn if q.is_cuda else _flash_on_cpu
        own, backward_own = kernel(q, k[:, :, seen:], v[:, :, seen:], True, scale)
        ctx.backwards = [(slice(seen, None), backward_own)]
        if not seen:
            o, lse = own
        else:
            past, backward_past = kernel(q, k[:, :, :seen], v[:, :, :seen], False, scale)
            ctx.backwards.append((slice(0, seen), backward_past))
            o, lse = _together(own, past)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        dq, dk, dv = torch.zeros_like(q, dtype=wide), torch.empty_like(k), torch.empty_like(v)
        for keys, backward in ctx.backwards:
            more, dk[:, :, keys], dv[:, :, keys] = backward(do, q, k[:, :, keys], v[:, :, keys], o, lse)
            dq += more
        return dq.to(q.dtype), dk, dv, None


def _together(one, other):
    """Outputs [B, H, n, V] and log-sum-exps [B, H, n] or [B, H, n, 1] over two sets of keys: over both."""
    (o, lse), (more, lse_more) = one, other
    both = torch.logaddexp(lse, lse_more)
    shares = [(part - both).exp().view(*o.shape[:-1], 1) for part in (lse, lse_more)]
    return (shares[0] * o + shares[1] * more).to(o.dtype), both


def _cudnn(q, k, v, causal, scale):
    """Output and log-sum-exp, and the function of their backward pass."""
    o, lse, *facts, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )

    def backward(do, q, k, v, o, lse):
        return aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse, seed, offset, None, *facts, 0.0, causal, scale=scale
        )

    return (o, lse), backward


def _flash_on_cpu(q, k, v, causal, scale):
    """As `_cudnn`; this one wants values as wide as keys."""
    width = v.shape[-1]

    def padded(x):
        return F.pad(x, (0, q.shape[-1] - width))

    o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, padded(v), 0.0, causal, scale=scale)

    def backward(do, q, k, v, o, lse):
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            padded(do), q, k, padded(v), padded(o), lse, 0.0, causal, scale=scale
        )
        return dq, dk, dv[..., :width]

    return (o[..., :width], lse), backward
