"""Laws of the expert MLPs."""

import numpy as np
import pytest
import torch

from modeling_moe_lc.kernels.experts import expert_mlp
from modeling_moe_lc.kernels.experts.reference import tile_height


CAPS = {"beta": 4.0, "linear_beta": 25.0}


def make(N=29, D=12, I=10, E=7, k=3, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=g, dtype=torch.float64)
    indices = torch.rand(N, E, generator=g).argsort(dim=1)[:, :k]
    weights = torch.rand(N, k, generator=g, dtype=torch.float64)
    gate_up_proj = torch.randn(E, 2 * I, D, generator=g, dtype=torch.float64) * D**-0.5 * 2
    down_proj = torch.randn(E, D, I, generator=g, dtype=torch.float64) * I**-0.5
    narrow = torch.promote_types(dtype, torch.float32)
    return x.to(dtype), indices, weights.to(narrow), gate_up_proj.to(dtype), down_proj.to(dtype)


def naive(x, indices, weights, gate_up_proj, down_proj, beta=4.0, linear_beta=25.0):
    """One token and one expert at a time, in numpy, without any sort."""
    x, p, w1, w2 = (t.detach().double().numpy() for t in (x, weights, gate_up_proj, down_proj))
    out = np.zeros(x.shape)
    for n, j in np.ndindex(p.shape):
        e = indices[n, j].item()
        if e == len(w1):
            continue
        g, u = np.split(w1[e] @ x[n], 2)
        gate = g if beta is None else beta * np.tanh(g / beta)
        up = u if linear_beta is None else linear_beta * np.tanh(u / linear_beta)
        out[n] += p[n, j] * (w2[e] @ (gate / (1 + np.exp(-g)) * up))
    return torch.from_numpy(out)


@pytest.mark.parametrize("N, E, k", [(29, 7, 3), (1, 7, 1), (200, 4, 4), (3, 1, 1)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_equals_the_formula(N, E, k, dtype, tolerance):
    inputs = make(N=N, E=E, k=k, dtype=dtype)
    out = expert_mlp(*inputs, **CAPS)
    expected = naive(*inputs)
    assert out.dtype == dtype and out.shape == inputs[0].shape
    assert (out.double() - expected).norm() <= tolerance * expected.norm()


def test_without_caps_the_experts_are_swiglu():
    inputs = make()
    out = expert_mlp(*inputs, beta=None, linear_beta=None)
    torch.testing.assert_close(out, naive(*inputs, None, None), rtol=1e-11, atol=1e-13)


def test_gradients_also_with_sentinels_and_idle_experts():
    x, indices, weights, gate_up_proj, down_proj = make(N=5, D=4, I=3, E=4, k=2)
    indices = torch.where(indices == 1, 4, indices)
    leaves = [t.requires_grad_() for t in (x, weights, gate_up_proj, down_proj)]
    assert torch.autograd.gradcheck(lambda x, p, w1, w2: expert_mlp(x, indices, p, w1, w2, **CAPS), leaves)


def grads(x, indices, weights, gate_up_proj, down_proj):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weights, gate_up_proj, down_proj)]
    out = expert_mlp(leaves[0], indices, *leaves[1:], **CAPS)
    out.float().square().sum().backward()
    return out, [t.grad for t in leaves]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_idle_experts_get_exactly_zero_gradients(dtype):
    x, indices, *rest = make(N=1, E=256, k=8, dtype=dtype)
    _, (_, _, d_gate_up, d_down) = grads(x, indices, *rest)
    idle = torch.ones(256, dtype=torch.bool).index_fill(0, indices.flatten(), False)
    for grad in (d_gate_up, d_down):
        assert torch.equal(grad[idle], torch.zeros_like(grad[idle]))
        assert (grad[~idle] != 0).flatten(1).any(1).all() and grad.isfinite().all()


@pytest.mark.parametrize("N, sentinel", [(0, False), (5, True)])
def test_nothing_to_compute_gives_zeros_and_zero_gradients(N, sentinel):
    x, indices, weights, gate_up_proj, down_proj = make(N=N, dtype=torch.float32)
    if sentinel:
        indices = torch.full_like(indices, 7)
    out, gradients = grads(x, indices, weights, gate_up_proj, down_proj)
    assert torch.equal(out, torch.zeros_like(x)) and out.shape == (N, 12)
    for grad, t in zip(gradients, (x, weights, gate_up_proj, down_proj)):
        assert torch.equal(grad, torch.zeros_like(t))


