"""Cross-entropy together with its gradient, over the logits: the public function."""

import torch

from ..checks import check_floating, check_shape
from ..dispatch import choose
from .reference import cross_entropy_with_gradient_reference


def cross_entropy_with_gradient(
    logits: torch.Tensor, targets: torch.Tensor, *, ignore_index: int = -100, impl: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Nats of each target, and the gradient of their sum, which takes the place of the logits: half the memory of both.

    Not differentiable: who has the gradient needs no backward pass.

    Args:
        logits: [N, V] any floating dtype, overwritten.
        targets: [N] int64, from 0 to V - 1, or `ignore_index`: such rows have loss and gradient zero.
        impl: "auto", "triton" or "reference".

    Returns:
        nats: [N] FP32 (FP64 for FP64 logits).
        gradient: [N, V], `logits` itself: softmax minus one at the target, computed in FP32 and rounded once.

    Raises:
        ValueError: shapes or dtypes that do not fit. The values of `targets` are not checked.
    """
    dims: dict[str, int] = {}
    check_floating("logits", logits)
    check_shape("logits", logits, "N V", dims)
    check_shape("targets", targets, "N", dims)
    if targets.dtype != torch.int64:
        raise ValueError(f"targets: expected int64, got {targets.dtype}")
    with torch.no_grad():
        if choose(impl, logits, triton=True) == "triton":
            return _fused(logits, impl)(logits, targets, ignore_index)
        return cross_entropy_with_gradient_reference(logits, targets, ignore_index)


def _fused(logits, impl):
    """The Triton implementation; for "auto" the reference where the kernel cannot take the inputs."""
    from .fused import cross_entropy_with_gradient_fused, supports

    refused = supports(logits)
    if refused and impl == "triton":
        raise ValueError(f"impl: 'triton' was asked for, but {refused}")
    return cross_entropy_with_gradient_reference if refused else cross_entropy_with_gradient_fused
