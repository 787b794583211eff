"""More than a hundred kinds of odd and bad pictures: each gives the right picture or an error that names it."""

import functools
import http.server
import json
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from modeling_moe_lc.pictures import read_picture


PROGRAM = Path(__file__).with_name("odd_pictures.py")
odd = runpy.run_path(str(PROGRAM))
CARDS, SIZES, ERRORS, OTHERS = (odd[name] for name in ("CARDS", "SIZES", "ERRORS", "OTHERS"))
COLOURS = [list(colour) for colour in odd["CARD"].values()]
CLOSE = 8  # levels of 255, for lossy formats


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    odd["write"](folder)
    return folder


@pytest.fixture(scope="module")
def outcomes(folder):
    """Of every source, in a process with a limit to its memory and its time."""
    done = subprocess.run([sys.executable, PROGRAM, folder], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_there_are_enough_kinds():
    assert len(CARDS) + len(SIZES) + len(ERRORS) + len(OTHERS) >= 100


@pytest.mark.parametrize("name", [*CARDS, *(name for name, (error, _) in OTHERS.items() if error is None)])
def test_the_card_is_seen(outcomes, name):
    outcome = outcomes[name]
    assert outcome.get("size") == list(odd["SIZE"]), outcome
    assert outcome["grids"] == [[1, 2, 4]]
    colours = np.array(COLOURS)
    if name in odd["GREY"]:
        colours = np.repeat(np.rint(colours @ [0.299, 0.587, 0.114])[:, None], 3, axis=1)
    np.testing.assert_allclose(outcome["colours"], colours, atol=CLOSE)


@pytest.mark.parametrize("name", SIZES)
def test_odd_sizes_and_modes_are_read(outcomes, name):
    assert outcomes[name].get("size") == list(SIZES[name][0]), outcomes[name]


@pytest.mark.parametrize("name", [*ERRORS, *(name for name, (error, _) in OTHERS.items() if error is not None)])
def test_the_error_says_what_is_wrong(outcomes, name):
    words, _ = {**ERRORS, **OTHERS}[name]
    assert words in outcomes[name].get("error", ""), outcomes[name]
    if name in ERRORS:
        assert name in outcomes[name]["error"]


def test_transparency_stays_until_after_the_resize(folder):
    for name in ("half_transparent.png", "half_transparent.webp", "transparent_palette.gif"):
        image = read_picture(folder / name)
        assert image.mode == "RGBA"
        assert [image.getpixel((x, 3))[3] for x in (0, 19, 20, 39)] == [255, 255, 0, 0]


@pytest.mark.parametrize("number", range(2, 9))
def test_orientation_is_that_of_pillow(folder, number):
    with Image.open(folder / f"turned{number}.jpg") as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    np.testing.assert_array_equal(np.asarray(read_picture(folder / f"turned{number}.jpg")), expected)


@pytest.mark.parametrize(("shape", "size"), [((1, 9, 3), (9, 1)), ((3, 9, 3), (9, 3)), ((4, 5, 1), (5, 4))])
def test_where_both_readings_fit_arrays_have_channels_last_and_tensors_first(shape, size):
    assert read_picture(np.zeros(shape, np.uint8)).size == size
    tensor = torch.zeros(shape, dtype=torch.uint8)
    assert read_picture(tensor).size == (shape[2], shape[1])
    assert read_picture(tensor, input_data_format="channels_last").size == size


def test_one_picture_in_every_type_of_array():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    for source in (pixels, pixels.transpose(2, 0, 1), torch.tensor(pixels), torch.tensor(pixels).permute(2, 0, 1)):
        np.testing.assert_array_equal(np.asarray(read_picture(source)), pixels)
    np.testing.assert_array_equal(
        np.asarray(read_picture(pixels[..., 0] > 9)), 255 * np.repeat(pixels[..., :1] > 9, 3, 2)
    )


def test_a_smaller_limit_is_kept(folder):
    with pytest.raises(ValueError, match=r"rgb.png\): expected at most 959 pixels, got 40 x 24"):
        read_picture(folder / "rgb.png", max_pixels=959)


def test_a_url_is_read(folder):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    handler.log_message = lambda *args: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        assert read_picture(f"{address}/rgb.png").size == odd["SIZE"]
        with pytest.raises(ValueError, match=r"none.png.*404"):
            read_picture(f"{address}/none.png")
        server.shutdown()
