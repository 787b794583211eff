"""Conversations on disk: token shards, and beside each which of its tokens are learned.

To NAME.tokens and NAME.offsets of a shard comes NAME.learned (uint8 [tokens], 1 where a token is predicted). A split's part
of the manifest says `learned`, and each of its shards the digest of that file.
"""

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .shards import OPEN_SHARDS, TokenShards, check_size, write_atomically, write_shard


LEARNED = "learned"


class Conversation(NamedTuple):
    """`input_ids`, an array of the shard's dtype; `learned` bool [tokens]."""

    input_ids: np.ndarray
    learned: np.ndarray


def write_chat_shard(folder: Path, name: str, conversations: Sequence[Conversation]) -> dict[str, Any]:
    """Writes conversations as the shard `name`; returns its entry in the manifest."""
    content = np.concatenate([one.learned for one in conversations]).astype(np.uint8).tobytes()
    write_atomically(folder / f"{name}.{LEARNED}", content)
    entry = write_shard(folder, name, [one.input_ids for one in conversations])
    return {**entry, LEARNED: hashlib.sha256(content).hexdigest()}


class ChatShards(TokenShards):
    """`TokenShards` of conversations. Raises ValueError, too, if what says what is learned has another size."""

    def __init__(self, folder: str | Path, split: str = "train"):
        super().__init__(folder, split)
        for shard in self._shards:
            check_size(self.folder / f"{shard['name']}.{LEARNED}", shard["tokens"])
        self._masks = functools.lru_cache(OPEN_SHARDS)(self._map_mask)

    def learned(self, index: int) -> np.ndarray:
        """bool [lengths[index]]: which tokens of conversation `index` are learned; IndexError if there is none."""
        shard, place = self.place(index)
        _, offsets = self._open(shard)
        return self._masks(shard)[offsets[place] : offsets[place + 1]].astype(bool)

    def _map_mask(self, number: int) -> np.ndarray:
        return np.memmap(self.folder / f"{self._shards[number]['name']}.{LEARNED}", np.uint8, mode="r")
