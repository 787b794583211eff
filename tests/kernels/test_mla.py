"""Laws of absorbed MLA over the latent cache."""

import numpy as np
import pytest
import torch

from modeling_moe_lc.kernels.mla import mla_decode


SCALE = 24**-0.5


def make(B=2, T=3, S=11, H=3, R=13, P=5, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((B, T, H, R), (B, T, H, P), (B, S, R), (B, S, P))
    return [torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


def naive(q_latent, q_rope, latent, k_rope, visible, extra=None):
    """One query and one head at a time, in numpy, over the visible keys only; `visible` [B, T, S]."""
    q, qr, c, kr = (t.double().numpy() for t in (q_latent, q_rope, latent, k_rope))
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(q.shape[:3]):
        keys = np.flatnonzero(visible[b, t].numpy())
        scores = (c[b, keys] @ q[b, t, h] + kr[b, keys] @ qr[b, t, h]) * SCALE
        if extra is not None:
            scores = scores + extra[b, 0, t, keys].double().numpy()
        if len(keys):
            p = np.exp(scores - scores.max())
            out[b, t, h] = p @ c[b, keys] / p.sum()
    return torch.from_numpy(out)


def causal(B, T, S):
    return (torch.arange(S) <= S - T + torch.arange(T)[:, None]).expand(B, T, S)


@pytest.mark.parametrize("T, S, P", [(1, 1, 5), (1, 11, 5), (3, 11, 5), (11, 11, 5), (2, 7, 0)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_causal_equals_the_formula(T, S, P, dtype, tolerance):
    inputs = make(T=T, S=S, P=P, dtype=dtype)
    o = mla_decode(*inputs, scale=SCALE)
    expected = naive(*inputs, causal(2, T, S))
    assert o.dtype == dtype and o.shape == (2, T, 3, 13)
    assert (o.double() - expected).norm() <= tolerance * expected.norm()


def test_masks_equal_the_formula_and_blind_rows_are_zero():
    inputs = make()
    visible = torch.rand(2, 3, 11, generator=torch.Generator().manual_seed(1)) < 0.5
    visible[1, 2] = False
    expected = naive(*inputs, visible)
    mask = visible.unsqueeze(1)
    torch.testing.assert_close(mla_decode(*inputs, scale=SCALE, mask=mask), expected, rtol=1e-12, atol=1e-14)
    for hide in (float("-inf"), torch.finfo(torch.float32).min):
        additive = torch.randn(2, 1, 3, 11).masked_fill(~mask, hide)
        o = mla_decode(*inputs, scale=SCALE, mask=additive)
        torch.testing.assert_close(o, naive(*inputs, visible, additive), rtol=1e-12, atol=1e-14)
        assert torch.equal(o[1, 2], torch.zeros(3, 13, dtype=torch.float64))


def test_equals_expanded_attention():
    """Absorbing the up-projections changes nothing: attention with per-head keys and values gives the same."""
    g = torch.Generator().manual_seed(2)
    B, T, S, H, R, P, K, V = 2, 4, 9, 3, 13, 5, 8, 6
    q_nope, q_rope, latent, k_rope, up_k, up_v = (
        torch.randn(*shape, generator=g, dtype=torch.float64)
        for shape in ((B, T, H, K), (B, T, H, P), (B, S, R), (B, S, P), (H, K, R), (H, V, R))
    )
    k = torch.cat([torch.einsum("hkr,bsr->bhsk", up_k, latent), k_rope[:, None].expand(B, H, S, P)], dim=-1)
    v = torch.einsum("hvr,bsr->bhsv", up_v, latent)
    q = torch.cat([q_nope, q_rope], dim=-1).transpose(1, 2)
    mask = causal(B, T, S).unsqueeze(1)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE)

    q_latent = torch.einsum("bthk,hkr->bthr", q_nope, up_k)
    o = torch.einsum("bthr,hvr->bhtv", mla_decode(q_latent, q_rope, latent, k_rope, scale=SCALE), up_v)
    torch.testing.assert_close(o, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_also_with_a_blind_row(masked):
    inputs = [t.requires_grad_() for t in make(B=2, T=2, S=4, H=2, R=3, P=2)]
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0]], dtype=torch.bool).expand(2, 1, 2, 4) if masked else None
    assert torch.autograd.gradcheck(lambda *t: mla_decode(*t, scale=SCALE, mask=mask), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_see_its_neighbours_to_the_bit(dtype):
    inputs = make(B=3, T=2, S=65, H=4, R=32, P=16, dtype=dtype)
    before = mla_decode(*inputs, scale=SCALE)
    for t in inputs:
        t[0] = torch.randn_like(t[0]) * 50
    after = mla_decode(*inputs, scale=SCALE)
    assert torch.equal(after[1:], before[1:])
    assert not torch.equal(after[0], before[0])


@pytest.mark.parametrize("form", ["causal", "bool", "additive"])
def test_keys_behind_the_mask_change_no_bit(form):
    B, T, S = 2, 9, 33
    q_latent, q_rope, latent, k_rope = make(B=B, T=T, S=S, R=32, P=16, dtype=torch.float32)
    visible = causal(B, T, S).unsqueeze(1)
    additive = torch.zeros(B, 1, T, S).masked_fill(~visible, float("-inf"))
    mask = {"causal": None, "bool": visible, "additive": additive}[form]
    before = mla_decode(q_latent, q_rope, latent, k_rope, scale=SCALE, mask=mask)
    for t in (latent, k_rope):
        t[:, S - 4 :] = torch.randn_like(t[:, S - 4 :]) * 1e3
    after = mla_decode(q_latent, q_rope, latent, k_rope, scale=SCALE, mask=mask)
    assert torch.equal(after[:, : T - 4], before[:, : T - 4])
    assert (after[:, T - 4 :] != before[:, T - 4 :]).flatten(2).any(-1).all()


def test_autocast_does_not_reach_inside():
    inputs = make(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = mla_decode(*inputs, scale=SCALE)
    assert torch.equal(inside, mla_decode(*inputs, scale=SCALE))


def test_bad_inputs_name_the_argument():
    q_latent, q_rope, latent, k_rope = make(dtype=torch.float32)
    for name, args in {
        "q_latent": (q_latent[0], q_rope, latent, k_rope),
        "q_rope": (q_latent, q_rope[:, :2], latent, k_rope),
        "latent": (q_latent, q_rope, latent[..., 1:], k_rope),
        "k_rope": (q_latent, q_rope, latent, k_rope[:, 1:]),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}:"):
            mla_decode(*args, scale=SCALE)
    with pytest.raises(ValueError, match="^latent"):
        mla_decode(q_latent, q_rope, latent[:, :2], k_rope[:, :2], scale=SCALE)
    with pytest.raises(ValueError, match="^scale"):
        mla_decode(q_latent, q_rope, latent, k_rope, scale=0.0)
    for bad in (torch.ones(2, 3, 11, dtype=torch.bool), torch.ones(2, 1, 3, 11, dtype=torch.int64)):
        with pytest.raises(ValueError, match="^mask"):
            mla_decode(q_latent, q_rope, latent, k_rope, scale=SCALE, mask=bad)
    with pytest.raises(ValueError, match="^impl"):
        mla_decode(q_latent, q_rope, latent, k_rope, scale=SCALE, impl="cuda")
