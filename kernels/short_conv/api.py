"""The short convolution before KDA's q, k and v: the public functions."""

import torch

from ..checks import check_cu_seqlens, check_floating, check_shape
from ..dispatch import choose, traceable
from .reference import short_convs as short_convs_reference


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
    (y,), new_state = _run((x,), (weight,), state, cu_seqlens, impl, ("x", "weight", "state"))
    return y, new_state


def short_convs(
    xs: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, ...],
    *,
    states: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    impl: str = "auto",
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """`short_conv` of up to three tensors that share everything but their channels; one launch on a GPU.

    Args:
        xs: tensors [B, T, C_i] of one dtype.
        weights: a [C_i, 1, W] for each.
        states: [B or N, C_1 + C_2 + ..., W-1] their states side by side, as the cache of a layer holds them.
        cu_seqlens, impl: as in `short_conv`.

    Returns:
        The outputs, a tuple like `xs`, and the new states side by side.

    Raises:
        ValueError: as in `short_conv`.
    """
    if not 1 <= len(xs) <= 3 or len(weights) != len(xs):
        raise ValueError(f"xs: expected 1 to 3 tensors and a weight for each, got {len(xs)} and {len(weights)}")
    return _run(tuple(xs), tuple(weights), states, cu_seqlens, impl, ("xs", "weights", "states"))


def _run(xs, weights, states, cu_seqlens, impl, names):
    """Either public function; `names` are what it calls the first three arguments."""
    _check(xs, weights, states, cu_seqlens, names)
    run = _fused(xs, weights, impl, names) if choose(impl, xs[0], triton=True) == "triton" else short_convs_reference
    ys, new_states = run(xs, weights, states=states, cu_seqlens=cu_seqlens)
    return tuple(ys), new_states


def _fused(xs, weights, impl, names):
    """The Triton implementation; for "auto" the reference where the kernels cannot take the inputs."""
    from .fused import short_convs_fused, supports

    refused = supports(xs, weights, names)
    if refused and impl == "triton":
        raise ValueError(f"impl: 'triton' was asked for, but {refused}")
    return short_convs_reference if refused else traceable("short_convs", short_convs_fused)


def _check(xs, weights, states, cu_seqlens, names):
    x_name, weight_name, state_name = names
    dims: dict[str, int] = {}
    channels = 0
    for x, weight in zip(xs, weights, strict=True):
        dims.pop("C", None)
        check_shape(x_name, x, "B T C", dims)
        check_shape(weight_name, weight, "C 1 W", dims)
        check_floating(x_name, x)
        check_floating(weight_name, weight)
        if x.dtype != xs[0].dtype:
            raise ValueError(f"{x_name}: expected one dtype, {xs[0].dtype}, got {x.dtype}")
        channels += dims["C"]
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, dims["B"], dims["T"])
        dims["N"] = len(cu_seqlens) - 1
    if states is not None:
        dims |= {"C": channels, "W-1": dims["W"] - 1}
        check_shape(state_name, states, "B C W-1" if cu_seqlens is None else "N C W-1", dims)
        if states.dtype != xs[0].dtype:
            raise ValueError(f"{state_name}: expected the dtype of {x_name}, {xs[0].dtype}, got {states.dtype}")
