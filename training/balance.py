"""How evenly the routers load their experts."""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import nn

from ..router import Router


def routers(model: nn.Module) -> list[Router]:
    """The routers of a model, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, Router)]


def max_violation(counts: torch.Tensor) -> torch.Tensor:
    """MaxVio of loads `counts` [..., E] (routed tokens per expert): the largest load over the mean load, minus 1.

    0 is perfect balance; E / top_k - 1 is the worst case (arXiv 2408.15664). Returns float64 [...].
    """
    counts = counts.double()
    return counts.amax(-1) / counts.mean(-1).clamp(min=1e-9) - 1.0


def sampling_floor(tokens: int, num_experts: int, top_k: int) -> float:
    """About the MaxVio that chance alone leaves when `tokens` independent tokens choose `top_k` of `num_experts` experts
    with equal probability: sqrt(2 ln n (1 - k/n) / (m k/n)), the expected largest of n normal deviations."""
    share = top_k / num_experts
    return math.sqrt(2.0 * math.log(num_experts) * (1.0 - share) / (tokens * share))


@contextlib.contextmanager
def without_bias(model: nn.Module) -> Iterator[None]:
    """Inside, every router chooses by its scores alone: `e_score_correction_bias` is zero; afterwards it is back."""
    saved = [(router, router.e_score_correction_bias.clone()) for router in routers(model)]
    try:
        for router, bias in saved:
            router.e_score_correction_bias.zero_()
        yield
    finally:
        for router, bias in saved:
            router.e_score_correction_bias.copy_(bias)


@contextlib.contextmanager
def counting(model: nn.Module) -> Iterator[torch.Tensor]:
    """Inside, counts what every router chooses, in evaluation as well: gives int64 [layers, E], filled as forwards run."""
    watched = routers(model)
    counts = torch.zeros(len(watched), model.config.num_experts, dtype=torch.int64)

    def hook(row: torch.Tensor):
        def count(router: Router, inputs: tuple, output: tuple) -> None:
            _, _, indices = output
            row.add_(torch.bincount(indices.flatten().cpu(), minlength=len(row)))

        return count

    handles = [router.register_forward_hook(hook(row)) for router, row in zip(watched, counts)]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()
