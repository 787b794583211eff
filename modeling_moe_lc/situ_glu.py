"""SiTU-GLU: the gated MLP of dense layers and of shared experts (SwiGLU where the config says `silu`)."""

import torch
from torch import nn

from .backends import operator_impl
from .kernels.situ_glu import situ_glu


class SiTUGLU(nn.Module):
    """`down(SiTU(gate(x), up(x)))`; gate and up are one matrix, gate rows first, stored apart on disk."""

    def __init__(self, config, intermediate_size: int):
        super().__init__()
        self.config = config
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up_proj(hidden_states)  # [B, T, 2I]
        impl = operator_impl(self.config)
        activated = situ_glu(gate_up, *self.config.glu_caps, impl=impl)  # [B, T, I]
        return self.down_proj(activated)