def test_a_sentinel_contributes_exactly_zero_whatever_its_weight():
    x, indices, weights, *projections = make(dtype=torch.float32)
    indices[:, 1] = 7
    junk = weights.clone()
    junk[:, 1] = float("nan")
    out = expert_mlp(x, indices, junk, *projections, **CAPS)
    kept = expert_mlp(x, indices[:, [0, 2]], weights[:, [0, 2]], *projections, **CAPS)
    torch.testing.assert_close(out, kept, rtol=1e-6, atol=1e-7)
    _, (_, d_weights, _, _) = grads(x, indices, weights, *projections)
    assert torch.equal(d_weights[:, 1], torch.zeros(29))


def test_one_hot_expert_is_its_mlp():
    x, indices, weights, gate_up_proj, down_proj = make(N=300, k=1, dtype=torch.float32)
    out = expert_mlp(x, torch.full_like(indices, 5), torch.ones_like(weights), gate_up_proj, down_proj, **CAPS)
    expected = naive(x, torch.full_like(indices, 5), torch.ones_like(weights), gate_up_proj, down_proj)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_an_expert_is_seen_by_its_tokens_alone():
    x, indices, weights, gate_up_proj, down_proj = make(dtype=torch.float32)
    before = expert_mlp(x, indices, weights, gate_up_proj, down_proj, **CAPS)
    gate_up_proj[3], down_proj[3] = float("nan"), float("inf")
    after = expert_mlp(x, indices, weights, gate_up_proj, down_proj, **CAPS)
    touched = (indices == 3).any(1)
    assert touched.any() and not touched.all()
    assert torch.equal(after[~touched], before[~touched])
    assert not after[touched].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("N, D, E, k", [(257, 96, 8, 2), (64, 65, 16, 4)])
def test_a_token_does_not_see_where_the_others_go_to_the_bit(dtype, N, D, E, k):
    """New neighbours change the number of rows of an expert, and with it the path that BLAS would take."""
    x, indices, *rest = make(N=N, D=D, I=33, E=E, k=k, dtype=dtype)
    others = slice(N // 3, None)
    before = expert_mlp(x, indices, *rest, **CAPS)
    x[others] = torch.randn_like(x[others])
    indices[others] = torch.arange(k)
    after = expert_mlp(x, indices, *rest, **CAPS)
    assert torch.equal(after[: N // 3], before[: N // 3])


def test_the_order_of_the_experts_of_a_token_does_not_matter_beyond_rounding():
    x, indices, weights, *projections = make()
    out = expert_mlp(x, indices, weights, *projections, **CAPS)
    flipped = expert_mlp(x, indices.flip(1), weights.flip(1), *projections, **CAPS)
    torch.testing.assert_close(flipped, out, rtol=1e-12, atol=1e-14)


def test_tile_height_is_half_the_mean_load_within_bounds():
    assert [tile_height(*args) for args in ((0, 8), (8, 64), (512, 64), (1500, 64), (10**6, 8))] == [1, 1, 4, 12, 256]


def test_narrow_inputs_meet_wide_parameters_without_autocast_inside():
    x, *rest = make(dtype=torch.float32)
    expected = expert_mlp(x.bfloat16(), *rest, **CAPS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = expert_mlp(x.bfloat16(), *rest, **CAPS)
    assert inside.dtype == torch.bfloat16 and torch.equal(inside, expected)


def test_bad_inputs_name_the_argument():
    names = ("x", "indices", "weights", "gate_up_proj", "down_proj")
    good = dict(zip(names, make(dtype=torch.float32)))
    bad = {
        "x": good["x"][0],
        "indices": good["indices"].int(),
        "weights": good["weights"][:, 1:],
        "gate_up_proj": good["gate_up_proj"][:, 1:],
        "down_proj": good["down_proj"].mT,
    }
    for name, value in bad.items():
        with pytest.raises(ValueError, match=f"^{name}:"):
            expert_mlp(**{**good, name: value}, **CAPS)
    with pytest.raises(ValueError, match="^linear_beta"):
        expert_mlp(**good, beta=4.0, linear_beta=0.0)
    with pytest.raises(ValueError, match="^impl"):
        expert_mlp(**good, **CAPS, impl="fused")
