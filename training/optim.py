"""What a short run from scratch needs beside the model: a start that learns at once, AdamW, the learning rate."""

import math

import torch
from torch import nn

from ..gated_mla import GatedMLA
from ..kda import KimiDeltaAttention
from ..latent_moe import LatentMoE
from ..situ_glu import SiTUGLU


EMBEDDING_RATE = 20.0  # times the learning rate: most rows of the table are met only now and then


def initialise(model: nn.Module) -> None:
    """Changes a freshly built model so that it starts as its embedding followed by its head.

    Embeddings get a standard deviation of 1, and every projection that writes to the residual stream is zero. Otherwise
    the tokens' own vectors, as small as all weights at first, drown in the output of untrained layers, and hundreds of
    steps go by before the loss falls below that of token frequencies.
    """
    nn.init.normal_(model.get_input_embeddings().weight, std=1.0)
    for module in model.modules():
        if isinstance(module, (KimiDeltaAttention, GatedMLA)):
            nn.init.zeros_(module.o_proj.weight)
        elif isinstance(module, SiTUGLU):
            nn.init.zeros_(module.down_proj.weight)
        elif isinstance(module, LatentMoE):
            nn.init.zeros_(module.routed_expert_up_proj.weight if module.has_latent else module.experts.down_proj)


def adamw(model: nn.Module, weight_decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95)) -> torch.optim.AdamW:
    """AdamW with decay on matrices only; `set_learning_rate` before every step.

    A matrix, or a stack of them, is a parameter whose last two dimensions are both larger than 1: norms, biases and short
    convolutions [channels, 1, width] are not. The embedding is one, with a learning rate of its own.
    """
    embedding = model.get_input_embeddings().weight
    matrices, others = [], []
    for parameter in model.parameters():
        if parameter is not embedding:
            (matrices if parameter.ndim >= 2 and 1 not in parameter.shape[-2:] else others).append(parameter)
    groups = [
        {"params": [embedding], "weight_decay": weight_decay, "rate": EMBEDDING_RATE},
        {"params": matrices, "weight_decay": weight_decay, "rate": 1.0},
        {"params": others, "weight_decay": 0.0, "rate": 1.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets every group's learning rate to `rate` times the group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate"]


def warmup_cosine(step: int, steps: int, peak: float, warmup: int, final: float = 0.1) -> float:
    """Learning rate of step 0 <= `step` < `steps`: linear from `peak` / `warmup` up to `peak` in `warmup` steps, then
    a cosine down to `final` * `peak` at the last step."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup + 1) / max(1, steps - warmup)
    return peak * (final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress)))
