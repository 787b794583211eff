"""The Triton RMS norm computes what the reference says, forward and every gradient; on a CPU under the interpreter."""

import pytest
import torch

from modeling_moe_lc.kernels.rms_norm import rms_norm


LIMIT = 2e-6  # relative, FP32; measured under the interpreter: at most 4e-7
GPU_LIMIT = 6e-3  # BF16 inputs against FP64: two roundings of the results, 2.3e-3
# One piece, several rows; one row in 3 to 5 pieces; the widest. Every number of warps.
WIDTHS = (1, 5, 64, 96, 1000, 1024, 1032, 1280, 1536, 2304, 4096, 7168, 8192)


def make(*shape, dtype=torch.float32, device="cpu"):
    """x, weight and the cotangent of the output."""
    generator = torch.Generator(device).manual_seed(shape[0])
    x, dy = (torch.randn(*shape, generator=generator, device=device).to(dtype) for _ in range(2))
    return 3 * x, (1 + 0.2 * torch.randn(shape[-1], generator=generator, device=device)).to(dtype), dy


def run(x, weight, dy, eps=1e-5, **kwargs):
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    y = rms_norm(*leaves, eps, **kwargs)
    return dict(zip(("y", "dx", "dweight"), (y.detach(), *torch.autograd.grad(y, leaves, dy)), strict=True))


def check(inputs, limit, **kwargs):
    ours = run(*inputs, impl="triton", **kwargs)
    theirs = run(*(t.double() for t in inputs), impl="reference", **kwargs)
    for name, reference in theirs.items():
        error = (ours[name].double() - reference).norm() / reference.norm()
        assert ours[name].dtype == inputs[0].dtype and error < limit, (name, error.item())


@pytest.mark.parametrize("D", WIDTHS)
def test_fused_equals_the_reference(D, poison_empty):
    check(make(3, D), 2e-5 if D == 1 else LIMIT, eps=1.0 if D == 1 else 1e-5)


@pytest.mark.parametrize("rows", [(1,), (2, 3), (65,)])
def test_any_number_of_rows(rows, poison_empty):
    check(make(*rows, 48), LIMIT)


@pytest.mark.parametrize("D", [96, 1040])
def test_a_program_sums_the_weight_gradient_over_several_rows(D, poison_empty, monkeypatch):
    from modeling_moe_lc.kernels.rms_norm import fused

    monkeypatch.setattr(fused, "MULTIPROCESSORS", 1)
    monkeypatch.setattr(fused, "BACKWARD_WARPS", dict.fromkeys(range(1, 6), 4))
    monkeypatch.setattr(fused, "BACKWARD_ELEMENTS", 256)
    check(make(11, D), LIMIT)


def test_no_rows():
    results = run(*make(0, 16), impl="triton")
    assert results["y"].shape == (0, 16) and not results["dweight"].any()


@pytest.mark.parametrize("D", [32, 1032])
def test_rows_are_independent_to_the_bit(D):
    inputs = make(4, D)
    whole = run(*inputs, impl="triton")
    edited = inputs[0].clone()
    edited[0] = float("nan")
    others = run(edited, *inputs[1:], impl="triton")
    alone = run(*(t[2:3] if t.ndim > 1 else t for t in inputs), impl="triton")
    for name in ("y", "dx"):
        assert torch.equal(others[name][1:], whole[name][1:]), name
        assert torch.equal(alone[name], whole[name][2:3]), name


def test_the_missing_rows_of_a_tile_are_harmless_without_eps():
    check(make(5, 32), LIMIT, eps=0.0)


def test_any_strides():
    x, weight, dy = make(6, 32)
    expected = run(x, weight, dy, impl="triton")
    wide = torch.cat([x, x, x], -1)
    for given in (wide[:, 32:64], wide.view(2, 3, 96)[..., :32], x.mT.contiguous().mT):
        results = run(given, weight, dy.mT.contiguous().mT.view(given.shape), impl="triton")
        for name, result in results.items():
            assert torch.equal(result.reshape(expected[name].shape), expected[name]), name


