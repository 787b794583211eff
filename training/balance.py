"""The routers of a model, watched: what they choose, and what they would choose without their bias."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from ..router import Router


def routers(model: nn.Module) -> list[Router]:
    """The routers of a model, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, Router)]


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
    counts = torch.zeros(len(watched), model.config.get_text_config().num_experts, dtype=torch.int64)

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
