"""Experts with low-rank updates in split form are the experts on W + b a, forward and every gradient."""

import pytest
import torch

from modeling_moe_lc.kernels.experts import expert_mlp
from modeling_moe_lc.kernels.experts_lora import LowRank, expert_mlp_lora, expert_mlp_lora_mxfp4
from modeling_moe_lc.kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4


CAPS = {"beta": 4.0, "linear_beta": 25.0}
NAMES = ("dx", "dweights", "gate_up.a", "gate_up.b", "down.a", "down.b")
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}  # measured: 1e-15, 2e-6, 5e-3


def make(N=11, D=12, I=20, E=5, k=3, r=3, *, dtype=torch.float32, seed=0):
    """Inputs with sentinels and, where k > 1, an expert that a token has twice; base, updates, cotangent."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    indices = torch.rand(N, E, generator=g).argsort(dim=1)[:, :k]
    indices[1::4, 0] = E
    indices[2::5, -1] = indices[2::5, 0]
    base = D**-0.5 * normal(E, 2 * I, D), I**-0.5 * normal(E, D, I)
    factors = D**-0.5 * normal(E, r, D), normal(E, 2 * I, r), I**-0.5 * normal(E, r, I), normal(E, D, r)
    weights = torch.rand(N, k, generator=g).to(torch.promote_types(dtype, torch.float32))
    return normal(N, D), indices, weights, base, factors, normal(N, D)


def gradients(y, leaves, dy):
    return y.detach(), torch.autograd.grad(y, leaves, dy, allow_unused=True)


def split(x, indices, weights, base, factors, dy, *, used=(True, True), impl="auto", operator=expert_mlp_lora):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weights, *factors)]
    updates = [LowRank(*leaves[i : i + 2]) if it_is else None for i, it_is in zip((2, 4), used, strict=True)]
    return gradients(operator(leaves[0], indices, leaves[1], *base, *updates, **CAPS, impl=impl), leaves, dy)


def merged(x, indices, weights, base, factors, dy, *, used=(True, True)):
    x, weights, dy = (t.double() for t in (x, weights, dy))
    leaves = [t.detach().double().requires_grad_() for t in (x, weights, *factors)]
    whole = [
        w.double() + (b @ a if it_is else 0)
        for w, a, b, it_is in zip(base, leaves[2::2], leaves[3::2], used, strict=True)
    ]
    return gradients(expert_mlp(leaves[0], indices, leaves[1], *whole, **CAPS, impl="reference"), leaves, dy)


def check(ours, theirs, limit):
    for name, mine, reference in zip(("y", *NAMES), (ours[0], *ours[1]), (theirs[0], *theirs[1]), strict=True):
        assert (mine is None) == (reference is None), name
        if reference is not None:
            error = (mine.double() - reference).norm() / reference.norm().clamp_min(1e-30)
            assert error < limit, (name, error.item())


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)], ids=["both", "gate_up", "down"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_split_is_merged(dtype, used):
    inputs = make(dtype=dtype)
    check(split(*inputs, used=used), merged(*inputs, used=used), LIMITS[dtype])


@pytest.mark.parametrize(
    "sizes, used, keep",
    [
        ({}, (True, True), True),
        ({}, (True, False), False),
        ({}, (False, True), True),
        ({"N": 65, "D": 36, "I": 44, "E": 3, "k": 2, "r": 17}, (True, True), False),
        ({"N": 3, "E": 9, "k": 1}, (True, True), False),
        ({"N": 1, "E": 1, "k": 1, "D": 16, "I": 16, "r": 16}, (True, True), True),
    ],
    ids=str,
)
def test_triton_is_merged(sizes, used, keep, monkeypatch, poison_empty):
    pytest.importorskip("triton")
    from modeling_moe_lc.kernels.experts import fused

    monkeypatch.setattr(fused, "KEEP_BYTES", fused.KEEP_BYTES if keep else 0)
    inputs = make(**sizes)
    check(split(*inputs, used=used, impl="triton"), merged(*inputs, used=used), 1e-5)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_without_gradients_and_through_a_retained_graph(impl):
    pytest.importorskip("triton")
    x, indices, weights, base, factors, dy = make(D=16)
    updates = LowRank(*factors[:2]), LowRank(*factors[2:])
    with torch.no_grad():
        quiet = expert_mlp_lora(x, indices, weights, *base, *updates, **CAPS, impl=impl)
    leaf = x.clone().requires_grad_()
    y = expert_mlp_lora(leaf, indices, weights, *base, *updates, **CAPS, impl=impl)
    assert torch.equal(quiet, y)
    first, second = (torch.autograd.grad(y, leaf, dy, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_base_weights_may_train_too():
    pytest.importorskip("triton")
    x, indices, weights, base, factors, dy = make()
    updates = LowRank(*factors[:2]), LowRank(*factors[2:])
    found = []
    for impl in ("reference", "triton"):
        leaves = [w.clone().requires_grad_() for w in base]
        y = expert_mlp_lora(x, indices, weights, *leaves, *updates, **CAPS, impl=impl)
        found.append(torch.autograd.grad(y, leaves, dy))
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def test_an_update_of_zero_changes_no_bit():
    x, indices, weights, base, factors, _ = make(N=40)
    a, b, c, d = factors
    updates = LowRank(a, torch.zeros_like(b)), LowRank(c, torch.zeros_like(d))
    ours = expert_mlp_lora(x, indices, weights, *base, *updates, **CAPS)
    assert torch.equal(ours, expert_mlp(x, indices, weights, *base, **CAPS))


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("N", [1, 0])
def test_experts_without_tokens_have_gradients_of_zero(N, impl):
    pytest.importorskip("triton")
    x, indices, weights, base, factors, dy = make(N=max(N, 1), k=1)
    x, indices, weights, dy = x[:N], indices[:N].fill_(2), weights[:N], dy[:N]
    _, (_, _, *found) = split(x, indices, weights, base, factors, dy, impl=impl)
    for gradient in found:
        hit = gradient.flatten(1).any(dim=1).tolist()
        assert hit == [N == 1 and e == 2 for e in range(5)]


def test_a_token_does_not_depend_on_the_others():
    x, indices, weights, base, factors, _ = make(N=40)
    updates = LowRank(*factors[:2]), LowRank(*factors[2:])
    before = expert_mlp_lora(x, indices, weights, *base, *updates, **CAPS)
    x[20:], indices[20:] = 7.0, 1
    after = expert_mlp_lora(x, indices, weights, *base, *updates, **CAPS)
    assert torch.equal(before[:20], after[:20])


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_packed_base(impl):
    pytest.importorskip("triton")
    x, indices, weights, base, factors, dy = make(D=64, I=32)
    pairs = [quantize_mxfp4(w) for w in base]
    packed = [t for codes, scales in pairs for t in (codes, scales.mT.contiguous())]
    whole = [dequantize_mxfp4(*p, torch.float32) for p in pairs]
    ours = split(x, indices, weights, packed, factors, dy, impl=impl, operator=expert_mlp_lora_mxfp4)
    check(ours, merged(x, indices, weights, whole, factors, dy), 1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a.update(indices=a["indices"].int()), "indices: expected int64"),
        (lambda a: a.update(gate_up_lora=LowRank(a["gate_up_lora"].a.mT, a["gate_up_lora"].b)), "gate_up_lora.a: exp"),
        (lambda a: a.update(down_lora=LowRank(a["down_lora"].a, a["down_lora"].b[:, 1:])), "down_lora.b: expected"),
        (lambda a: a.update(gate_up_lora=a["down_lora"]), "gate_up_lora.a: expected"),
        (lambda a: a.update(down_proj=a["down_proj"][:, :, 1:]), "gate_up: expected 2I"),
        (lambda a: a.update(impl="fast"), "impl: expected one of"),
    ],
)
def test_bad_arguments_raise(change, message):
    x, indices, weights, base, factors, _ = make()
    arguments = {
        "x": x, "indices": indices, "weights": weights, "gate_up_proj": base[0], "down_proj": base[1],
        "gate_up_lora": LowRank(*factors[:2]), "down_lora": LowRank(*factors[2:]), **CAPS,
    }  # fmt: skip
    change(arguments)
    with pytest.raises(ValueError, match=message):
        expert_mlp_lora(**arguments)