def check_roundings(*dtypes, device="cpu"):
    x, weight, _ = make(60, 32, device=device)
    x, weight = x.to(dtypes[0]), weight.to(dtypes[1])
    dy = torch.randn(60, 32, device=device).to(torch.promote_types(*dtypes))
    ours, theirs = (run(x, weight, dy, impl=impl) for impl in ("triton", "reference"))
    for name, expected in theirs.items():
        assert ours[name].dtype == expected.dtype, name
        assert (ours[name] - expected).float().norm() < 1e-2 * expected.float().norm(), name
    # Here and there a norm falls on the other side of a rounding.
    assert dtypes[0] == torch.float32 or (ours["y"] != theirs["y"]).sum() < 20


def test_roundings_and_dtypes_are_those_of_the_reference():
    for dtypes in ((torch.float16, torch.float16), (torch.float16, torch.float32), (torch.float32, torch.float16)):
        check_roundings(*dtypes)


@pytest.mark.gpu
def test_roundings_on_a_gpu_are_those_of_the_reference():
    check_roundings(torch.bfloat16, torch.bfloat16, device="cuda")
    check_roundings(torch.bfloat16, torch.float32, device="cuda")


@torch.no_grad()
def test_autocast_changes_nothing():
    x, weight, _ = make(5, 16)
    y = rms_norm(x, weight, 1e-5, impl="triton")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rms_norm(x, weight, 1e-5, impl="triton"), y)


def test_inputs_that_the_kernels_do_not_take_are_refused_by_name():
    x, weight = torch.zeros(3, 16), torch.zeros(16)
    for name, arguments in (
        ("x", (x.double(), weight)),
        ("weight", (x, weight.double())),
        ("D", (torch.zeros(1, 8193), torch.zeros(8193))),
    ):
        with pytest.raises(ValueError, match=f"^impl: .*but {name}: "):
            rms_norm(*arguments, 1e-5, impl="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 63, 5000])
@pytest.mark.parametrize("D", [*WIDTHS, 16, 128, 256, 384, 512, 768, 2048, 3072, 5120])
def test_bf16_on_a_gpu_against_fp64(rows, D, poison_empty):
    check(make(rows, D, dtype=torch.bfloat16, device="cuda"), GPU_LIMIT, eps=1.0 if D == 1 else 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [128, 1000, 2304, 8192])
def test_fp32_on_a_gpu_against_fp64(D, poison_empty):
    check(make(300, D, device="cuda"), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [128, 2304])
def test_runs_repeat_to_the_bit_on_a_gpu(D):
    inputs = make(20000, D, dtype=torch.bfloat16, device="cuda")
    first = run(*inputs, impl="triton")
    for _ in range(10):
        for name, x in run(*inputs, impl="triton").items():
            assert torch.equal(x, first[name]), name


@pytest.mark.gpu
def test_more_than_2_31_elements():
    rows, D = 2**20 + 40, 2048
    if torch.cuda.mem_get_info()[0] < 6 * 2 * rows * D:
        pytest.skip("needs 26 GB of free memory")
    x = torch.ones(rows, D, dtype=torch.bfloat16, device="cuda")
    x[-50:] = torch.randn(50, D, device="cuda")
    weight, dy = torch.randn(D, device="cuda").bfloat16(), torch.zeros_like(x)
    dy[-50:] = torch.randn(50, D, device="cuda")
    expected = run(x[-50:].clone(), weight, dy[-50:], impl="triton")
    results = run(x, weight, dy, impl="triton")
    assert all(torch.equal(results[name][-50:], expected[name]) for name in ("y", "dx"))
    assert (results["dweight"] - expected["dweight"]).norm() < 4e-3 * expected["dweight"].norm()
