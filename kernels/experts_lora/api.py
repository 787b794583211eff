"""The public face of the expert MLPs with low-rank updates in split form."""

from typing import NamedTuple

import torch

from ..checks import check_floating, check_shape
from ..dispatch import choose
from ..situ_glu.api import check_caps
from .reference import expert_mlp_lora_reference, frozen_mxfp4, plain


class LowRank(NamedTuple):
    """The update `b[e] a[e]` of every expert's projection; a scale is the caller's to fold into `b`."""

    a: torch.Tensor  # [E, r, in]
    b: torch.Tensor  # [E, out, r]


def expert_mlp_lora(
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    gate_up_lora: LowRank | None,
    down_lora: LowRank | None,
    *,
    beta: float | None,
    linear_beta: float | None,
    impl: str = "auto",
) -> torch.Tensor:
    """`expert_mlp` of the projections W + b a, as W x + b (a x): no matrix of the size of W is made.

    Args:
        x: [N, D]; indices: [N, k] int64, E for an assignment of another rank; weights: [N, k] FP32; beta, linear_beta: as
            in `expert_mlp`.
        gate_up_proj: [E, 2I, D], the gate rows first. down_proj: [E, D, I].
        gate_up_lora: a [E, r, D] and b [E, 2I, r]; None without an update. down_lora: a [E, r, I] and b [E, D, r].
        impl: "auto", "triton" or "reference".

    Returns:
        [N, D] in the dtype of `x`, in which all products run (factors are cast to it); the sum of base and update of the
        pre-activations is rounded to it before the activation. Differentiable in all but `indices`; gradients of factors
        come in the factors' dtype, those of an expert without tokens are exactly zero.

    Raises:
        ValueError: shapes or dtypes that do not fit, a cap <= 0, an implementation that cannot run here.

    Source: LoRA (arXiv 2106.09685), for every expert of the MLPs of `expert_mlp`.
    """
    dims: dict[str, int] = {}
    check_shape("x", x, "N D", dims)
    check_shape("gate_up_proj", gate_up_proj, "E 2I D", dims)
    check_shape("down_proj", down_proj, "E D I", dims)
    check_floating("gate_up_proj", gate_up_proj)
    check_floating("down_proj", down_proj)
    _check(x, indices, weights, gate_up_lora, down_lora, dims)
    check_caps(beta, linear_beta)
    if _is_fused(x, indices, gate_up_proj, impl):
        from .fused import expert_mlp_lora_fused

        bases = gate_up_proj, down_proj
        return expert_mlp_lora_fused(x, indices, weights, bases, gate_up_lora, down_lora, (beta, linear_beta))
    bases = plain(gate_up_proj), plain(down_proj)
    E = len(gate_up_proj)
    return expert_mlp_lora_reference(x, indices, weights, E, *bases, gate_up_lora, down_lora, beta, linear_beta)


def expert_mlp_lora_mxfp4(
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up_packed: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down_packed: torch.Tensor,
    down_scales: torch.Tensor,
    gate_up_lora: LowRank | None,
    down_lora: LowRank | None,
    *,
    beta: float | None,
    linear_beta: float | None,
    impl: str = "auto",
) -> torch.Tensor:
    """`expert_mlp_lora` on frozen projections in MXFP4.

    Args:
        gate_up_packed [E, 2I, D / 2], gate_up_scales [E, D / 32, 2I], down_packed [E, D, I / 2], down_scales
            [E, I / 32, D], all uint8: as in `expert_mlp_mxfp4`. The others: as in `expert_mlp_lora`.
        impl: "reference" has the dequantised projections of one expert at a time, "triton" a tile in registers.

    Returns:
        [N, D] in the dtype of `x`, differentiable in `x`, `weights` and the factors.

    Raises:
        ValueError: as `expert_mlp_lora`.
    """
    dims: dict[str, int] = {}
    check_shape("x", x, "N D", dims)
    for name, tensor, spec in (
        ("gate_up_packed", gate_up_packed, "E 2I D/2"),
        ("gate_up_scales", gate_up_scales, "E D/32 2I"),
        ("down_packed", down_packed, "E D I/2"),
        ("down_scales", down_scales, "E I/32 D"),
    ):
        check_shape(name, tensor, spec, dims)
        if tensor.dtype != torch.uint8:
            raise ValueError(f"{name}: expected uint8, got {tensor.dtype}")
    dims["I"] = 2 * dims["I/2"]
    for name, size, half, blocks in (("D", dims["D"], "D/2", "D/32"), ("I", dims["I"], "I/2", "I/32")):
        if (2 * dims[half], 32 * dims[blocks]) != (size, size):
            raise ValueError(f"{name}: expected a multiple of 32 in codes and scales, got {size}")
    _check(x, indices, weights, gate_up_lora, down_lora, dims)
    check_caps(beta, linear_beta)
    packed = gate_up_packed, gate_up_scales, down_packed, down_scales
    if _is_fused(x, indices, gate_up_packed, impl):
        from .fused import expert_mlp_lora_fused

        return expert_mlp_lora_fused(x, indices, weights, packed, gate_up_lora, down_lora, (beta, linear_beta))
    bases = frozen_mxfp4(*packed[:2]), frozen_mxfp4(*packed[2:])
    E = len(gate_up_packed)
    return expert_mlp_lora_reference(x, indices, weights, E, *bases, gate_up_lora, down_lora, beta, linear_beta)


def _check(x, indices, weights, gate_up_lora, down_lora, dims) -> None:
    check_shape("indices", indices, "N k", dims)
    check_shape("weights", weights, "N k", dims)
    check_floating("x", x)
    check_floating("weights", weights)
    if indices.dtype != torch.int64:
        raise ValueError(f"indices: expected int64, got {indices.dtype}")
    if dims["2I"] != 2 * dims["I"]:
        raise ValueError(f"gate_up: expected 2I = {2 * dims['I']} rows, twice the width of down, got {dims['2I']}")
    for name, lora, into, out in (("gate_up_lora", gate_up_lora, "D", "2I"), ("down_lora", down_lora, "I", "D")):
        if lora is not None:
            rank = f"rank of {name}"
            dims[rank] = lora.a.shape[1] if lora.a.ndim == 3 else 0
            for part, tensor, shape in (("a", lora.a, ("E", rank, into)), ("b", lora.b, ("E", out, rank))):
                check_floating(f"{name}.{part}", tensor)
                expected = [dims[letter] for letter in shape]
                if list(tensor.shape) != expected or dims[rank] == 0:
                    raise ValueError(f"{name}.{part}: expected {list(shape)} = {expected}, got {list(tensor.shape)}")


def _is_fused(x, indices, gate_up, impl) -> bool:
    """Whether Triton runs; for "auto" the reference where the kernels cannot take the inputs."""
    if choose(impl, x, triton=True) != "triton":
        return False
    from ..experts.fused import supports

    refused = supports(x, indices, gate_up)
    if refused and impl == "triton":
        raise ValueError(f"impl: 'triton' was asked for, but {refused}")
    return not refused
