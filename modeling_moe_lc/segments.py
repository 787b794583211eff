"""Where documents begin and end in a batch: packed rows and padded rows become one list of segments.

Recurrent layers run over the real tokens of all segments laid end to end, so that padding never touches a state and no
document reads another.
"""

from typing import NamedTuple

import torch


class Segments(NamedTuple):
    """Segments of a batch `[B, T]` flattened to `B * T` tokens.

    `cu_seqlens` `[N + 1]` int32: where each segment begins among the kept tokens. `kept`: indices of the real tokens in
    the flattened batch, None when all are (a packed batch). Padded: one segment a row. `longest`: no document of a packed
    batch has more tokens; None where nobody counted. `counted`: bool `[B * T]`, the tokens of a packed batch that take
    part in the statistics of the routers; None: all.
    """

    cu_seqlens: torch.Tensor
    kept: torch.Tensor | None = None
    longest: int | None = None
    counted: torch.Tensor | None = None

    @classmethod
    def of_documents(cls, borders: torch.Tensor) -> "Segments":
        return cls(borders.to(torch.int32), longest=int(borders.diff().max()))

    @property
    def packed(self) -> bool:
        return self.kept is None

    def documents(self) -> int | torch.Tensor:
        """How many segments there are; where only some tokens count, how many begin with one that does."""
        if self.counted is None:
            return len(self.cu_seqlens) - 1
        begins = self.cu_seqlens[:-1]
        counted = self.counted[begins.clamp(max=len(self.counted) - 1)]
        return ((self.cu_seqlens.diff() > 0) & counted).sum()

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, D]` -> the kept tokens `[1, L, D]`."""
        flat = x.flatten(0, 1)
        return (flat if self.kept is None else flat[self.kept])[None]

    def unpack(self, x: torch.Tensor, batch: int, length: int) -> torch.Tensor:
        """`[1, L, D]` -> `[B, T, D]`, zeros where padding stands."""
        if self.kept is None:
            return x.view(batch, length, -1)
        return x.new_zeros(batch * length, x.shape[-1]).index_copy(0, self.kept, x[0]).view(batch, length, -1)


def packed_segments(
    cu_seq_lens_q=None, seq_idx=None, position_ids=None, *, batch: int, length: int
) -> Segments | None:
    """The documents of a packed batch, from the first of three descriptions that is given; None: each row is one.

    `cu_seq_lens_q` `[N + 1]`: borders over the flattened batch; `seq_idx` `[B, T]`: the document of each token;
    `position_ids` `[B, T]` that start again at every document. Raises `ValueError` when they do not fit the batch.
    """
    total = batch * length
    if cu_seq_lens_q is not None:
        borders = cu_seq_lens_q
        if borders.dim() != 1 or borders[0] != 0 or borders[-1] != total or (borders.diff() < 0).any():
            raise ValueError(f"cu_seq_lens_q: expected rising borders from 0 to {total}, got {borders.tolist()}")
        return Segments.of_documents(borders)
    for name, given in (("seq_idx", seq_idx), ("position_ids", position_ids)):
        if given is not None and (given.dim() != 2 or given.shape[0] not in (1, batch) or given.shape[1] != length):
            raise ValueError(f"{name}: expected [B, T] = [{batch}, {length}], got {list(given.shape)}")
    if seq_idx is not None:
        starts = seq_idx.diff(dim=-1) != 0
    elif position_ids is not None:
        starts = position_ids.diff(dim=-1) != 1
    else:
        return None
    if not starts.any():
        return None
    starts = torch.nn.functional.pad(starts, (1, 0), value=True).expand(batch, length)  # every row starts a document
    begins = starts.flatten().nonzero()[:, 0].to(torch.int32)
    return Segments.of_documents(torch.nn.functional.pad(begins, (0, 1), value=total))


def padded_segments(attention_mask: torch.Tensor | None, length: int) -> Segments | None:
    """The real tokens of a padded batch, one segment a row, from the mask `[B, past + T]`; None when nothing is padded."""
    if attention_mask is None or attention_mask.dim() != 2 or length == 1:
        return None
    mask = attention_mask[:, -length:].bool()
    if mask.all():
        return None
    lengths = mask.sum(-1, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return Segments(cu_seqlens, mask.flatten().nonzero()[:, 0])


def has_right_padding(attention_mask: torch.Tensor, length: int) -> bool:
    """Whether some row of the last `length` columns has padding after a real token."""
    mask = attention_mask[:, -length:].bool()
    return bool((mask[:, :-1] & ~mask[:, 1:]).any())
