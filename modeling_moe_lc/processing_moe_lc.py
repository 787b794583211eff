"""Text, pictures and videos to the inputs of the model."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from transformers.image_processing_utils import BatchFeature
from transformers.processing_utils import (
    ImagesKwargs,
    MultiModalData,
    ProcessingKwargs,
    ProcessorMixin,
    TextKwargs,
    VideosKwargs,
)
from transformers.utils.chat_template_utils import render_jinja_template

from .conversation import breaker, cut, media_of, unused_character, without_media
from .frames import clock
from .image_processing_moe_lc import Medium, MoeLcImageProcessorKwargs, concatenated, flat_pictures


MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END = "<|media_begin|>", "<|media_content|>", "<|media_end|>"
MEDIA_PAD = "<|media_pad|>"
IMAGE, VIDEO = (f"{MEDIA_BEGIN}{kind}{MEDIA_CONTENT}{MEDIA_PAD}{MEDIA_END}" for kind in ("image", "video"))
PLACEHOLDER = re.compile("|".join(map(re.escape, (IMAGE, VIDEO, MEDIA_PAD))))  # a bare pad stands for a picture

TYPE_IDS = {"image": 1, "video": 2}  # of `mm_token_type_ids`, as everywhere in transformers; 0 is text
CALL_OPTIONS = {"return_mm_token_type_ids", "images_kwargs", "videos_kwargs", "text_kwargs", "common_kwargs"}
OWN_FIELDS = set(MoeLcImageProcessorKwargs.__annotations__) - set(ImagesKwargs.__annotations__)
ENCODING_OPTIONS = {
    "padding",
    "truncation",
    "max_length",
    "padding_side",
    "pad_to_multiple_of",
    "return_attention_mask",
}
WITHOUT_MEANING = {
    "return_length",
    "return_offsets_mapping",
    "return_overflowing_tokens",
    "return_special_tokens_mask",
    "stride",
    "text_pair",
}


class MoeLcProcessor(ProcessorMixin):
    r"""
    A tokenizer and a [`MoeLcImageProcessor`] as one.

    In a prompt, `<|media_pad|>` stands for a picture and `<|media_begin|>video<|media_content|><|media_pad|><|media_end|>`
    for a video. They become

        <|media_begin|>image 640x480<|media_content|><|media_pad|>...<|media_end|>            the size as it was
        00:00:01.500<|media_begin|>video<|media_content|><|media_pad|>...<|media_end|>...     for each (up to) 4 frames

    with one `<|media_pad|>` for each token of the vision tower. `pixel_values` and `grid_thws` hold the media of all prompts,
    in the order of their placeholders.

    Args:
        image_processor: a [`MoeLcImageProcessor`].
        tokenizer: one that has the four media tokens as single tokens.
        chat_template (`str`, *optional*): the tokenizer's where there is none.
    """

    image_token = MEDIA_PAD
    video_token = VIDEO

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        super().__init__(image_processor, tokenizer, chat_template=chat_template, **kwargs)
        if self.chat_template is None:
            self.chat_template = tokenizer.chat_template
        vocabulary = tokenizer.get_vocab()
        missing = [token for token in (MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD) if token not in vocabulary]
        if missing:
            raise ValueError(f"tokenizer: expected one with the media tokens, got none of the name {missing}")
        self.image_token_id = vocabulary[MEDIA_PAD]

    def __call__(self, images: Any = None, text: Any = None, videos: Any = None, **kwargs) -> BatchFeature:
        """Inputs for prompts in which the control tokens are meant as such (text from users: `apply_chat_template`).

        Args:
            images: a picture, a list of them in the order of the placeholders, or one such list for each prompt.
            text: a prompt or a list of prompts.
            videos: a list of videos (each a list of pictures, or an array), or one such list for each prompt.
            kwargs: of transformers' processors; `video_metadata`: for each video its `fps` or `timestamps`, in seconds;
                `return_mm_token_type_ids`: 1 for the placeholders of pictures, 2 for those of videos.

        Returns:
            `input_ids`, `attention_mask`, `pixel_values`, `grid_thws`, as far as there is text and there are media.

        Raises:
            ValueError: placeholders and media that differ in number (with both numbers), a truncation that would cut
                placeholders, a medium that cannot be read.
        """
        if text is None and images is None and videos is None:
            raise ValueError("text, images, videos: expected at least one of them, got none")
        options = self._call_options(kwargs)
        if text is None:
            images, videos = ([] if media is None else media for media in (images, videos))
            pictures = [self.image_processor.picture(image, **options["images"]) for image in flat_pictures(images)]
            films = [self._video(video, data, options) for video, data in _with_metadata(flat_videos(videos), options)]
            return concatenated(pictures + films, options["text"].get("return_tensors"))
        texts = [text] if isinstance(text, str) else list(text)
        prompts = [[(prompt, False)] for prompt in texts]
        kinds = _placeholders(prompts)
        pictures = _in_order("images", images, _count(kinds, "image"), flat_pictures, _are_pictures)
        films = _in_order("videos", videos, _count(kinds, "video"), flat_videos, _are_videos)
        media = self._media(kinds, pictures, films, options)
        expanded = ["".join(part for part, _ in parts) for parts in _expanded(prompts, media)]
        return self._features(self.tokenizer(expanded, **options["text"]), media, options)

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]] | list[list[dict[str, Any]]],
        chat_template: str | None = None,
        tools: list[Any] | None = None,
        documents: list[dict[str, str]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        return_assistant_tokens_mask: bool = False,
        tokenize: bool = False,
        return_tensors: str | None = None,
        return_dict: bool = False,
        processor_kwargs: dict[str, Any] | None = None,
        **kwargs,
    ) -> Any:
        """A conversation, or a list of them, as the template writes it: a string, or with `tokenize` the model's inputs.

        Arguments as in transformers; other keyword arguments are variables of the template, those of `__call__` go to
        it. With `tokenize`, nothing that stands in the conversation, the tools or the variables becomes a control token or
        a placeholder, whatever it spells: only what the template itself writes does.

        Items of `content`: `{"type": "text", "text": ...}`; `{"type": "image", "image": ...}` (or `url`, `path`,
        `base64`); `{"type": "video", "video": frames, "fps": 2.0}` (or `timestamps`, in seconds).

        Raises:
            ValueError: as `__call__`; a medium without its data.
        """
        is_batch = not isinstance(conversation[0], dict) if len(conversation) else False
        conversations: list[Any] = [list(messages) for messages in conversation] if is_batch else [list(conversation)]
        known = CALL_OPTIONS.union(*(group.__annotations__ for group in (TextKwargs, ImagesKwargs, VideosKwargs)))
        known |= set(self.image_processor.valid_kwargs.__annotations__)
        variables = {name: value for name, value in kwargs.items() if name not in known}
        call = {name: value for name, value in kwargs.items() if name in known} | (processor_kwargs or {})
        template = self._template(chat_template)

        border = unused_character([conversations, tools, documents, variables, template]) if tokenize else ""
        broken = breaker({str(token) for token in self.tokenizer.added_tokens_decoder.values()}, border)
        prompts, spans = render_jinja_template(
            conversations=broken(without_media(conversations)),
            tools=broken(tools),
            documents=broken(documents),
            chat_template=template,
            return_assistant_tokens_mask=return_assistant_tokens_mask,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            **{**self.tokenizer.special_tokens_map, **broken(variables)},
        )
        if not tokenize:
            return prompts if is_batch else prompts[0]
        if return_tensors not in (None, "auto"):
            call["return_tensors"] = return_tensors
        if not return_assistant_tokens_mask:
            spans = [[] for _ in prompts]
        features = self._chat_features(conversations, prompts, spans, border, self._call_options(call))
        if not return_assistant_tokens_mask:
            del features["assistant_masks"]
        return features if return_dict else features["input_ids"]

    def _chat_features(
        self,
        conversations: list[Any],
        prompts: list[str],
        spans: list[list[tuple[int, int]]],
        border: str,
        options: dict[str, Any],
    ) -> BatchFeature:
        parts = [cut(prompt, places) for prompt, places in zip(prompts, spans, strict=True)]
        kinds = _placeholders(parts)
        found = {kind: [list(media_of(messages, kind)) for messages in conversations] for kind in TYPE_IDS}
        for kind, own in found.items():
            _expect(f"{kind}s", _count(kinds, kind), [len(media) for media in own])
        pictures, films = ([item for own in found[kind] for item in own] for kind in TYPE_IDS)
        options["metadata"] = [metadata for _, metadata in films]
        media = self._media(kinds, [image for image, _ in pictures], [frames for frames, _ in films], options)
        rows, masks = [], []
        for prompt in _expanded(parts, media):
            pieces = [(piece, mine) for part, mine in prompt for piece in part.split(border) if piece]
            encoded = self.tokenizer([piece for piece, _ in pieces] or [""], add_special_tokens=False)["input_ids"]
            rows.append([token for ids in encoded for token in ids])
            masks.append([int(mine) for ids, (_, mine) in zip(encoded, pieces, strict=False) for _ in ids])
        return self._features(self._padded(rows, masks, options["text"]), media, options)

    def _padded(self, rows: list[list[int]], masks: list[list[int]], text: dict[str, Any]) -> dict[str, Any]:
        """As the tokenizer would return these rows of ids, with `assistant_masks`."""
        for name in WITHOUT_MEANING & set(text):
            if text[name]:
                raise ValueError(f"{name}: expected none (a conversation is encoded in pieces), got {text[name]!r}")
        longest = text.get("max_length") or self.tokenizer.model_max_length
        if text.get("truncation"):
            left = self.tokenizer.truncation_side == "left"
            rows, masks = ([row[-longest:] if left else row[:longest] for row in kind] for kind in (rows, masks))
        wanted = {name: text[name] for name in ENCODING_OPTIONS - {"truncation"} if text.get(name) is not None}
        encoded = self.tokenizer.pad({"input_ids": rows}, **{"padding": False, **wanted})
        left = (text.get("padding_side") or self.tokenizer.padding_side) == "left"
        for mask, ids in zip(masks, encoded["input_ids"], strict=True):
            padding = [0] * (len(ids) - len(mask))
            mask[:] = padding + mask if left else mask + padding
        return {**encoded, "assistant_masks": masks}

    def _call_options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments by what they are for: `text`, `images`, `videos`, `metadata` (of each video, or None) and
        `type_ids`."""
        merged = self._merge_kwargs(ProcessingKwargs, tokenizer_init_kwargs=self.tokenizer.init_kwargs, **kwargs)
        text, images, videos = (dict(merged[f"{kind}_kwargs"]) for kind in ("text", "images", "videos"))
        asked = [text.pop("return_mm_token_type_ids", None), merged.get("return_mm_token_type_ids")]
        text = {name: value for name, value in text.items() if name != "return_text_replacement_offsets"}
        metadata = videos.pop("video_metadata", None)
        videos.pop("return_metadata", None)
        for pixels in (images, videos):
            pixels.pop("return_tensors", None)
        videos = {name: value for name, value in images.items() if name in OWN_FIELDS} | videos
        metadata = metadata if metadata is None or isinstance(metadata, list | tuple) else [metadata]
        return {"text": text, "images": images, "videos": videos, "metadata": metadata, "type_ids": any(asked)}

    def _template(self, chat_template: str | None) -> str:
        known = self.chat_template
        if isinstance(known, dict):
            name = chat_template or "default"
            if name not in known and chat_template is None:
                raise ValueError(f"chat_template: expected one of {sorted(known)}, got none")
            return known.get(name, name)
        if chat_template is None and known is None:
            raise ValueError("chat_template: expected a template, got none, and the tokenizer has none")
        return chat_template or known

    def _video(self, frames: Any, metadata: Any, options: dict[str, Any]) -> Medium:
        return self.image_processor.video(frames, metadata, **options["videos"])

    def _media(
        self, kinds: list[list[str]], pictures: list[Any], films: list[Any], options: dict[str, Any]
    ) -> list[list[tuple[str, Medium]]]:
        """Each prompt's media in the order of its placeholders, with their kind, read and cut into patches."""
        read = {
            "image": (self.image_processor.picture(image, **options["images"]) for image in pictures),
            "video": (self._video(frames, data, options) for frames, data in _with_metadata(films, options)),
        }
        return [[(kind, next(read[kind])) for kind in found] for found in kinds]

    def _features(self, encoded: Any, media: list[list[tuple[str, Medium]]], options: dict[str, Any]) -> BatchFeature:
        data = dict(encoded)
        return_tensors = options["text"].get("return_tensors")
        is_pad = [np.asarray(row) == self.image_token_id for row in data["input_ids"]]
        types = [[TYPE_IDS[kind] for kind, medium in found for _ in range(sum(medium.tokens))] for found in media]
        for here, wanted in zip(is_pad, types, strict=True):
            if here.sum() != len(wanted):
                raise ValueError(
                    f"max_length: expected room for all {len(wanted)} placeholders of a prompt, got {here.sum()} of them"
                )
        if options["type_ids"]:
            ids = [np.zeros(here.shape, np.int64) for here in is_pad]
            for row, here, wanted in zip(ids, is_pad, types, strict=True):
                row[here] = wanted
            data["mm_token_type_ids"] = [row.tolist() for row in ids]
        flat = [medium for found in media for _, medium in found]
        if flat:
            data |= concatenated(flat, None)
        return BatchFeature(data, tensor_type=return_tensors)

    def _get_num_multimodal_tokens(
        self, image_sizes: Sequence[Sequence[int]] | None = None, video_sizes: Any = None, **kwargs
    ) -> MultiModalData:
        """Placeholders of pictures of (height, width) and of videos of (sampled frames, height, width), in pixels."""
        options, processor = self._call_options(kwargs), self.image_processor
        cell = (options["images"].get("merge_kernel_size") or processor.merge_kernel_size) ** 2
        step = options["videos"].get("temporal_merge_kernel_size") or processor.temporal_merge_kernel_size
        data: dict[str, list[int]] = {}
        if image_sizes is not None:
            patches = [processor.get_number_of_image_patches(*size, options["images"]) for size in image_sizes]
            data |= {"num_image_patches": patches, "num_image_tokens": [count // cell for count in patches]}
        if video_sizes is not None:
            patches = [processor.get_number_of_video_patches(*size, options["videos"]) for size in video_sizes]
            counted = zip(video_sizes, patches, strict=True)
            data["num_video_tokens"] = [
                math.ceil(size[0] / step) * (count // size[0]) // cell for size, count in counted
            ]
        return MultiModalData(**data)

    @property
    def model_input_names(self) -> list[str]:
        return [*self.tokenizer.model_input_names, *self.image_processor.model_input_names]


def media_text(kind: str, medium: Medium) -> str:
    """What a medium becomes in the prompt."""
    if kind == "image":
        width, height = medium.size
        return f"{MEDIA_BEGIN}image {width}x{height}{MEDIA_CONTENT}{MEDIA_PAD * medium.tokens[0]}{MEDIA_END}"
    return "".join(
        f"{clock(seconds)}{MEDIA_BEGIN}video{MEDIA_CONTENT}{MEDIA_PAD * count}{MEDIA_END}"
        for seconds, count in zip(medium.times, medium.tokens, strict=True)
    )


def flat_videos(videos: Any) -> list[Any]:
    """The videos in any nesting of lists: a video is an array of frames, or a list of pictures."""
    if not isinstance(videos, list | tuple):
        return [videos]
    return [video for item in videos for video in flat_videos(item)] if _are_videos(videos) else [videos]


def _placeholders(prompts: list[list[tuple[str, bool]]]) -> list[list[str]]:
    """What each prompt has placeholders for, "image" or "video", in order."""
    found = [[match[0] for part, _ in parts for match in PLACEHOLDER.finditer(part)] for parts in prompts]
    return [["video" if placeholder == VIDEO else "image" for placeholder in own] for own in found]


def _count(kinds: list[list[str]], kind: str) -> list[int]:
    return [own.count(kind) for own in kinds]


def _in_order(
    name: str, media: Any, wanted: list[int], flatten: Callable[[Any], list[Any]], is_group: Callable[[Any], bool]
) -> list[Any]:
    """The media; raises ValueError unless there are as many as placeholders, in each prompt where they come in one list
    for each."""
    media = [] if media is None else media
    flat = flatten(media)
    grouped = isinstance(media, list | tuple) and len(media) == len(wanted) and all(map(is_group, media))
    if grouped:
        _expect(name, wanted, [len(flatten(own)) for own in media])
    else:
        _expect(name, [sum(wanted)], [len(flat)])
    return flat


def _expect(name: str, wanted: list[int], got: list[int]) -> None:
    if got != wanted:
        raise ValueError(f"{name}: expected {wanted}, the number of placeholders in the text, got {got}")


def _is_film(item: Any) -> bool:
    return getattr(item, "ndim", 0) > 3


def _are_pictures(item: Any) -> bool:
    return isinstance(item, list | tuple)


def _are_videos(item: Any) -> bool:
    return isinstance(item, list | tuple) and all(isinstance(video, list | tuple) or _is_film(video) for video in item)


def _with_metadata(videos: list[Any], options: dict[str, Any]) -> list[tuple[Any, Any]]:
    metadata = options["metadata"] or [None] * len(videos)
    if len(metadata) != len(videos):
        raise ValueError(f"video_metadata: expected {len(videos)}, one for each video, got {len(metadata)}")
    return list(zip(videos, metadata, strict=True))


def _expanded(
    prompts: list[list[tuple[str, bool]]], media: list[list[tuple[str, Medium]]]
) -> Iterator[list[tuple[str, bool]]]:
    for parts, found in zip(prompts, media, strict=True):
        texts = iter([media_text(kind, medium) for kind, medium in found])
        yield [(PLACEHOLDER.sub(lambda _, texts=texts: next(texts), part), mine) for part, mine in parts]
