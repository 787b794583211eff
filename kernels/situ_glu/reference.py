"""The definition of SiTU-GLU, in torch."""

import torch

from ..dispatch import compute_dtype, without_autocast


@without_autocast
def situ_glu_reference(gate_up: torch.Tensor, beta: float | None, linear_beta: float | None) -> torch.Tensor:
    """SiTU(g, u) for `gate_up` [..., 2I]; see `situ_glu`."""
    gate, up = gate_up.to(compute_dtype(gate_up)).chunk(2, dim=-1)  # [..., I] each
    return (_capped(gate, beta) * gate.sigmoid() * _capped(up, linear_beta)).to(gate_up.dtype)


def _capped(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)
