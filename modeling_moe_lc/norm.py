"""RMSNorm, and the modules that stay in full precision whatever the model is cast to."""

import torch
from torch import nn

from .backends import operator_impl
from .kernels.gated_norm import gated_rms_norm
from .kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension, FP32 inside, cast before the weight (Llama's order)."""

    def __init__(self, config, size: int, eps: float | None = None):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = config.rms_norm_eps if eps is None else eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, impl=operator_impl(self.config))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def full_precision_dtype() -> torch.dtype:
    """FP32, or FP64 where that is torch's default dtype."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def at_least_float32(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """`after`, a moved or cast `before`, unless the cast was to less than FP32: then `before`, only moved."""
    if after.is_floating_point() and after.dtype.itemsize < 4:
        return before.to(device=after.device, dtype=torch.float32)
    return after


class FullPrecision(nn.Module):
    """A module whose own tensors no cast makes narrower than FP32: `.to(bfloat16)` and `.half()` only move them.

    Loaders that know a list of FP32 names act in `from_pretrained` alone. Such a module is used only in its own forward,
    so that it can be a sharding unit with a precision policy of its own.
    """

    def _apply(self, fn, recurse=True):
        return super()._apply(lambda tensor: at_least_float32(tensor, fn(tensor)), recurse)


class GatedRMSNorm(FullPrecision):
    """Per-head RMSNorm of KDA's output times the sigmoid of its output gate; the weight is shared by the heads."""

    def __init__(self, head_dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim, dtype=full_precision_dtype()))
        self.eps = eps

    def forward(self, o: torch.Tensor, gate: torch.Tensor, impl: str) -> torch.Tensor:
        return gated_rms_norm(o, gate, self.weight, self.eps, impl=impl)  # [B, T, H, V]
