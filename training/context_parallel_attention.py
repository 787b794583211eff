"""Softmax attention of a sequence that ranks share, in equal parts.

The last tokens see most. So the sequence is cut into two chunks for each rank, and rank r computes for number r from the
front and for number r from the back: their queries go there, and what they found comes back.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import distributed as dist


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
