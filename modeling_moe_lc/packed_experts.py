"""Routed experts whose weights stay in MXFP4: 0.27 of the bytes of BF16, frozen, dequantised where they are used."""

import torch
from torch import nn

from .backends import operator_impl
from .kernels.mxfp4 import dequantize_mxfp4, expert_mlp_mxfp4, quantize_mxfp4, requantize_mxfp4


class PackedExperts(nn.Module):
    """Stands in for `MoeLcExperts`, with buffers of bytes for its parameters.

    gate_up_proj_packed `[E, 2I, D / 2]` and down_proj_packed `[E, D, I / 2]` are the released bytes, gate rows first.
    gate_up_proj_scale `[E, D / 32, 2I]` and down_proj_scale `[E, I / 32, D]` have the rows in the last dimension: a tile of
    rows finds its scales for 32 inputs side by side, like the 16 bytes of a row's 32 codes.
    """

    def __init__(self, config, plain: type[nn.Module]):
        super().__init__()
        self.config = config
        self.plain = plain  # what this becomes when it is dequantised
        self.num_experts = config.num_experts
        self.hidden_dim = config.expert_hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        E, D, I = self.num_experts, self.hidden_dim, self.intermediate_dim
        for name, rows, inputs in (("gate_up_proj", 2 * I, D), ("down_proj", D, I)):
            self.register_buffer(f"{name}_packed", torch.empty(E, rows, inputs // 2, dtype=torch.uint8))
            self.register_buffer(f"{name}_scale", torch.empty(E, inputs // 32, rows, dtype=torch.uint8))

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        """`[N, D]`, experts `[N, k]` and their weights -> `[N, D]`."""
        caps = dict(zip(("beta", "linear_beta"), self.config.glu_caps, strict=True))
        return expert_mlp_mxfp4(
            hidden_states, top_k_index, top_k_weights,
            self.gate_up_proj_packed, self.gate_up_proj_scale, self.down_proj_packed, self.down_proj_scale,
            **caps, impl=self._impl(),
        )  # fmt: skip

    def _impl(self) -> str:
        asked = self.config._experts_implementation
        if asked == "moe_lc_triton":
            return "triton"
        if asked not in (None, "eager"):
            raise ValueError(f"experts_implementation: expected 'eager' with experts in MXFP4, got {asked!r}")
        return operator_impl(self.config)

    @classmethod
    @torch.no_grad()
    def pack(cls, experts: nn.Module) -> "PackedExperts":
        """The packed twin of `experts`, expert by expert; those that came out of MXFP4 get back their bytes."""
        with torch.device(experts.down_proj.device):
            packed = cls(experts.config, type(experts))
        for name, parts in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
            for e, weight in enumerate(getattr(experts, name)):  # [rows, in]
                kept = [experts.released_scales.get(f"{e}.{part}.weight") for part in parts]
                known = None not in kept
                codes, scales = (
                    requantize_mxfp4(weight, torch.cat(kept).to(weight.device)) if known else quantize_mxfp4(weight)
                )
                getattr(packed, f"{name}_packed")[e] = codes
                getattr(packed, f"{name}_scale")[e] = scales.mT
        return packed

    @torch.no_grad()
    def unpack(self, dtype: torch.dtype) -> nn.Module:
        """The plain experts, in `dtype`."""
        device = self.down_proj_packed.device
        with torch.device(device):
            experts = self.plain(self.config).to(dtype)
        for name, parts in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
            for e, weight in enumerate(getattr(experts, name)):
                scales = getattr(self, f"{name}_scale")[e].mT
                weight.copy_(dequantize_mxfp4(getattr(self, f"{name}_packed")[e], scales, dtype))
                for part, kept in zip(parts, scales.cpu().chunk(len(parts)), strict=True):
                    experts.released_scales[f"{e}.{part}.weight"] = kept.clone()
        return experts
