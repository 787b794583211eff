"""Odd and bad picture files, and a program that reads them in a process with little memory and little time for each.

`write(folder)` makes the files; `python odd_pictures.py FOLDER` prints, as JSON, what became of each.
"""

import base64
import io
import json
import os
import resource
import signal
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
from PIL import Image


SIZE = (40, 24)  # width, height
CARD = {
    "top left": (200, 30, 30),
    "top right": (30, 180, 30),
    "bottom left": (30, 30, 190),
    "bottom right": (240,) * 3,
}
SECONDS, MEGABYTES = 20, 1000


def card(size=SIZE) -> Image.Image:
    """Four quarters of four colours: any turn, flip or mixed channel shows."""
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    middle_x, middle_y = size[0] // 2, size[1] // 2
    quarters = [
        (y, x) for y in (slice(middle_y), slice(middle_y, None)) for x in (slice(middle_x), slice(middle_x, None))
    ]
    for place, colour in zip(quarters, CARD.values(), strict=True):
        pixels[place] = colour
    return Image.fromarray(pixels)


def saved(image: Image.Image, file_format: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, file_format, **options)
    return stream.getvalue()


def turned(orientation: int) -> bytes:
    """A JPEG that shows the card upright to those who read its EXIF orientation."""
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    return saved(card().transpose(undo[orientation]), "JPEG", quality=95, exif=turned_exif(orientation))


