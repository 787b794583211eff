"""The Triton short convolution computes what the reference says: outputs, states, every gradient; on a CPU interpreted."""

import itertools

import pytest
import torch

from modeling_moe_lc.kernels.short_conv import short_conv, short_convs


LIMIT = 2e-6  # relative, FP32; measured under the interpreter: at most 4e-7
GPU_LIMIT = 5e-3  # BF16 inputs against FP64: the rounding of the results, 1.7e-3
DOCUMENTS = {
    "empty and short": [0, 0, 1, 3, 3, 10, 12, 30],
    "longer than a piece": [0, 0, 33, 34, 34, 50],
    "empty last": [0, 16, 32, 32],
}
CASES = {
    f"T = {T}": (B, T, None) for B, T in ((2, 1), (1, 2), (2, 3), (1, 4), (1, 63), (1, 64), (1, 65), (1, 130))
} | {name: (1, bounds[-1], bounds) for name, bounds in DOCUMENTS.items()}


def make(B, T, C=5, *, tensors=1, documents=None, dtype=torch.float32, device="cpu"):
    """xs and weights, the states, and cotangents for the outputs and the new states."""
    generator = torch.Generator(device).manual_seed(T)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    sequences = B if documents is None else len(documents) - 1
    xs, weights = [random(B, T, C).to(dtype) for _ in range(tensors)], [random(C, 1, 4) for _ in range(tensors)]
    states = random(sequences, tensors * C, 3).to(dtype)
    cu_seqlens = None if documents is None else torch.tensor(documents, dtype=torch.int32, device=device)
    return xs, weights, states, cu_seqlens, [torch.randn_like(x) for x in (*xs, states)]


def run(xs, weights, states, cu_seqlens, cotangents, **kwargs):
    """Everything that the operator computes, by name; nothing is asked of an output whose cotangent is None."""
    leaves = [t.detach().clone().requires_grad_() for t in (*xs, *weights, *([] if states is None else [states]))]
    n = len(xs)
    given = None if states is None else leaves[-1]
    ys, new_states = short_convs(leaves[:n], leaves[n : 2 * n], states=given, cu_seqlens=cu_seqlens, **kwargs)
    pairs = zip((*ys, new_states), cotangents, strict=True)
    outputs, asked = zip(*((y, dy) for y, dy in pairs if dy is not None), strict=True)
    gradients = torch.autograd.grad(outputs, leaves, asked, materialize_grads=True)
    names = [f"d_{name}_{i}" for name in ("x", "weight") for i in range(n)] + ["d_states"] * (given is not None)
    results = {f"y_{i}": y.detach() for i, y in enumerate(ys)} | {"new_states": new_states.detach()}
    return results | dict(zip(names, gradients, strict=True))


def assert_close(ours, theirs, limit):
    for name, reference in theirs.items():
        error = (ours[name].double() - reference).norm() / reference.norm().clamp_min(1e-30)
        assert error < limit, (name, error.item())


def in_fp64(tensors):
    return [None if t is None else t.double() for t in tensors]


def check(xs, weights, states, cu_seqlens, cotangents, limit):
    ours = run(xs, weights, states, cu_seqlens, cotangents, impl="triton")
    wide = in_fp64(xs), in_fp64(weights), *in_fp64([states])
    assert_close(ours, run(*wide, cu_seqlens, in_fp64(cotangents), impl="reference"), limit)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_fused_equals_the_reference(case, poison_empty):
    B, T, documents = case
    xs, weights, states, cu_seqlens, cotangents = make(B, T, documents=documents)
    check(xs, weights, states, cu_seqlens, cotangents, LIMIT)
    if T < 63 or documents:
        check(xs, weights, None, cu_seqlens, cotangents, LIMIT)


@pytest.mark.parametrize(
    "tensors, with_state, documents", [(2, True, None), (3, False, [0, 2, 2, 11]), (3, True, None)]
)
def test_several_tensors_are_one_launch(tensors, with_state, documents, poison_empty, monkeypatch):
    from modeling_moe_lc.kernels.short_conv import fused

    launched = []
    for name in ("short_conv_fwd_kernel", "short_conv_bwd_kernel"):
        kernel = getattr(fused, name)
        monkeypatch.setattr(fused, name, Counted(kernel, launched))
    arguments = make(1, 11, 3, tensors=tensors, documents=documents)
    xs, weights, states, cu_seqlens, cotangents = arguments
    check(xs, weights, states if with_state else None, cu_seqlens, cotangents, LIMIT)
    assert len(launched) == 2


class Counted:
    def __init__(self, kernel, launched):
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid):
        self.launched.append(grid)
        return self.kernel[grid]


