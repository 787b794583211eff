"""The short convolution: taps in the right order, states, document boundaries."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from modeling_moe_lc.kernels.short_conv import short_conv


FP64 = 1e-13  # measured 2e-16: elementwise functions round differently at the ragged end of a tensor
ROUNDED = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}  # measured 7e-8, 1.6e-3, 2.0e-4
BOUNDS = (0, 0, 1, 3, 3, 10, 12, 30)  # empty documents, and documents shorter than the history of 3


def inputs(B, T, C=5, W=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(T)
    x, weight, state = (torch.randn(*shape, generator=generator) for shape in ((B, T, C), (C, 1, W), (B, C, W - 1)))
    return x.to(dtype), weight.to(torch.float64 if dtype == torch.float64 else torch.float32), state.to(dtype)


def gap(result, expected):
    return ((result.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("T", [1, 2, 3, 4, 50])
def test_equals_the_formula(T):
    x, weight, state = inputs(2, T)
    y, new_state = short_conv(x, weight, state=state)
    before = torch.cat([state.mT, x], dim=1)  # y_t = SiLU(sum_r weight_r x_(t-3+r))
    for t in range(T):
        expected = sum(weight[:, 0, r] * before[:, t + r] for r in range(4))
        assert gap(y[:, t], expected / (1 + (-expected).exp())) < FP64
    assert torch.equal(new_state, before[:, -3:].mT)


def test_without_a_state_there_are_zeros_before_the_start():
    x, weight, state = inputs(2, 20)
    y, new_state = short_conv(x, weight)
    y_zeros, new_state_zeros = short_conv(x, weight, state=torch.zeros_like(state))
    assert torch.equal(y, y_zeros) and torch.equal(new_state, new_state_zeros)
    assert gap(y, F.silu(F.conv1d(F.pad(x.mT, (3, 0)), weight, groups=5)).mT) < FP64


@pytest.mark.parametrize("dtype", ROUNDED)
def test_computes_in_fp32_and_rounds_once(dtype):
    x, weight, state = inputs(2, 100, dtype=dtype)
    y, new_state = short_conv(x, weight, state=state)
    assert y.dtype == dtype and new_state.dtype == dtype
    assert gap(y, short_conv(x.double(), weight.double(), state=state.double())[0]) < ROUNDED[dtype]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(short_conv(x, weight, state=state)[0], y)


@pytest.mark.parametrize("split", [0, 1, 2, 3, 29, 30])
def test_chained_pieces_equal_one_piece(split):
    x, weight, state = inputs(2, 30)
    y, new_state = short_conv(x, weight, state=state)
    y_1, state_1 = short_conv(x[:, :split], weight, state=state)
    y_2, state_2 = short_conv(x[:, split:], weight, state=state_1)
    assert gap(torch.cat([y_1, y_2], 1), y) < FP64 and torch.equal(state_2, new_state)


@pytest.mark.parametrize("with_state", [False, True])
def test_packed_documents_equal_separate_runs(with_state):
    x, weight, _ = inputs(1, BOUNDS[-1])
    state = torch.randn(len(BOUNDS) - 1, 5, 3, dtype=torch.float64) if with_state else None
    y, new_state = short_conv(x, weight, state=state, cu_seqlens=torch.tensor(BOUNDS, dtype=torch.int32))
    for n, (a, b) in enumerate(itertools.pairwise(BOUNDS)):
        y_n, state_n = short_conv(x[:, a:b], weight, state=state[n : n + 1] if with_state else None)
        assert torch.allclose(y[:, a:b], y_n, rtol=FP64, atol=FP64) and torch.equal(new_state[n : n + 1], state_n)


def test_later_tokens_and_other_documents_change_no_bit():
    x, weight, _ = inputs(1, 30, dtype=torch.float32)
    edited = x.clone()
    edited[:, 12:20] = float("nan")
    y, y_edited = (short_conv(t, weight, cu_seqlens=torch.tensor([0, 20, 30]))[0] for t in (x, edited))
    assert torch.equal(y[:, :12], y_edited[:, :12]) and torch.equal(y[:, 20:], y_edited[:, 20:])


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 1, 1, 7])])
def test_gradcheck(cu_seqlens):
    x, weight, _ = inputs(1, 7, C=2)
    state = torch.randn(1 if cu_seqlens is None else 3, 2, 3, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x, weight, state)]
    assert torch.autograd.gradcheck(lambda x, w, s: short_conv(x, w, state=s, cu_seqlens=cu_seqlens), leaves)


def test_the_new_state_owns_its_memory():
    for W in (1, 2, 4):
        x, weight, _ = inputs(1, 100, W=W)
        _, state = short_conv(x, weight)
        assert (
            state.shape == (1, 5, W - 1) and state.is_contiguous() and state.untyped_storage().nbytes() == state.nbytes
        )


@pytest.mark.parametrize(
    "name, value",
    [
        ("x", torch.zeros(2, 6)),
        ("x", torch.zeros(1, 6, 5, dtype=torch.int64)),
        ("weight", torch.zeros(4, 1, 4)),
        ("weight", torch.zeros(5, 4)),
        ("state", torch.zeros(1, 5, 4)),
        ("state", torch.zeros(1, 5, 3).double()),
        ("cu_seqlens", torch.tensor([0, 5])),
        ("impl", "cuda"),
    ],
)
def test_bad_inputs_are_named(name, value):
    arguments = {"x": torch.zeros(1, 6, 5), "weight": torch.zeros(5, 1, 4), name: value}
    with pytest.raises(ValueError, match=f"^{name}: "):
        short_conv(**arguments)
