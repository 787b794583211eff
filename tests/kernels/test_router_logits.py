"""Logits of the router are those of full precision, whatever computes them."""

import pytest
import torch

from modeling_moe_lc.kernels.router import router_logits
from modeling_moe_lc.kernels.router.logits import gradients


def inputs(device, tokens=300, width=256, experts=48):
    x = torch.randn(tokens, width, device=device).bfloat16()
    weight = (0.05 * torch.randn(experts, width, device=device)).bfloat16()
    return x, weight, torch.randn(tokens, experts, device=device)


def in_fp64(x, weight, d_logits):
    x, weight = (y.double().requires_grad_() for y in (x, weight))
    logits = x @ weight.mT
    return logits.detach(), *torch.autograd.grad(logits, (x, weight), d_logits.double())


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("autocast", [False, True])
def test_narrow_inputs_are_multiplied_in_full_precision(autocast):
    x, weight, d_logits = inputs("cpu")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = router_logits(x, weight)
    assert logits.dtype == torch.float32 and relative(logits, in_fp64(x, weight, d_logits)[0]) < 1e-6
    assert router_logits(x.double(), weight.double()).dtype == torch.float64


def test_two_parts_of_a_gradient_hold_it():
    x, weight, d_logits = inputs("cpu")
    _, by_x, by_weight = in_fp64(x, weight, d_logits)

    def product(a, b):
        return a.float() @ b.float()

    # inputs that need no rounding of their own show what two parts lose
    dx, dw = gradients(d_logits, x, weight, product=product)
    assert dx.dtype == dw.dtype == torch.bfloat16
    assert relative(dx, by_x.bfloat16().double()) < 2e-3 and relative(dw, by_weight.bfloat16().double()) < 2e-3
    assert gradients(d_logits, x, weight, (False, True), product)[0] is None
    assert gradients(d_logits, x, weight, (True, False), product)[1] is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "width", "experts"), [(1, 64, 8), (300, 256, 48), (8192, 1024, 128), (4097, 7168, 896)]
)
def test_on_a_gpu(tokens, width, experts):
    x, weight, d_logits = inputs("cuda", tokens, width, experts)
    expected, by_x, by_weight = in_fp64(x, weight, d_logits)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    logits = router_logits(x, weight)
    # The sums of tensor cores are a little coarser than those of FP32: measured 8e-6 on an H200, D 7,168.
    assert logits.dtype == torch.float32 and relative(logits.detach(), expected) < 2e-5
    dx, dw = torch.autograd.grad(logits, (x, weight), d_logits)
    assert relative(dx, by_x) < 2e-3 and relative(dw, by_weight) < 2e-3
