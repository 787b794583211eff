"""The public face of absorbed MLA."""

import torch

from ..checks import check_floating, check_shape
from ..dispatch import choose, traceable
from .reference import mla_decode_reference


def mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Attention of T new tokens over S cached ones, without expanding keys or values per head.

    Args:
        q_latent: [B, T, H, R], the no-position part of the query, already multiplied by the key half of `kv_b_proj`.
        q_rope: [B, T, H, P], the rest of the query; P may be 0.
        latent: [B, S, R], the cached latent after its norm: key and value of every head. Finite, also where masked.
        k_rope: [B, S, P], the key part that all heads share.
        scale: factor on the scores, > 0: (width of an unabsorbed key) ** -0.5.
        mask: None is causal, aligned to the end of the cache: query t sees the keys up to S - T + t. Or bool
            [B, 1, T, S], True where a key is visible; or floating point [B, 1, T, S], added to the scores, where
            -inf and the smallest number of its dtype hide a key.
        impl: "auto", "triton" or "reference"; the Triton kernels have no gradients.

    Returns:
        o_latent [B, T, H, R] in the dtype of `q_latent`, computed in FP32 (FP64 for FP64); multiply it by the value
        half of `kv_b_proj`. A query that sees no key gives zeros.

    Raises:
        ValueError: shapes that do not fit, T > S without a mask, a dtype that is not floating point, scale <= 0.

    Source: multi-head latent attention, DeepSeek-V2 (arXiv 2405.04434), section 2.1, with the up-projections absorbed.
    """
    dims: dict[str, int] = {}
    for name, tensor, spec in (
        ("q_latent", q_latent, "B T H R"),
        ("q_rope", q_rope, "B T H P"),
        ("latent", latent, "B S R"),
        ("k_rope", k_rope, "B S P"),
    ):
        check_floating(name, tensor)
        check_shape(name, tensor, spec, dims)
    if not scale > 0:
        raise ValueError(f"scale: expected a number > 0, got {scale}")
    if mask is not None:
        check_shape("mask", mask, "B 1 T S", dims)
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(f"mask: expected bool or a floating point dtype, got {mask.dtype}")
    elif dims["T"] > dims["S"]:
        raise ValueError(
            f"latent: expected at least T = {dims['T']} cached tokens for a causal call without mask, got {dims['S']}"
        )

    inputs = q_latent, q_rope, latent, k_rope
    run = _fused(*inputs, mask, impl) if choose(impl, q_latent, triton=True) == "triton" else mla_decode_reference
    return run(*inputs, scale=scale, mask=mask)


def _fused(q_latent, q_rope, latent, k_rope, mask, impl):
    """The Triton implementation; for "auto" the reference where the kernels cannot take the inputs, or for gradients."""
    from .fused import mla_decode_fused, supports

    refused = supports(q_latent, q_rope, latent, k_rope, mask)
    if refused and impl == "triton":
        raise ValueError(f"impl: 'triton' was asked for, but {refused}")
    return mla_decode_reference if refused else traceable("mla_decode", mla_decode_fused)