@pytest.mark.parametrize("documents", [None, [0, 2, 2, 21]])
def test_cotangent_of_the_new_state_alone(documents, poison_empty):
    xs, weights, states, cu_seqlens, (_, d_new_states) = make(1, 21, documents=documents)
    check(xs, weights, states, cu_seqlens, [None, d_new_states], LIMIT)
    check(xs, weights, None, cu_seqlens, [None, d_new_states], LIMIT)


def test_many_channels_and_parts_of_the_weight_gradient(poison_empty, monkeypatch):
    """More channels than a warp holds; a program sums the weight gradient over several pieces, the last has fewer."""
    from modeling_moe_lc.kernels.short_conv import fused

    check(*make(1, 18, 130), LIMIT)
    monkeypatch.setattr(fused, "MOST_PARTS", 3)
    check(*make(2, 20), LIMIT)
    check(*make(1, 30, documents=DOCUMENTS["empty and short"]), LIMIT)


def test_no_tokens():
    xs, weights, states, _, _ = make(2, 0)
    y, new_state = short_conv(xs[0], weights[0], state=states, impl="triton")
    assert y.shape == (2, 0, 5) and torch.equal(new_state, states)


@torch.no_grad()
def test_packed_documents_equal_separate_runs_to_the_bit():
    bounds = DOCUMENTS["empty and short"]
    (x,), (weight,), states, cu_seqlens, _ = make(1, bounds[-1], documents=bounds)
    y, new_states = short_conv(x, weight, state=states, cu_seqlens=cu_seqlens, impl="triton")
    for n, (a, b) in enumerate(itertools.pairwise(bounds)):
        y_n, state_n = short_conv(x[:, a:b], weight, state=states[n : n + 1], impl="triton")
        assert torch.equal(y[:, a:b], y_n) and torch.equal(new_states[n : n + 1], state_n), n


@torch.no_grad()
def test_chained_pieces_equal_one_piece_to_the_bit():
    (x,), (weight,), state, _, _ = make(1, 20)
    y, new_state = short_conv(x, weight, state=state, impl="triton")
    for split in (1, 2, 3, 17):
        y_1, state_1 = short_conv(x[:, :split], weight, state=state, impl="triton")
        y_2, state_2 = short_conv(x[:, split:], weight, state=state_1, impl="triton")
        assert torch.equal(torch.cat([y_1, y_2], 1), y) and torch.equal(state_2, new_state), split


@torch.no_grad()
def test_later_tokens_and_other_documents_change_no_bit():
    (x,), (weight,), _, _, _ = make(1, 50)
    cu_seqlens = torch.tensor([0, 35, 50])
    y, _ = short_conv(x, weight, cu_seqlens=cu_seqlens, impl="triton")
    for t in (1, 16, 34):
        edited = x.clone()
        edited[:, t:35] = float("nan")
        y_edited, _ = short_conv(edited, weight, cu_seqlens=cu_seqlens, impl="triton")
        assert torch.equal(y[:, :t], y_edited[:, :t]) and torch.equal(y[:, 35:], y_edited[:, 35:]), t


def test_gradients_do_not_look_into_other_documents():
    (x,), (weight,), _, cu_seqlens, _ = make(1, 30, documents=[0, 10, 10, 30])
    x.requires_grad_()
    y, _ = short_conv(x, weight, cu_seqlens=cu_seqlens, impl="triton")
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    dy[:, 10:] = float("nan")
    (edited,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx[:, :10], edited[:, :10])


def test_the_state_may_be_overwritten_before_the_backward_pass():
    (x,), (weight,), state, _, _ = make(1, 5)
    expected = run([x], [weight], state, None, [torch.ones_like(x), None], impl="triton")["d_weight_0"]
    weight.requires_grad_()
    cache = state.clone()
    y, new_state = short_conv(x, weight, state=cache, impl="triton")
    cache.copy_(new_state.detach())
    assert torch.equal(torch.autograd.grad(y.sum(), weight)[0], expected)


def test_any_strides_and_weights_of_any_dtype():
    (x,), (weight,), state, _, _ = make(2, 20, 6)
    expected = short_conv(x, weight.bfloat16().float(), state=state, impl="triton")
    strided = x.mT.contiguous().mT, weight.bfloat16().requires_grad_(), state.mT.contiguous().mT
    y, new_state = short_conv(strided[0], strided[1], state=strided[2], impl="triton")
    assert torch.equal(y, expected[0]) and torch.equal(new_state, expected[1])
    y.mT.contiguous().sum().backward()
    assert strided[1].grad.dtype == torch.bfloat16


