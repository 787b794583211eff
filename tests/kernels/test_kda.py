"""Kimi Delta Attention: the paper's formula = recurrence = chunks = chained pieces = single steps, packed or not."""

import itertools

import numpy as np
import pytest
import torch

from modeling_moe_lc.kernels.kda import kda, kda_step
from modeling_moe_lc.kernels.kda.reference import kda_chunk, kda_recurrent


FP64 = 1e-10  # measured 7e-15 for results, 7e-13 for gradients
ROUNDED = {torch.bfloat16: 3e-3, torch.float16: 4e-4}  # measured 1.7e-3 and 2.1e-4: the rounding of o alone
GATES = (-5.0, None)
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 200)
BOUNDS = (0, 0, 1, 70, 70, 71, 135, 200)  # empty, one token, longer than a chunk, empty, one token, a chunk, the rest


def inputs(B, T, H=2, K=8, V=6, dtype=torch.float64, seed=0, requires_grad=False):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    drawn = {
        "q": normal(B, T, H, K),
        "k": normal(B, T, H, K),
        "v": normal(B, T, H, V),
        "g": 3 * normal(B, T, H, K),  # from gates that forget at once to gates that hardly forget
        "beta": 2 * normal(B, T, H),
        "A_log": normal(H).abs(),
        "dt_bias": normal(H, K),
    }
    return {name: x.to(dtype).requires_grad_(requires_grad) for name, x in drawn.items()}


def states(N, H=2, K=8, V=6, dtype=torch.float64, requires_grad=False):
    generator = torch.Generator().manual_seed(99)
    return torch.randn(N, H, K, V, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)


def tokens(x, *index):
    """The inputs at some tokens; the parameters as they are."""
    return {name: t[index] if t.ndim > 2 else t for name, t in x.items()}