def turned_exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def png(width: int, height: int, depth: int, colour: int, data: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """A PNG from its raw lines, each with the filter byte in front; `more` are chunks before the data."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    extra = b"".join(chunk(*item) for item in more)
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def sixteen_bit_rgb() -> bytes:
    wide = np.asarray(card()).astype(">u2") * 257  # [H, W, 3]
    return png(*SIZE, 16, 2, zlib.compress(b"".join(b"\0" + line.tobytes() for line in wide)))


def sixteen_bit_grey(file_format: str) -> bytes:
    return saved(Image.fromarray(np.asarray(card().convert("L")).astype(np.uint16) * 257), file_format)


def transparent() -> Image.Image:
    image = card().convert("RGBA")
    image.putalpha(Image.fromarray(np.repeat(np.uint8([[255] * 20 + [0] * 20]), SIZE[1], 0)))
    return image


def frames() -> dict:
    return {"save_all": True, "append_images": [card().transpose(Image.Transpose.ROTATE_180)] * 3}


def zeros(length: int) -> bytes:
    compressor = zlib.compressobj(1)
    return b"".join([*(compressor.compress(bytes(1 << 20)) for _ in range(length >> 20)), compressor.flush()])


def looping_tiff() -> bytes:
    """Its only directory names itself as the next one."""
    entries = [
        (256, 3, 1, 8),
        (257, 3, 1, 8),
        (258, 3, 1, 8),
        (259, 3, 1, 1),
        (262, 3, 1, 1),
        (273, 4, 1, 8),
        (279, 4, 1, 64),
    ]
    directory = struct.pack("<H", len(entries))
    for tag, kind, count, value in entries:
        directory += struct.pack("<HHII", tag, kind, count, value)
    return b"II*\0" + struct.pack("<I", 72) + bytes(64) + directory + struct.pack("<I", 72)


def cut(data: bytes, part: float = 0.6) -> bytes:
    return data[: int(len(data) * part)]


def with_size(data: bytes, place: int, layout: str, side: int) -> bytes:
    """A file whose header claims a square of this side."""
    size = struct.pack(layout, side, side)
    return data[:place] + size + data[place + len(size) :]


def lossless_webp_of(side: int) -> bytes:
    """A small file whose header claims a square of this side."""
    data = saved(card(), "WEBP", lossless=True)
    size = (side - 1) | (side - 1) << 14  # 14 bits each, behind the byte that marks the format
    return data[:21] + struct.pack("<I", size) + data[25:]


def damaged(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


LARGEST = (8192, 8192)
noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))

# Shown as the card, in colour unless `GREY` says otherwise.
CARDS = {
    "rgb.png": lambda: saved(card(), "PNG"),
    "plain.jpg": lambda: saved(card(), "JPEG", quality=95),
    "progressive.jpg": lambda: saved(card(), "JPEG", quality=95, progressive=True),
    **{f"turned{number}.jpg": lambda number=number: turned(number) for number in range(2, 9)},
    "grey.png": lambda: saved(card().convert("L"), "PNG"),
    "grey.jpg": lambda: saved(card().convert("L"), "JPEG", quality=95),
    "grey_alpha.png": lambda: saved(card().convert("LA"), "PNG"),
    "palette.png": lambda: saved(card().quantize(4), "PNG"),
    "opaque_alpha.png": lambda: saved(card().convert("RGBA"), "PNG"),
    "sixteen_bit_grey.png": lambda: sixteen_bit_grey("PNG"),
    "sixteen_bit_grey.tif": lambda: sixteen_bit_grey("TIFF"),
    "sixteen_bit_grey.pgm": lambda: sixteen_bit_grey("PPM"),
    "sixteen_bit_rgb.png": sixteen_bit_rgb,
    "cmyk.jpg": lambda: saved(card().convert("CMYK"), "JPEG", quality=95),
    "cmyk.tif": lambda: saved(card().convert("CMYK"), "TIFF"),
    "ycbcr.tif": lambda: saved(card().convert("YCbCr"), "TIFF"),
    "lzw.tif": lambda: saved(card(), "TIFF", compression="tiff_lzw"),
    "pages.tif": lambda: saved(card(), "TIFF", **frames()),
    "plain.gif": lambda: saved(card(), "GIF"),
    "animated.gif": lambda: saved(card(), "GIF", **frames()),
    "animated.png": lambda: saved(card(), "PNG", **frames()),
    "animated.webp": lambda: saved(card(), "WEBP", lossless=True, **frames()),
    "two_views.mpo": lambda: saved(card(), "MPO", quality=95, **frames()),
    "plain.webp": lambda: saved(card(), "WEBP", quality=95),
    "plain.avif": lambda: saved(card(), "AVIF", quality=95),
    "plain.bmp": lambda: saved(card(), "BMP"),
    "plain.ppm": lambda: saved(card(), "PPM"),
    "wrong_ending.gif": lambda: saved(card(), "PNG"),
    "trailing_bytes.png": lambda: saved(card(), "PNG") + b"more" * 100,
    "damaged_exif.png": lambda: saved(card(), "PNG", exif=b"Exif\0\0not exif at all"),
}
GREY = {name for name in CARDS if "grey" in name}

# Shown in these sizes.
SIZES = {
    "half_transparent.png": (SIZE, lambda: saved(transparent(), "PNG")),
    "half_transparent.webp": (SIZE, lambda: saved(transparent(), "WEBP", lossless=True)),
    "transparent_palette.gif": (SIZE, lambda: saved(transparent(), "GIF")),
    "one_bit.png": (SIZE, lambda: saved(card().convert("1"), "PNG")),
    "one_pixel.png": ((1, 1), lambda: saved(card((1, 1)), "PNG")),
    "one_column.png": ((1, 60_000), lambda: saved(Image.new("RGB", (1, 60_000)), "PNG")),
    "one_row.png": ((900_000, 1), lambda: saved(Image.new("L", (900_000, 1)), "PNG")),
    "colours_of_the_eye.tif": (SIZE, lambda: saved(Image.new("LAB", SIZE), "TIFF")),
    "loop.tif": ((8, 8), looping_tiff),
    "largest_turned.jpg": (LARGEST, lambda: saved(Image.new("RGB", LARGEST), "JPEG", exif=turned_exif(6))),
}

# Refused, with these words in the error.
ERRORS = {
    "empty.png": ("formats", lambda: b""),
    "text.png": ("formats", lambda: b"not a picture, but text\n" * 40),
    "page.jpg": ("formats", lambda: b"<!DOCTYPE html><html><body>404</body></html>"),
    "drawing.svg": ("formats", lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><rect width="9" height="9"/></svg>'),
    "print.eps": ("formats", lambda: saved(card(), "EPS")),
    "page.pdf": ("formats", lambda: saved(card(), "PDF")),
    "icon.ico": ("formats", lambda: saved(card(), "ICO")),
    "lossless.jp2": ("formats", lambda: saved(card(), "JPEG2000")),
    "targa.tga": ("formats", lambda: saved(card(), "TGA")),
    "only_a_signature.png": ("expected", lambda: b"\x89PNG\r\n\x1a\n" + bytes(range(256))),
    "only_a_header.png": ("truncated", lambda: saved(noise, "PNG")[:45]),
    "truncated.png": ("truncated", lambda: cut(saved(noise, "PNG"))),
    "truncated.jpg": ("truncated", lambda: cut(saved(noise, "JPEG"))),
    "truncated.gif": ("readable", lambda: cut(saved(noise, "GIF"))),
    "truncated.tif": ("expected", lambda: cut(saved(noise, "TIFF", compression="tiff_lzw"))),
    "truncated.webp": ("expected", lambda: cut(saved(noise, "WEBP"))),
    "truncated.avif": ("expected", lambda: cut(saved(noise, "AVIF"))),
    "truncated.bmp": ("truncated", lambda: cut(saved(noise, "BMP"))),
    "truncated.ppm": ("truncated", lambda: cut(saved(noise, "PPM"))),
    "damaged_header.png": ("expected", lambda: damaged(saved(noise, "PNG"), 20)),
    "damaged_data.png": ("readable", lambda: damaged(saved(noise, "PNG"), 100)),
    "no_rows.png": ("expected", lambda: png(5, 0, 8, 0, zlib.compress(b""))),
    "claims.png": ("pixels", lambda: png(60_000, 60_000, 8, 2, zlib.compress(bytes(99)))),
    "bomb.png": ("pixels", lambda: png(30_000, 30_000, 1, 0, zeros(1 << 20))),
    "text_bomb.png": (
        "readable",
        lambda: png(1, 1, 8, 0, zlib.compress(bytes(2)), (b"zTXt", b"a\0\0" + zeros(1 << 26))),
    ),
    "profile_bomb.png": (
        "readable",
        lambda: png(1, 1, 8, 0, zlib.compress(bytes(2)), (b"iCCP", b"a\0\0" + zeros(1 << 26))),
    ),
    "claims.gif": ("pixels", lambda: with_size(saved(card(), "GIF"), 6, "<HH", 65_535)),
    "claims.ppm": ("pixels", lambda: b"P6 99999 99999 255\n" + bytes(100)),
    "claims.bmp": ("pixels", lambda: with_size(saved(card(), "BMP"), 18, "<ii", 50_000)),
    "claims_a_little.bmp": ("at most", lambda: with_size(saved(card(), "BMP"), 18, "<ii", 8193)),
    "claims.jpg": (
        "pixels",
        lambda: saved(card(), "JPEG").replace(struct.pack(">HH", 24, 40), b"\xff\xdc\xff\xdc", 1),
    ),
    "too_long.png": ("sides", lambda: saved(Image.new("1", ((1 << 20) + 8, 1)), "PNG")),
    "too_large.webp": ("at most", lambda: lossless_webp_of(8192)),
    "claims.webp": ("expected", lambda: lossless_webp_of(16384)),
    "floating_point.tif": ("floating point", lambda: saved(Image.new("F", SIZE, 0.5), "TIFF")),
    "thirty_two_bit.tif": ("65535", lambda: saved(Image.new("I", SIZE, 1 << 20), "TIFF")),
}

# Not files: source -> words in the error, or None for the card.
OTHERS = {
    "bytes": (None, lambda folder: (folder / "rgb.png").read_bytes()),
    "a string path": (None, lambda folder: str(folder / "rgb.png")),
    "base64": (None, lambda folder: base64.b64encode((folder / "plain.bmp").read_bytes()).decode()),
    "a data URL": (None, lambda folder: "data:image/png;base64," + base64.b64encode(saved(card(), "PNG")).decode()),
    "rows first": (None, lambda folder: np.asarray(card())),
    "channels first": (None, lambda folder: np.asarray(card()).transpose(2, 0, 1)),
    "sixteen bits": (None, lambda folder: np.asarray(card()).astype(np.uint16) * 257),
    "an unread picture": (None, lambda folder: Image.open(folder / "turned6.jpg")),
    "an unread truncated picture": ("truncated", lambda folder: Image.open(folder / "truncated.jpg")),
    "a folder": ("expected a file", lambda folder: folder),
    "no file": ("no such file", lambda folder: folder / "none.png"),
    "no file, as text": ("no such file", lambda folder: "none.png"),
    "no base64": ("neither", lambda folder: "picture! " * 20),
    "a pipe": ("expected a file", lambda folder: folder / "pipe"),
    "a device": ("expected a file", lambda folder: "/dev/zero"),
    "a closed port": ("readable", lambda folder: "http://127.0.0.1:9/picture.png"),
    "another scheme": ("no such file", lambda folder: "ftp://127.0.0.1/picture.png"),
    "nothing": ("expected a PIL image", lambda folder: None),
    "a number": ("expected a PIL image", lambda folder: 7),
    "an empty array": ("at least one pixel", lambda folder: np.zeros((0, 5, 3), np.uint8)),
    "a floating point array": ("float64", lambda folder: np.zeros((5, 5, 3))),
    "five channels": ("channels", lambda folder: np.zeros((6, 7, 5), np.uint8)),
    "one dimension": ("dimensions", lambda folder: np.zeros(9, np.uint8)),
    "an array that is too large": ("at most", lambda folder: np.broadcast_to(np.uint8(0), (1 << 14, 1 << 14, 3))),
}


def write(folder: Path) -> None:
    files = CARDS | {name: make for table in (SIZES, ERRORS) for name, (_, make) in table.items()}
    for name, make in files.items():
        (folder / name).write_bytes(make())
    os.mkfifo(folder / "pipe")


def outcome(source) -> dict:
    """Of reading and processing one source."""
    from modeling_moe_lc.image_processing_moe_lc import MoeLcImageProcessor
    from modeling_moe_lc.pictures import read_picture

    try:
        image = read_picture(source)
        width, height = image.size
        places = [(x, y) for y in (height // 4, 3 * height // 4) for x in (width // 4, 3 * width // 4)]
        colours = [image.convert("RGB").getpixel(place) for place in places]
        del image
        grids = MoeLcImageProcessor()([source]).grid_thws.tolist()
        return {"size": (width, height), "colours": colours, "grids": grids}
    except ValueError as error:
        return {"error": str(error)}


def in_a_small_process(sources: dict) -> dict:
    """The outcomes, up to the first source that ends the process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEGABYTES * 1_000_000,) * 2)
        for name, source in sources.items():
            signal.alarm(SECONDS)
            os.write(writer, json.dumps([name, outcome(source)]).encode() + b"\n")
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        results = dict(map(json.loads, pipe))
    _, status = os.waitpid(child, 0)
    if status:
        results[next(name for name in sources if name not in results)] = {"died": os.waitstatus_to_exitcode(status)}
    return results


def main(folder: Path) -> None:
    import modeling_moe_lc  # noqa: F401  # once, for all processes

    outcome(card())
    sources = {name: folder / name for name in (*CARDS, *SIZES, *ERRORS)}
    sources |= {name: make(folder) for name, (_, make) in OTHERS.items()}
    results: dict = {}
    while left := {name: source for name, source in sources.items() if name not in results}:
        results |= in_a_small_process(left)
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
