"""Pictures and videos to patches: released limits, native resolution, nothing but PIL and NumPy.

A picture is scaled down until it fits (never up), padded with black at the right and the bottom to whole cells of 2 x 2
patches, and cut into patches, row by row. A video is such pictures of one size, up to four frames to a grid.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from huggingface_hub.dataclasses import validate_typed_dict
from PIL import Image
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import PILImageResampling
from transformers.processing_utils import ImagesKwargs
from transformers.utils import logging

from .frames import frame_times, sampled_frames
from .pictures import MAX_PIXELS, read_picture


logger = logging.get_logger(__name__)

CHESSBOARD_SQUARE, CHESSBOARD = 8, (255, 180)  # what shows through transparent pixels; the top left square is white
POSITIVE = (
    "patch_size",
    "merge_kernel_size",
    "in_patch_limit",
    "patch_limit_on_one_side",
    "in_patch_limit_each_frame",
    "in_patch_limit_video",
    "sample_fps",
    "temporal_merge_kernel_size",
    "max_pixels",
)
NOT_OURS = ("crop_size", "pad_size", "size", "do_center_crop", "do_pad", "image_seq_length")
OF_A_VIDEO = ("do_sample_frames", "fps", "num_frames")


class MoeLcImageProcessorKwargs(ImagesKwargs, total=False):  # type: ignore[call-arg]  # mypy does not see a TypedDict
    """Fields of the released `media_proc_cfg`, under their names there, and `max_pixels`.

    Attributes:
        patch_size: side of a patch, in pixels.
        merge_kernel_size: side of the cell of patches that becomes one token.
        in_patch_limit: patches of a picture, before it is padded.
        patch_limit_on_one_side: patches along each side.
        in_patch_limit_each_frame, in_patch_limit_video: patches of a frame, and of the frames of a video together.
        sample_fps: frames per second that a video is sampled down to.
        temporal_merge_kernel_size: frames that one token covers at most.
        max_pixels: the largest picture that is decoded at all.
    """

    patch_size: int | None
    merge_kernel_size: int | None
    in_patch_limit: int | None
    patch_limit_on_one_side: int | None
    in_patch_limit_each_frame: int | None
    in_patch_limit_video: int | None
    sample_fps: float | int | None
    temporal_merge_kernel_size: int | None
    max_pixels: int | None


@dataclass(frozen=True)
class Medium:
    """A picture or a video as the model reads it.

    `pixel_values` float32 [patches, 3, patch_size, patch_size]; `grid_thws` one (frames, rows, columns) in patches for
    each stretch of placeholders, with `tokens` placeholders each; `times` the seconds at which the stretches begin, empty
    for a picture; `size` (width, height) of the original in pixels.
    """

    pixel_values: np.ndarray
    grid_thws: list[tuple[int, int, int]]
    tokens: list[int]
    times: list[float]
    size: tuple[int, int]


def resized_size(width: int, height: int, patch_size: int, patches: int, patches_on_one_side: int) -> tuple[int, int]:
    """(width, height) in pixels after scaling: at most about `patches` patches, at most `patches_on_one_side` along a
    side, never larger than before, at least 1 x 1."""
    longest = patches_on_one_side * patch_size
    count = max(1, width // patch_size) * max(1, height // patch_size)
    scale = min(1.0, math.sqrt(patches / count), longest / width, longest / height)
    new_width, new_height = (min(longest, max(1, int(side * scale))) for side in (width, height))
    return new_width, new_height


def patchify(pixels: np.ndarray, patch_size: int) -> np.ndarray:
    """[3, H, W] to [H / patch_size * W / patch_size, 3, patch_size, patch_size]: rows, then columns."""
    channels, height, width = pixels.shape
    rows, columns = height // patch_size, width // patch_size
    cut = pixels.reshape(channels, rows, patch_size, columns, patch_size)
    return cut.transpose(1, 3, 0, 2, 4).reshape(rows * columns, channels, patch_size, patch_size)


def on_chessboard(image: Image.Image) -> Image.Image:
    """An RGBA picture on grey and white squares, as RGB."""
    width, height = image.size
    rows, columns = np.ogrid[:height, :width]
    odd = (rows // CHESSBOARD_SQUARE + columns // CHESSBOARD_SQUARE) % 2
    board = Image.fromarray(np.array(CHESSBOARD, np.uint8)[odd]).convert("RGBA")
    return Image.alpha_composite(board, image).convert("RGB")


class MoeLcImageProcessor(PilBackend):
    r"""
    Pictures, and videos as lists of frames, to `pixel_values` float32 [patches, 3, patch_size, patch_size] and
    `grid_thws` int64 [grids, 3] (frames, rows, columns), all behind one another. A picture is anything that `read_picture`
    reads. Fields are those of `MoeLcImageProcessorKwargs`; a released `media_proc_cfg` is read too.
    """

    valid_kwargs = MoeLcImageProcessorKwargs
    model_input_names = ["pixel_values", "grid_thws"]

    do_convert_rgb = True
    do_resize = True
    resample = PILImageResampling.BICUBIC
    do_rescale = True
    do_normalize = True
    image_mean = [0.5, 0.5, 0.5]
    image_std = [0.5, 0.5, 0.5]
    patch_size = 14
    merge_kernel_size = 2
    in_patch_limit = 65536
    patch_limit_on_one_side = 512
    in_patch_limit_each_frame = 16384
    in_patch_limit_video = 655360
    sample_fps = 8.0
    temporal_merge_kernel_size = 4
    max_pixels = MAX_PIXELS

    def __init__(self, **kwargs):
        released = kwargs.pop("media_proc_cfg", None) or {}
        if released.get("fixed_output_tokens") is not None:
            raise ValueError(f"fixed_output_tokens: expected None, got {released['fixed_output_tokens']!r}")
        known = {name: value for name, value in released.items() if name in self.valid_kwargs.__annotations__}
        super().__init__(**{**known, **kwargs})

    def preprocess(self, images: Any, **kwargs) -> BatchFeature:
        """Pictures, in any nesting of lists, in order.

        Raises:
            ValueError: as `read_picture`; for an option that these pictures have no use for.
        """
        return_tensors = kwargs.pop("return_tensors", None)
        return concatenated([self.picture(image, **kwargs) for image in flat_pictures(images)], return_tensors)

    def picture(self, source: Any, **kwargs) -> Medium:
        """One picture. `kwargs` override fields, for this call. Raises ValueError as `preprocess`."""
        options = self._options(kwargs)
        image = read_picture(source, options["max_pixels"], options["input_data_format"])
        pixel_values, rows, columns = self._patches(image, options["in_patch_limit"], options)
        tokens = rows * columns // options["merge_kernel_size"] ** 2
        return Medium(pixel_values, [(1, rows, columns)], [tokens], [], image.size)

    def video(self, frames: Any, metadata: Any = None, **kwargs) -> Medium:
        """One video.

        Args:
            frames: a list of pictures, or an array of them; all of one size.
            metadata: when they were taken (`frame_times`). None: they are `sample_fps` frames per second already.
            do_sample_frames: False: all frames are used.
            fps, num_frames: frames per second in place of `sample_fps`, and the most frames.

        Raises:
            ValueError: as `read_picture`; for no frames, frames of different sizes, times that do not fit, a file.
        """
        sampling = {name: kwargs.pop(name, None) for name in OF_A_VIDEO}
        options = self._options(kwargs)
        if isinstance(frames, str | bytes) or not hasattr(frames, "__len__") or not len(frames):
            got = "none" if hasattr(frames, "__len__") and not len(frames) else type(frames).__name__
            raise ValueError(f"video: expected a list of frames, or an array of them (decode a file first), got {got}")
        times = frame_times(len(frames), metadata, options["sample_fps"])
        if metadata is None:
            logger.warning_once(
                f"A video without times (`fps` or `timestamps`) is taken as {options['sample_fps']} frames per second."
            )
        if sampling["num_frames"] is not None and sampling["num_frames"] < 1:
            raise ValueError(f"num_frames: expected at least 1, got {sampling['num_frames']}")
        used = range(len(frames))
        if sampling["do_sample_frames"] is not False:
            used = sampled_frames(times, sampling["fps"] or options["sample_fps"], sampling["num_frames"])
        return self._grids(frames, [(index, times[index]) for index in used], options)

    def _grids(self, frames: Any, used: Sequence[tuple[int, float]], options: dict[str, Any]) -> Medium:
        limit = min(options["in_patch_limit_each_frame"], max(1, options["in_patch_limit_video"] // len(used)))
        size, patches = None, []
        for index, _ in used:
            image = read_picture(frames[index], options["max_pixels"], options["input_data_format"])
            if size not in (None, image.size):
                raise ValueError(f"video: expected frames of one size, got {size} and {image.size} (frame {index})")
            size = image.size
            pixel_values, rows, columns = self._patches(image, limit, options)
            patches.append(pixel_values)
        step = options["temporal_merge_kernel_size"]
        grids = [(min(step, len(used) - first), rows, columns) for first in range(0, len(used), step)]
        tokens = [rows * columns // options["merge_kernel_size"] ** 2] * len(grids)
        return Medium(np.concatenate(patches), grids, tokens, [seconds for _, seconds in used[::step]], size)

    def _patches(self, image: Image.Image, limit: int, options: dict[str, Any]) -> tuple[np.ndarray, int, int]:
        patch_size = options["patch_size"]
        size = resized_size(*image.size, patch_size, limit, options["patch_limit_on_one_side"])
        if size != image.size:
            image = image.resize(size, options["resample"])
        if image.mode == "RGBA":
            image = on_chessboard(image)
        cell = patch_size * options["merge_kernel_size"]
        width, height = (math.ceil(side / cell) * cell for side in size)
        pixels = np.zeros((3, height, width), np.float32)
        pixels[:, : size[1], : size[0]] = np.asarray(image).transpose(2, 0, 1)
        if options["do_rescale"]:
            pixels *= np.float32(options["rescale_factor"])
        if options["do_normalize"]:
            mean, std = (
                np.reshape(options[name], (-1, 1, 1)).astype(np.float32) for name in ("image_mean", "image_std")
            )
            pixels -= mean
            pixels /= std
        return patchify(pixels, patch_size), height // patch_size, width // patch_size

    def _options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """All fields, those of the call before those of the processor, checked."""
        validate_typed_dict(self.valid_kwargs, kwargs)
        options = {name: getattr(self, name, None) for name in self.valid_kwargs.__annotations__}
        options |= {name: value for name, value in kwargs.items() if value is not None}
        for name in NOT_OURS:
            if options[name]:
                raise ValueError(f"{name}: expected None (the limits are in patches), got {options[name]!r}")
        for name in ("do_convert_rgb", "do_resize"):
            if not options[name]:
                raise ValueError(f"{name}: expected True (patches are RGB, and of a limited number), got False")
        for name in POSITIVE:
            if not options[name] > 0:
                raise ValueError(f"{name}: expected a positive number, got {options[name]!r}")
        for name in ("image_mean", "image_std"):
            if np.size(options[name]) not in (1, 3):
                raise ValueError(f"{name}: expected one number or three, got {options[name]!r}")
        return options

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: dict | None = None) -> int:
        """Patches of a picture of this size, padding included."""
        options = self._options(dict(images_kwargs or {}))
        return self._count(height, width, options["in_patch_limit"], options)

    def get_number_of_video_patches(
        self, num_frames: int, height: int, width: int, videos_kwargs: dict | None = None
    ) -> int:
        """Patches of a video of `num_frames` sampled frames, padding included."""
        options = self._options({k: v for k, v in (videos_kwargs or {}).items() if k not in OF_A_VIDEO})
        limit = min(options["in_patch_limit_each_frame"], max(1, options["in_patch_limit_video"] // num_frames))
        return num_frames * self._count(height, width, limit, options)

    @staticmethod
    def _count(height: int, width: int, limit: int, options: dict[str, Any]) -> int:
        patch_size, cell = options["patch_size"], options["merge_kernel_size"]
        size = resized_size(width, height, patch_size, limit, options["patch_limit_on_one_side"])
        return math.prod(math.ceil(side / (patch_size * cell)) * cell for side in size)


def flat_pictures(images: Any) -> list[Any]:
    """The pictures in any nesting of lists and of arrays and tensors with more than three dimensions, in order."""
    if isinstance(images, list | tuple) or (isinstance(images, np.ndarray | torch.Tensor) and images.ndim > 3):
        return [picture for item in images for picture in flat_pictures(item)]
    return [images]


def concatenated(media: Sequence[Medium], return_tensors: str | None) -> BatchFeature:
    """`pixel_values` and `grid_thws` of the media, behind one another. Raises ValueError if there are none."""
    if not media:
        raise ValueError("images: expected at least one picture, got none")
    pixel_values = np.concatenate([medium.pixel_values for medium in media])
    grid_thws = np.array([grid for medium in media for grid in medium.grid_thws], np.int64)
    return BatchFeature({"pixel_values": pixel_values, "grid_thws": grid_thws}, tensor_type=return_tensors)
