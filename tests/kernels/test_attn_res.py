"""Laws of the block attention residual mix."""

import pytest
import torch

from modeling_moe_lc.kernels.attn_res import attn_res


EPS = 1e-5


def make(num_blocks, *shape, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    blocks = [torch.randn(*shape, generator=g, dtype=dtype) * (1 + j) for j in range(num_blocks)]
    partial = torch.randn(*shape, generator=g, dtype=dtype)
    query = torch.randn(shape[-1], generator=g, dtype=dtype) * 0.3
    norm_weight = 1 + 0.2 * torch.randn(shape[-1], generator=g, dtype=dtype)
    return blocks, partial, query, norm_weight


def naive(sources, query, norm_weight, eps):
    """The formula with everything that the operator avoids: one stack of sources and their normalised keys."""
    values = torch.stack([s.double() for s in sources])  # [M, ..., D]
    keys = values / (values.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm_weight.double()
    p = torch.einsum("m...d,d->m...", keys, query.double()).softmax(0)
    return torch.einsum("m...,m...d->...d", p, values)


@pytest.mark.parametrize("num_blocks, with_partial", [(1, False), (1, True), (3, True), (16, True)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_equals_the_formula(num_blocks, with_partial, dtype, tolerance):
    blocks, partial, query, norm_weight = make(num_blocks, 2, 5, 37, dtype=dtype)
    partial = partial if with_partial else None
    h = attn_res(blocks, partial, query, norm_weight, EPS)
    expected = naive(blocks + ([partial] if with_partial else []), query, norm_weight, EPS)
    assert h.dtype == dtype
    assert (h.double() - expected).norm() <= tolerance * expected.norm()


def test_gradients():
    blocks, partial, query, norm_weight = make(2, 3, 7)
    leaves = [t.requires_grad_() for t in (*blocks, partial, query, norm_weight)]
    assert torch.autograd.gradcheck(lambda a, b, c, w, n: attn_res([a, b], c, w, n, EPS), leaves)


def test_zero_query_is_the_mean_and_a_lone_source_passes_unchanged():
    blocks, partial, query, norm_weight = make(4, 6, 33, dtype=torch.float32)
    mean = torch.stack([*blocks, partial]).mean(0)
    torch.testing.assert_close(attn_res(blocks, partial, torch.zeros_like(query), norm_weight, EPS), mean)
    assert torch.equal(attn_res(blocks[:1], None, query, norm_weight, EPS), blocks[0])


def test_values_are_not_normalised():
    """Scaling every source leaves the probabilities alone and scales the result."""
    blocks, partial, query, norm_weight = make(3, 5, 33)
    h = attn_res(blocks, partial, query, norm_weight, 1e-30)
    scaled = attn_res([b * 7.0 for b in blocks], partial * 7.0, query, norm_weight, 1e-30)
    torch.testing.assert_close(scaled, h * 7.0, rtol=1e-12, atol=0)


def test_a_token_depends_on_itself_alone_to_the_bit():
    blocks, partial, query, norm_weight = make(3, 2, 9, 31, dtype=torch.float32)
    before = attn_res(blocks, partial, query, norm_weight, EPS)
    for source in (*blocks, partial):
        source[:, 4:] = torch.randn(2, 5, 31)
    after = attn_res(blocks, partial, query, norm_weight, EPS)
    assert torch.equal(after[:, :4], before[:, :4])
    assert not torch.equal(after[:, 4:], before[:, 4:])


def test_zero_sources_give_zeros_and_finite_gradients():
    query = torch.randn(8, requires_grad=True)
    block = torch.zeros(3, 8, requires_grad=True)
    h = attn_res([block], torch.zeros(3, 8), query, torch.ones(8), EPS)
    h.sum().backward()
    assert torch.equal(h, torch.zeros(3, 8))
    assert block.grad.isfinite().all() and query.grad.isfinite().all()


def test_autocast_does_not_reach_inside_and_the_widest_source_decides():
    blocks, partial, query, norm_weight = make(2, 4, 64, dtype=torch.float32)
    expected = attn_res(blocks, partial.bfloat16(), query, norm_weight, EPS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = attn_res(blocks, partial.bfloat16(), query, norm_weight, EPS)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, expected)


def test_bad_inputs_name_the_argument():
    blocks, partial, query, norm_weight = make(2, 3, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match="blocks"):
        attn_res([], partial, query, norm_weight, EPS)
    with pytest.raises(ValueError, match="blocks"):
        attn_res(torch.stack(blocks), partial, query, norm_weight, EPS)
    with pytest.raises(ValueError, match=r"blocks\[1\]"):
        attn_res([blocks[0], blocks[1][:2]], partial, query, norm_weight, EPS)
    with pytest.raises(ValueError, match="partial"):
        attn_res(blocks, partial.long(), query, norm_weight, EPS)
    with pytest.raises(ValueError, match="query"):
        attn_res(blocks, partial, query[None], norm_weight, EPS)
    with pytest.raises(ValueError, match="norm_weight"):
        attn_res(blocks, partial, query, norm_weight[1:], EPS)
    with pytest.raises(ValueError, match="eps"):
        attn_res(blocks, partial, query, norm_weight, 0.0)
    with pytest.raises(ValueError, match="impl"):
        attn_res(blocks, partial, query, norm_weight, EPS, impl="cuda")
