"""Kimi Delta Attention at its edges: extreme gates, causality and isolation to the bit, bad inputs."""

import pytest
import torch

from modeling_moe_lc.kernels.kda import kda, kda_step
from modeling_moe_lc.kernels.kda.reference import kda_chunk, kda_recurrent


FP64 = 1e-10  # measured 8e-14
FP32 = 2e-5  # measured 3e-6
GATES = (-5.0, None)


def inputs(B, T, H=2, K=16, V=12, dtype=torch.float64, requires_grad=False, **replaced):
    generator = torch.Generator().manual_seed(T)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    drawn = {
        "q": normal(B, T, H, K),
        "k": normal(B, T, H, K),
        "v": normal(B, T, H, V),
        "g": 3 * normal(B, T, H, K),
        "beta": 2 * normal(B, T, H),
        "A_log": normal(H).abs(),
        "dt_bias": normal(H, K),
        **replaced,
    }
    return {name: x.to(dtype).requires_grad_(requires_grad) for name, x in drawn.items()}


def gap(result, expected):
    return ((result.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def assert_chunks_equal_recurrence(x, lower_bound):
    """Results and gradients in FP64; results of FP32, which has the smaller range, against FP64."""
    x = {name: t.detach().double().requires_grad_() for name, t in x.items()}
    results = []
    for fn in (kda_chunk, kda_recurrent):
        o, S = fn(**x, lower_bound=lower_bound)
        gradients = torch.autograd.grad(o.square().sum() + S.square().sum(), list(x.values()))
        results.append([o, S, *gradients])
    for result, expected in zip(*results):
        assert result.isfinite().all() and (result - expected).norm() <= FP64 * expected.norm().clamp(min=1e-6)
    x = {name: t.detach().float().requires_grad_() for name, t in x.items()}
    o, S = kda(**x, lower_bound=lower_bound)
    gradients = torch.autograd.grad(o.square().sum() + S.square().sum(), list(x.values()))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gap(o, results[1][0]) < FP32 and gap(S, results[1][1]) < FP32


@pytest.mark.parametrize("gate", [40.0, -9.0])
@pytest.mark.parametrize("lower_bound", [-5.0, -5.8, -6.0, -20.0])
def test_every_gate_at_the_bound_or_near_zero(gate, lower_bound):
    assert_chunks_equal_recurrence(inputs(1, 150, g=torch.full((1, 150, 2, 16), gate)), lower_bound)


@pytest.mark.parametrize("lower_bound", GATES)
def test_nearly_equal_keys_with_full_writes_and_slow_gates(lower_bound):
    # The powers of A grow like binomials here, its inverse does not.
    keys = torch.ones(1, 200, 2, 16) + 1e-3 * torch.randn(1, 200, 2, 16, generator=torch.Generator().manual_seed(0))
    x = inputs(1, 200, k=keys, beta=torch.full((1, 200, 2), 9.0), g=torch.full((1, 200, 2, 16), -12.0))
    assert_chunks_equal_recurrence(x, lower_bound)
    assert kda(**x, lower_bound=lower_bound)[0].abs().max() < 10 * x["v"].abs().max()


@pytest.mark.parametrize("decay", [320.0, 1000.0])
def test_unbounded_gate_with_strong_decay(decay):
    # Every second channel forgets at once at every token, the others at some tokens only.
    g = torch.full((1, 150, 2, 16), decay)
    g[..., 1::2] = 3 * torch.randn(1, 150, 2, 8, generator=torch.Generator().manual_seed(0))
    g[:, ::20] = decay
    x = inputs(1, 150, g=g, A_log=torch.zeros(2), dt_bias=torch.zeros(2, 16))
    assert_chunks_equal_recurrence(x, None)


@pytest.mark.parametrize("lower_bound", GATES)
@pytest.mark.parametrize("A_log", [80.0, 100.0])
def test_saturated_rate_keeps_gradients_finite(A_log, lower_bound):
    x = inputs(1, 70, A_log=torch.tensor([A_log, 0.5]))
    x["g"] = torch.where(torch.rand(1, 70, 2, 1, generator=torch.Generator().manual_seed(0)) < 0.2, 1e4, x["g"])
    for dtype in (torch.float32, torch.float64):
        y = {name: t.to(dtype).requires_grad_() for name, t in x.items()}
        for fn in (kda_chunk, kda_recurrent):
            o, S = fn(**y, lower_bound=lower_bound)
            gradients = dict(zip(y, torch.autograd.grad(o.square().sum() + S.square().sum(), list(y.values()))))
            assert o.isfinite().all() and S.isfinite().all()
            assert all(gradient.isfinite().all() for gradient in gradients.values())
            if A_log > 80:
                assert gradients["A_log"][0] == 0 and gradients["A_log"][1] != 0


def test_rate_above_80_counts_as_80():
    x = inputs(1, 20, A_log=torch.tensor([80.0, 0.5]))
    assert torch.equal(kda(**x)[0], kda(**{**x, "A_log": torch.tensor([100.0, 0.5], dtype=torch.float64)})[0])


@pytest.mark.parametrize("lower_bound", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", [1, 15, 16, 21, 64, 100, 199])
def test_later_tokens_change_no_bit_of_earlier_outputs(position, dtype, lower_bound):
    x = inputs(2, 200, dtype=dtype)
    edited = {name: t.clone() for name, t in x.items()}
    for name in ("q", "k", "v", "g", "beta"):
        edited[name][:, position:] = -5 * edited[name][:, position:].flip(1) + 1
    o, o_edited = (kda(**y, lower_bound=lower_bound)[0] for y in (x, edited))
    assert torch.equal(o[:, :position], o_edited[:, :position])
    assert not torch.equal(o[:, position:], o_edited[:, position:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_of_the_last_token_of_a_partial_tile_stays_out_of_the_past(dtype):
    # An anchor in the middle of the tile would be min(8, T - 1 - 16) = 5 rows in: the edited row.
    x = inputs(1, 22, dtype=dtype)
    edited = {**x, "g": x["g"].clone()}
    edited["g"][:, 21] += 7
    assert torch.equal(kda(**x)[0][:, :21], kda(**edited)[0][:, :21])


@pytest.mark.parametrize("poison", [3.0, float("nan")])
@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 75, 75, 150])])
def test_neighbours_change_no_bit(cu_seqlens, poison):
    x = inputs(2, 75, dtype=torch.float32)
    if cu_seqlens is not None:
        x = {name: t.flatten(0, 1)[None] if t.ndim > 2 else t for name, t in x.items()}
    edited = {name: t.clone() for name, t in x.items()}
    for name in ("q", "k", "v", "g", "beta"):
        edited[name].view(150, -1)[:75] *= poison
    (o, S), (o_edited, S_edited) = (kda(**y, cu_seqlens=cu_seqlens) for y in (x, edited))
    assert torch.equal(o.flatten(0, 1)[75:], o_edited.flatten(0, 1)[75:])
    assert torch.equal(S[1:], S_edited[1:]) and not torch.equal(S[0], S_edited[0])


def test_no_tokens():
    x, S = inputs(2, 0, dtype=torch.bfloat16), torch.randn(2, 2, 16, 12)
    for fn in (kda, kda_recurrent):
        o, final_state = fn(**x, initial_state=S)
        assert o.shape == (2, 0, 2, 12) and o.dtype == torch.bfloat16 and torch.equal(final_state, S)
    assert torch.equal(kda(**x)[1], torch.zeros(2, 2, 16, 12))


@pytest.mark.parametrize(
    "name, value",
    [
        ("k", torch.zeros(1, 5, 2, 15)),
        ("v", torch.zeros(1, 4, 2, 12)),
        ("g", torch.zeros(1, 5, 2, 16, dtype=torch.int64)),
        ("beta", torch.zeros(1, 5, 2, 1)),
        ("A_log", torch.zeros(1, 1, 2, 1)),
        ("dt_bias", torch.zeros(32)),
        ("lower_bound", 0.0),
        ("lower_bound", float("nan")),
        ("lower_bound", -float("inf")),
        ("initial_state", torch.zeros(2, 2, 16, 12)),
        ("initial_state", torch.zeros(1, 2, 12, 16)),
        ("initial_state", torch.zeros(1, 2, 16, 12, dtype=torch.bfloat16)),
        ("cu_seqlens", torch.tensor([0, 3])),
        ("cu_seqlens", torch.tensor([0, 4, 3, 5])),
        ("cu_seqlens", torch.tensor([1, 5])),
        ("cu_seqlens", torch.tensor([0.0, 5.0])),
        ("impl", "cuda"),
        ("impl", "triton"),
    ],
)
def test_bad_inputs_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name}: "):
        kda(**{**inputs(1, 5, dtype=torch.float32), name: value})


def test_packing_needs_one_row():
    with pytest.raises(ValueError, match="^cu_seqlens: .*batch size 1, got batch size 2"):
        kda(**inputs(2, 5), cu_seqlens=torch.tensor([0, 5]))


@pytest.mark.parametrize(
    "state",
    [torch.zeros(1, 2, 16, 12), torch.zeros(3, 2, 16, 12).double(), torch.zeros(3, 2, 16, 12, requires_grad=True)],
)
def test_step_refuses_a_state_it_cannot_update(state):
    x = {name: t[:, 0] if t.ndim > 2 else t for name, t in inputs(3, 1, dtype=torch.float32).items()}
    with pytest.raises(ValueError, match="^state: "):
        kda_step(**x, state=state)
