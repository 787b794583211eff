"""The public face of the router."""

import torch

from ..checks import check_floating, check_shape
from ..dispatch import choose, traceable
from .reference import route_reference


def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    *,
    num_groups: int = 1,
    topk_group: int = 1,
    renormalize: bool = True,
    scaling: float = 1.0,
    token_mask: torch.Tensor | None = None,
    histogram: torch.Tensor | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose `top_k` experts per token by sigmoid(logits) + bias and weigh them by sigmoid(logits) alone.

    Args:
        logits: [N, E], one row per token; computed in FP32 by the caller, since BF16 flips near ties.
        bias: [E], FP32 (or FP64). Takes part in the choice only, never in the weights, never in a gradient.
        top_k: experts per token, from 1 to the number of experts that the groups leave.
        num_groups: consecutive groups of E / num_groups experts; a group scores the sum of its two best experts.
        topk_group: how many of the groups stay eligible for a token.
        renormalize: divide the weights of a token by their sum + 1e-20.
        scaling: factor on the weights, after that.
        token_mask: [N] bool, False for padding, which is left out of `counts` and `histogram`; None counts all.
        histogram: [E, bins] int64, added to in place: where each counted token's required bias, cutoff - score, falls
            among uniform bins on [min(bias) - 1, max(bias) + 1]. For `quantile_bias`.
        impl: "auto", "triton" or "reference".

    Returns:
        indices: [N, top_k] int64, by descending biased score; equal scores by ascending expert.
        weights: [N, top_k] FP32 (FP64 for FP64 logits), differentiable in `logits`.
        counts: [E] int64, how often each expert was chosen by the counted tokens.
        cutoff: [N], the (top_k + 1)-th biased score among the eligible experts, -inf where there is none.

    Raises:
        ValueError: shapes or dtypes that do not fit, a number out of range, or a `histogram` where its quantiles mean
            nothing: with no expert left to set a cutoff, or with groups that hide experts from a token.

    Source: Kimi K3 technical report, section 2.3.3 and appendix D; groups as in DeepSeek-V3 (arXiv 2412.19437).
    """
    dims: dict[str, int] = {}
    check_floating("logits", logits)
    check_shape("logits", logits, "N E", dims)
    check_shape("bias", bias, "E", dims)
    if bias.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"bias: expected float32, since narrower dtypes change the choice, got {bias.dtype}")
    _check_numbers(dims["E"], top_k, num_groups, topk_group)
    if token_mask is not None:
        check_shape("token_mask", token_mask, "N", dims)
        if token_mask.dtype != torch.bool:
            raise ValueError(f"token_mask: expected bool, got {token_mask.dtype}")
    if histogram is not None:
        check_shape("histogram", histogram, "E bins", dims)
        if histogram.dtype != torch.int64 or dims["bins"] == 0:
            raise ValueError(f"histogram: expected int64 with at least one bin, got {histogram.dtype} {dims['bins']}")
        if top_k >= dims["E"]:
            raise ValueError(f"top_k: expected less than E = {dims['E']} experts with a histogram, got {top_k}")
        if topk_group < num_groups:
            raise ValueError(
                f"topk_group: expected all {num_groups} groups with a histogram, got {topk_group}: "
                "an expert of a hidden group has no required bias"
            )

    fused = choose(impl, logits, triton=True) == "triton"
    run = _fused(logits, bias, top_k, num_groups, topk_group, impl) if fused else route_reference
    return run(
        logits,
        bias,
        top_k,
        num_groups=num_groups,
        topk_group=topk_group,
        renormalize=renormalize,
        scaling=scaling,
        token_mask=token_mask,
        histogram=histogram,
    )


def _fused(logits, bias, top_k, num_groups, topk_group, impl):
    """The Triton implementation; for "auto" the reference where the kernels cannot take the inputs."""
    from .fused import route_fused, supports

    refused = supports(logits, bias, top_k, num_groups, topk_group)
    if refused and impl == "triton":
        raise ValueError(f"impl: 'triton' was asked for, but {refused}")
    return route_reference if refused else traceable("route", route_fused)


def _check_numbers(num_experts: int, top_k: int, num_groups: int, topk_group: int) -> None:
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups: expected a divisor of E = {num_experts}, got {num_groups}")
    if not 1 <= topk_group <= num_groups:
        raise ValueError(f"topk_group: expected 1 to num_groups = {num_groups}, got {topk_group}")
    eligible = num_experts // num_groups * topk_group
    if not 1 <= top_k <= eligible:
        raise ValueError(f"top_k: expected 1 to {eligible} eligible experts, got {top_k}")
