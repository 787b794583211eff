"""The definition of the block attention residual mix, in torch."""

import functools

import torch

from ..dispatch import compute_dtype, without_autocast
from ..rms_norm.reference import rms_norm_reference


@without_autocast
def attn_res_reference(
    sources: list[torch.Tensor], query: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """h = sum_j softmax_j(<w * n, v_j / rms(v_j)>) v_j over the `sources` v_j [..., D]; see `attn_res`.

    The norm is one factor per token, so it is applied to the score: no normalised key is ever formed.
    """
    out_dtype = functools.reduce(torch.promote_types, (source.dtype for source in sources))
    dtype = compute_dtype(torch.empty((), dtype=out_dtype))
    values = [source.to(dtype) for source in sources]
    weighted_query = query.to(dtype) * norm_weight.to(dtype)  # [D]

    scores = [
        torch.linalg.vecdot(v, weighted_query) * torch.rsqrt(v.square().mean(-1) + eps)  # [...]
        for v in values
    ]
    probabilities = torch.stack(scores, dim=-1).softmax(dim=-1)  # [..., M]
    mixed = sum(p.unsqueeze(-1) * v for p, v in zip(probabilities.unbind(-1), values))  # [..., D]
    return mixed.to(out_dtype)


def attn_res_norm_reference(
    sources: list[torch.Tensor],
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    out_norm_weight: torch.Tensor,
    out_eps: float,
) -> torch.Tensor:
    """The RMS norm of the mix, which is rounded to the dtype of the sources before; see `attn_res_norm`."""
    return rms_norm_reference(attn_res_reference(sources, query, norm_weight, eps), out_norm_weight, out_eps)