@torch.no_grad()
def test_autocast_changes_nothing():
    (x,), (weight,), state, _, _ = make(1, 20)
    y, _ = short_conv(x, weight, state=state, impl="triton")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(short_conv(x, weight, state=state, impl="triton")[0], y)


@torch.no_grad()
def test_16_bit_inputs_are_rounded_once():
    for dtype, limit in ((torch.bfloat16, 3e-3), (torch.float16, 4e-4)):
        xs, weights, states, _, _ = make(1, 20, dtype=dtype)
        (y,), new_states = short_convs(xs, weights, states=states, impl="triton")
        expected, _ = short_convs(in_fp64(xs), in_fp64(weights), states=states.double())
        assert y.dtype == dtype and torch.equal(new_states, xs[0][:, -3:].mT)
        assert_close({"y": y}, {"y": expected[0]}, limit)


def test_inputs_that_the_kernels_do_not_take_are_refused_by_name():
    x, weight = torch.zeros(1, 6, 5), torch.zeros(5, 1, 4)
    for named, arguments in (
        ("x: ", ((x.double(),), (weight,))),
        ("weight: ", ((x,), (weight[..., :3],))),
    ):
        with pytest.raises(ValueError, match=f"^impl: .*but {named}"):
            short_conv(arguments[0][0], arguments[1][0], impl="triton")
    with pytest.raises(ValueError, match=r"^impl: .*but xs: .*\[5, 6\]"):
        short_convs((x, torch.zeros(1, 6, 6)), (weight, torch.zeros(6, 1, 4)), impl="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("T", [1, 3, 63, 64, 65, 3000])
def test_bf16_on_a_gpu_against_fp64(T, with_state, poison_empty):
    xs, weights, states, _, cotangents = make(2, T, 768, tensors=3, dtype=torch.bfloat16, device="cuda")
    check(xs, weights, states if with_state else None, None, cotangents, GPU_LIMIT)


@pytest.mark.gpu
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("C", [5, 96, 1000])
def test_packed_bf16_on_a_gpu_against_fp64(C, with_state, poison_empty):
    documents = [0, 0, 57, 58, 58, 60, 700, 1500, 1500]
    arguments = make(1, 1500, C, tensors=3, documents=documents, dtype=torch.bfloat16, device="cuda")
    xs, weights, states, cu_seqlens, cotangents = arguments
    check(xs, weights, states if with_state else None, cu_seqlens, cotangents, GPU_LIMIT)


@pytest.mark.gpu
def test_fp32_on_a_gpu_against_fp64(poison_empty):
    check(*make(2, 300, 200, tensors=2, device="cuda"), 1e-5)


@pytest.mark.gpu
@torch.no_grad()
def test_cuts_and_later_tokens_change_no_bit_on_a_gpu():
    (x,), (weight,), state, _, _ = make(1, 500, 256, dtype=torch.bfloat16, device="cuda")
    y, new_state = short_conv(x, weight, state=state, impl="triton")
    for t in (1, 2, 3, 127, 128, 129, 499):
        y_1, state_1 = short_conv(x[:, :t], weight, state=state, impl="triton")
        y_2, state_2 = short_conv(x[:, t:], weight, state=state_1, impl="triton")
        assert torch.equal(torch.cat([y_1, y_2], 1), y) and torch.equal(state_2, new_state), t


@pytest.mark.gpu
def test_runs_repeat_to_the_bit_on_a_gpu():
    arguments = make(1, 5000, 768, tensors=3, dtype=torch.bfloat16, device="cuda")
    first = run(*arguments, impl="triton")
    for _ in range(30):
        for name, x in run(*arguments, impl="triton").items():
            assert torch.equal(x, first[name]), name


@pytest.mark.gpu
def test_more_than_2_31_elements():
    T, C = 2**19 + 8, 4096
    if torch.cuda.mem_get_info()[0] < 5 * 2 * T * C:
        pytest.skip("needs 22 GB of free memory")
    x = torch.zeros(1, T, C, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(C, 1, 4, device="cuda").requires_grad_()
    x[:, -70:] = torch.randn(70, C, device="cuda")
    end = x[:, -70:].clone().requires_grad_()
    x.requires_grad_()
    y, new_state = short_conv(x, weight, impl="triton")
    dy = torch.zeros_like(y)
    dy[:, -64:] = torch.randn(64, C, device="cuda")
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    expected, end_state = short_conv(end, weight, impl="triton")
    dx_end, dw_end = torch.autograd.grad(expected, (end, weight), dy[:, -70:])
    assert torch.equal(y[:, -64:], expected[:, -64:]) and torch.equal(new_state, end_state)
    assert torch.equal(dx[:, -64:], dx_end[:, -64:])
    assert_close({"dw": dw}, {"dw": dw_end}, 1e-5)
