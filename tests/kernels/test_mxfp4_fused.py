"""The Triton kernels of MXFP4 equal the reference to the bit; on a CPU under the interpreter."""

import pytest
import torch

from modeling_moe_lc.kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def same_bits(x, y):
    bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
    nan = x.isnan() & y.isnan()
    return torch.equal(x.view(bits).masked_fill(nan, 0), y.view(bits).masked_fill(nan, 0))


# Triton's interpreter gets subnormal BF16 numbers wrong; on a GPU they are tested.
def smallest_scale(device, dtype):
    return 3 if device == "cpu" and dtype == torch.bfloat16 else 0


def all_pairs(device, dtype):
    """Every code under every scale, in both halves of a byte."""
    codes = torch.cat([torch.arange(16), torch.arange(16).flip(0)]).to(torch.uint8)
    scales = torch.arange(smallest_scale(device, dtype), 256).to(torch.uint8)[:, None]
    packed = (codes[::2] | codes[1::2] << 4).expand(len(scales), 16).contiguous()
    return packed.to(device), scales.to(device)


def blocks(rows, device, dtype):
    """[rows, 32]: every magnitude, ties, zeros of both signs, infinities and NaN."""
    generator = torch.Generator().manual_seed(rows)
    grid = (torch.randn(rows, 32, dtype=torch.float64, generator=generator) * 16).round() / 8
    smallest = -115 if smallest_scale(device, dtype) else -150
    w = torch.ldexp(grid, torch.randint(smallest, 126, (rows, 1), generator=generator)).to(dtype)
    w[::7] *= 0
    for row, value in enumerate((float("inf"), float("-inf"), float("nan"), torch.finfo(dtype).max)):
        w[row % rows, row] = value if rows > 4 else 1
    return w.to(device)


def check_quantiser(w):
    ours, theirs = quantize_mxfp4(w, impl="triton"), quantize_mxfp4(w, impl="reference")
    assert torch.equal(ours[1], theirs[1]) and torch.equal(ours[0], theirs[0])


def check_dequantiser(packed, scales, dtype):
    ours = dequantize_mxfp4(packed, scales, dtype, impl="triton")
    assert same_bits(ours, dequantize_mxfp4(packed, scales, dtype, impl="reference"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_under_every_scale(dtype, poison_empty):
    check_dequantiser(*all_pairs("cpu", dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 63, 64, 65, 300])
def test_quantiser_equals_the_reference(rows, dtype):
    check_quantiser(blocks(rows, "cpu", dtype))


@pytest.mark.parametrize("shape", [(0, 32), (3, 5, 64), (96,)])
def test_shapes_and_strides(shape, poison_empty):
    w = torch.randn(*shape)
    packed, scales = quantize_mxfp4(w, impl="triton")
    assert packed.shape == (*shape[:-1], shape[-1] // 2) and scales.shape == (*shape[:-1], shape[-1] // 32)
    check_quantiser(w)
    check_dequantiser(packed, scales, torch.bfloat16)
    if len(shape) > 1:
        check_quantiser(torch.randn(64, *shape[1:-1], 3).mT.contiguous().mT.movedim(0, -1))
        check_dequantiser(packed, scales.movedim(-1, 0).contiguous().movedim(0, -1), torch.float32)


def test_blocks_are_independent_to_the_bit():
    w = blocks(70, "cpu", torch.float32)
    whole, edited = quantize_mxfp4(w, impl="triton"), w.clone()
    edited[::2] = float("nan")
    others = quantize_mxfp4(edited, impl="triton")
    assert all(torch.equal(ours[1::2], theirs[1::2]) for ours, theirs in zip(others, whole, strict=True))


def test_what_the_kernels_do_not_take_is_refused_by_name():
    with pytest.raises(ValueError, match="^impl: .*but w: expected"):
        quantize_mxfp4(torch.zeros(32, dtype=torch.float64), impl="triton")
    with pytest.raises(ValueError, match="^impl: .*but dtype: expected"):
        dequantize_mxfp4(*all_pairs("cpu", torch.float32), torch.float64, impl="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_to_the_bit(dtype, poison_empty):
    check_dequantiser(*all_pairs("cuda", dtype), dtype)
    for rows in (1, 63, 65, 70001):
        check_quantiser(blocks(rows, "cuda", dtype))
        packed = torch.randint(0, 256, (rows, 16), dtype=torch.uint8, device="cuda")
        check_dequantiser(packed, torch.randint(0, 256, (rows, 1), dtype=torch.uint8, device="cuda"), dtype)


@pytest.mark.gpu
def test_beyond_two_to_the_31_values():
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of free memory")
    packed = torch.full((2**31 // 32 + 3, 16), 0x21, dtype=torch.uint8, device="cuda")
    scales = torch.full((len(packed), 1), 129, dtype=torch.uint8, device="cuda")
    w = dequantize_mxfp4(packed, scales, torch.bfloat16, impl="triton")
    assert (w[-4:] == torch.tensor([2.0, 4.0], device="cuda").repeat(16)).all()
    w[-4:] *= 2
    again, new = quantize_mxfp4(w, impl="triton")
    assert (again == 0x64).all() and new[-5] == 127 and (new[-4:] == 128).all()
