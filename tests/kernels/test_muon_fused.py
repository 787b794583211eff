"""Muon's elements: reference = definition, fused = reference under the interpreter and on a GPU, refusals."""

import pytest
import torch

from modeling_moe_lc.kernels.muon import muon_descend, muon_direction


BETA, LR, DECAY = 0.95, 0.02, 0.1


def make(shape, device="cpu", dtype=torch.float32):
    """As cut from parameters: heads with other rows between them."""
    generator = torch.Generator(device).manual_seed(sum(shape))
    count, rows, columns = shape
    return [
        torch.randn(count, rows + more, columns, generator=generator, device=device, dtype=dtype)[:, :rows]
        for more in (3, 1, 0)
    ]


def moved(function, changed, *others, **options):
    """A copy of the tensor that `function` changes, in a layout like its own, after it has."""
    whole = torch.full((len(changed), changed.shape[1] + 2, changed.shape[2]), 7.0).to(changed)
    here = whole[:, : changed.shape[1]]
    here.copy_(changed)
    function(here, *others, **options)
    assert (whole[:, changed.shape[1] :] == 7.0).all()
    return here.clone()


def direction(gradient, momentum, dtype, impl):
    out = torch.full(gradient.shape, torch.nan, dtype=dtype, device=gradient.device)
    after = moved(lambda m, **options: muon_direction(gradient, m, out, **options), momentum, beta=BETA, impl=impl)
    return after, out


def compare(shape, impl, dtype, device, limit):
    gradient, momentum, parameter = make(shape, device)
    for ours, exact in zip(
        direction(gradient, momentum, dtype, impl),
        direction(gradient.double(), momentum.double(), torch.float64, "reference"),
        strict=True,
    ):
        assert (ours.double() - exact).norm() <= (limit if ours.dtype == dtype else 1e-6) * exact.norm()
    update = gradient.to(dtype).contiguous()
    for lr in (LR, torch.tensor(LR, device=device)):
        ours = moved(muon_descend, parameter, update, lr=lr, weight_decay=DECAY, impl=impl)
        exact = (1 - LR * DECAY) * parameter.double() - LR * update.double()
        assert (ours.double() - exact).norm() <= 1e-6 * exact.norm()


def test_the_definition():
    gradient, momentum, parameter = make((2, 3, 5), dtype=torch.float64)
    after, out = direction(gradient, momentum, torch.float64, "reference")
    torch.testing.assert_close(after, BETA * momentum + (1 - BETA) * gradient)
    torch.testing.assert_close(out, gradient + BETA / (1 - BETA) * after)
    ours = moved(muon_descend, parameter, gradient.contiguous(), lr=LR, impl="reference")
    torch.testing.assert_close(ours, parameter - LR * gradient)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (2, 64, 96), (1, 3, 2049), (0, 4, 4)])
def test_equals_fp64(shape, impl):
    compare(shape, impl, torch.float32, "cpu", 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 4e-3), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (256, 512, 1024), (1, 3, 2049)])
def test_on_a_gpu_against_fp64(shape, dtype, limit):
    compare(shape, "triton", dtype, "cuda", limit)


def test_refusals_name_the_argument():
    gradient, momentum, parameter = make((2, 3, 5))
    with pytest.raises(ValueError, match="momentum: expected .N, R, C. = .2, 3, 5., got .1, 3, 5."):
        muon_direction(gradient, momentum[:1], gradient, beta=BETA)
    with pytest.raises(ValueError, match="beta: expected at least 0"):
        muon_direction(gradient, momentum, parameter, beta=1.0)
    with pytest.raises(ValueError, match="update: expected a floating point dtype"):
        muon_descend(parameter, gradient.long(), lr=LR)
    with pytest.raises(ValueError, match="parameter: expected FP32, got torch.float64"):
        muon_descend(parameter.double(), gradient, lr=LR, impl="triton")
