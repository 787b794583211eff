"""The image processor against a direct computation in NumPy on photographs, the released numbers, and videos."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from modeling_moe_lc import MoeLcImageProcessor
from modeling_moe_lc.frames import clock
from modeling_moe_lc.image_processing_moe_lc import patchify


FIXTURE = Path(__file__).parents[1] / "fixtures" / "k3-vision-tiny"
RELEASED = {  # as nested in the released preprocessor_config.json
    "patch_size": 14,
    "merge_kernel_size": 2,
    "in_patch_limit": 65536,
    "patch_limit_on_one_side": 512,
    "fixed_output_tokens": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "in_patch_limit_each_frame": 16384,
    "in_patch_limit_video": 655360,
    "sample_fps": 8.0,
    "temporal_merge_kernel_size": 4,
}


@pytest.fixture(scope="module")
def photographs():
    datasets = pytest.importorskip("sklearn.datasets")
    return [Image.fromarray(image) for image in datasets.load_sample_images().images]


def cubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def scaled(pixels: np.ndarray, length: int) -> np.ndarray:
    """Bicubic along the first axis, the kernel as wide as the pixels that one becomes; to whole levels."""
    if length == len(pixels):
        return pixels
    scale = len(pixels) / length
    centres = (np.arange(length) + 0.5) * scale
    weights = cubic((np.arange(len(pixels)) + 0.5 - centres[:, None]) / scale)
    weights /= weights.sum(1, keepdims=True)
    return np.clip(np.floor(np.tensordot(weights, pixels, 1) + 0.5), 0, 255)


def by_hand(image: Image.Image, limit: int, side: int = 512) -> tuple[np.ndarray, list[int]]:
    """Patches and grid in float64, one pixel loop at a time."""
    width, height = image.size
    count = max(1, width // 14) * max(1, height // 14)
    scale = min(1.0, math.sqrt(limit / count), side * 14 / width, side * 14 / height)
    new_width, new_height = (min(side * 14, max(1, int(length * scale))) for length in (width, height))
    pixels = scaled(np.asarray(image, np.float64).transpose(1, 0, 2), new_width).transpose(1, 0, 2)
    pixels = scaled(pixels, new_height)
    rows, columns = (2 * math.ceil(length / 28) for length in (new_height, new_width))
    padded = np.zeros((rows * 14, columns * 14, 3))
    padded[:new_height, :new_width] = pixels
    patches = [
        padded[14 * row : 14 * row + 14, 14 * column : 14 * column + 14].transpose(2, 0, 1)
        for row in range(rows)
        for column in range(columns)
    ]
    return (np.array(patches) / 255 - 0.5) / 0.5, [1, rows, columns]


@pytest.mark.parametrize("box", [(0, 0, 640, 427), (3, 5, 32, 32), (0, 0, 1, 400), (0, 9, 640, 10), (7, 7, 8, 8)])
def test_photographs_in_their_own_size_equal_the_computation_by_hand(photographs, box):
    for photograph in photographs:
        image = photograph.crop(box)
        got = MoeLcImageProcessor()(image, return_tensors="np")
        patches, grid = by_hand(image, 65536)
        assert got.grid_thws.tolist() == [grid]
        assert got.pixel_values.dtype == np.float32
        np.testing.assert_allclose(got.pixel_values, patches, atol=1e-6)


@pytest.mark.parametrize(("limit", "side"), [(500, 512), (65536, 17), (37, 512)])
def test_scaled_photographs_equal_the_computation_by_hand(photographs, limit, side):
    for photograph in photographs:
        processor = MoeLcImageProcessor(in_patch_limit=limit, patch_limit_on_one_side=side)
        got = processor(photograph, return_tensors="np")
        patches, grid = by_hand(photograph, limit, side)
        assert got.grid_thws.tolist() == [grid]
        difference = np.abs(got.pixel_values - patches)
        assert (
            difference.max() < 2.01 * 2 / 255
        )  # Pillow's weights are whole numbers: two roundings, two levels at most
        assert difference.mean() < 0.1 * 2 / 255


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ((1, 1), 1),
        ((27, 29), 2),
        ((28, 28), 1),
        ((448, 448), 256),
        ((1792, 1792), 4096),
        ((3584, 3584), 16384),  # the limit
        ((5000, 30), 358),
        ((7168, 28), 256),
        ((8000, 8000), 129 * 129),  # scaled by 256 / 571 whole patches to 3,586 pixels, and padded over the limit
        ((60000, 28), 256),  # scaled down to 512 patches along one side
        ((640, 480), 23 * 18),
        ((4032, 3024), 144 * 108),
    ],
)
def test_tokens_of_the_released_limits(size, tokens):
    patches = MoeLcImageProcessor(media_proc_cfg=RELEASED).get_number_of_image_patches(size[1], size[0])
    assert patches == 4 * tokens


def test_released_settings_are_the_defaults_and_are_saved_flat(tmp_path):
    processor = MoeLcImageProcessor(media_proc_cfg=RELEASED)
    assert processor.to_dict() == MoeLcImageProcessor().to_dict()
    changed = MoeLcImageProcessor(media_proc_cfg={**RELEASED, "in_patch_limit": 99})
    changed.save_pretrained(tmp_path)
    assert "media_proc_cfg" not in json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert MoeLcImageProcessor.from_pretrained(tmp_path).in_patch_limit == 99
    with pytest.raises(ValueError, match="fixed_output_tokens: expected None, got 64"):
        MoeLcImageProcessor(media_proc_cfg={**RELEASED, "fixed_output_tokens": 64})


def test_transparent_pixels_show_a_chessboard_that_is_not_scaled(photographs):
    image = photographs[0].convert("RGBA")
    image.putalpha(0)
    processor = MoeLcImageProcessor(in_patch_limit=64)
    got = processor(image, return_tensors="np", do_normalize=False, do_rescale=False)
    _, rows, columns = got.grid_thws[0]
    picture = got.pixel_values.reshape(rows, columns, 3, 14, 14).transpose(2, 0, 3, 1, 4).reshape(3, rows * 14, -1)
    for y in range(0, 56, 4):
        for x in range(0, 56, 4):
            assert (picture[:, y, x] == (180 if (x // 8 + y // 8) % 2 else 255)).all()
    assert (picture[:, -1, -1] == 0).all()  # the padding is black


def test_half_transparent_pixels_mix_with_the_chessboard():
    image = Image.new("RGBA", (28, 28), (100, 0, 200, 128))
    got = MoeLcImageProcessor()(image, return_tensors="np", do_normalize=False, do_rescale=False).pixel_values
    for x, square in ((0, 255), (8, 180)):
        np.testing.assert_allclose(got[0, :, 0, x], np.array([100, 0, 200]) * 128 / 255 + square * 127 / 255, atol=1)


def test_patches_are_those_of_the_fixture():
    """The fixture has no pictures, only patches: put together and cut again they are the same."""
    inputs = load_file(FIXTURE / "inputs.safetensors")
    first = 0
    for frames, rows, columns in inputs["grid_thws"]:
        for _ in range(frames):
            patches = inputs["pixel_values"][first : first + rows * columns]
            picture = np.concatenate(
                [np.concatenate(list(row), axis=2) for row in patches.reshape(rows, columns, 3, 14, 14)], 1
            )
            np.testing.assert_array_equal(patchify(picture, 14), patches)
            first += rows * columns
    assert first == len(inputs["pixel_values"])


def test_pictures_are_processed_one_by_one(photographs):
    processor = MoeLcImageProcessor(in_patch_limit=300)
    pictures = [photographs[0], photographs[1].crop((0, 0, 50, 90)), photographs[1]]
    together = processor([pictures[:1], [], pictures[1:]], return_tensors="pt")
    apart = [processor(picture, return_tensors="pt") for picture in pictures]
    assert torch.equal(together.pixel_values, torch.cat([one.pixel_values for one in apart]))
    assert torch.equal(together.grid_thws, torch.cat([one.grid_thws for one in apart]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": {"height": 3, "width": 3}}, "size: expected None"),
        ({"do_center_crop": True}, "do_center_crop: expected None"),
        ({"do_resize": False}, "do_resize: expected True"),
        ({"do_convert_rgb": False}, "do_convert_rgb: expected True"),
        ({"patch_size": 0}, "patch_size: expected a positive number, got 0"),
        ({"image_mean": [0.5, 0.5]}, "image_mean: expected one number or three"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        MoeLcImageProcessor()(Image.new("RGB", (9, 9)), **options)


def test_no_pictures_are_refused():
    with pytest.raises(ValueError, match="at least one picture"):
        MoeLcImageProcessor()([])


def film(count: int, size=(60, 32)) -> list[Image.Image]:
    return [Image.new("RGB", size, (index, 0, 0)) for index in range(count)]


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 11])
def test_up_to_four_frames_are_one_grid(count):
    medium = MoeLcImageProcessor().video(film(count), {"fps": 4.0})
    assert [frames for frames, _, _ in medium.grid_thws] == [4] * (count // 4) + [count % 4] * (count % 4 > 0)
    assert medium.tokens == [3 * 2] * len(medium.grid_thws)
    assert medium.times == [index / 4 for index in range(0, count, 4)]
    frames = medium.pixel_values.reshape(count, 4 * 6, 3, 14, 14)
    for index, frame in enumerate(film(count)):
        np.testing.assert_array_equal(frames[index], MoeLcImageProcessor()(frame, return_tensors="np").pixel_values)


@pytest.mark.parametrize(
    ("metadata", "options", "seconds"),
    [
        ({"fps": 4.0}, {}, [index / 4 for index in range(8)]),  # fewer than 8 a second: all
        ({"fps": 16.0}, {}, [0, 2 / 16, 5 / 16, 7 / 16]),
        ({"fps": 4.0}, {"fps": 2.0}, [0, 0.5, 1.25, 1.75]),
        ({"fps": 4.0}, {"num_frames": 2}, [0, 1.75]),
        ({"fps": 400.0}, {}, [0]),
        ({"fps": 400.0}, {"do_sample_frames": False}, [index / 400 for index in range(8)]),
        ({"timestamps": [0, 1, 2, 3, 4, 50, 60, 70]}, {}, [0, 1, 2, 3, 4, 50, 60, 70]),
        ({"timestamps": [5, 5.01, 5.02, 5.03, 5.04, 5.05, 5.06, 6]}, {}, [5, 5.01, 5.02, 5.03, 5.04, 5.05, 5.06, 6]),
        (None, {}, [index / 8 for index in range(8)]),
        (None, {"fps": 4}, [0, 2 / 8, 5 / 8, 7 / 8]),
    ],
)
def test_frames_are_sampled_evenly_and_keep_their_times(metadata, options, seconds):
    medium = MoeLcImageProcessor(temporal_merge_kernel_size=1).video(film(8), metadata, **options)
    assert medium.times == pytest.approx(seconds)
    numbers = np.rint((medium.pixel_values.reshape(len(seconds), -1)[:, 0] + 1) * 127.5).tolist()
    assert numbers == sorted(numbers) and numbers[0] == 0 and (numbers[-1] == 7 or len(numbers) == 1)


def test_a_video_has_limits_of_its_own():
    processor = MoeLcImageProcessor(in_patch_limit=10**6, in_patch_limit_each_frame=100, in_patch_limit_video=160)
    one, many = (processor.video(film(count, (800, 800)), {"fps": 1.0}) for count in (1, 8))
    assert one.grid_thws == [(1, 10, 10)]
    assert many.grid_thws == [(4, 6, 6)] * 2  # 160 / 8 patches each: 4.5 along a side, padded
    assert len(many.pixel_values) == processor.get_number_of_video_patches(8, 800, 800)


@pytest.mark.parametrize(
    ("frames", "metadata", "words"),
    [
        ([], None, "video: expected a list of frames.*got none"),
        ("clip.mp4", None, "video: expected a list of frames.*got str"),
        (7, None, "got int"),
        ([*film(1), *film(1, (5, 5))], None, r"frames of one size, got \(60, 32\) and \(5, 5\) \(frame 1\)"),
        (film(2), {"fps": 0}, "fps: expected a positive number, got 0"),
        (film(2), {"timestamps": [1.0]}, "timestamps: expected 2, one for each frame, got 1"),
        (film(2), {"timestamps": [1.0, 0.5]}, "do not decrease"),
        ([*film(1), "none.png"], None, "no such file"),
    ],
)
def test_bad_videos_are_refused(frames, metadata, words):
    with pytest.raises(ValueError, match=words):
        MoeLcImageProcessor().video(frames, metadata)


def test_a_clock_shows_milliseconds():
    assert clock(0) == "00:00:00.000"
    assert clock(59.9996) == "00:01:00.000"
    assert clock(3723.5) == "01:02:03.500"
    assert clock(360000.25) == "100:00:00.250"
