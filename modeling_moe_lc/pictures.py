"""Pictures from wherever they come, as 8-bit RGB or RGBA, or a `ValueError` that says what is wrong with them.

Sizes are checked on the header, before anything is decoded: a file of a few kilobytes can claim gigabytes of pixels.
"""

import base64
import binascii
import io
import os
import struct
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps


# Formats whose decoders run in this process and hold about one copy of the picture. Not here: those that start other
# programs (EPS), that any bytes may pass for (TGA), or that need several times the picture (JPEG 2000).
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP")
MAX_PIXELS = 1 << 26  # 8192 x 8192: under 1 GB in every mode, with the copies that turning and resizing make
MAX_PIXELS_OF = {"AVIF": 1 << 25, "WEBP": 1 << 25}  # these hold two canvases beside the picture
MAX_SIDE = 1 << 20  # the weights of a resize need 32 bytes per pixel of a side
MAX_BYTES = 1 << 28  # of a file
TIMEOUT = 20.0  # seconds that a server may be silent
DAMAGED_METADATA = (SyntaxError, ValueError, TypeError, LookupError, OSError, struct.error)

_CHANNELS = (1, 2, 3, 4)
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}


def read_picture(source: Any, max_pixels: int = MAX_PIXELS, input_data_format: str | None = None) -> Image.Image:
    """One picture, upright (EXIF orientation applied), in mode RGB, or RGBA where some pixel is not opaque.

    Args:
        source: a `PIL.Image`; an array or tensor of uint8, uint16 or bool, `[H, W]`, `[H, W, C]` or `[C, H, W]` with 1
            to 4 channels (where both readings fit, arrays have their channels last and tensors first); the bytes of a
            file; a path; an `http(s)` URL; a `data:` URL or base64 text. Of an animated file the first frame.
        max_pixels: the most pixels that are decoded.
        input_data_format: `"channels_first"` or `"channels_last"`, for arrays and tensors.

    16-bit channels keep their high byte. Colour profiles are not applied.

    Raises:
        ValueError: naming the picture and what is wrong: no such file, no picture, an unknown format or mode, too
            large, truncated, damaged.
    """
    try:
        if isinstance(source, np.ndarray | torch.Tensor):
            _check_size(_array_size(source, input_data_format), max_pixels)
            return _opaque_or_rgba(_from_array(source, input_data_format))
        image = source if isinstance(source, Image.Image) else _opened(source)
        _check_size(image.size, min(max_pixels, MAX_PIXELS_OF.get(image.format or "", max_pixels)))
        image.load()
        return _opaque_or_rgba(_eight_bit(_upright(image)))
    except _Refused as error:
        raise ValueError(f"{_name(source)}: {error}") from error
    except Exception as error:  # what decoders raise on damaged bytes is any of a dozen kinds
        got = f"{type(error).__name__}: {error}"
        raise ValueError(f"{_name(source)}: expected a readable picture, got {got}") from error


class _Refused(ValueError):
    """What is wrong with a picture that has no name yet."""


def _name(source: Any) -> str:
    if isinstance(source, Image.Image):
        return f"image ({getattr(source, 'filename', '') or type(source).__name__})"
    if isinstance(source, str | Path):
        text = str(source)
        return f"image ({text if len(text) < 200 else text[:60] + '...'})"
    return f"image ({type(source).__name__})"


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if not width or not height:
        raise _Refused(f"expected at least one pixel, got {width} x {height}")
    if width * height > max_pixels:
        raise _Refused(f"expected at most {max_pixels:,} pixels, got {width} x {height}")
    if max(size) > MAX_SIDE:
        raise _Refused(f"expected sides of at most {MAX_SIDE:,} pixels, got {width} x {height}")


def _opened(source: Any) -> Image.Image:
    """The header of a file, decoded no further."""
    data = _bytes_of(source)
    Image.init()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # sizes are checked by the caller
        try:
            return Image.open(io.BytesIO(data), formats=[name for name in FORMATS if name in Image.OPEN])
        except Image.UnidentifiedImageError as error:
            raise _Refused(f"expected a picture of the formats {', '.join(FORMATS)}, got {data[:16]!r}...") from error


