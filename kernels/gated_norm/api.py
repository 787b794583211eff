"""Gated RMSNorm, the norm of KDA's output: the public function."""

import torch

from ..checks import check_floating, check_shape
from ..dispatch import choose, traceable
from .reference import gated_rms_norm as gated_rms_norm_reference


def gated_rms_norm(
    o: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, impl: str = "auto"
) -> torch.Tensor:
    """RMSNorm(o) * weight * sigmoid(gate) over the last dimension (Kimi Linear technical report, KDA output gate).

    Args:
        o: [..., V] any floating dtype.
        gate: [..., V] the shape of `o`, before the sigmoid.
        weight: [V], shared by all rows (in KDA: by all heads).
        eps: added to the mean of squares.
        impl: "auto", "triton" or "reference".

    Returns:
        [..., V] in the dtype of `o`, computed in FP32 (FP64 when `o` is FP64) and rounded once at the end.

    Raises:
        ValueError: a shape or dtype that does not fit, or an implementation that cannot run here.
    """
    check_shape("weight", weight, "V", {"V": o.shape[-1]} if o.ndim else {})
    if not o.ndim:
        raise ValueError("o: expected [..., D], got []")
    if gate.shape != o.shape:
        raise ValueError(f"gate: expected the shape of o, {list(o.shape)}, got {list(gate.shape)}")
    for name, tensor in (("o", o), ("gate", gate), ("weight", weight)):
        check_floating(name, tensor)
    run = _fused(o, gate, impl) if choose(impl, o, triton=True) == "triton" else gated_rms_norm_reference
    return run(o, gate, weight, eps)


def _fused(o, gate, impl):
    """The Triton implementation; for "auto" the reference where the kernels cannot take the inputs."""
    from .fused import gated_rms_norm_fused, supports

    refused = supports(o, gate)
    if refused and impl == "triton":
        raise ValueError(f"impl: 'triton' was asked for, but {refused}")
    return gated_rms_norm_reference if refused else traceable("gated_rms_norm", gated_rms_norm_fused)
