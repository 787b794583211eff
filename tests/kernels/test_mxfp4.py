"""MXFP4 is the format of the standard, to the bit: every code, every scale, every tie, against a scalar implementation."""

import math

import pytest
import torch

from modeling_moe_lc.kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4, requantize_mxfp4


MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NAN, INF = float("nan"), float("inf")


def scalar_value(code, scale):
    """Section 5.3.3 and 5.4.1 of the MX standard for one element, in Python's float64."""
    if scale == 255:
        return NAN
    sign, exponent, fraction = code >> 3, (code >> 1) & 3, code & 1
    magnitude = fraction / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + fraction / 2)
    return math.copysign(magnitude * 2.0 ** (scale - 127), -1.0 if sign else 1.0)


def scalar_block(values):
    """Section 6.3 for one block: (codes, scale). Picks the nearest code by distance, not by thresholds."""
    if not all(math.isfinite(v) for v in values):
        return [0] * 32, 255
    amax = max(abs(v) for v in values)
    shared = -127 if amax == 0 else min(max(math.floor(math.log2(amax)) - 2, -127), 127)
    codes = []
    for v in values:
        ratio = abs(v) / 2.0**shared
        distance = [abs(ratio - m) for m in MAGNITUDES]
        code = min(range(8), key=lambda c: (distance[c], c % 2))
        codes.append(code + 8 * (math.copysign(1, v) < 0))
    return codes, shared + 127


def pack(codes):
    codes = torch.tensor(codes, dtype=torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def same_bits(x, y):
    """Equal, signs of zeros included; a NaN equals a NaN."""
    return (
        x.dtype == y.dtype and torch.equal(x.nan_to_num(7), y.nan_to_num(7)) and torch.equal(x.signbit(), y.signbit())
    )


def all_pairs():
    """Every code under every scale: packed [256, 16], scales [256, 1], values [256, 32] in float64."""
    codes = [*range(16), *reversed(range(16))]
    values = [[scalar_value(code, scale) for code in codes] for scale in range(256)]
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    return pack(codes).expand(256, 16).contiguous(), scales, torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_code_under_every_scale(dtype):
    packed, scales, values = all_pairs()
    decoded = dequantize_mxfp4(packed, scales, dtype)
    assert same_bits(decoded, values.to(dtype))
    if dtype in (torch.float32, torch.bfloat16):
        assert same_bits(decoded[:253].double(), values[:253]), "not exact"


def test_low_half_of_a_byte_comes_first():
    packed = torch.zeros(16, dtype=torch.uint8)
    packed[3] = 0x92  # low 2: 1.0, high 9: -0.5
    w = dequantize_mxfp4(packed, torch.tensor([128], dtype=torch.uint8), torch.float32)
    assert w[6:8].tolist() == [2.0, -1.0] and w.count_nonzero() == 2


def blocks_to_try(generator):
    """[blocks, 32] float32: noise at every magnitude, ties, halves, subnormal, zero, infinite and NaN blocks."""
    exponents = torch.arange(-149, 128)[:, None]
    noise = torch.ldexp(torch.randn(len(exponents), 32, dtype=torch.float64, generator=generator), exponents).float()
    noise = noise.nan_to_num(posinf=3e38, neginf=-3e38)
    grid = torch.randint(0, 65, (200, 32), generator=generator) / 8  # multiples of an eighth: ties everywhere
    grid = torch.ldexp(grid, torch.randint(-100, 100, (200, 1), generator=generator)).float()
    grid *= torch.randint(0, 2, grid.shape, generator=generator) * 2 - 1
    zeros = torch.zeros(2, 32)
    zeros[1, ::3] = -0.0
    odd = torch.ones(4, 32)
    odd[0, 5], odd[1, 31], odd[2, 0], odd[3, 7] = INF, -INF, NAN, torch.finfo(torch.float32).max
    return torch.cat([noise, grid, zeros, odd])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_quantiser_against_a_scalar_implementation(dtype):
    w = blocks_to_try(torch.Generator().manual_seed(0)).to(dtype)
    packed, scales = quantize_mxfp4(w)
    for row, values in enumerate(w.double().tolist()):
        codes, scale = scalar_block(values)
        assert scales[row].item() == scale, (row, values)
        assert torch.equal(packed[row], pack(codes)), (row, values)


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (0.25, 0),
        (0.75, 1),
        (1.25, 1),
        (1.75, 2),
        (2.5, 2),
        (3.5, 4),
        (5, 4),
        (7, 6),
        (7.99, 6),
        (-0.25, -0.0),
        (-2.5, -2),
    ],
)
def test_ties_go_to_the_even_code_and_large_values_saturate(value, rounded):
    w = torch.full((32,), float(value))
    w[0] = 4.0  # the scale is 1
    again = dequantize_mxfp4(*quantize_mxfp4(w), torch.float32)
    assert same_bits(again[1:], torch.full((31,), float(rounded)))
    below, above = (torch.nextafter(torch.tensor(abs(value)), torch.tensor(to)) for to in (0.0, 100.0))
    for beside in (below, above):
        nearest = min(MAGNITUDES, key=lambda m: abs(m - beside.item()))
        w[1] = beside
        assert dequantize_mxfp4(*quantize_mxfp4(w), torch.float32)[1] == nearest


