"""What a stretch of tokens does to the KDA state, as an affine map: how sequences are cut, and joined again, exactly."""

import torch

from ..checks import check_cu_seqlens
from ..dispatch import choose
from .api import _check_gate, _check_lower_bound, _check_tokens
from .reference import kda_state_map as kda_state_map_reference


@torch.no_grad()
def kda_state_map(
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None = -5.0,
    cu_seqlens: torch.Tensor | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Phi and Psi such that the state after the tokens is Phi @ S + Psi for the state S before them; without gradients.

    A sequence that lies on several devices goes on each of them from the map of its part alone; the maps, joined by
    `combine_state_maps`, give the state that every part begins with.

    Args:
        k, g: [B, T, H, K]; v: [B, T, H, V]; beta: [B, T, H]; raw, as in `kda`; so are the others.

    Returns:
        Phi [N, H, K, K] and Psi [N, H, K, V] of the N = B rows or N documents, FP32 (FP64 when `k` is FP64).

    Raises:
        ValueError: as in `kda`.
    """
    dims: dict[str, int] = {}
    _check_tokens("B T", dims, k, k, v, g, beta)
    _check_gate(dims, A_log, dt_bias)
    _check_lower_bound(lower_bound)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, dims["B"], dims["T"])
    run = _fused(k, v, lower_bound, impl) if choose(impl, k, triton=True) == "triton" else kda_state_map_reference
    return run(k, v, g, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, cu_seqlens=cu_seqlens)


def _fused(k, v, lower_bound, impl):
    from .fused import kda_state_map_fused, supports

    refused = supports(k, v, lower_bound)
    if refused and impl == "triton":
        raise ValueError(f"impl: 'triton' was asked for, but {refused}")
    return kda_state_map_reference if refused else kda_state_map_fused


def combine_state_maps(
    earlier: tuple[torch.Tensor, torch.Tensor], later: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The map (Phi, Psi) of two stretches, one after the other. Keep it in FP32: a chain of maps in less loses digits."""
    (phi, psi), (later_phi, later_psi) = earlier, later
    return later_phi @ phi, later_phi @ psi + later_psi
