"""The public face of SiTU-GLU."""

import torch

from ..checks import check_floating
from ..dispatch import choose, traceable
from .reference import situ_glu_reference


def situ_glu(
    gate_up: torch.Tensor, beta: float | None, linear_beta: float | None, *, impl: str = "auto"
) -> torch.Tensor:
    """beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta), elementwise.

    Args:
        gate_up: [..., 2I], the gate branch g in the first half, the up branch u in the second.
        beta: cap of the linear factor of the gate branch, > 0; None leaves it uncapped.
        linear_beta: cap of the up branch, > 0; None leaves it uncapped. Both None is SwiGLU exactly.
        impl: "auto", "triton" or "reference".

    Returns:
        [..., I] in the dtype of `gate_up`, computed in FP32 (FP64 for FP64); at most beta * linear_beta in size.

    Raises:
        ValueError: an odd last dimension, a dtype that is not floating point, a cap <= 0.

    Source: Kimi K3 technical report, eq. 12 and 19.
    """
    check_floating("gate_up", gate_up)
    if gate_up.ndim == 0 or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: expected [..., 2I] with an even last dimension, got {list(gate_up.shape)}")
    check_caps(beta, linear_beta)

    run = _fused(gate_up, impl) if choose(impl, gate_up, triton=True) == "triton" else situ_glu_reference
    return run(gate_up, beta, linear_beta)


def _fused(gate_up, impl):
    """The Triton implementation; for "auto" the reference where the kernels cannot take the input."""
    from .fused import situ_glu_fused, supports

    refused = supports(gate_up)
    if refused and impl == "triton":
        raise ValueError(f"impl: 'triton' was asked for, but {refused}")
    return situ_glu_reference if refused else traceable("situ_glu", situ_glu_fused)


def check_caps(beta: float | None, linear_beta: float | None) -> None:
    for name, cap in (("beta", beta), ("linear_beta", linear_beta)):
        if cap is not None and not cap > 0:
            raise ValueError(f"{name}: expected a number > 0 or None (not capped), got {cap}")
