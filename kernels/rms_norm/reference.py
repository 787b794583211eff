"""The definition of the RMS norm, in torch."""

import torch

from ..dispatch import compute_dtype, without_autocast


@without_autocast
def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Arguments and results as in `api.rms_norm`; the norm in FP32, FP64 for FP64 inputs."""
    wide = x.to(compute_dtype(x))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)
