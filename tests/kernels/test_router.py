"""Laws of the router: the choice, the weights, the counts, the cutoff and the histogram."""

import numpy as np
import pytest
import torch

from modeling_moe_lc.kernels.router import route


def make(N=64, E=37, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(N, E, generator=g, dtype=torch.float64).to(dtype) * 2
    bias = torch.randn(E, generator=g, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32)) * 0.3
    return logits, bias


def naive(logits, bias, top_k, num_groups=1, topk_group=1):
    """One token at a time in numpy: indices and cutoff. Works on the FP32 scores, so that it sees the same ties."""
    biased = (torch.sigmoid(logits) + bias).numpy()
    indices, cutoffs = [], []
    for row in biased:
        groups = row.reshape(num_groups, -1)
        group_scores = np.sort(groups, axis=-1)[:, -2:].sum(-1)
        best = np.argsort(-group_scores, kind="stable")[:topk_group]
        size = groups.shape[1]
        eligible = [e for e in range(len(row)) if e // size in best]
        ranked = sorted(eligible, key=lambda e: (-row[e], e))
        indices.append(ranked[:top_k])
        cutoffs.append(row[ranked[top_k]] if len(ranked) > top_k else -np.inf)
    return torch.tensor(indices), torch.tensor(cutoffs)


@pytest.mark.parametrize("N, E, top_k", [(64, 37, 5), (1, 8, 1), (33, 8, 8), (0, 8, 2)])
def test_equals_the_formula(N, E, top_k):
    logits, bias = make(N, E)
    indices, weights, counts, cutoff = route(logits, bias, top_k, scaling=2.446)
    if N:
        expected, expected_cutoff = naive(logits, bias, top_k)
        assert torch.equal(indices, expected)
        assert torch.equal(cutoff, expected_cutoff.to(cutoff.dtype))
    scores = torch.sigmoid(logits.double()).gather(1, indices)
    torch.testing.assert_close(weights.double(), 2.446 * scores / scores.sum(1, keepdim=True), rtol=1e-6, atol=0)
    assert torch.equal(counts, torch.bincount(indices.flatten(), minlength=E))
    assert (indices.dtype, weights.dtype, counts.dtype) == (torch.int64, torch.float32, torch.int64)
    assert indices.shape == weights.shape == (N, top_k) and cutoff.shape == (N,)


def test_without_renormalisation_weights_are_the_scores():
    logits, bias = make()
    indices, weights, _, _ = route(logits, bias, 4, renormalize=False)
    assert torch.equal(weights, torch.sigmoid(logits).gather(1, indices))


def test_weights_do_not_contain_the_bias():
    """A constant on every bias changes neither the choice nor the weights; it moves the cutoff by itself."""
    logits, bias = make(1000, 64, dtype=torch.float64)  # in FP32 the sum with 5 would round scores into new ties
    indices, weights, counts, cutoff = route(logits, bias, 8)
    shifted = route(logits, bias + 5.0, 8)
    assert torch.equal(shifted[0], indices) and torch.equal(shifted[1], weights) and torch.equal(shifted[2], counts)
    torch.testing.assert_close(shifted[3], cutoff + 5.0)
    torch.testing.assert_close(weights.sum(1), torch.ones(1000, dtype=torch.float64))


def test_ties_go_to_the_lowest_expert():
    indices, _, _, cutoff = route(torch.zeros(3, 200), torch.zeros(200), 5)
    assert torch.equal(indices, torch.arange(5).expand(3, 5))
    assert torch.equal(cutoff, torch.full((3,), 0.5))
    logits = torch.randint(-2, 3, (500, 64)).float()  # many ties
    expected, _ = naive(logits, torch.zeros(64), 8)
    assert torch.equal(route(logits, torch.zeros(64), 8)[0], expected)


@pytest.mark.parametrize(
    "num_groups, topk_group, E, top_k", [(4, 2, 16, 4), (8, 3, 64, 8), (16, 5, 16, 5), (4, 2, 16, 8)]
)
def test_groups_are_never_left_even_with_a_negative_bias(num_groups, topk_group, E, top_k):
    logits, _ = make(1000, E, seed=1)
    bias = torch.full((E,), -2.0)
    indices, _, _, cutoff = route(logits, bias, top_k, num_groups=num_groups, topk_group=topk_group)
    expected, expected_cutoff = naive(logits, bias, top_k, num_groups, topk_group)
    assert torch.equal(indices, expected)
    assert torch.equal(cutoff, expected_cutoff.to(cutoff.dtype))
    groups = indices // (E // num_groups)
    assert max(len(set(row.tolist())) for row in groups) <= topk_group


def test_group_ties_go_to_the_lowest_group():
    indices, _, _, _ = route(torch.zeros(1, 12), torch.zeros(12), 3, num_groups=4, topk_group=2)
    assert indices.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("renormalize", [True, False])
def test_gradients_flow_through_the_weights_only(renormalize):
    logits, bias = (t.requires_grad_() for t in make(4, 9, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x: route(x, bias, 3, renormalize=renormalize, scaling=1.7)[1], logits)
    indices, weights, _, cutoff = route(logits, bias, 3)
    assert not cutoff.requires_grad
    weights.square().sum().backward()
    assert bias.grad is None
    unchosen = torch.ones_like(logits).scatter(1, indices, 0.0)
    assert torch.equal(logits.grad * unchosen, torch.zeros_like(logits))


def test_padding_is_neither_counted_nor_a_neighbour():
    logits, bias = make(50, 16)
    mask = torch.rand(50) < 0.6
    logits[~mask] = float("nan")
    histogram = torch.zeros(16, 100, dtype=torch.int64)
    indices, weights, counts, cutoff = route(logits, bias, 3, token_mask=mask, histogram=histogram)
    alone = torch.zeros_like(histogram)
    expected = route(logits[mask], bias, 3, histogram=alone)
    assert torch.equal(counts, expected[2]) and torch.equal(histogram, alone)
    assert torch.equal(indices[mask], expected[0])
    torch.testing.assert_close(weights[mask], expected[1])
    torch.testing.assert_close(cutoff[mask], expected[3])


def test_histogram_pools_to_the_integer_and_holds_the_required_bias():
    logits, bias = make(1024, 64, seed=2)
    whole = torch.zeros(64, 1000, dtype=torch.int64)
    cutoff = route(logits, bias, 8, histogram=whole)[3]
    pooled = torch.zeros_like(whole)
    for part in logits.split(128):
        route(part, bias, 8, histogram=pooled)
    assert torch.equal(pooled, whole)
    assert torch.equal(whole.sum(1), torch.full((64,), 1024))

    required = (cutoff[:, None] - torch.sigmoid(logits)).double().numpy()
    edges = np.linspace(bias.min().item() - 1, bias.max().item() + 1, 1001)
    expected = np.stack([np.histogram(column, edges)[0] for column in required.T])
    moved = np.abs(np.cumsum(expected - whole.numpy(), axis=1)).sum()
    assert moved <= 5  # values on an edge, to FP32 rounding, may fall to either side


def test_a_row_does_not_see_its_neighbours_to_the_bit():
    logits, bias = make(40, 64)
    before = route(logits, bias, 8)
    logits[20:] = torch.randn(20, 64) * 5
    after = route(logits, bias, 8)
    for i in (0, 1, 3):
        assert torch.equal(after[i][:20], before[i][:20])


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[-200.0] * 8, [200.0] * 8, [1e30] * 4 + [-1e30] * 4], requires_grad=True)
    _, weights, _, cutoff = route(logits, torch.zeros(8), 3)
    weights.sum().backward()
    assert weights.isfinite().all() and cutoff.isfinite().all() and logits.grad.isfinite().all()


