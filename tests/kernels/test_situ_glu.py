"""Laws of SiTU-GLU."""

import numpy as np
import pytest
import torch

from modeling_moe_lc.kernels.situ_glu import situ_glu


CAPS = [(4.0, 25.0), (1.0, None), (None, 25.0), (None, None)]


def naive(gate_up, beta, linear_beta):
    g, u = np.split(gate_up.double().numpy(), 2, axis=-1)
    gate = g if beta is None else beta * np.tanh(g / beta)
    up = u if linear_beta is None else linear_beta * np.tanh(u / linear_beta)
    return torch.from_numpy(gate / (1 + np.exp(-g)) * up)


@pytest.mark.parametrize("beta, linear_beta", CAPS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 5e-7), (torch.bfloat16, 4e-3)])
def test_equals_the_formula(beta, linear_beta, dtype, tolerance):
    gate_up = (torch.randn(3, 5, 2 * 37, generator=torch.Generator().manual_seed(0)) * 6).to(dtype)
    out = situ_glu(gate_up, beta, linear_beta)
    expected = naive(gate_up, beta, linear_beta)
    assert out.dtype == dtype and out.shape == (3, 5, 37)
    assert (out.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("beta, linear_beta", CAPS)
def test_gradients(beta, linear_beta):
    gate_up = (torch.randn(4, 14, dtype=torch.float64) * 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: situ_glu(x, beta, linear_beta), gate_up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_bounded_and_finite_everywhere(dtype):
    edges = torch.tensor([0.0, 1e-4, 1.0, 88.0, 1e3, 6e4]).to(dtype)
    g, u = torch.meshgrid(torch.cat([edges, -edges]), torch.cat([edges, -edges]), indexing="ij")
    gate_up = torch.stack([g, u], -1).requires_grad_()
    out = situ_glu(gate_up, 4.0, 25.0)
    out.float().sum().backward()
    assert out.abs().max() <= 100.0
    assert gate_up.grad.isfinite().all()


def test_without_caps_it_is_swiglu_and_large_caps_tend_to_it():
    gate_up = torch.randn(11, 26, dtype=torch.float64) * 3
    g, u = gate_up.chunk(2, -1)
    swiglu = torch.nn.functional.silu(g) * u
    torch.testing.assert_close(situ_glu(gate_up, None, None), swiglu, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(situ_glu(gate_up, 1e6, 1e6), swiglu, rtol=1e-9, atol=1e-12)


def test_bf16_is_rounded_once():
    gate_up = (torch.randn(64, 32, generator=torch.Generator().manual_seed(1)) * 4).bfloat16()
    in_fp32 = situ_glu(gate_up.float(), 4.0, 25.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(situ_glu(gate_up, 4.0, 25.0), in_fp32.bfloat16())


def test_bad_inputs_name_the_argument():
    gate_up = torch.randn(3, 8)
    with pytest.raises(ValueError, match="gate_up"):
        situ_glu(gate_up[:, :7], 4.0, 25.0)
    with pytest.raises(ValueError, match="gate_up"):
        situ_glu(gate_up.long(), 4.0, 25.0)
    for bad in (0.0, -4.0, float("nan")):
        with pytest.raises(ValueError, match="^beta"):
            situ_glu(gate_up, bad, 25.0)
        with pytest.raises(ValueError, match="^linear_beta"):
            situ_glu(gate_up, 4.0, bad)
    with pytest.raises(ValueError, match="impl"):
        situ_glu(gate_up, 4.0, 25.0, impl="fast")
