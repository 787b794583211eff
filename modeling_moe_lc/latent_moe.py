"""Stable LatentMoE: routed experts that work in a narrow latent, beside shared experts in full width."""

import torch
from torch import nn
from transformers.integrations.moe import use_experts_implementation

from .backends import operator_impl
from .expert_lora import run_experts
from .kernels.experts import expert_mlp
from .kernels.situ_glu import situ_glu
from .norm import RMSNorm
from .router import Router
from .situ_glu import SiTUGLU


@use_experts_implementation
class MoeLcExperts(nn.Module):
    """All routed experts of a layer in two tensors (gate rows first), the layout of grouped GEMMs and of PEFT."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_experts
        self.hidden_dim = config.expert_hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))
        self.released_scales: dict[str, torch.Tensor] = {}  # of MXFP4 weights: released_experts.py

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """What transformers' own expert backends call between the two products."""
        return situ_glu(gate_up, *self.config.glu_caps, impl=operator_impl(self.config))

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        return self.mlp(hidden_states, top_k_index, top_k_weights, operator_impl(self.config))

    def mlp(self, hidden_states, top_k_index, top_k_weights, impl: str) -> torch.Tensor:
        """`[N, D]`, experts `[N, k]` and their weights -> `[N, D]`."""
        caps = dict(zip(("beta", "linear_beta"), self.config.glu_caps, strict=True))
        return expert_mlp(
            hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj, **caps, impl=impl
        )


def triton_experts_forward(experts: MoeLcExperts, hidden_states, top_k_index, top_k_weights) -> torch.Tensor:
    """What `experts_implementation="moe_lc_triton"` runs."""
    return experts.mlp(hidden_states, top_k_index, top_k_weights, "triton")


class LatentMoE(nn.Module):
    """Router in full width; experts between a down and an up projection where the config names a latent width.

    The latent norm stands after the weighted sum of the experts and before the up projection.
    """

    def __init__(self, config):
        super().__init__()
        width, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Router(config)
        self.experts = MoeLcExperts(config)
        if latent is not None:
            self.routed_expert_down_proj = nn.Linear(width, latent, bias=False)
            self.routed_expert_up_proj = nn.Linear(latent, width, bias=False)
        self.routed_expert_norm = RMSNorm(config, latent) if config.latent_moe_use_norm else nn.Identity()
        self.has_latent = latent is not None
        shared = config.shared_intermediate_size
        self.shared_experts = SiTUGLU(config, shared) if shared else None

    def forward(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        tokens = hidden_states.flatten(0, -2)  # [N, D]
        _, weights, indices = self.gate(tokens, token_mask)  # [N, k]
        latent = self.routed_expert_down_proj(tokens) if self.has_latent else tokens  # [N, L]
        routed = self.routed_expert_norm(run_experts(self.experts, latent, indices, weights))
        routed = self.routed_expert_up_proj(routed) if self.has_latent else routed  # [N, D]
        routed = routed.view_as(hidden_states)
        return routed if self.shared_experts is None else routed + self.shared_experts(hidden_states)
