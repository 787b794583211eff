"""RMS norm: the public function."""

import torch

from ..checks import check_floating, check_shape
from ..dispatch import choose, traceable
from .reference import rms_norm_reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, impl: str = "auto") -> torch.Tensor:
    """weight * (x / sqrt(mean(x^2) + eps)) over the last dimension, in Llama's order: rounded before the weight.

    Args:
        x: [..., D] any floating dtype; rows may be strided, as in a slice of a fused projection.
        weight: [D].
        eps: added to the mean of squares.
        impl: "auto", "triton" or "reference".

    Returns:
        [..., D] in the dtype that a product of `weight` and `x` has. The norm is computed in FP32 (FP64 when `x` is FP64)
        and rounded to the dtype of `x`, then the product with the weight is rounded to that of the result.

    Raises:
        ValueError: a shape or dtype that does not fit, or an implementation that cannot run here.
    """
    if not x.ndim:
        raise ValueError("x: expected [..., D], got []")
    check_floating("x", x)
    check_floating("weight", weight)
    check_shape("weight", weight, "D", {"D": x.shape[-1]} if x.ndim else {})
    run = _fused(x, weight, impl) if choose(impl, x, triton=True) == "triton" else rms_norm_reference
    return run(x, weight, eps)


def _fused(x, weight, impl):
    """The Triton implementation; for "auto" the reference where the kernels cannot take the inputs."""
    from .fused import rms_norm_fused, supports

    refused = supports(x, weight)
    if refused and impl == "triton":
        raise ValueError(f"impl: 'triton' was asked for, but {refused}")
    return rms_norm_reference if refused else traceable("rms_norm", rms_norm_fused)
