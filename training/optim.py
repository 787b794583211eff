"""AdamW with decay on matrices only, and the learning rate over a run."""

import math

import torch
from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups for an optimiser: matrices (linear weights, experts, embeddings), which decay, and the rest (norms,
    gates' biases, short convolutions, depth-mixing queries), which does not.

    A matrix, or a stack of them, is a parameter whose last two dimensions are both larger than 1: a short convolution
    [channels, 1, width] is not.
    """
    matrices, others = [], []
    for parameter in model.parameters():
        is_matrix = parameter.ndim >= 2 and 1 not in parameter.shape[-2:]
        (matrices if is_matrix else others).append(parameter)
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def adamw(model: nn.Module, weight_decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95)) -> torch.optim.AdamW:
    """AdamW over `parameter_groups`; the learning rate is set at every step."""
    return torch.optim.AdamW(parameter_groups(model, weight_decay), lr=0.0, betas=betas, fused=True)


def warmup_cosine(step: int, steps: int, peak: float, warmup: int, final: float = 0.1) -> float:
    """Learning rate of step 0 <= `step` < `steps`: linear from `peak` / `warmup` up to `peak` in `warmup` steps, then
    a cosine down to `final` * `peak` at the last step."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup + 1) / max(1, steps - warmup)
    return peak * (final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress)))