def test_float64_beyond_the_largest_scale_saturates():
    w = torch.full((32,), 2.0**200, dtype=torch.float64)
    packed, scales = quantize_mxfp4(w)
    assert scales.item() == 254 and (packed == 0x77).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_of_the_format_are_quantised_without_loss(dtype):
    packed, scales, _ = all_pairs()
    w = dequantize_mxfp4(packed[:253], scales[:253], dtype)
    again = quantize_mxfp4(w)
    assert torch.equal(again[0], packed[:253]) and torch.equal(again[1], scales[:253])


def released_like(generator, rows=64):
    """Codes and scales as other quantisers write them: many blocks whose largest code is small, or zero."""
    codes = torch.randint(0, 16, (rows, 96), generator=generator)
    small = torch.tensor([7, 5, 3, 1, 0])[torch.randint(0, 5, (rows, 3), generator=generator)]
    limit = small.repeat_interleave(32, dim=1)
    codes = torch.minimum(codes & 7, limit) | codes & 8
    scales = torch.randint(0, 253, (rows, 3), generator=generator).to(torch.uint8)
    return pack(codes.tolist()), scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_requantised_bytes_are_the_released_ones(dtype):
    packed, scales = released_like(torch.Generator().manual_seed(1))
    w = dequantize_mxfp4(packed, scales, dtype)
    again, same = requantize_mxfp4(w, scales)
    assert torch.equal(again, packed) and torch.equal(same, scales)
    other, minimal = quantize_mxfp4(w)
    assert not torch.equal(minimal, scales), "this test needs scales that are not the smallest"
    assert same_bits(dequantize_mxfp4(other, minimal, dtype), w)


def test_a_changed_block_takes_the_scale_of_the_standard():
    packed, scales = released_like(torch.Generator().manual_seed(2))
    w = dequantize_mxfp4(packed, scales, torch.float32)
    w[3, 40] = 1.3 * w[3].abs().max() + 1e-30
    again, new = requantize_mxfp4(w, scales)
    by_standard = quantize_mxfp4(w)
    changed = torch.zeros_like(scales, dtype=torch.bool)
    changed[3, 1] = True
    assert torch.equal(new[~changed], scales[~changed]) and new[3, 1] == by_standard[1][3, 1]
    assert torch.equal(again[3, 16:32], by_standard[0][3, 16:32])
    assert torch.equal(again[:3], packed[:3]) and torch.equal(again[4:], packed[4:])


def test_a_nan_block_stays_one():
    packed, scales, _ = all_pairs()
    w = dequantize_mxfp4(packed, scales, torch.float32)
    again, same = requantize_mxfp4(w, scales)
    assert same[255] == 255 and not again[255].any()


def test_any_leading_shape_and_strides():
    w = torch.randn(3, 64, 5).mT  # [3, 5, 64], not contiguous
    packed, scales = quantize_mxfp4(w)
    assert (packed.shape, scales.shape) == ((3, 5, 32), (3, 5, 2))
    whole = dequantize_mxfp4(packed, scales, torch.float32)
    assert torch.equal(dequantize_mxfp4(packed[1], scales.mT.contiguous().mT[1], torch.float32), whole[1])
    empty = quantize_mxfp4(torch.zeros(0, 32))
    assert dequantize_mxfp4(*empty, torch.bfloat16).shape == (0, 32)


def test_autocast_changes_nothing():
    w = torch.randn(4, 64)
    packed, scales = quantize_mxfp4(w)
    with torch.autocast("cpu", torch.bfloat16):
        again = quantize_mxfp4(w)
        assert torch.equal(again[0], packed) and dequantize_mxfp4(packed, scales, torch.float32).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("w", lambda: quantize_mxfp4(torch.zeros(4, 33))),
        ("w", lambda: quantize_mxfp4(torch.zeros(4, 32, dtype=torch.int64))),
        ("w", lambda: quantize_mxfp4(torch.tensor(1.0))),
        ("scales", lambda: requantize_mxfp4(torch.zeros(4, 64), torch.zeros(4, 1, dtype=torch.uint8))),
        ("packed", lambda: dequantize_mxfp4(torch.zeros(4, 16), torch.zeros(4, 1, dtype=torch.uint8), torch.float32)),
        ("packed", lambda: dequantize_mxfp4(byte(4, 17), byte(4, 1), torch.float32)),
        ("scales", lambda: dequantize_mxfp4(byte(4, 32), byte(4, 1), torch.float32)),
        ("scales", lambda: dequantize_mxfp4(byte(4, 32), torch.zeros(4, 2), torch.float32)),
        ("dtype", lambda: dequantize_mxfp4(byte(4, 32), byte(4, 2), torch.int32)),
        ("impl", lambda: quantize_mxfp4(torch.zeros(32), impl="cuda")),
    ],
)
def test_bad_arguments_are_refused_by_name(name, call):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        call()


def byte(*shape):
    return torch.zeros(shape, dtype=torch.uint8)
