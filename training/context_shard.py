"""A packed batch cut into contiguous shards of tokens, one for each rank of a context-parallel group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from ..segments import packed_segments
from .packing import IGNORED


CUT = {"input_ids", "labels", "shift_labels", "position_ids", "cu_seq_lens_q", "seq_idx", "attention_mask"}
# What collators say beside the borders, and what the result does not need.
DROPPED = {"cu_seq_lens_k", "max_length_q", "max_length_k", "use_cache"}


@dataclass(frozen=True, eq=False)
class ContextShard:
    """Where the tokens of one rank lie in the sequence. A piece is the part of a document that lies on this rank.

    `documents`: their bounds in the whole sequence. `lengths`: tokens of every rank. `borders`: N + 1 bounds of the pieces, from 0 to the tokens of this rank, every piece
    with at least one; `cu_seqlens`: the same, int32, on the device of the tokens. `before`: how many tokens of the
    first piece's document lie on the ranks to the left, 0 when it begins here. `goes_on`: whether the last piece's
    document continues on the right.
    """

    documents: tuple[int, ...]
    lengths: tuple[int, ...]
    borders: tuple[int, ...]
    cu_seqlens: torch.Tensor
    before: int
    goes_on: bool

    @property
    def passes_through(self) -> bool:
        """Whether one document covers the whole shard and comes from the left."""
        return self.before > 0 and len(self.borders) == 2


def process_group(group: DeviceMesh | dist.ProcessGroup) -> dist.ProcessGroup:
    """The group of a mesh of one dimension, such as `mesh["cp"]`; a group is returned as it is."""
    return group.get_group() if isinstance(group, DeviceMesh) else group


def of_all_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`x` [...] of every rank, of one shape: [ranks, ...], without gradients."""
    everyone = x.new_empty(dist.get_world_size(group), *x.shape)
    # With lists: the collectives of single tensors go by other names in newer versions of torch, which warn of the old.
    dist.all_gather(list(everyone.unbind()), x.contiguous(), group=group)
    return everyone


def context_shard(
    borders: Sequence[int], lengths: Sequence[int], rank: int, device: torch.device | str | None = None
) -> ContextShard:
    """The shard of `rank`: `borders` are those of the documents in the whole sequence, `lengths` the tokens of every rank.

    Raises ValueError when `lengths` has an empty shard or does not sum up to the last border.
    """
    if min(lengths) < 1 or sum(lengths) != borders[-1]:
        raise ValueError(
            f"lengths: expected shards of at least one token that sum up to {borders[-1]}, got {list(lengths)}"
        )
    first = sum(lengths[:rank])
    last = first + lengths[rank]
    pieces, before = pieces_between(borders, first, last)
    return ContextShard(
        documents=tuple(borders),
        lengths=tuple(lengths),
        borders=pieces,
        cu_seqlens=torch.tensor(pieces, dtype=torch.int32, device=device),
        before=before,
        goes_on=last not in borders,
    )


def pieces_between(documents: Sequence[int], first: int, last: int) -> tuple[tuple[int, ...], int]:
    """Bounds of the parts of documents between two places of a sequence, counted from the first; how many tokens of the
    first part's document come before it."""
    inside = sorted({border - first for border in documents if first < border < last})
    return (0, *inside, last - first), first - max(border for border in documents if border <= first)


def shard_sequence(
    batch: Mapping, group: DeviceMesh | dist.ProcessGroup, lengths: Sequence[int] | None = None
) -> dict:
    """The part of a batch that this rank of `group` computes, as arguments of a model under `context_parallel`.

    Every rank of the group brings the same whole batch. Its rows are laid end to end, each as a document or as the
    documents that the batch describes, and cut into contiguous shards. Labels are shifted before the cut: the target of
    a shard's last token may be the first token of the next shard.

    Args:
        batch: `input_ids` [B, T]; perhaps `labels` [B, T] (or `shift_labels`, already shifted); the documents as
            `cu_seq_lens_q`, `seq_idx` or `position_ids` (see `packed_segments`); perhaps `num_items_in_batch`.
        group: the process group, or a mesh of one dimension.
        lengths: tokens of each rank; None: as even as possible.

    Returns:
        `input_ids` [1, t], `cu_seq_lens_q`, `use_cache`, `context_shard` (unless the group is of one rank) and, with
        labels, `labels` = `shift_labels` [1, t] and `num_items_in_batch`: that of the batch, or else the number of targets
        in all shards. So the losses of the ranks sum up to the loss of the batch; what this means for the gradients,
        `context_parallel` says.

    Raises:
        ValueError: padding, an argument that cannot be cut, a shard without tokens.
    """
    group = process_group(group)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    _check(batch)
    ids = batch["input_ids"]
    rows, length = ids.shape
    total = rows * length
    if total < size:
        raise ValueError(f"input_ids: expected at least one token for each of {size} ranks, got {total}")
    if lengths is None:
        lengths = [total // size + (r < total % size) for r in range(size)]
    elif len(lengths) != size:
        raise ValueError(f"lengths: expected one for each of {size} ranks, got {list(lengths)}")
    shard = context_shard(_document_borders(batch, rows, length), lengths, rank, ids.device)
    first = sum(lengths[:rank])

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(1, -1)[:, first : first + lengths[rank]]

    result = {"input_ids": cut(ids), "cu_seq_lens_q": shard.cu_seqlens, "use_cache": False}
    if size > 1:
        result["context_shard"] = shard
    targets = batch.get("shift_labels")
    if targets is None and batch.get("labels") is not None:
        targets = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)  # [B, T]
    if targets is not None:
        items = batch.get("num_items_in_batch")
        result["labels"] = result["shift_labels"] = cut(targets)
        result["num_items_in_batch"] = (targets != IGNORED).sum() if items is None else items
    return result


def _check(batch: Mapping) -> None:
    unknown = set(batch) - CUT - DROPPED - {"num_items_in_batch"}
    if unknown:
        raise ValueError(f"batch: expected only {sorted(CUT)} and num_items_in_batch, got {sorted(unknown)} as well")
    mask = batch.get("attention_mask")
    if mask is not None and not mask.all():
        raise ValueError("attention_mask: expected no padding under context parallelism, got some; pack instead")


def _document_borders(batch: Mapping, rows: int, length: int) -> list[int]:
    described = (batch.get(name) for name in ("cu_seq_lens_q", "seq_idx", "position_ids"))
    segments = packed_segments(*described, batch=rows, length=length)
    if segments is None:
        return list(range(0, rows * length + 1, length))
    return segments.cu_seqlens.tolist()
