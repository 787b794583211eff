"""The public face of the block attention residual mix."""

from collections.abc import Sequence

import torch

from ..checks import check_floating, check_shape
from ..dispatch import choose
from .reference import attn_res_reference


MAX_BLOCKS = 16


def attn_res(
    blocks: Sequence[torch.Tensor],
    partial: torch.Tensor | None,
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """Mix what earlier depths have written, by a softmax over the sources, per token.

    Args:
        blocks: 1 to 16 tensors [..., D], the finished block representations, oldest first.
        partial: [..., D], the running sum of the unfinished block as one more source; None right after a block border.
        query: [D], the pseudo-query of this site. Zeros give the plain mean of the sources.
        norm_weight: [D], weight of the RMS norm of the keys. The values are not normalised.
        eps: added to the mean square of a key, > 0.
        impl: "auto", "triton" or "reference".

    Returns:
        [..., D] in the dtype of the sources (the widest of them), computed in FP32, or FP64 for FP64 sources.

    Raises:
        ValueError: no block or more than 16, shapes that differ, a dtype that is not floating point, eps <= 0.

    Source: Kimi K3 technical report, block attention residuals (eq. 10).
    """
    if isinstance(blocks, torch.Tensor) or not 1 <= len(blocks) <= MAX_BLOCKS:
        got = f"a tensor {list(blocks.shape)}" if isinstance(blocks, torch.Tensor) else f"{len(blocks)} tensors"
        raise ValueError(f"blocks: expected a sequence of 1 to {MAX_BLOCKS} tensors, got {got}")
    named = [(f"blocks[{j}]", block) for j, block in enumerate(blocks)]
    if partial is not None:
        named.append(("partial", partial))
    shape = blocks[0].shape
    for name, source in named:
        check_floating(name, source)
        if source.ndim == 0 or source.shape != shape:
            raise ValueError(f"{name}: expected [..., D] = {list(shape)} like blocks[0], got {list(source.shape)}")
    dims = {"D": shape[-1]}
    for name, vector in (("query", query), ("norm_weight", norm_weight)):
        check_floating(name, vector)
        check_shape(name, vector, "D", dims)
    if not eps > 0:
        raise ValueError(f"eps: expected a number > 0, got {eps}")

    choose(impl, blocks[0], triton=False)
    return attn_res_reference([source for _, source in named], query, norm_weight, eps)
