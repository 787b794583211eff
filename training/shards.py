"""Tokenised documents on disk: what `moe-lc prepare` writes and training reads.

A prepared folder holds `manifest.json`, the tokenizer, and shards. A shard holds whole documents in two flat
little-endian files: NAME.tokens (uint16 or uint32, the documents behind one another) and NAME.offsets (int64
[documents + 1]: where each begins, and at last the number of tokens). The manifest is written last, so a folder with a
manifest is complete; it lists the shards of each split with their sizes.
"""

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


FORMAT = 1
MANIFEST = "manifest.json"
OFFSET = np.dtype("<i8")
OPEN_SHARDS = 128  # each holds two file descriptors, of which a process commonly has 1,024


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrower of uint16 and uint32 that holds every id below `vocab_size`."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, and waits until it is on the disk."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_shard(folder: Path, name: str, documents: Sequence[np.ndarray]) -> dict[str, Any]:
    """Writes documents (arrays of one dtype, uint16 or uint32) as the shard `name`; returns its entry in the manifest."""
    tokens = np.concatenate(documents)
    tokens = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False)
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in documents])]).astype(OFFSET)
    content = tokens.tobytes()
    write_atomically(folder / f"{name}.tokens", content)
    write_atomically(folder / f"{name}.offsets", offsets.tobytes())
    return {
        "name": name,
        "documents": len(documents),
        "tokens": len(tokens),
        "dtype": tokens.dtype.name,
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Declares a folder complete. `manifest` (JSON) has at least `tokenizer` and, for each split, `splits[NAME]["shards"]`
    with the entries of `write_shard` in order."""
    digest = hashlib.sha256(json.dumps([manifest["tokenizer"], manifest["splits"]], sort_keys=True).encode())
    whole = {"format": FORMAT, "fingerprint": digest.hexdigest(), **manifest}
    write_atomically(folder / MANIFEST, json.dumps(whole, indent=2).encode())


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a prepared folder. Its `fingerprint` differs when tokens or tokenizer differ; `tokenizer` holds
    `fingerprint`, `vocab_size`, `bos_token_id` (may be null) and `eos_token_id`.

    Raises ValueError if the folder has none, or one of another format.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ValueError(f"data: expected a folder that `moe-lc prepare` has finished, got {str(folder)!r}")
    manifest = json.loads(path.read_text())
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path}: format: expected {FORMAT}, got {manifest.get('format')}")
    return manifest


def checked_lengths(folder: Path, shard: dict[str, Any]) -> np.ndarray:
    """Tokens of each document, int64 [documents], of a shard by its entry in the manifest.

    Raises ValueError, naming the file, if one of its two does not have the size that the entry says.
    """
    check_size(folder / f"{shard['name']}.tokens", shard["tokens"] * np.dtype(shard["dtype"]).itemsize)
    path = folder / f"{shard['name']}.offsets"
    check_size(path, (shard["documents"] + 1) * OFFSET.itemsize)
    offsets = np.fromfile(path, OFFSET)
    lengths = np.diff(offsets).astype(np.int64)
    if offsets[0] != 0 or offsets[-1] != shard["tokens"] or (lengths <= 0).any():
        raise ValueError(f"{path}: expected offsets that rise from 0 to {shard['tokens']}, got others")
    return lengths


class TokenShards:
    """The documents of one split of a prepared folder, memory-mapped; `len()` counts them.

    `lengths` int64 [documents] holds the tokens of each. Can be pickled: the copy opens the files anew.
    Raises ValueError, naming the file, if a shard does not have the size that the manifest says, and as `read_manifest`.
    """

    def __init__(self, folder: str | Path, split: str = "train"):
        self.folder, self.split = Path(folder), split
        self.manifest = read_manifest(folder)
        splits = self.manifest["splits"]
        if split not in splits:
            raise ValueError(f"split: expected one of {', '.join(map(repr, splits))}, got {split!r}")
        self._shards = splits[split]["shards"]
        self.lengths = np.concatenate(
            [np.zeros(0, np.int64), *(checked_lengths(self.folder, one) for one in self._shards)]
        )
        self._first = np.cumsum([0, *(shard["documents"] for shard in self._shards)])  # document of each shard
        self._open = functools.lru_cache(OPEN_SHARDS)(self._map)

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, index: int) -> np.ndarray:
        """Tokens of document `index`, [lengths[index]] uint16 or uint32, a read-only view of the file.

        Raises IndexError if there is no such document.
        """
        shard, place = self.place(index)
        tokens, offsets = self._open(shard)
        return tokens[offsets[place] : offsets[place + 1]]

    def place(self, index: int) -> tuple[int, int]:
        """The shard that holds document `index`, and the document's number there. Raises IndexError as `document`."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"document: expected less than {len(self)}, got {index}")
        index %= len(self)
        shard = int(np.searchsorted(self._first, index, side="right")) - 1
        return shard, int(index - self._first[shard])

    def __reduce__(self):
        return type(self), (self.folder, self.split)

    def _map(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        shard = self._shards[number]
        dtype = np.dtype(shard["dtype"]).newbyteorder("<")
        tokens = np.memmap(self.folder / f"{shard['name']}.tokens", dtype, mode="r")
        return tokens, np.memmap(self.folder / f"{shard['name']}.offsets", OFFSET, mode="r")


def check_size(path: Path, expected: int) -> None:
    """Raises ValueError, naming the file, if it does not have so many bytes."""
    got = f"{path.stat().st_size}" if path.is_file() else "no such file"
    if got != str(expected):
        raise ValueError(f"{path}: expected {expected} bytes, got {got}")
