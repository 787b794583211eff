"""Laws of the bias rules, and the balancing law itself on routers with fixed preferences."""

import math

import numpy as np
import pytest
import torch

from modeling_moe_lc.kernels.router import (
    auto_ema,
    load_quantile_bias,
    max_violation,
    quantile_bias,
    route,
    sampling_floor,
    sign_bias,
)
from modeling_moe_lc.kernels.router.balance import required_bias


BINS = 1000


def routed(N=1024, E=64, top_k=8, seed=0):
    """Logits, a bias and the histogram of one step."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(E, generator=g) + torch.randn(N, E, generator=g)
    bias = torch.randn(E, generator=g) * 0.2
    histogram = torch.zeros(E, BINS, dtype=torch.int64)
    cutoff = route(logits, bias, top_k, histogram=histogram)[3]
    return logits, bias, histogram, cutoff[:, None] - torch.sigmoid(logits)


def naive_quantile(histogram, bias, top_k):
    """Appendix D, one expert and one bin at a time, in float64."""
    E, bins = histogram.shape
    low, high = bias.min().item() - 1, bias.max().item() + 1
    width, required = (high - low) / bins, np.zeros(E)
    for j, row in enumerate(histogram.tolist()):
        target, before = sum(row) * top_k / E, 0
        for index, inside in enumerate(row):
            if before + inside >= math.ceil(target):
                required[j] = low + (index + min(max((target - before) / inside, 0), 1)) * width
                break
            before += inside
    return torch.from_numpy(required)


@pytest.mark.parametrize("N, E, top_k", [(1024, 64, 8), (1000, 37, 5), (3, 16, 2), (1, 7, 6)])
def test_histogram_quantile_equals_the_formula(N, E, top_k):
    _, bias, histogram, _ = routed(N, E, top_k)
    expected = naive_quantile(histogram, bias, top_k)
    torch.testing.assert_close(required_bias(histogram, bias, top_k).double(), expected, rtol=0, atol=1e-6)
    new = quantile_bias(histogram, bias, top_k)
    torch.testing.assert_close(new.double(), expected - expected.mean(), rtol=0, atol=2e-6)
    assert new.dtype == torch.float32 and abs(new.mean().item()) < 1e-7


@pytest.mark.parametrize("N, E, top_k", [(1024, 64, 8), (1000, 37, 5), (3, 16, 2)])
def test_histogram_quantile_is_within_a_bin_of_the_exact_one(N, E, top_k):
    _, bias, histogram, required = routed(N, E, top_k)
    exact = required.sort(dim=0).values[math.ceil(N * top_k / E) - 1]
    width = (bias.max() - bias.min() + 2) / BINS
    assert (required_bias(histogram, bias, top_k) - exact).abs().max() < width


def test_an_expert_at_its_required_bias_takes_its_share():
    """Against the cutoffs of this step, each expert alone then wins k / E of the tokens, to the width of a bin.

    Not to a token: where an expert itself set the cutoff, its required bias is its present one, so values coincide.
    """
    logits, bias, _, required = routed(N=4096)
    fine = torch.zeros(64, 200_000, dtype=torch.int64)
    route(logits, bias, 8, histogram=fine)
    width = (bias.max() - bias.min() + 2) / 200_000
    threshold = required_bias(fine, bias, 8)
    assert ((required < threshold - width).sum(0) <= 4096 * 8 / 64).all()
    assert ((required < threshold + width).sum(0) >= 4096 * 8 / 64).all()


def test_without_tokens_the_bias_stays():
    bias = torch.randn(8) + 3
    assert torch.equal(quantile_bias(torch.zeros(8, 10, dtype=torch.int64), bias, 2), bias)
    assert torch.equal(sign_bias(torch.zeros(8, dtype=torch.int64), bias, 0.1), bias)
    assert torch.equal(load_quantile_bias(torch.zeros(8, dtype=torch.int64), bias, 0.1), bias)
    assert max_violation(torch.zeros(8, dtype=torch.int64)) == 0


def test_identical_experts_get_a_finite_bias_of_zero():
    histogram = torch.zeros(16, 10, dtype=torch.int64)
    route(torch.zeros(5, 16), torch.zeros(16), 2, histogram=histogram)
    assert torch.equal(quantile_bias(histogram, torch.zeros(16), 2), torch.zeros(16))


def test_step_rules_move_the_right_experts():
    counts = torch.tensor([0, 10, 10, 10, 10, 10, 10, 10, 10, 100])
    bias = torch.linspace(-1, 1, 10)
    moved = load_quantile_bias(counts, bias, 0.5, 0.9, 0.1) - bias
    torch.testing.assert_close(moved, torch.tensor([0.5] + [0.0] * 8 + [-0.5]))
    moved = sign_bias(counts, bias, 0.5) - bias
    torch.testing.assert_close(moved, torch.tensor([0.5] * 9 + [-0.5]))
    torch.testing.assert_close(max_violation(counts), torch.tensor(100 / 18 - 1))


def test_sampling_floor_is_what_balanced_random_routing_shows():
    assert sampling_floor(8192, 64, 8) == pytest.approx(0.084, abs=1e-3)
    assert sampling_floor(8192, 896, 16) == pytest.approx(0.30, abs=5e-3)
    g = torch.Generator().manual_seed(0)
    seen = [max_violation(route(torch.randn(8192, 64, generator=g), torch.zeros(64), 8)[2]) for _ in range(5)]
    assert 0.5 < torch.stack(seen).mean() / sampling_floor(8192, 64, 8) < 1.2


def test_auto_ema_falls_with_the_documents_of_an_expert():
    factors = [auto_ema(documents, num_experts=64, top_k=8) for documents in (1, 16, 64, 256, 1024, 2048, 10**6)]
    assert factors == sorted(factors, reverse=True)
    assert 0.85 < factors[0] <= 0.9 and factors[-2:] == [0.0, 0.0]
    assert auto_ema(64, num_experts=64, top_k=8) == auto_ema(128, num_experts=128, top_k=8)


def test_bad_inputs_name_the_argument():
    with pytest.raises(ValueError, match="low, high"):
        load_quantile_bias(torch.ones(4), torch.zeros(4), 0.1, high=0.1, low=0.9)
    with pytest.raises(ValueError, match="tokens"):
        sampling_floor(0, 64, 8)
    with pytest.raises(ValueError, match="top_k"):
        sampling_floor(10, 64, 65)
    with pytest.raises(ValueError, match="documents"):
        auto_ema(-1, num_experts=64, top_k=8)


class PreferringRouter:
    """Fixed preferences N(0, 1) per expert, fresh token noise N(0, 1) at every step, and a bias that a rule moves."""

    def __init__(self, seed, tokens, E=64, top_k=8):
        self.g = torch.Generator().manual_seed(seed)
        self.preferences = torch.randn(E, generator=self.g)
        self.tokens, self.E, self.top_k = tokens, E, top_k
        self.bias = torch.zeros(E)

    def step(self, histogram=None):
        logits = self.preferences + torch.randn(self.tokens, self.E, generator=self.g)
        return route(logits, self.bias, self.top_k, histogram=histogram)[2]


@pytest.mark.parametrize("seed", range(5))
def test_quantile_balances_within_three_updates(seed):
    router = PreferringRouter(seed, tokens=8192)
    violations = []
    for _ in range(4):
        histogram = torch.zeros(router.E, BINS, dtype=torch.int64)
        violations.append(max_violation(router.step(histogram)).item())
        router.bias = quantile_bias(histogram, router.bias, router.top_k)
    floor = sampling_floor(8192, router.E, router.top_k)
    print(f"seed {seed}: quantile MaxVio {[round(v, 3) for v in violations]}, floor {floor:.3f}")
    assert violations[0] > 2
    assert violations[3] < 2 * floor


@pytest.mark.parametrize("rule", [sign_bias, load_quantile_bias])
def test_step_rules_improve_slowly(rule):
    router = PreferringRouter(0, tokens=512)
    violations = []
    for _ in range(500):
        counts = router.step()
        violations.append(max_violation(counts).item())
        router.bias = rule(counts, router.bias, 1e-3)
    shown = {step: round(violations[step], 2) for step in (0, 5, 50, 200, 499)}
    print(f"{rule.__name__} 1e-3: MaxVio by step {shown}, floor {sampling_floor(512, 64, 8):.3f}")
    assert np.mean(violations[-10:]) < 0.6 * violations[0]
