"""The sigmoid gate: reference, fused kernel under the interpreter, refusals."""

import pytest
import torch

from modeling_moe_lc.kernels.sigmoid_gate import sigmoid_gate
from modeling_moe_lc.kernels.sigmoid_gate.reference import sigmoid_gate_reference


def make(*shape, dtype=torch.float32, device="cpu"):
    generator = torch.Generator(device).manual_seed(len(shape))
    return [torch.randn(*shape, generator=generator, device=device).mul(3).to(dtype) for _ in range(3)]


def run(o, gate, dy, impl):
    leaves = [t.detach().requires_grad_() for t in (o, gate)]
    y = sigmoid_gate(*leaves, impl=impl)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def check(o, gate, dy, limit):
    for ours, exact in zip(
        run(o, gate, dy, "triton"), run(o.double(), gate.double(), dy.double(), "reference"), strict=True
    ):
        assert ours.dtype == o.dtype
        assert (ours.double() - exact).norm() <= limit * exact.norm()


def test_reference_is_differentiable():
    o, gate, _ = (t.double().requires_grad_() for t in make(3, 5))
    assert torch.autograd.gradcheck(sigmoid_gate_reference, (o, gate))


@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (2, 2049), (4097,)])
def test_fused_equals_the_reference(shape, poison_empty):
    check(*make(*shape), 1e-6)


def test_nothing_and_strided_inputs():
    assert sigmoid_gate(*make(0, 4)[:2], impl="triton").shape == (0, 4)
    o, gate, dy = (t.transpose(0, 1) for t in make(6, 9))
    check(o, gate, dy, 1e-6)


def test_extreme_gates_give_exact_limits():
    gate = torch.tensor([-torch.inf, -200.0, 200.0, torch.inf])
    assert sigmoid_gate(torch.full((4,), 3.0), gate, impl="triton").tolist() == [0.0, 0.0, 3.0, 3.0]


def test_refusals_name_the_argument():
    o, gate, _ = make(2, 3)
    with pytest.raises(ValueError, match="gate: expected the shape of o"):
        sigmoid_gate(o, gate[0])
    with pytest.raises(ValueError, match="gate.*int64"):
        sigmoid_gate(o, gate.long())
    with pytest.raises(ValueError, match="o: expected bfloat16"):
        sigmoid_gate(o.double(), gate, impl="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 3e-3), (torch.float32, 3e-6)], ids=str)
@pytest.mark.parametrize("shape", [(1, 7), (3, 8192, 1024)])
def test_on_a_gpu_against_fp64(shape, dtype, limit, poison_empty):
    inputs = make(*shape, dtype=dtype, device="cuda")
    check(*inputs, limit)
    assert all(torch.equal(a, b) for a, b in zip(run(*inputs, "triton"), run(*inputs, "triton"), strict=True))