def test_bad_inputs_name_the_argument():
    logits, bias = make(4, 12)
    histogram = torch.zeros(12, 10, dtype=torch.int64)
    for name, kwargs in {
        "logits": {"logits": logits[0]},
        "bias": {"bias": bias.bfloat16()},
        "top_k": {"top_k": 13},
        "num_groups": {"num_groups": 5},
        "topk_group": {"num_groups": 4, "topk_group": 5},
        "token_mask": {"token_mask": torch.ones(4)},
        "histogram": {"histogram": histogram.int()},
        "impl": {"impl": "cuda"},
    }.items():
        with pytest.raises(ValueError, match=f"^{name}"):
            route(**{"logits": logits, "bias": bias, "top_k": 3, **kwargs})
    for name, kwargs in {
        "bias": {"bias": bias[1:]},
        "top_k": {"top_k": 12, "histogram": histogram},
        "topk_group": {"num_groups": 4, "topk_group": 2, "histogram": histogram},
        "token_mask": {"token_mask": torch.ones(3, dtype=torch.bool)},
        "histogram": {"histogram": histogram[1:]},
    }.items():
        with pytest.raises(ValueError, match=f"^{name}"):
            route(**{"logits": logits, "bias": bias, "top_k": 3, **kwargs})
    with pytest.raises(ValueError, match="^top_k: expected 1 to 6"):
        route(logits, bias, 7, num_groups=4, topk_group=2)
    with pytest.raises(ValueError, match="^top_k"):
        route(logits, bias, 0)
