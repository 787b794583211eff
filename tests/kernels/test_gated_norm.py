"""The gated RMSNorm of KDA's output."""

import pytest
import torch

from modeling_moe_lc.kernels.gated_norm import gated_rms_norm


# Measured: 1e-16, 9e-8, 1.7e-3, 2.2e-4; the last two are the rounding of the result.
ROUNDED = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}


def inputs(dtype, *shape):
    generator = torch.Generator().manual_seed(0)
    o, gate, weight = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in (shape, shape, shape[-1:]))
    return (3 * o).to(dtype), (4 * gate).to(dtype), 1 + 0.2 * weight


@pytest.mark.parametrize("dtype", ROUNDED)
def test_equals_the_formula(dtype):
    o, gate, weight = inputs(dtype, 2, 7, 3, 33)
    result = gated_rms_norm(o, gate, weight, 1e-5)
    x = o.double()
    expected = x / (x.square().sum(-1, keepdim=True) / 33 + 1e-5).sqrt() * weight / (1 + (-gate.double()).exp())
    assert result.dtype == dtype
    assert (result.double() - expected).norm() < ROUNDED[dtype] * expected.norm()


def test_small_and_large_outputs_keep_their_precision():
    o, gate, weight = inputs(torch.float16, 4, 32)
    assert gated_rms_norm(o * 2**-14, gate, weight, 0.0).isfinite().all()  # squares below the range of FP16
    assert torch.equal(gated_rms_norm(o * 2**10, gate, weight, 0.0), gated_rms_norm(o, gate, weight, 0.0))


def test_rows_are_independent_to_the_bit():
    o, gate, weight = inputs(torch.float32, 5, 16)
    edited = o.clone()
    edited[0] = float("nan")
    assert torch.equal(gated_rms_norm(o, gate, weight, 1e-5)[1:], gated_rms_norm(edited, gate, weight, 1e-5)[1:])
    assert gated_rms_norm(torch.zeros(2, 16), gate[:2], weight, 1e-5).count_nonzero() == 0


def test_autocast_changes_nothing():
    o, gate, weight = inputs(torch.float32, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        result = gated_rms_norm(o, gate, weight, 1e-5)
    assert torch.equal(result, gated_rms_norm(o, gate, weight, 1e-5))


def test_gradcheck():
    leaves = [t.requires_grad_() for t in inputs(torch.float64, 2, 3, 4)]
    assert torch.autograd.gradcheck(lambda o, gate, weight: gated_rms_norm(o, gate, weight, 1e-5), leaves)


@pytest.mark.parametrize(
    "name, value",
    [
        ("o", torch.zeros(3, 8, dtype=torch.int64)),
        ("gate", torch.zeros(3, 1)),
        ("gate", torch.zeros(3, 8, dtype=torch.bool)),
        ("weight", torch.zeros(7)),
        ("weight", torch.zeros(3, 8)),
        ("impl", "cuda"),
    ],
)
def test_bad_inputs_are_named(name, value):
    arguments = {"o": torch.zeros(3, 8), "gate": torch.zeros(3, 8), "weight": torch.zeros(8), "eps": 1e-5, name: value}
    with pytest.raises(ValueError, match=f"^{name}: "):
        gated_rms_norm(**arguments)
