"""Cross-entropy and its gradient: what autograd says, ignored rows, the fused kernel under the interpreter, refusals."""

import pytest
import torch
from torch.nn import functional as F

from modeling_moe_lc.kernels.cross_entropy import cross_entropy_with_gradient


def make(N=7, V=50, dtype=torch.float32, device="cpu", scale=4.0):
    generator = torch.Generator(device).manual_seed(N * V)
    logits = (scale * torch.randn(N, V, generator=generator, device=device)).to(dtype)
    targets = torch.randint(V, (N,), generator=generator, device=device)
    targets[1::3] = -100
    return logits, targets


def exact(logits, targets):
    leaf = logits.detach().double().requires_grad_()
    nats = F.cross_entropy(leaf, targets, reduction="none")
    return nats.detach(), torch.autograd.grad(nats.sum(), leaf)[0]


def check(logits, targets, impl, limit):
    expected = exact(logits, targets)
    nats, gradient = cross_entropy_with_gradient(logits, targets, impl=impl)
    assert gradient is logits
    for ours, theirs in zip((nats, gradient), expected, strict=True):
        assert (ours.double() - theirs).norm() <= limit * theirs.norm()
    ignored = targets == -100
    assert not nats[ignored].any() and not gradient[ignored].any()


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 50), (3, 4096), (5, 4097), (2, 9000)])
def test_equals_autograd(shape, impl, poison_empty):
    check(*make(*shape), impl, 1e-6)


def test_fp64_is_exact():
    check(*make(dtype=torch.float64), "auto", 1e-14)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_large_and_infinite_logits(impl):
    logits = torch.tensor([[1e4, -1e4, 0.0], [-torch.inf, 0.0, 1.0], [3e38, 1.0, -3e38]])
    targets = torch.tensor([0, 2, 0])
    nats, gradient = cross_entropy_with_gradient(logits, targets, impl=impl)
    assert nats.isfinite().all() and gradient.isfinite().all()
    assert nats[0] == 0.0 and gradient[0].tolist() == [0.0, 0.0, 0.0]


def test_nothing_and_rows_with_a_stride():
    nats, _ = cross_entropy_with_gradient(torch.empty(0, 5), torch.empty(0, dtype=torch.int64), impl="triton")
    assert nats.shape == (0,)
    logits, targets = make(6, 40)
    wide = torch.full((6, 64), 7.0)
    wide[:, :40] = logits
    check(wide[:, :40], targets, "triton", 1e-6)
    assert (wide[:, 40:] == 7.0).all()


def test_refusals_name_the_argument():
    logits, targets = make()
    for bad, match in (
        ((logits, targets[:3]), "targets"),
        ((logits, targets.int()), "targets: expected int64"),
        ((logits.long(), targets), "logits"),
    ):
        with pytest.raises(ValueError, match=match):
            cross_entropy_with_gradient(*bad)
    with pytest.raises(ValueError, match="logits: expected bfloat16"):
        cross_entropy_with_gradient(logits.double(), targets, impl="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 4e-3), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("shape", [(3, 1000), (2048, 32_768), (300, 163_840)])
def test_on_a_gpu_against_fp64(shape, dtype, limit, poison_empty):
    logits, targets = make(*shape, dtype=dtype, device="cuda")
    again = logits.clone()
    check(logits, targets, "triton", limit)
    assert torch.equal(cross_entropy_with_gradient(again, targets)[1], logits)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_a_target_far_ahead_keeps_its_digits(impl, offset):
    """However large the logits themselves are."""
    logits = torch.rand(4, 8).mul(0.1) + offset - 5.0
    logits[:, 3] += 5.0
    targets = torch.full((4,), 3)
    expected = exact(logits, targets)
    nats, gradient = cross_entropy_with_gradient(logits.clone(), targets, impl=impl)
    assert ((nats.double() - expected[0]).abs() / expected[0]).max() < 1e-5
    assert ((gradient.double() - expected[1]).abs() / expected[1].abs()).max() < 1e-5


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_an_ignored_row_may_hold_anything(impl):
    logits, targets = make()
    logits[1], targets[1] = torch.nan, -100
    nats, gradient = cross_entropy_with_gradient(logits, targets, impl=impl)
    assert not nats[1] and not gradient[1].any() and gradient.isfinite().all()
