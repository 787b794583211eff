"""The gated RMSNorm of KDA's output in plain torch."""

import torch

from ..dispatch import compute_dtype, without_autocast


@without_autocast
def gated_rms_norm(o, gate, weight, eps):
    """Arguments and results as in `api.gated_rms_norm`; FP32 inside, FP64 for FP64 inputs."""
    x, gate, weight = (t.to(compute_dtype(o)) for t in (o, gate, weight))
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * weight * gate.sigmoid()).to(o.dtype)
