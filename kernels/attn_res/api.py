"""The public face of the block attention residual mix, alone and with the norm behind it."""

from collections.abc import Sequence

import torch

from ..checks import check_floating, check_shape
from ..dispatch import choose, traceable
from .reference import attn_res_norm_reference, attn_res_reference


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
    sources = _check(blocks, partial, query, norm_weight, eps)
    run = _fused(sources, (query, norm_weight), impl)[0] if _is_triton(impl, sources) else attn_res_reference
    return run(sources, query, norm_weight, eps)


def attn_res_norm(
    blocks: Sequence[torch.Tensor],
    partial: torch.Tensor | None,
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    out_norm_weight: torch.Tensor,
    out_eps: float,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """`rms_norm(attn_res(...), out_norm_weight, out_eps)`: the mix and the norm of the sublayer behind it, in one launch.

    Args:
        blocks, partial, query, norm_weight, eps, impl: as in `attn_res`.
        out_norm_weight: [D], weight of the norm of the mix.
        out_eps: added to the mean square of the mix, > 0.

    Returns:
        [..., D] in the dtype that the product of the mix and `out_norm_weight` has: the widest of both.

    Raises:
        ValueError: as `attn_res`; `out_norm_weight` of another shape, out_eps <= 0.
    """
    sources = _check(blocks, partial, query, norm_weight, eps)
    check_floating("out_norm_weight", out_norm_weight)
    check_shape("out_norm_weight", out_norm_weight, "D", {"D": query.shape[0]})
    if not out_eps > 0:
        raise ValueError(f"out_eps: expected a number > 0, got {out_eps}")
    vectors = (query, norm_weight, out_norm_weight)
    run = _fused(sources, vectors, impl)[1] if _is_triton(impl, sources) else attn_res_norm_reference
    return run(sources, query, norm_weight, eps, out_norm_weight, out_eps)


def attn_res_norm_through(
    blocks: Sequence[torch.Tensor],
    partial: torch.Tensor | None,
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    out_norm_weight: torch.Tensor,
    out_eps: float,
    *,
    impl: str = "auto",
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor | None]:
    """`attn_res_norm`, then `blocks` and `partial` as they came: what reads these sources later should take them from here.

    The gradients that they get there are then added up inside the backward launch of this site, instead of one by one in
    a launch of their own; nothing else differs. Arguments, errors as `attn_res_norm`.
    """
    sources = _check(blocks, partial, query, norm_weight, eps)
    if _is_triton(impl, sources) and not torch.compiler.is_compiling():
        from .fused import attn_res_norm_through_fused, supports

        if supports(sources, query, norm_weight, out_norm_weight) is None:
            arguments = query, norm_weight, eps, out_norm_weight, out_eps
            y, sources = attn_res_norm_through_fused(sources, *arguments)
            return (y, sources, None) if partial is None else (y, sources[:-1], sources[-1])
    y = attn_res_norm(blocks, partial, query, norm_weight, eps, out_norm_weight, out_eps, impl=impl)
    return y, list(blocks), partial


def _check(blocks, partial, query, norm_weight, eps) -> list[torch.Tensor]:
    """The sources in one list."""
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
    return [source for _, source in named]


def _is_triton(impl, sources) -> bool:
    return choose(impl, sources[0], triton=True) == "triton"


def _fused(sources, vectors, impl):
    """The Triton implementations of both functions; for "auto" the references where the kernels cannot take the inputs."""
    from .fused import attn_res_fused, attn_res_norm_fused, supports

    refused = supports(sources, *vectors)
    if refused and impl == "triton":
        raise ValueError(f"impl: 'triton' was asked for, but {refused}")
    if refused:
        return attn_res_reference, attn_res_norm_reference
    return traceable("attn_res", attn_res_fused), traceable("attn_res_norm", attn_res_norm_fused)
