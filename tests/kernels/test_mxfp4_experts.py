"""Experts on packed weights are the experts on what these dequantise to: outputs and gradients, to the bit."""

import pytest
import torch

from modeling_moe_lc.kernels.experts import expert_mlp
from modeling_moe_lc.kernels.mxfp4 import dequantize_mxfp4, expert_mlp_mxfp4, quantize_mxfp4


E, D, I, K = 5, 64, 96, 3
CAPS = {"beta": 4.0, "linear_beta": 25.0}


def make(N, dtype=torch.float32, seed=0):
    """x, indices, weights, the packed arguments, and the dequantised projections."""
    generator = torch.Generator().manual_seed(seed + N)
    x = torch.randn(N, D, generator=generator).to(dtype)
    indices = (
        torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(N)]) if N else torch.zeros(0, K).long()
    )
    weights = torch.rand(N, K, generator=generator)
    gate_up = quantize_mxfp4(torch.randn(E, 2 * I, D, generator=generator))
    down = quantize_mxfp4(torch.randn(E, D, I, generator=generator))
    packed = (gate_up[0], gate_up[1].mT.contiguous(), down[0], down[1].mT.contiguous())
    return x, indices, weights, packed, [dequantize_mxfp4(*pair, dtype) for pair in (gate_up, down)]


def run(operator, x, indices, weights, projections, **kwargs):
    leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    y = operator(leaves[0], indices, leaves[1], *projections, **CAPS, **kwargs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("N", [1, 7, 40])
def test_outputs_and_gradients_are_those_of_the_dequantised_experts(N, dtype):
    x, indices, weights, packed, projections = make(N, dtype)
    ours, theirs = (
        run(expert_mlp_mxfp4, x, indices, weights, packed),
        run(expert_mlp, x, indices, weights, projections),
    )
    for name, mine, reference in zip(("y", "dx", "dweights"), ours, theirs, strict=True):
        assert torch.equal(mine, reference), name


def test_assignments_of_another_rank_and_an_empty_batch():
    x, indices, weights, packed, projections = make(9)
    indices[::2, 1] = E
    indices[3] = E
    for mine, reference in zip(
        run(expert_mlp_mxfp4, x, indices, weights, packed),
        run(expert_mlp, x, indices, weights, projections), strict=True,
    ):  # fmt: skip
        assert torch.equal(mine, reference)
    x, indices, weights, packed, _ = make(0)
    assert expert_mlp_mxfp4(x, indices, weights, *packed, **CAPS).shape == (0, D)


def test_no_dequantised_weight_is_kept_for_the_backward_pass():
    x, indices, weights, packed, _ = make(40)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        expert_mlp_mxfp4(x.requires_grad_(), indices, weights, *packed, **CAPS)
    assert not [t for t in saved if t.is_floating_point() and t.shape[-2:] in ((2 * I, D), (D, 2 * I), (D, I), (I, D))]


def test_autocast_changes_nothing():
    x, indices, weights, packed, _ = make(6)
    y = expert_mlp_mxfp4(x, indices, weights, *packed, **CAPS)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(expert_mlp_mxfp4(x, indices, weights, *packed, **CAPS), y)


def test_bad_arguments_are_refused_by_name():
    x, indices, weights, (gate_up, gate_up_scales, down, down_scales), _ = make(4)
    for name, arguments in (
        ("x", (x.long(), indices, weights, gate_up, gate_up_scales, down, down_scales)),
        ("indices", (x, indices.int(), weights, gate_up, gate_up_scales, down, down_scales)),
        ("gate_up_packed", (x, indices, weights, gate_up.float(), gate_up_scales, down, down_scales)),
        ("gate_up_packed", (x, indices, weights, gate_up[..., 1:], gate_up_scales, down, down_scales)),
        ("gate_up_scales", (x, indices, weights, gate_up, gate_up_scales.mT, down, down_scales)),
        ("down_packed", (x, indices, weights, gate_up, gate_up_scales, down[..., 16:], down_scales)),
        ("down_scales", (x, indices, weights, gate_up, gate_up_scales, down, down_scales.mT)),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            expert_mlp_mxfp4(*arguments, **CAPS)
    with pytest.raises(ValueError, match="^impl: expected one of"):
        expert_mlp_mxfp4(x, indices, weights, gate_up, gate_up_scales, down, down_scales, **CAPS, impl="cuda")


@pytest.mark.parametrize("N", [0, 3])
def test_a_rank_without_work_has_gradients_of_zeros(N):
    x, _, weights, packed, _ = make(N)
    leaf = x.clone().requires_grad_()
    y = expert_mlp_mxfp4(leaf, torch.full((N, K), E), weights, *packed, **CAPS)
    [dx] = torch.autograd.grad(y.sum(), leaf)
    assert not dx.any() and not y.any()
