"""Packing: several documents behind one another in one sequence, with their borders."""

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch


IGNORED = -100  # the label that transformers' losses skip


@dataclass(frozen=True)
class Pack:
    """Documents in one sequence. Document i is `input_ids[cu_seqlens[i]:cu_seqlens[i + 1]]`; `cu_seqlens` starts at 0
    and ends at the number of tokens. There is no padding: a pack may be shorter than the length it was packed for.
    `learned`: whether each token is to be predicted; None: all are."""

    input_ids: list[int]
    cu_seqlens: list[int]
    learned: list[bool] | None = field(default=None, kw_only=True)

    @property
    def predictions(self) -> int:
        """Tokens that are predicted: the first of a document is none."""
        if self.learned is None:
            return len(self.input_ids) - (len(self.cu_seqlens) - 1)
        return sum(self.learned) - sum(self.learned[first] for first in self.cu_seqlens[:-1])


def split_document(document: Sequence[int], length: int, prefix: Sequence[int] = ()) -> list[list[int]]:
    """Cuts a document into pieces of at most `length` tokens, all full except the last one. Every piece after the
    first starts with `prefix` (say, the bos token), so that its first real token has something to be predicted from.

    Raises ValueError if `length` leaves no room after the prefix, or if the document is empty.
    """
    if length <= len(prefix):
        raise ValueError(f"length: expected more than the {len(prefix)} tokens of the prefix, got {length}")
    if not document:
        raise ValueError("document: expected at least one token, got none")
    pieces = [list(document[:length])]
    step = length - len(prefix)
    for start in range(length, len(document), step):
        pieces.append([*prefix, *document[start : start + step]])
    return pieces


def pack(documents: Sequence[Sequence[int]], length: int, prefix: Sequence[int] = ()) -> list[Pack]:
    """Packs documents into sequences of at most `length` tokens, as `assign_packs` says; in a pack, from long to short.

    A document that fits into `length` is never split; a longer one is cut by `split_document` first.
    Raises ValueError as `split_document` does.
    """
    pieces = [piece for document in documents for piece in split_document(document, length, prefix)]
    places = assign_packs(np.array([len(piece) for piece in pieces], np.int64), length).tolist()
    packs: list[list[list[int]]] = [[] for _ in range(max(places, default=-1) + 1)]
    for place, piece in sorted(zip(places, pieces, strict=True), key=lambda item: -len(item[1])):
        packs[place].append(piece)
    return [_join(pieces) for pieces in packs]


def assign_packs(lengths: np.ndarray, length: int) -> np.ndarray:
    """Which pack each piece goes to, by best-fit decreasing: from the longest piece to the shortest, each goes to the
    pack that it fills best, ties to the earliest piece and pack.

    `lengths` int64 [pieces], each from 1 to `length`; returns int64 [pieces], the packs numbered from 0 without a gap.
    Pieces of one length are placed together: if the fullest packs that take one have room for k, each takes k. The
    number of turns therefore grows with the number of different lengths, not of pieces.
    """
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    borders = [0, *(np.flatnonzero(np.diff(descending)) + 1).tolist(), len(lengths)]
    places = np.empty(len(lengths), np.int64)
    frees: list[int] = []  # ascending; the keys of `waiting`
    waiting: dict[int, list[np.ndarray]] = {}  # free tokens: packs
    count = 0

    def put(free: int, packs: np.ndarray) -> None:
        if free and len(packs):
            if free not in waiting:
                bisect.insort(frees, free)
            waiting.setdefault(free, []).append(packs)

    for begin, end in itertools.pairwise(borders):
        while begin < end:
            size = int(descending[begin])
            place = bisect.bisect_left(frees, size)
            if place < len(frees):
                free = frees.pop(place)
                packs = np.sort(np.concatenate(waiting.pop(free)), kind="stable")
                each = free // size
            else:
                free, each = length, length // size
                packs = np.arange(count, count + math.ceil((end - begin) / each))
                count += len(packs)
            taken = min(end - begin, each * len(packs))
            places[order[begin : begin + taken]] = np.repeat(packs, each)[:taken]
            full, rest = divmod(taken, each)
            used = full + (rest > 0)
            put(free - each * size, packs[:full])
            put(free - rest * size, packs[full:used])
            put(free, packs[used:])
            begin += taken
    return places


def _join(documents: list[list[int]]) -> Pack:
    input_ids: list[int] = []
    cu_seqlens = [0]
    for document in documents:
        input_ids += document
        cu_seqlens.append(len(input_ids))
    return Pack(input_ids, cu_seqlens)


def count_tokens(packs: Sequence[Pack]) -> int:
    """Tokens in all the packs."""
    return sum(len(pack.input_ids) for pack in packs)


def collate(packs: Sequence[Pack]) -> dict[str, torch.Tensor]:
    """Model inputs for packs behind one another in a batch of one row of N tokens and D documents.

    Returns `input_ids`, `labels`, `position_ids` (int64 [1, N]) and `cu_seq_lens_q` (int32 [D + 1]). The label of each
    document's first token is -100: the model shifts labels by one, so nothing is predicted across a border; so is that of
    each token that is not learned.
    """
    input_ids = torch.tensor([token for pack in packs for token in pack.input_ids])
    lengths = torch.tensor([end - start for pack in packs for start, end in itertools.pairwise(pack.cu_seqlens)])
    borders = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    labels = torch.cat([learned_labels(pack) for pack in packs])
    labels[borders[:-1]] = IGNORED
    position_ids = torch.arange(len(input_ids)) - borders[:-1].repeat_interleave(lengths)
    return {
        "input_ids": input_ids[None],
        "labels": labels[None],
        "position_ids": position_ids[None],
        "cu_seq_lens_q": borders.int(),
    }


def learned_labels(pack: Pack) -> torch.Tensor:
    """int64 [N]: the tokens of a pack, -100 where nothing is learned."""
    labels = torch.tensor(pack.input_ids)
    return labels if pack.learned is None else labels.masked_fill(~torch.tensor(pack.learned), IGNORED)
