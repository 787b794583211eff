"""The public face of the expert MLPs."""

import torch

from ..checks import check_floating, check_shape
from ..dispatch import choose, traceable
from ..situ_glu.api import check_caps
from .reference import expert_mlp_reference


def expert_mlp(
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    *,
    beta: float | None,
    linear_beta: float | None,
    impl: str = "auto",
) -> torch.Tensor:
    """sum_k weights[:, k] * down(situ_glu(gate_up(x))) through the chosen expert of each token.

    Args:
        x: [N, D], one row per token; N may be 0.
        indices: [N, k] int64, the chosen experts. E, one past the last expert, marks an assignment that another rank
            computes: it contributes exactly zero, whatever its weight.
        weights: [N, k], FP32.
        gate_up_proj: [E, 2I, D], the gate rows first.
        down_proj: [E, D, I].
        beta, linear_beta: caps of `situ_glu`; None for both is SwiGLU.
        impl: "auto", "triton" or "reference".

    Returns:
        [N, D] in the dtype of `x`. The matrix products run in that dtype (the weights are cast to it), the activation
        and the sum over k in FP32 (FP64 for FP64). Differentiable in all but `indices`; the gradient of an expert
        without tokens is exactly zero.

    Raises:
        ValueError: shapes or dtypes that do not fit, a cap <= 0. The values of `indices` are not checked.

    Source: Kimi K3 technical report, Stable LatentMoE (eq. 11), the routed sum before its norm.
    """
    dims: dict[str, int] = {}
    for name, tensor, spec in (
        ("x", x, "N D"),
        ("indices", indices, "N k"),
        ("weights", weights, "N k"),
        ("gate_up_proj", gate_up_proj, "E 2I D"),
        ("down_proj", down_proj, "E D I"),
    ):
        check_shape(name, tensor, spec, dims)
        if tensor is not indices:
            check_floating(name, tensor)
    if indices.dtype != torch.int64:
        raise ValueError(f"indices: expected int64, got {indices.dtype}")
    if dims["2I"] != 2 * dims["I"]:
        raise ValueError(
            f"gate_up_proj: expected 2I = {2 * dims['I']} rows, twice the width of down_proj, got {dims['2I']}"
        )
    check_caps(beta, linear_beta)

    fused = choose(impl, x, triton=True) == "triton"
    run = _fused(x, indices, gate_up_proj, impl) if fused else expert_mlp_reference
    return run(x, indices, weights, gate_up_proj, down_proj, beta=beta, linear_beta=linear_beta)


def _fused(x, indices, gate_up_proj, impl):
    """The Triton implementation; for "auto" the reference where the kernels cannot take the inputs."""
    from .fused import expert_mlp_fused, supports

    refused = supports(x, indices, gate_up_proj)
    if refused and impl == "triton":
        raise ValueError(f"impl: 'triton' was asked for, but {refused}")
    return expert_mlp_reference if refused else traceable("expert_mlp", expert_mlp_fused)
