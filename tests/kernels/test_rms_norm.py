"""The RMS norm."""

import pytest
import torch

from modeling_moe_lc.kernels.rms_norm import rms_norm


# Measured: 1e-16, 9e-8, 2.3e-3, 3e-4; the last two are the two roundings.
ROUNDED = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def inputs(dtype, *shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return (3 * x).to(dtype), (1 + 0.2 * torch.randn(shape[-1], generator=generator, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("dtype", ROUNDED)
def test_equals_the_formula(dtype):
    x, weight = inputs(dtype, 2, 7, 33)
    y = rms_norm(x, weight, 1e-5)
    wide = x.double()
    expected = weight.double() * wide / (wide.square().sum(-1, keepdim=True) / 33 + 1e-5).sqrt()
    assert y.dtype == dtype and (y.double() - expected).norm() < ROUNDED[dtype] * expected.norm()


def test_is_rounded_before_the_weight_and_the_wider_dtype_decides():
    x, weight = inputs(torch.bfloat16, 4, 32)
    ones = rms_norm(x, torch.ones_like(weight), 1e-5)
    assert torch.equal(rms_norm(x, weight, 1e-5), ones * weight)
    assert torch.equal(rms_norm(x, weight.float(), 1e-5), ones.float() * weight.float())


def test_rows_are_independent_to_the_bit():
    x, weight = inputs(torch.float32, 5, 16)
    edited = x.clone()
    edited[0] = float("nan")
    assert torch.equal(rms_norm(x, weight, 1e-5)[1:], rms_norm(edited, weight, 1e-5)[1:])
    assert rms_norm(torch.zeros(2, 16), weight, 1e-5).count_nonzero() == 0


def test_autocast_changes_nothing():
    x, weight = inputs(torch.float32, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = rms_norm(x, weight, 1e-5)
    assert torch.equal(y, rms_norm(x, weight, 1e-5))


def test_gradcheck():
    leaves = [t.requires_grad_() for t in inputs(torch.float64, 2, 3, 4)]
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, 1e-5), leaves)


@pytest.mark.parametrize(
    "name, value",
    [
        ("x", torch.zeros(3, 8, dtype=torch.int64)),
        ("weight", torch.zeros(8, dtype=torch.bool)),
        ("weight", torch.zeros(7)),
        ("weight", torch.zeros(3, 8)),
        ("impl", "cuda"),
    ],
)
def test_bad_inputs_are_named(name, value):
    arguments = {"x": torch.zeros(3, 8), "weight": torch.zeros(8), "eps": 1e-5, name: value}
    with pytest.raises(ValueError, match=f"^{name}: "):
        rms_norm(**arguments)
