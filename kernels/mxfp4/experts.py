"""The routed experts on weights that stay packed: `kernels/experts/expert_mlp` with frozen MXFP4 projections."""

import itertools

import torch
import torch.nn.functional as F

from ..checks import check_floating, check_shape
from ..dispatch import choose, compute_dtype, traceable, without_autocast
from ..experts.reference import tile_height
from ..situ_glu.api import check_caps
from ..situ_glu.reference import situ_glu_reference
from .api import dequantize_mxfp4
from .reference import BLOCK


def expert_mlp_mxfp4(
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up_packed: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down_packed: torch.Tensor,
    down_scales: torch.Tensor,
    *,
    beta: float | None,
    linear_beta: float | None,
    impl: str = "auto",
) -> torch.Tensor:
    """`expert_mlp` of the dequantised projections, of which only those of one expert exist at a time.

    Args:
        x: [N, D]; indices: [N, k] int64, E for an assignment of another rank; weights: [N, k] FP32; beta, linear_beta: as
            in `expert_mlp`.
        gate_up_packed: [E, 2I, D / 2] uint8, the gate rows first, codes as in `quantize_mxfp4`.
        gate_up_scales: [E, D / 32, 2I] uint8: for 32 inputs, the scales of all rows.
        down_packed: [E, D, I / 2] uint8.
        down_scales: [E, I / 32, D] uint8.
        impl: "auto", "triton" or "reference".

    Returns:
        [N, D] in the dtype of `x`, differentiable in `x` and `weights`; the projections are frozen. In the dtype of `x` they
        are what `dequantize_mxfp4` makes of them. The result of the reference is that of `expert_mlp` to the bit.

    Raises:
        ValueError: shapes or dtypes that do not fit, a cap <= 0, an implementation that cannot run here. The values of
            `indices` are not checked.
    """
    dims: dict[str, int] = {}
    for name, tensor, spec in (
        ("x", x, "N D"),
        ("indices", indices, "N k"),
        ("weights", weights, "N k"),
        ("gate_up_packed", gate_up_packed, "E 2I D/2"),
        ("gate_up_scales", gate_up_scales, "E D/32 2I"),
        ("down_packed", down_packed, "E D I/2"),
        ("down_scales", down_scales, "E I/32 D"),
    ):
        check_shape(name, tensor, spec, dims)
        if tensor.dtype != torch.uint8 and ("packed" in name or "scales" in name):
            raise ValueError(f"{name}: expected uint8, got {tensor.dtype}")
    check_floating("x", x)
    check_floating("weights", weights)
    if indices.dtype != torch.int64:
        raise ValueError(f"indices: expected int64, got {indices.dtype}")
    for name, size, packed, scales in (
        ("gate_up_packed", dims["D"], dims["D/2"], dims["D/32"]),
        ("down_packed", dims["2I"] // 2, dims["I/2"], dims["I/32"]),
    ):
        if (2 * packed, BLOCK * scales) != (size, size):
            raise ValueError(
                f"{name}: expected {size} inputs, a multiple of {BLOCK}, got {2 * packed} of {BLOCK * scales}"
            )
    check_caps(beta, linear_beta)
    run = (
        _fused(x, indices, gate_up_packed, impl) if choose(impl, x, triton=True) == "triton" else _one_expert_at_a_time
    )
    return run(x, indices, weights, gate_up_packed, gate_up_scales, down_packed, down_scales, beta, linear_beta)


def _fused(x, indices, gate_up_packed, impl):
    """The Triton implementation; for "auto" the reference where the kernels cannot take the inputs."""
    from .fused_experts import expert_mlp_mxfp4_fused, supports

    refused = supports(x, indices, gate_up_packed)
    if refused and impl == "triton":
        raise ValueError(f"impl: 'triton' was asked for, but {refused}")
    return _one_expert_at_a_time if refused else traceable("expert_mlp_mxfp4", expert_mlp_mxfp4_fused)


@without_autocast
def _one_expert_at_a_time(
    x, indices, weights, gate_up_packed, gate_up_scales, down_packed, down_scales, beta, linear_beta
):
    """The reference of `expert_mlp`, tile by tile in its order, with the products of `FrozenLinear`."""
    (N, k), E = indices.shape, gate_up_packed.shape[0]
    expert_of, order = indices.flatten().sort(stable=True)  # [N * k]: assignments by expert, sentinels last
    bounds = torch.searchsorted(expert_of, torch.arange(E + 1, device=x.device)).tolist()
    height = tile_height(N * k, E)

    segments = x.index_select(0, order // k).split([hi - lo for lo, hi in itertools.pairwise([*bounds, N * k])])
    outputs = []
    # One at least: the output hangs on x, whose gradient is then zeros.
    for e in [e for e in range(E) if len(segments[e])] or [0]:
        tiles = [F.pad(tile, (0, 0, 0, height - len(tile))) for tile in segments[e].split(height)]
        gate_up = FrozenLinear.apply(gate_up_packed[e], gate_up_scales[e], *tiles)  # [height, 2I] each
        activated = [situ_glu_reference(tile, beta, linear_beta) for tile in gate_up]
        down = FrozenLinear.apply(down_packed[e], down_scales[e], *activated)  # [height, D] each
        outputs.append(torch.cat(down)[: len(segments[e])])
    outputs.append(torch.zeros_like(segments[E]))  # the sentinels

    expert_out = torch.cat(outputs).index_select(0, order.argsort()).view(N, k, x.shape[1])  # [N, k, D]
    dtype = compute_dtype(x)
    p = weights.to(dtype).masked_fill(indices == E, 0.0)  # [N, k]
    total = torch.zeros_like(x, dtype=dtype)
    for j in range(k):
        total = total + expert_out[:, j] * p[:, j, None]
    return total.to(x.dtype)


class FrozenLinear(torch.autograd.Function):
    """`tile @ weight.T` for several tiles; backward dequantises once more instead of keeping the weight."""

    @staticmethod
    def forward(ctx, packed, scales, *tiles):
        ctx.save_for_backward(packed, scales)
        weight = dequantize_mxfp4(packed, scales.mT, tiles[0].dtype)  # [out, in]
        return tuple(F.linear(tile, weight) for tile in tiles)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        packed, scales = ctx.saved_tensors
        weight = dequantize_mxfp4(packed, scales.mT, gradients[0].dtype)
        return None, None, *(gradient @ weight for gradient in gradients)
