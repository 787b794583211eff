"""What a training step reads: packs of documents from prepared folders, in shares of tokens, by the step's number alone.

Nothing here remembers what was read. Pack p of a folder is fixed by the lengths of its documents; an epoch is a seeded
permutation of the packs; sequence number n of a stage is one pack of one folder. A run that resumes needs one integer.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .chat_shards import ChatShards
from .collate_images import MediaPack
from .media_shards import MediaShards, open_shards
from .packing import Pack, assign_packs
from .shards import TokenShards


# Fractions are integers over these, so that every machine of a run rounds alike.
SIXTEEN, THIRTY_TWO = 1 << 16, 1 << 32


@dataclass(frozen=True)
class LongDocuments:
    """Up-sampling: in each epoch a document of n tokens appears min(at_most, max(1, n / above) ** exponent) times.

    The fraction is rounded up for some documents and down for the others, evenly over the lengths, so that the mean is
    exact; which ones is a matter of the seed. Shares between folders stay as they were asked for: long documents take
    the place of short ones of the same folder (per-source length up-sampling, Fu et al. 2024, arXiv:2402.10171).
    `above` is in tokens; 0 as `exponent` switches it off. Raises ValueError if a field is out of range.
    """

    above: int
    exponent: float = 1.0
    at_most: float = 4.0

    def __post_init__(self):
        for name, least in (("above", 1), ("exponent", 0), ("at_most", 1)):
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")

    def times(self, lengths: np.ndarray, phase: int) -> np.ndarray:
        """How often each document appears: int64 [documents] for `lengths` int64 [documents] in tokens. `phase`, from 0
        to 65,535, chooses which are rounded up; over all phases each is rounded up as often as its fraction says."""
        wanted = np.minimum(np.maximum(lengths / self.above, 1.0) ** self.exponent, self.at_most)
        whole, fraction = np.divmod(np.rint(wanted * SIXTEEN).astype(np.int64), SIXTEEN)
        by_length = np.argsort(lengths, kind="stable")
        reached = (np.cumsum(fraction[by_length]) + phase) // SIXTEEN
        whole[by_length] += np.diff(reached, prepend=0)
        return whole


class PackedShards(Sequence[Pack]):
    """One split of a prepared folder as packs of at most `sequence_length` tokens: one epoch, in a fixed order.

    A document that fits into a pack is never split. A longer one fills packs of its own, each but the first beginning
    with the bos token if there is one, as in `split_document`; its rest is packed like a document.
    The plan is made at the first use and kept: about a second and 12 MB per million pieces, some more where most
    lengths differ; the permutation of an epoch, half a second per million packs.
    Raises ValueError if the split is empty, or if `sequence_length` leaves no room after the bos token.
    """

    def __init__(
        self,
        shards: TokenShards,
        sequence_length: int,
        *,
        long_documents: LongDocuments | None = None,
        seed: Sequence[int] = (0,),
    ):
        self.shards, self.sequence_length, self.long_documents = shards, sequence_length, long_documents
        self.seed = tuple(seed)
        bos = shards.manifest["tokenizer"]["bos_token_id"]
        self._prefix = [] if bos is None else [bos]
        if sequence_length <= len(self._prefix):
            raise ValueError(
                f"sequence_length: expected more than the {len(self._prefix)} tokens of the prefix, got {sequence_length}"
            )
        if not len(shards):
            more = " (prepare again with a larger --validation-share)" if shards.split == "validation" else ""
            raise ValueError(f"{shards.folder}: expected documents in the split {shards.split!r}, got none{more}")

    def __len__(self) -> int:
        return len(self._plan[2]) - 1

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"pack: expected less than {len(self)}, got {index}")
        documents, parts, first = self._plan
        index %= len(self)
        pieces = range(first[index], first[index + 1])
        return self._pack([(int(documents[piece]), int(parts[piece])) for piece in pieces])

    def _pack(self, pieces: Sequence[tuple[int, int]]) -> Pack:
        """Of (document, part) pairs."""
        input_ids: list[int] = []
        cu_seqlens = [0]
        for document, part in pieces:
            input_ids += self._piece(document, part)
            cu_seqlens.append(len(input_ids))
        return Pack(input_ids, cu_seqlens)

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens in all the packs, with the bos tokens of pieces and the repetitions of long documents."""
        times, parts = self._times, self._parts(self.shards.lengths)
        return int((times * (self.shards.lengths + (parts - 1) * len(self._prefix))).sum())

    def order(self, epoch: int) -> np.ndarray:
        """The permutation of the packs in an epoch, int64 [packs]. Made from raw random bits and a stable sort, which
        unlike a library's shuffle are promised to stay the same in every version."""
        return np.argsort(np.random.PCG64([epoch + 1, *self.seed]).random_raw(len(self)), kind="stable")

    @functools.cached_property
    def _times(self) -> np.ndarray:
        if self.long_documents is None:
            return np.ones(len(self.shards), np.int64)
        phase = np.random.PCG64([0, *self.seed]).random_raw() % SIXTEEN
        return self.long_documents.times(self.shards.lengths, phase)

    @functools.cached_property
    def _plan(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Document and part of each piece, int32 [pieces], pack by pack, and where each pack begins, int64 [packs + 1]."""
        copies = np.repeat(np.arange(len(self.shards)), self._times)  # documents
        count = self._parts(self.shards.lengths[copies])
        documents = np.repeat(copies, count).astype(np.int32)  # [pieces]
        parts = (np.arange(len(documents)) - np.repeat(np.cumsum(count) - count, count)).astype(np.int32)
        begin, end = self._span(self.shards.lengths[documents], parts)
        sizes = end - begin + np.where(parts > 0, len(self._prefix), 0)
        packs = assign_packs(sizes, self.sequence_length)
        by_pack = np.lexsort((-sizes, packs))
        return documents[by_pack], parts[by_pack], np.concatenate([[0], np.cumsum(np.bincount(packs))])

    def _parts(self, lengths: np.ndarray) -> np.ndarray:
        """Pieces that documents of these lengths are cut into."""
        return 1 + np.maximum(-(-(lengths - self.sequence_length) // (self.sequence_length - len(self._prefix))), 0)

    def _span(self, lengths, parts):
        """Where in its document a piece begins and ends, for arrays or single numbers."""
        step = self.sequence_length - len(self._prefix)
        begin = np.where(parts > 0, self.sequence_length + (parts - 1) * np.int64(step), 0)
        return begin, np.minimum(np.where(parts > 0, begin + step, self.sequence_length), lengths)

    def _piece(self, document: int, part: int) -> list[int]:
        begin, end = self._span(self.shards.lengths[document], part)
        return (self._prefix if part else []) + self.shards.document(document)[begin:end].tolist()


class PackedMedia(PackedShards):
    """`PackedShards` of documents with pictures, as `MediaPack`s. Raises ValueError, too, if a document does not fit into
    a pack: half a picture is none."""

    shards: MediaShards

    def __init__(self, shards: MediaShards, sequence_length: int, **options):
        super().__init__(shards, sequence_length, **options)
        if (longest := shards.lengths.max()) > sequence_length:
            raise ValueError(
                f"sequence_length: expected at least the {longest} tokens of the longest document with pictures in "
                f"{shards.folder}, since they are not cut, got {sequence_length}"
            )

    def _pack(self, pieces: Sequence[tuple[int, int]]) -> MediaPack:
        return MediaPack.of([self.shards.media_document(document) for document, _ in pieces])


class PackedChat(PackedShards):
    """`PackedShards` of conversations, of which only a part is learned. Raises ValueError, too, if one does not fit into a
    pack: its rest would be answers without their questions."""

    shards: ChatShards

    def __init__(self, shards: ChatShards, sequence_length: int, **options):
        super().__init__(shards, sequence_length, **options)
        if (longest := shards.lengths.max()) > sequence_length:
            raise ValueError(
                f"sequence_length: expected at least the {longest} tokens of the longest conversation in "
                f"{shards.folder}, since they are not cut, got {sequence_length}"
            )

    def _pack(self, pieces: Sequence[tuple[int, int]]) -> Pack:
        learned = [self.shards.learned(document).tolist() for document, _ in pieces]
        return dataclasses.replace(super()._pack(pieces), learned=list(itertools.chain.from_iterable(learned)))


def packed(shards: TokenShards, sequence_length: int, **options) -> PackedShards:
    """The packs of a prepared folder, whatever is in it."""
    if isinstance(shards, MediaShards):
        return PackedMedia(shards, sequence_length, **options)
    if isinstance(shards, ChatShards):
        return PackedChat(shards, sequence_length, **options)
    return PackedShards(shards, sequence_length, **options)


class StageData:
    """The data of one stage: `stage[step]` is the list of packs that step reads, the same in every process.

    `folders` maps prepared folders to their weights: the shares of tokens, whatever the fill of their packs. Each step
    reads `sequences_per_step` packs of at most `sequence_length` tokens; every stretch of sequences holds each folder
    within a few packs of its share. When a folder's epoch ends, inside a step or not, its next begins with the same
    packs in another order, however far the other folders are; nothing is dropped. With `long_documents`, long documents
    come more often in each epoch. `pictures`: folder -> what its pictures are, for those that hold some.

    Raises ValueError for empty or unfinished folders, for folders of different tokenizers and for values out of range.
    """

    def __init__(
        self,
        folders: Mapping[str, float],
        *,
        sequence_length: int,
        sequences_per_step: int,
        seed: int = 0,
        long_documents: LongDocuments | None = None,
        split: str = "train",
    ):
        _check(folders, sequences_per_step, seed)
        self.folders = dict(folders)
        self.sequence_length, self.sequences_per_step, self.seed = sequence_length, sequences_per_step, seed
        self.long_documents, self.split = long_documents, split
        shards = [open_shards(folder, split) for folder in folders]
        self.pictures = {str(one.folder): one.pictures for one in shards if isinstance(one, MediaShards)}
        self.tokenizer: dict[str, Any] = shards[0].manifest["tokenizer"]
        for one in shards:
            if one.manifest["tokenizer"]["fingerprint"] != self.tokenizer["fingerprint"]:
                raise ValueError(f"{one.folder}: expected the tokenizer of {shards[0].folder}, got another")
        self._packs = [
            packed(one, sequence_length, long_documents=long_documents, seed=(seed, number))
            for number, one in enumerate(shards)
        ]
        self._order = functools.lru_cache(2 * len(shards))(lambda number, epoch: self._packs[number].order(epoch))

    def __getitem__(self, step: int) -> list[Pack]:
        return self.slice(step, 0, 1)

    def slice(self, step: int, rank: int, world: int) -> list[Pack]:
        """The packs of one of `world` ranks in a step, read without those of the others: together they are `self[step]`
        in its order, each has as many.

        Raises ValueError if the ranks cannot have equally many, or if `step` or `rank` is out of range.
        """
        if step < 0:
            raise ValueError(f"step: expected at least 0, got {step}")
        if world < 1 or self.sequences_per_step % world:
            raise ValueError(
                f"world: expected a divisor of the {self.sequences_per_step} sequences of a step, got {world}"
            )
        if not 0 <= rank < world:
            raise ValueError(f"rank: expected 0 to {world - 1}, got {rank}")
        count = self.sequences_per_step // world
        first = step * self.sequences_per_step + rank * count
        return [self._sequence(number) for number in range(first, first + count)]

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens in a step: a little below sequences_per_step x sequence_length, for packs are not full."""
        return self.sequences_per_step / sum(share / fill for share, fill in self._shares_and_fills)

    def epochs(self, step: int) -> dict[str, float]:
        """How often each folder has been read when `step` begins."""
        left = step * self.sequences_per_step
        read = {}
        for folder, packs, rate in zip(self.folders, self._packs, self._rates, strict=True):
            taken = _taken(left, rate)
            left -= taken
            read[folder] = taken / len(packs)
        return read

    @functools.cached_property
    def fingerprint(self) -> str:
        """Differs when any step would: a checkpoint keeps it, and a resumed run compares it. The paths are left out, so
        that data may be moved."""
        content = {
            "folders": [
                (one.shards.manifest["fingerprint"], weight)
                for one, weight in zip(self._packs, self.folders.values(), strict=True)
            ],
            "settings": [self.sequence_length, self.sequences_per_step, self.seed, self.split],
            "long_documents": self.long_documents and asdict(self.long_documents),
        }
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @functools.cached_property
    def _shares_and_fills(self) -> list[tuple[float, float]]:
        """Of each folder: its share of the tokens, and the mean tokens of its packs."""
        whole = sum(self.folders.values())
        return [
            (weight / whole, packs.tokens / len(packs))
            for weight, packs in zip(self.folders.values(), self._packs, strict=True)
        ]

    @functools.cached_property
    def _rates(self) -> list[int]:
        """The share of each folder, in 2^-32, of the sequences that the folders before it leave."""
        packs = [share / fill for share, fill in self._shares_and_fills]
        return [round(own / sum(packs[number:]) * THIRTY_TWO) for number, own in enumerate(packs)]

    def _sequence(self, number: int) -> Pack:
        """Sequence `number` of the stage. Of the first n sequences, a folder takes its share of those that the folders
        before it leave, rounded; so who takes the next one, and how many it took before, needs no history."""
        for packs, (index, rate) in zip(self._packs, enumerate(self._rates), strict=True):
            before = _taken(number, rate)
            if _taken(number + 1, rate) > before:
                break
            number -= before
        epoch, place = divmod(before, len(packs))
        return packs[self._order(index, epoch)[place]]


def _taken(sequences: int, rate: int) -> int:
    return (sequences * rate + THIRTY_TWO // 2) // THIRTY_TWO


def _check(folders: Mapping[str, float], sequences_per_step: int, seed: int) -> None:
    if not folders:
        raise ValueError("folders: expected at least one, got none")
    for folder, weight in folders.items():
        if not 0.0 < weight < math.inf:
            raise ValueError(f"weight of {folder}: expected a number above 0, got {weight}")
    if sequences_per_step < 1:
        raise ValueError(f"sequences_per_step: expected at least 1, got {sequences_per_step}")
    if seed < 0:
        raise ValueError(f"seed: expected at least 0, got {seed}")