def _bytes_of(source: Any) -> bytes:
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return _downloaded(source)
    if isinstance(source, str) and source.startswith("data:"):
        return _from_base64(source, source.partition(",")[2])
    if not isinstance(source, str | Path):
        kinds = "a PIL image, array, tensor, bytes, path or URL"
        raise _Refused(f"expected {kinds}, got {type(source).__name__}")
    path = Path(source)
    if os.path.exists(source):  # unlike that of `Path`, False for base64, which is too long for a name
        if not path.is_file():  # a pipe or a device would never end
            raise _Refused("expected a file, got something else of that name")
        if path.stat().st_size > MAX_BYTES:
            size = path.stat().st_size
            raise _Refused(f"expected at most {MAX_BYTES:,} bytes, got {size:,}")
        return path.read_bytes()
    if isinstance(source, Path) or len(source) < 64:
        raise _Refused("expected a file or a URL, got no such file")
    return _from_base64(source, source)


def _from_base64(source: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _Refused(f"expected a file, a URL or base64 text, got neither ({error})") from error


def _downloaded(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
        data = response.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise _Refused(f"expected at most {MAX_BYTES:,} bytes, got more")
    return data


def _upright(image: Image.Image) -> Image.Image:
    try:
        image.getexif()
    except DAMAGED_METADATA:  # which says nothing about the picture
        return image
    return ImageOps.exif_transpose(image)


def _eight_bit(image: Image.Image) -> Image.Image:
    """The picture in a mode with 8 bits per channel."""
    if image.mode == "F":
        raise _Refused("expected integers of 1 to 16 bits per channel, got floating point")
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            low, high = values.min(), values.max()
            raise _Refused(f"expected values from 0 to 65535, got {low} to {high}")
        return Image.fromarray((values >> 8).astype(np.uint8))
    return image


def _opaque_or_rgba(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data and image.mode not in ("RGBa", "La"):
        return image.convert("RGB")
    image = image.convert({"La": "LA"}.get(image.mode, image.mode)).convert("RGBA")
    opaque = image.getextrema()[3][0] == 255
    return image.convert("RGB") if opaque else image


def _channels_first(shape: tuple[int, ...], is_tensor: bool, input_data_format: str | None) -> bool:
    if input_data_format is not None:
        return str(getattr(input_data_format, "value", input_data_format)) == "channels_first"
    first, last = shape[0] in _CHANNELS, shape[2] in _CHANNELS
    return first and (is_tensor or not last)


def _array_size(array: np.ndarray | torch.Tensor, input_data_format: str | None) -> tuple[int, int]:
    """(width, height); raises ValueError if it is no picture."""
    shape = tuple(array.shape)
    if len(shape) == 2:
        return shape[1], shape[0]
    if len(shape) != 3:
        raise _Refused(f"expected two or three dimensions, got shape {shape}")
    first = _channels_first(shape, isinstance(array, torch.Tensor), input_data_format)
    channels = shape[0] if first else shape[2]
    if channels not in _CHANNELS:
        raise _Refused(f"expected 1 to 4 channels, first or last, got shape {shape}")
    return (shape[2], shape[1]) if first else (shape[1], shape[0])


def _from_array(array: np.ndarray | torch.Tensor, input_data_format: str | None) -> Image.Image:
    values = array.detach().cpu().numpy() if isinstance(array, torch.Tensor) else array
    if values.dtype == bool:
        values = values.astype(np.uint8) * 255
    elif values.dtype == np.uint16:
        values = (values >> 8).astype(np.uint8)
    elif values.dtype != np.uint8:
        raise _Refused(f"expected pixels of uint8, uint16 or bool, got {values.dtype}")
    if values.ndim == 2:
        values = values[..., None]
    elif _channels_first(values.shape, isinstance(array, torch.Tensor), input_data_format):
        values = values.transpose(1, 2, 0)  # [H, W, C]
    mode = _MODES[values.shape[2]]
    return Image.fromarray(np.ascontiguousarray(values[..., 0] if mode == "L" else values))
