"""Documents with pictures on disk: token shards, and beside each the patches of its media, as bytes, and what is learned.

To NAME.tokens and NAME.offsets of a shard come NAME.learned (uint8 [tokens], 1 where a token is predicted), NAME.grids
(int32 [grids, 4]: document, frames, rows, columns) and NAME.patches (uint8 [patches, 3, side, side]). A split's part of the
manifest holds under `pictures` what the bytes mean. So training opens no pictures, and a folder can be moved as it is.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from .chat_shards import LEARNED, ChatShards
from .collate_images import MediaDocument
from .shards import OPEN_SHARDS, TokenShards, check_size, read_manifest, write_atomically, write_shard


PICTURES = "pictures"
GRID = np.dtype("<i4")


@dataclass(frozen=True)
class Pictures:
    """How patches become what the model reads, and what it must be made for.

    `scale`, `mean`, `std`: (byte * scale - mean) / std, for each colour. `media_token_id`: of the placeholders.
    """

    patch_size: int
    merge_kernel_size: int
    media_token_id: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, processor: Any) -> Self:
        """Those of a `MoeLcProcessor`."""
        images = processor.image_processor
        plain = not images.do_normalize
        return cls(
            patch_size=images.patch_size,
            merge_kernel_size=images.merge_kernel_size,
            media_token_id=processor.image_token_id,
            scale=images.rescale_factor if images.do_rescale else 1.0,
            mean=(0.0,) * 3 if plain else tuple(np.broadcast_to(images.image_mean, 3).tolist()),
            std=(1.0,) * 3 if plain else tuple(np.broadcast_to(images.image_std, 3).tolist()),
        )

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        return cls(**{**content, "mean": tuple(content["mean"]), "std": tuple(content["std"])})

    def pixel_values(self, patches: np.ndarray) -> torch.Tensor:
        """uint8 [patches, 3, side, side] to float32, to the bit what the image processor makes of the same bytes."""
        pixels = patches.astype(np.float32)
        pixels *= np.float32(self.scale)
        pixels -= np.reshape(self.mean, (3, 1, 1)).astype(np.float32)
        pixels /= np.reshape(self.std, (3, 1, 1)).astype(np.float32)
        return torch.from_numpy(pixels)


@dataclass(frozen=True)
class StoredDocument:
    """`input_ids`, an array of the shard's dtype; `learned` bool [tokens]; `grids` int64 [grids, 3]; `patches` uint8."""

    input_ids: np.ndarray
    learned: np.ndarray
    grids: np.ndarray
    patches: np.ndarray


def write_media_shard(folder: Path, name: str, documents: Sequence[StoredDocument]) -> dict[str, Any]:
    """Writes documents as the shard `name`; returns its entry in the manifest."""
    grids = [
        np.insert(document.grids, 0, number, axis=1).astype(GRID).reshape(-1, 4)
        for number, document in enumerate(documents)
    ]
    parts: dict[str, np.ndarray] = {
        "learned": np.concatenate([document.learned for document in documents]).astype(np.uint8),
        "grids": np.concatenate(grids),
        "patches": np.concatenate([document.patches for document in documents]),
    }
    digest = hashlib.sha256()
    for kind, values in parts.items():
        content = values.tobytes()
        digest.update(content)
        write_atomically(folder / f"{name}.{kind}", content)
    entry = write_shard(folder, name, [document.input_ids for document in documents])
    media = {"grids": len(parts["grids"]), "patches": len(parts["patches"]), "sha256": digest.hexdigest()}
    return {**entry, "media": media}


class MediaShards(TokenShards):
    """`TokenShards` whose documents can have pictures; `pictures` says what these are."""

    def __init__(self, folder: str | Path, split: str = "train"):
        super().__init__(folder, split)
        self.pictures = Pictures.from_json(self.manifest["splits"][split][PICTURES])
        side = self.pictures.patch_size
        self._patch = 3, side, side
        self._media = functools.lru_cache(OPEN_SHARDS)(self._map_media)
        for shard in self._shards:
            sizes = {"learned": shard["tokens"], "grids": shard["media"]["grids"] * 4 * GRID.itemsize}
            sizes["patches"] = shard["media"]["patches"] * 3 * side * side
            for kind, size in sizes.items():
                check_size(self.folder / f"{shard['name']}.{kind}", size)

    def media_document(self, index: int) -> MediaDocument:
        """Document `index` as a model reads it, `learned` given. Raises IndexError if there is no such document."""
        input_ids = self.document(index)
        shard, place = self.place(index)
        offsets = self._open(shard)[1]
        learned, grids, borders, patches = self._media(shard)
        begin, end = np.searchsorted(grids[:, 0], (place, place + 1))
        own = patches[borders[begin] : borders[end]]
        return MediaDocument(
            input_ids.astype(np.int64),
            self.pictures.pixel_values(own) if len(own) else None,
            torch.from_numpy(grids[begin:end, 1:].astype(np.int64)) if len(own) else None,
            learned[offsets[place] : offsets[place + 1]].astype(bool),
        )

    def _map_media(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of a shard: `learned`, `grids`, at which patch each grid begins, `patches`."""
        shard = self._shards[number]
        name = str(self.folder / shard["name"])
        grids = np.fromfile(f"{name}.grids", GRID).reshape(-1, 4)
        borders = np.concatenate([[0], np.cumsum(grids[:, 1:].astype(np.int64).prod(1))])
        learned = np.memmap(f"{name}.learned", np.uint8, mode="r")
        if not len(grids):
            return learned, grids, borders, np.zeros((0, *self._patch), np.uint8)
        return learned, grids, borders, np.memmap(f"{name}.patches", np.uint8, mode="r").reshape(-1, *self._patch)


def open_shards(folder: str | Path, split: str = "train") -> TokenShards:
    """The documents of a split of a prepared folder, with or without pictures, or conversations; raises ValueError as they
    do."""
    known = read_manifest(folder)["splits"].get(split, {})
    kind = MediaShards if PICTURES in known else ChatShards if LEARNED in known else TokenShards
    return kind(folder, split)


def as_json(pictures: Pictures) -> dict[str, Any]:
    """What `Pictures.from_json` reads."""
    return asdict(pictures)
