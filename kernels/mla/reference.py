"""The definition of absorbed MLA, in torch."""

import torch

from ..dispatch import compute_dtype, without_autocast


@without_autocast
def mla_decode_reference(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """o = softmax((q_latent . latent + q_rope . k_rope) scale) latent; see `mla_decode`."""
    dtype = compute_dtype(q_latent)
    c = latent.to(dtype)  # [B, S, R]
    scores = torch.einsum("bthr,bsr->bhts", q_latent.to(dtype), c)
    scores = (scores + torch.einsum("bthp,bsp->bhts", q_rope.to(dtype), k_rope.to(dtype))) * scale  # [B, H, T, S]

    if mask is not None and mask.is_floating_point():
        scores = scores + mask.to(dtype)
    hidden = _hidden_keys(mask, scores.shape[-2], scores.shape[-1], scores.device)
    # A finite fill keeps a row without any visible key, and its gradients, free of NaN; the second fill makes it zeros.
    p = scores.masked_fill(hidden, torch.finfo(dtype).min).softmax(dim=-1).masked_fill(hidden, 0.0)
    return torch.einsum("bhts,bsr->bthr", p, c).to(q_latent.dtype)


def _hidden_keys(mask: torch.Tensor | None, T: int, S: int, device: torch.device) -> torch.Tensor:
    """True where a query must not see a key: [T, S] without a mask, else [B, 1, T, S]."""
    if mask is None:
        return torch.ones(T, S, dtype=torch.bool, device=device).triu(diagonal=S - T + 1)
    if mask.dtype == torch.bool:
        return ~mask
    return mask <= torch.finfo(mask.dtype).min
