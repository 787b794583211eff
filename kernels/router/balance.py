"""Rules that move the routing bias between two optimiser steps, and the numbers that judge them.

All are pure functions without gradients that stay on the device of their inputs. `counts` [E] and `histogram` [E, bins]
are sums over every micro-batch and every rank of one optimiser step; `bias` [E] is what routed that step.
"""

import math

import torch


def histogram_range(bias: torch.Tensor, bins: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower edge and width of the bins on [min(bias) - 1, max(bias) + 1], which hold every possible required bias.

    A cutoff lies within [min(bias), max(bias) + 1] and a score within [0, 1], so their difference never leaves it.
    """
    low, high = torch.aminmax(bias)
    return low - 1, (high - low + 2) / bins


@torch.no_grad()
def required_bias(histogram: torch.Tensor, bias: torch.Tensor, top_k: int) -> torch.Tensor:
    """The top_k / E quantile of each row of `histogram`: the bias at which an expert gets its share of the tokens.

    Args:
        histogram: [E, bins] int64, from `route` with this `bias`; every row sums to the number of tokens.
        bias: [E].
        top_k: experts per token.

    Returns:
        [E], within one bin width of the exact order statistic; undefined for a histogram without tokens.

    Source: Kimi K3 technical report, appendix D.
    """
    E, bins = histogram.shape
    low, width = histogram_range(bias, bins)
    share = histogram.sum(dim=-1, keepdim=True) * top_k  # [E, 1], E times the target load: integers stay exact
    cumulative = histogram.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, (share + E - 1) // E).clamp_(max=bins - 1)  # [E, 1]
    inside = histogram.gather(-1, index)
    before = cumulative.gather(-1, index) - inside
    fraction = ((share - before * E) / (inside * E)).clamp(0, 1)
    return (low + (index + fraction) * width).squeeze(-1).to(bias.dtype)


@torch.no_grad()
def quantile_bias(histogram: torch.Tensor, bias: torch.Tensor, top_k: int) -> torch.Tensor:
    """Quantile Balancing: the centred `required_bias` replaces the bias outright, without a step size.

    Args and source as for `required_bias`. Returns [E] with mean zero, or `bias` unchanged where no token was counted.
    For the smoothed form, blend with the factor of `auto_ema`: `torch.lerp(new, bias, ema)`.
    """
    required = required_bias(histogram, bias, top_k)
    return torch.where(histogram.sum() > 0, required - required.mean(), bias)


@torch.no_grad()
def load_quantile_bias(
    counts: torch.Tensor, bias: torch.Tensor, eta: float, high: float = 0.9, low: float = 0.1
) -> torch.Tensor:
    """Lower the bias of experts loaded above the `high` quantile of the loads by `eta`; raise it below the `low` one.

    Raises:
        ValueError: unless 0 <= low <= high <= 1.
    """
    if not 0 <= low <= high <= 1:
        raise ValueError(f"low, high: expected 0 <= low <= high <= 1, got {low}, {high}")
    loads = counts.to(bias.dtype)
    above = (loads > loads.quantile(high)).to(bias.dtype)
    below = (loads < loads.quantile(low)).to(bias.dtype)
    return bias + eta * (below - above)


@torch.no_grad()
def sign_bias(counts: torch.Tensor, bias: torch.Tensor, eta: float) -> torch.Tensor:
    """Move each bias by `eta` towards the mean load: loss-free balancing, arXiv 2408.15664."""
    loads = counts.to(bias.dtype)
    return bias + eta * torch.sign(loads.mean() - loads)


@torch.no_grad()
def max_violation(counts: torch.Tensor) -> torch.Tensor:
    """MaxVio = max / mean - 1 of `counts` [..., E] over the last axis: 0 is perfect balance. FP32, 0 without tokens."""
    loads = counts.float()
    mean = loads.mean(dim=-1)
    return torch.where(mean > 0, loads.amax(dim=-1) / mean - 1, 0.0)


def sampling_floor(tokens: int, num_experts: int, top_k: int) -> float:
    """MaxVio that `tokens` independent tokens show by chance under perfect balance: print it beside MaxVio.

    sqrt(2 ln n (1 - k/n) / (mk/n)) for m tokens, n experts and top-k: the expected maximum of n Gaussians with the
    spread of a binomial load, relative to its mean.
    """
    if tokens < 1 or not 1 <= top_k <= num_experts:
        raise ValueError(
            f"tokens, top_k: expected tokens >= 1 and 1 <= top_k <= {num_experts} experts, got {tokens}, {top_k}"
        )
    share = top_k / num_experts
    return math.sqrt(2 * math.log(num_experts) * (1 - share) / (tokens * share))


def auto_ema(documents: float | torch.Tensor, num_experts: int, top_k: int) -> float | torch.Tensor:
    """EMA factor for `quantile_bias` from the number of documents in a step: 0.9 for few, 0 for many.

    Tokens of one document share their preferences, so the noise of an expert's quantile falls with the documents that
    an expert sees, d = documents * top_k / num_experts, rather than with its tokens, while the lag of an average does
    not depend on them. The weight of the newest estimate that trades one for the other grows as sqrt(d):

        ema = 0.9 * max(0, 1 - sqrt(d / 256))

    Args:
        documents: documents of the whole step, over all micro-batches and ranks; for documents of unequal lengths their
            effective number, sum(length) ** 2 / sum(length ** 2), is the better measure. A tensor [] gives one of FP64:
            nothing waits for its device.
        num_experts, top_k: of the router.

    Source: our simulation; the numbers are in the README of this folder.
    """
    if isinstance(documents, torch.Tensor):
        return 0.9 * (1 - (documents.double() * top_k / num_experts / 256).sqrt()).clamp(min=0.0)
    if documents < 0:
        raise ValueError(f"documents: expected a number >= 0, got {documents}")
    return 0.9 * max(0.0, 1 - math.sqrt(documents * top_k / num_experts / 256))
