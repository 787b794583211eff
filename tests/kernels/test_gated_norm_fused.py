"""The Triton gated norm computes what the reference says, forward and every gradient; on a CPU under the interpreter."""

import pytest
import torch

from modeling_moe_lc.kernels.gated_norm import gated_rms_norm


LIMIT = 2e-6  # relative, FP32; measured under the interpreter: at most 4e-7
GPU_LIMIT = 5e-3  # BF16 inputs against FP64: the rounding of the results, 1.7e-3


def make(*shape, dtype=torch.float32, device="cpu"):
    """o, gate, weight and the cotangent of the output."""
    generator = torch.Generator(device).manual_seed(shape[0])
    o, gate, dy = (torch.randn(*shape, generator=generator, device=device).to(dtype) for _ in range(3))
    return 3 * o, 4 * gate, 1 + 0.2 * torch.randn(shape[-1], generator=generator, device=device), dy


def run(o, gate, weight, dy, eps=1e-5, **kwargs):
    leaves = [t.detach().clone().requires_grad_() for t in (o, gate, weight)]
    y = gated_rms_norm(*leaves, eps, **kwargs)
    return dict(zip(("y", "do", "dgate", "dweight"), (y.detach(), *torch.autograd.grad(y, leaves, dy)), strict=True))


def check(inputs, limit, **kwargs):
    ours = run(*inputs, impl="triton", **kwargs)
    theirs = run(*(t.double() for t in inputs), impl="reference", **kwargs)
    for name, reference in theirs.items():
        error = (ours[name].double() - reference).norm() / reference.norm()
        assert error < limit, (name, error.item())


@pytest.mark.parametrize("rows", [(1,), (2, 3), (63,), (65, 2)])
@pytest.mark.parametrize("V", [16, 32, 64, 128, 256])
def test_fused_equals_the_reference(rows, V, poison_empty):
    check(make(*rows, V), LIMIT)


@pytest.mark.parametrize("V", [1, 2, 1024])
def test_the_narrowest_and_the_widest_rows(V, poison_empty):
    check(make(5, V), 2e-5 if V == 1 else LIMIT, eps=1.0)


def test_a_program_sums_the_weight_gradient_over_several_tiles(poison_empty, monkeypatch):
    from modeling_moe_lc.kernels.gated_norm import fused

    monkeypatch.setattr(fused, "MOST_PARTS", 3)
    monkeypatch.setattr(fused, "TILE_BYTES", 256)
    check(make(30, 16), LIMIT)


def test_no_rows():
    results = run(*make(0, 16), impl="triton")
    assert results["y"].shape == (0, 16) and not results["dweight"].any()


def test_rows_are_independent_to_the_bit():
    inputs = make(5, 32)
    whole = run(*inputs, impl="triton")
    edited = inputs[0].clone()
    edited[0] = float("nan")
    others = run(edited, *inputs[1:], impl="triton")
    alone = run(*(t[2:3] if t.ndim > 1 else t for t in inputs), impl="triton")
    for name in ("y", "do", "dgate"):
        assert torch.equal(others[name][1:], whole[name][1:]), name
        assert torch.equal(alone[name], whole[name][2:3]), name


def test_the_missing_rows_of_a_tile_are_harmless_without_eps():
    check(make(5, 32), LIMIT, eps=0.0)


def test_any_strides_and_dtypes():
    o, gate, weight, dy = make(6, 32)
    mixed = o.mT.contiguous().mT, gate.half(), weight.bfloat16(), dy.mT.contiguous().mT
    results = run(*mixed, impl="triton")
    assert [results[name].dtype for name in ("do", "dgate", "dweight")] == [t.dtype for t in mixed[:3]]
    expected = run(o, gate.half().float(), weight.bfloat16().float(), dy, impl="triton")
    assert torch.equal(results["y"], expected["y"]) and torch.equal(results["do"], expected["do"])


@torch.no_grad()
def test_16_bit_outputs_are_rounded_once():
    for dtype, limit in ((torch.bfloat16, 3e-3), (torch.float16, 4e-4)):
        o, gate, weight, _ = make(6, 32, dtype=dtype)
        y = gated_rms_norm(o, gate, weight, 1e-5, impl="triton")
        expected = gated_rms_norm(o.double(), gate.double(), weight.double(), 1e-5)
        assert y.dtype == dtype and (y - expected).norm() < limit * expected.norm()


@torch.no_grad()
def test_autocast_changes_nothing():
    o, gate, weight, _ = make(5, 16)
    y = gated_rms_norm(o, gate, weight, 1e-5, impl="triton")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gated_rms_norm(o, gate, weight, 1e-5, impl="triton"), y)


def test_inputs_that_the_kernels_do_not_take_are_refused_by_name():
    o, gate, weight = torch.zeros(3, 16), torch.zeros(3, 16), torch.zeros(16)
    for name, arguments in (
        ("o", (o.double(), gate, weight)),
        ("gate", (o, gate.double(), weight)),
        ("V", (o[:, :12], gate[:, :12], weight[:12])),
        ("V", (torch.zeros(1, 2048), torch.zeros(1, 2048), torch.zeros(2048))),
    ):
        with pytest.raises(ValueError, match=f"^impl: .*but {name}: "):
            gated_rms_norm(*arguments, 1e-5, impl="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 63, 5000, 70001])
@pytest.mark.parametrize("V", [16, 64, 128, 256, 1024])
def test_bf16_on_a_gpu_against_fp64(rows, V, poison_empty):
    check(make(rows, V, dtype=torch.bfloat16, device="cuda"), GPU_LIMIT)


@pytest.mark.gpu
def test_fp32_on_a_gpu_against_fp64(poison_empty):
    check(make(300, 128, device="cuda"), 1e-5)


@pytest.mark.gpu
def test_runs_repeat_to_the_bit_on_a_gpu():
    inputs = make(50000, 128, dtype=torch.bfloat16, device="cuda")
    first = run(*inputs, impl="triton")
    for _ in range(30):
        for name, x in run(*inputs, impl="triton").items():
            assert torch.equal(x, first[name]), name


@pytest.mark.gpu
def test_more_than_2_31_elements():
    rows, V = 2**24 + 40, 128
    if torch.cuda.mem_get_info()[0] < 7 * 2 * rows * V:
        pytest.skip("needs 30 GB of free memory")
    o = torch.ones(rows, V, dtype=torch.bfloat16, device="cuda")
    o[-50:] = torch.randn(50, V, device="cuda")
    gate, weight, dy = o.clone(), torch.randn(V, device="cuda").requires_grad_(), torch.zeros_like(o)
    dy[-50:] = torch.randn(50, V, device="cuda")
    ends = [t[-50:].clone().requires_grad_() for t in (o, gate)]
    whole = gated_rms_norm(o.requires_grad_(), gate.requires_grad_(), weight, 1e-5, impl="triton")
    end = gated_rms_norm(*ends, weight, 1e-5, impl="triton")
    assert torch.equal(whole[-50:], end)
    gradients = torch.autograd.grad(whole, (o, gate, weight), dy)
    expected = torch.autograd.grad(end, (*ends, weight), dy[-50:])
    assert all(torch.equal(g[-50:], e) for g, e in zip(gradients[:2], expected[:2], strict=True))
    assert (gradients[2] - expected[2]).norm() < 1e-5 * expected[2].norm()