def gap(result, expected):
    return ((result.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def results_and_gradients(fn, leaves, seed=5):
    o, S = fn()
    generator = torch.Generator().manual_seed(seed)
    cotangents = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (o, S)]
    return [o, S, *torch.autograd.grad([o, S], leaves, cotangents)]


def test_recurrence_is_the_formula_of_the_paper():
    x = {name: t[0].numpy() if t.ndim > 2 else t.numpy() for name, t in inputs(1, 5).items()}
    o, S = kda_recurrent(**inputs(1, 5), initial_state=states(1))
    for h in range(2):
        S_h = states(1)[0, h].numpy()
        for t in range(5):
            q, k = (x[n][t, h] / np.sqrt((x[n][t, h] ** 2).sum() + 1e-6) for n in ("q", "k"))
            alpha = np.exp(-5 / (1 + np.exp(-np.exp(x["A_log"][h]) * (x["g"][t, h] + x["dt_bias"][h]))))
            beta = 1 / (1 + np.exp(-x["beta"][t, h]))
            S_h = (np.eye(8) - beta * np.outer(k, k)) @ np.diag(alpha) @ S_h + beta * np.outer(k, x["v"][t, h])
            np.testing.assert_allclose(o[0, t, h], S_h.T @ q / np.sqrt(8), rtol=1e-11)
        np.testing.assert_allclose(S[0, h], S_h, rtol=1e-11)


@pytest.mark.parametrize("lower_bound", GATES)
@pytest.mark.parametrize("T", LENGTHS)
def test_chunks_equal_recurrence(T, lower_bound):
    for initial_state in (None, states(3)):
        x = inputs(3, T, seed=T)
        chunked = kda_chunk(**x, lower_bound=lower_bound, initial_state=initial_state)
        for result, expected in zip(chunked, kda_recurrent(**x, lower_bound=lower_bound, initial_state=initial_state)):
            assert gap(result, expected) < FP64


@pytest.mark.parametrize("lower_bound", GATES)
@pytest.mark.parametrize("T", [1, 17, 130])
def test_gradients_of_chunks_equal_gradients_of_recurrence(T, lower_bound):
    x, S = inputs(2, T, requires_grad=True), states(2, requires_grad=True)
    leaves = [*x.values(), S]
    chunked, recurrent = (
        results_and_gradients(lambda fn=fn: fn(**x, lower_bound=lower_bound, initial_state=S), leaves)
        for fn in (kda_chunk, kda_recurrent)
    )
    for result, expected in zip(chunked, recurrent):
        assert gap(result, expected) < FP64


@pytest.mark.parametrize("fn", [kda_chunk, kda_recurrent])
@pytest.mark.parametrize("lower_bound", GATES)
def test_gradcheck(fn, lower_bound):
    T, cu_seqlens = (20, torch.tensor([0, 1, 1, 20])) if fn is kda_chunk else (3, None)
    x, S = inputs(1, T, 1, 3, 2, requires_grad=True), states(3 if fn is kda_chunk else 1, 1, 3, 2, requires_grad=True)

    def function(*leaves):
        named = dict(zip(x, leaves))
        return fn(**named, lower_bound=lower_bound, initial_state=leaves[-1], cu_seqlens=cu_seqlens)

    # The chunked form is too slow for the full check; its gradients are compared with the recurrence above.
    assert torch.autograd.gradcheck(function, [*x.values(), S], fast_mode=fn is kda_chunk)


@pytest.mark.parametrize("fn", [kda_chunk, kda_recurrent])
@pytest.mark.parametrize("lower_bound", GATES)
def test_packed_documents_equal_separate_runs(fn, lower_bound):
    x, S = inputs(1, BOUNDS[-1], requires_grad=True), states(len(BOUNDS) - 1, requires_grad=True)

    def separate():
        runs = [
            fn(**tokens(x, slice(None), slice(a, b)), lower_bound=lower_bound, initial_state=S[n : n + 1])
            for n, (a, b) in enumerate(itertools.pairwise(BOUNDS))
        ]
        return torch.cat([o for o, _ in runs], 1), torch.cat([state for _, state in runs])

    def packed():
        return fn(**x, lower_bound=lower_bound, initial_state=S, cu_seqlens=torch.tensor(BOUNDS, dtype=torch.int32))

    leaves = [*x.values(), S]
    for result, expected in zip(results_and_gradients(packed, leaves), results_and_gradients(separate, leaves)):
        assert gap(result, expected) < FP64
    assert torch.equal(packed()[1][[0, 3]], S[[0, 3]])  # through an empty document the state passes unchanged


def test_many_short_documents_equal_separate_runs():
    x = inputs(1, 90)
    bounds = [0, *torch.randperm(90, generator=torch.Generator().manual_seed(1))[:25].sort()[0].tolist(), 90]
    o, S = kda(**x, cu_seqlens=torch.tensor(bounds))
    for n, (a, b) in enumerate(itertools.pairwise(bounds)):
        o_n, S_n = kda_recurrent(**tokens(x, slice(None), slice(a, b)))
        assert gap(o[:, a:b], o_n) < FP64 and gap(S[n : n + 1], S_n) < FP64


@pytest.mark.parametrize("split", [0, 1, 16, 63, 64, 99, 100])
def test_chained_pieces_equal_one_piece(split):
    x = inputs(2, 100)
    o, S = kda(**x)
    o_1, S_1 = kda(**tokens(x, slice(None), slice(0, split)))
    o_2, S_2 = kda(**tokens(x, slice(None), slice(split, None)), initial_state=S_1)
    assert gap(torch.cat([o_1, o_2], 1), o) < FP64
    assert gap(S_2, S) < FP64


@pytest.mark.parametrize("lower_bound", GATES)
def test_steps_equal_recurrence_and_update_the_state_in_place(lower_bound):
    x, S = inputs(3, 7, requires_grad=True), states(3)
    o, final_state = kda_recurrent(**x, lower_bound=lower_bound, initial_state=S.clone())
    address = S.data_ptr()
    for t in range(7):
        o_t = kda_step(**tokens(x, slice(None), t), lower_bound=lower_bound, state=S)
        assert not o_t.requires_grad and gap(o_t, o[:, t]) < FP64
    assert S.data_ptr() == address
    assert gap(S, final_state) < FP64


@pytest.mark.parametrize("dtype", ROUNDED)
def test_half_precision_inputs_stay_close_to_fp64(dtype):
    x = inputs(2, 150, K=16, V=16, dtype=dtype)
    exact = {name: t.double() for name, t in x.items()}
    o, S = kda(**x, initial_state=states(2, K=16, V=16, dtype=torch.float32))
    o_64, S_64 = kda(**exact, initial_state=states(2, K=16, V=16, dtype=torch.float32).double())
    assert o.dtype == dtype and S.dtype == torch.float32
    assert gap(o, o_64) < ROUNDED[dtype]
    assert gap(S, S_64) < 1e-5  # measured 1.4e-6: the state stays FP32


@pytest.mark.parametrize("fn", [kda_chunk, kda_recurrent])
def test_autocast_changes_nothing(fn):
    x, S = inputs(1, 70, dtype=torch.float32), states(1, dtype=torch.float32)
    expected, expected_S = fn(**x, initial_state=S)
    with torch.autocast("cpu", torch.bfloat16):
        o, final_state = fn(**x, initial_state=S)
        o_t = kda_step(**tokens(x, slice(None), 0), state=S.clone())
    assert torch.equal(o, expected) and torch.equal(final_state, expected_S)
    assert torch.equal(o_t, kda_step(**tokens(x, slice(None), 0), state=S.clone()))
