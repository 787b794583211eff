"""The Triton SiTU-GLU computes what the reference says, forward and backward; on a CPU under the interpreter."""

import pytest
import torch

from modeling_moe_lc.kernels.situ_glu import situ_glu


LIMIT = 2e-6  # relative, FP32; measured under the interpreter: at most 3e-7
GPU_LIMIT = 5e-3  # BF16 inputs against FP64: the rounding of the results, 1.7e-3
CAPS = [(4.0, 25.0), (3.0, 25.0), (1.0, None), (None, 25.0), (None, None)]


def make(*shape, dtype=torch.float32, device="cpu", scale=6.0):
    """gate_up [..., 2I] and the cotangent of the output."""
    generator = torch.Generator(device).manual_seed(shape[0])
    gate_up = torch.randn(*shape, generator=generator, device=device) * scale
    dy = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator, device=device)
    return gate_up.to(dtype), dy.to(dtype)


def run(gate_up, dy, beta, linear_beta, **kwargs):
    leaf = gate_up.detach().requires_grad_()
    y = situ_glu(leaf, beta, linear_beta, **kwargs)
    return {"y": y.detach(), "d_gate_up": torch.autograd.grad(y, leaf, dy)[0]}


def check(gate_up, dy, beta, linear_beta, limit):
    ours = run(gate_up, dy, beta, linear_beta, impl="triton")
    theirs = run(gate_up.double(), dy.double(), beta, linear_beta, impl="reference")
    for name, reference in theirs.items():
        error = (ours[name].double() - reference).norm() / reference.norm()
        assert ours[name].dtype == gate_up.dtype and error < limit, (name, error.item())


@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 2 * 37), (130, 2 * 16), (2, 2 * 1100)])
def test_fused_equals_the_reference(shape, caps, poison_empty):
    check(*make(*shape), *caps, LIMIT)


@pytest.mark.parametrize("caps", CAPS)
def test_small_inputs(caps):
    """1 - e^-x has the precision of 1, so that of tanh is relative to the cap: 25 times 6e-8 of 0.01."""
    check(*make(40, 64, scale=0.01), *caps, 3e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("caps", CAPS[:2])
def test_is_bounded_and_finite_everywhere(caps, dtype):
    edges = torch.tensor([0.0, 1e-4, 1.0, 20.0, 88.0, 1e3, 6e4])
    edges = torch.cat([edges, -edges]).to(dtype)
    g, u = torch.meshgrid(edges, edges, indexing="ij")
    results = run(torch.cat([g, u], -1), torch.ones_like(g), *caps, impl="triton")
    assert results["y"].abs().max() <= caps[0] * caps[1] * (1 + 1e-6)
    assert results["d_gate_up"].isfinite().all()


def test_what_is_not_a_number_stays_so():
    for place in (3, 11):
        gate_up, dy = make(2, 16)
        gate_up[1, place] = float("nan")
        y = run(gate_up, dy, 4.0, 25.0, impl="triton")["y"]
        assert y[1, 3].isnan() and y.isnan().sum() == 1


def test_elements_are_independent_to_the_bit():
    gate_up, dy = make(5, 2 * 20)
    whole = run(gate_up, dy, 4.0, 25.0, impl="triton")
    edited = gate_up.clone()
    edited[0] = float("nan")
    others = run(edited, dy, 4.0, 25.0, impl="triton")
    alone = run(gate_up[2:3], dy[2:3], 4.0, 25.0, impl="triton")
    for name, x in whole.items():
        assert torch.equal(others[name][1:], x[1:]) and torch.equal(alone[name], x[2:3]), name


def test_any_strides_and_no_rows():
    gate_up, dy = make(6, 32)
    expected = run(gate_up, dy, 4.0, 25.0, impl="triton")
    wide = torch.cat([gate_up, gate_up], -1)
    for x in (wide[:, :32], wide[:, 32:], gate_up.mT.contiguous().mT):
        for name, result in run(x, dy.mT.contiguous().mT, 4.0, 25.0, impl="triton").items():
            assert torch.equal(result, expected[name]), name
    empty = run(*make(0, 32), 4.0, 25.0, impl="triton")
    assert empty["y"].shape == (0, 16) and empty["d_gate_up"].shape == (0, 32)
    assert situ_glu(torch.zeros(3, 0), 4.0, 25.0, impl="triton").shape == (3, 0)


@torch.no_grad()
def test_16_bit_outputs_are_rounded_once_and_autocast_changes_nothing():
    for dtype, limit in ((torch.bfloat16, 3e-3), (torch.float16, 4e-4)):
        gate_up, _ = make(6, 64, dtype=dtype)
        y = situ_glu(gate_up, 4.0, 25.0, impl="triton")
        expected = situ_glu(gate_up.double(), 4.0, 25.0)
        assert y.dtype == dtype and (y - expected).norm() < limit * expected.norm()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(situ_glu(gate_up, 4.0, 25.0, impl="triton"), y)


def test_inputs_that_the_kernels_do_not_take_are_refused_by_name():
    with pytest.raises(ValueError, match="^impl: .*but gate_up: "):
        situ_glu(torch.zeros(3, 8, dtype=torch.float64), 4.0, 25.0, impl="triton")


def test_no_tile_is_mostly_empty():
    from modeling_moe_lc.kernels.situ_glu.fused import WIDTHS, _width

    assert [_width(I) for I in (1024, 4096, 1408, 128, 17, 1)] == [1024, 1024, 128, 128, 32, 16]
    assert all(_width(I) in WIDTHS and -I % _width(I) <= max(15, I / 16) for I in range(1, 3000))


@pytest.mark.gpu
@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.parametrize("I", [16, 37, 64, 128, 320, 1024, 1408, 2048])
def test_bf16_on_a_gpu_against_fp64(I, caps, poison_empty):
    check(*make(1027, 2 * I, dtype=torch.bfloat16, device="cuda"), *caps, GPU_LIMIT)


@pytest.mark.gpu
@pytest.mark.parametrize("caps", CAPS)
def test_fp32_on_a_gpu_against_fp64(caps, poison_empty):
    check(*make(300, 2 * 128, device="cuda"), *caps, 1e-5)


@pytest.mark.gpu
def test_runs_repeat_to_the_bit_on_a_gpu():
    inputs = make(50000, 2 * 128, dtype=torch.bfloat16, device="cuda")
    first = run(*inputs, 4.0, 25.0, impl="triton")
    for _ in range(10):
        assert all(torch.equal(x, first[name]) for name, x in run(*inputs, 4.0, 25.0, impl="triton").items())


@pytest.mark.gpu
def test_more_than_2_31_elements():
    rows, I = 2**22 + 40, 512
    if torch.cuda.mem_get_info()[0] < 4 * 2 * rows * 2 * I:
        pytest.skip("needs 36 GB of free memory")
    gate_up = torch.ones(rows, 2 * I, dtype=torch.bfloat16, device="cuda")
    gate_up[-50:] = torch.randn(50, 2 * I, device="cuda")
    dy = torch.ones(rows, I, dtype=torch.bfloat16, device="cuda")
    expected = run(gate_up[-50:].clone(), dy[-50:], 4.0, 25.0, impl="triton")
    assert all(torch.equal(x[-50:], expected[name]) for name, x in run(gate_up, dy, 4.0, 25.0, impl="triton").items())
