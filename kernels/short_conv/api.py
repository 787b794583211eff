"""The short convolution before KDA's q, k and v: the public function."""

import torch

from ..checks import check_cu_seqlens, check_floating, check_shape
from ..dispatch import choose
from .reference import short_conv as short_conv_reference


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """y_t = SiLU(sum_r weight[c, 0, r] x_(t-W+1+r)): depthwise, causal, without bias (Kimi Linear technical report).

    Args:
        x: [B, T, C] any floating dtype.
        weight: [C, 1, W], the last tap on the current token (W = 4 in the released models), often FP32.
        state: [B, C, W-1], or [N, C, W-1] with `cu_seqlens`: the inputs before the first token, oldest first, in the
            dtype of `x`; zeros when None.
        cu_seqlens: [N + 1] int32 or int64, bounds of N documents packed in one row (B = 1), from 0 to T. A document
            may be empty or shorter than W - 1.
        impl: "auto", "triton" or "reference".

    Returns:
        y [B, T, C] in the dtype of `x`, computed in FP32 (FP64 when `x` is FP64), and the new state: the last W - 1
        inputs of each row or document, old state included where it is shorter. Differentiable in x, weight and state.

    Raises:
        ValueError: a shape, dtype or bound that does not fit, or an implementation that cannot run here.
    """
    dims: dict[str, int] = {}
    check_shape("x", x, "B T C", dims)
    check_shape("weight", weight, "C 1 W", dims)
    check_floating("x", x)
    check_floating("weight", weight)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, dims["B"], dims["T"])
        dims["N"] = len(cu_seqlens) - 1
    if state is not None:
        dims["W-1"] = dims["W"] - 1
        check_shape("state", state, "B C W-1" if cu_seqlens is None else "N C W-1", dims)
        if state.dtype != x.dtype:
            raise ValueError(f"state: expected the dtype of x, {x.dtype}, got {state.dtype}")
    choose(impl, x, triton=False)
    return short_conv_reference(x, weight, state=state, cu_seqlens=cu_seqlens)
