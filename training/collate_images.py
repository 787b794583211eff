"""Training on text with pictures and videos: documents packed behind one another, each with its patches."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from .packing import IGNORED, Pack, assign_packs, collate


MEDIA = ("pixel_values", "grid_thws")


@dataclass(frozen=True)
class MediaDocument:
    """One document: `input_ids`; `pixel_values` [patches, 3, side, side] and `grid_thws` [grids, 3] of its media, in order,
    or None; `learned` [tokens] bool, the tokens that are predicted, or None: all but the placeholders."""

    input_ids: np.ndarray
    pixel_values: torch.Tensor | None = None
    grid_thws: torch.Tensor | None = None
    learned: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class MediaPack(Pack):
    """A pack of `documents` with pictures; each of them says what is learned."""

    documents: list[MediaDocument]

    @classmethod
    def of(cls, documents: Sequence[MediaDocument]) -> Self:
        tokens = [document.input_ids.tolist() for document in documents]
        borders = itertools.accumulate(map(len, tokens), initial=0)
        return cls([token for ids in tokens for token in ids], list(borders), list(documents))

    @property
    def predictions(self) -> int:
        return sum(int(document.learned[1:].sum()) for document in self.documents if document.learned is not None)


def media_document(features: Mapping[str, Any]) -> MediaDocument:
    """What a processor returns for one prompt, as a document; with `assistant_masks`, only what the assistant wrote is
    learned.

    Raises:
        ValueError: for features of several prompts.
    """
    rows = [np.asarray(row) for row in features["input_ids"]]
    if len(rows) != 1:
        raise ValueError(f"features: expected those of one prompt, got {len(rows)}")
    pixels, grids = (None if features.get(name) is None else torch.as_tensor(features[name]) for name in MEDIA)
    masks = features.get("assistant_masks")
    return MediaDocument(rows[0], pixels, grids, None if masks is None else np.asarray(masks[0], bool))


def pack_media(documents: Sequence[MediaDocument], length: int) -> list[list[MediaDocument]]:
    """The documents in packs of at most `length` tokens (`assign_packs`). None is split: half a picture is none.

    Raises:
        ValueError: for a document that is empty or longer than `length`.
    """
    lengths = np.array([len(document) for document in documents], np.int64)
    for number in np.flatnonzero((lengths > length) | (lengths == 0)):
        raise ValueError(f"documents: expected 1 to {length} tokens each, got {lengths[number]} (document {number})")
    places = assign_packs(lengths, length)
    packs: list[list[MediaDocument]] = [[] for _ in range(places.max(initial=-1) + 1)]
    for place, document in zip(places, documents, strict=True):
        packs[place].append(document)
    return packs


@dataclass(frozen=True)
class CollateImages:
    """Documents behind one another in a batch of one row: the inputs of `MoeLcForConditionalGeneration`.

    Also a `data_collator` of transformers' `Trainer`, for a data set whose examples are what the processor returns for one
    prompt each. Inputs as those of `collate`, and `pixel_values`, `grid_thws` of the media in the order of their
    placeholders where there are any. Labels are -100 at placeholders (`media_token_id`), at the first token of each
    document, and where a document says that nothing is learned.
    """

    media_token_id: int

    def __call__(self, examples: Iterable[MediaDocument | Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        documents = [item if isinstance(item, MediaDocument) else media_document(item) for item in examples]
        if not documents:
            raise ValueError("examples: expected at least one document, got none")
        inputs = collate([MediaPack.of(documents)])
        learned = [
            np.ones(len(document), bool) if document.learned is None else document.learned for document in documents
        ]
        ignored = torch.from_numpy(~np.concatenate(learned)) | (inputs["input_ids"][0] == self.media_token_id)
        inputs["labels"][0, ignored] = IGNORED
        for name in MEDIA:
            values = [getattr(document, name) for document in documents]
            if any(value is not None for value in values):
                inputs[name] = torch.cat([value for value in values if value is not None])
        return inputs


@dataclass(frozen=True)
class CollatePacks:
    """Packs with and without pictures as inputs of a multimodal model, never without a picture.

    Where there is none, a document of one blank token is put behind the others, on which nothing is learned: so every
    process of a run uses the tower in every forward, and every parameter has a gradient in every step.
    """

    media_token_id: int
    patch_size: int
    merge_kernel_size: tuple[int, int]

    def __call__(self, packs: Sequence[Pack]) -> dict[str, torch.Tensor]:
        documents = [document for pack in packs for document in documents_of(pack)]
        if all(document.pixel_values is None for document in documents):
            documents.append(self.blank())
        return CollateImages(self.media_token_id)(documents)

    def blank(self) -> MediaDocument:
        rows, columns = self.merge_kernel_size
        pixels = torch.zeros(rows * columns, 3, self.patch_size, self.patch_size)
        return MediaDocument(np.array([self.media_token_id]), pixels, torch.tensor([[1, rows, columns]]))


def documents_of(pack: Pack) -> list[MediaDocument]:
    if isinstance(pack, MediaPack):
        return pack.documents
    learned = None if pack.learned is None else np.array(pack.learned)
    return [
        MediaDocument(np.array(pack.input_ids[begin:end]), learned=None if learned is None else learned[begin:end])
        for begin, end in itertools.pairwise(pack.cu_seqlens)
    ]
