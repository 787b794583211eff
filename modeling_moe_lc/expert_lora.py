"""LoRA on routed experts in split form: W x + B (A x) per expert, where PEFT's wrapper would build W + B A of the layer.

PEFT puts a `ParamWrapper` around the experts for each adapted projection. What it holds is read here; the module tree, and
so the names in a saved adapter, stay PEFT's. Without this file PEFT's own forward computes the same in its own way.
"""

import torch
from torch import nn

from .backends import operator_impl
from .kernels.experts_lora import LowRank, expert_mlp_lora, expert_mlp_lora_mxfp4


PROJECTIONS = ("gate_up_proj", "down_proj")


def run_experts(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """`experts(...)`: `[N, D]`, experts `[N, k]` and their weights -> `[N, D]`, in split form where adapters are active."""
    updates = active_updates(experts)
    if not any(updates):
        return experts(hidden_states, top_k_index, top_k_weights)
    base = experts.get_base_layer()
    config = base.config
    impl = "triton" if config._experts_implementation == "moe_lc_triton" else operator_impl(config)
    caps = dict(zip(("beta", "linear_beta"), config.glu_caps, strict=True))
    routed = hidden_states, top_k_index, top_k_weights
    if not is_packed(base):
        return expert_mlp_lora(*routed, base.gate_up_proj, base.down_proj, *updates, **caps, impl=impl)
    packed = base.gate_up_proj_packed, base.gate_up_proj_scale, base.down_proj_packed, base.down_proj_scale
    return expert_mlp_lora_mxfp4(*routed, *packed, *updates, **caps, impl=impl)


def is_packed(experts: nn.Module) -> bool:
    return hasattr(experts, "gate_up_proj_packed")


def active_updates(experts: nn.Module) -> tuple[LowRank | None, LowRank | None]:
    """Those of `gate_up_proj` and `down_proj`; None where PEFT's own forward applies none, or is asked for."""
    if not is_wrapper(experts):
        return None, None
    chain = [experts]
    while is_wrapper(chain[-1]):
        chain.append(chain[-1].base_layer)
    *wrappers, base = chain
    if any(module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook") for module in chain):
        if is_packed(base):
            raise ValueError(
                "experts in MXFP4: expected no forward hooks on them while an adapter is on them, got some"
            )
        return (
            None,
            None,
        )  # hooks want the modules called; adapters by row of a batch come as hooks too, and PEFT refuses them
    found = {wrapper.parameter_name: update_of(wrapper) for wrapper in wrappers}
    return found.get("gate_up_proj"), found.get("down_proj")


def is_wrapper(module: nn.Module) -> bool:
    """Whether it is PEFT's wrapper of a projection; PEFT itself need not be installed to know."""
    return getattr(module, "parameter_name", None) in PROJECTIONS and hasattr(module, "lora_A")


def update_of(wrapper) -> LowRank | None:
    """The update by all active adapters, their ranks side by side, scales in B. PEFT keeps A [E r, in] and B [out, r E]."""
    if wrapper.disable_adapters or wrapper.merged:
        return None
    E, names = wrapper.num_experts, [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if not names:
        return None
    a = [wrapper.lora_A[name].weight.unflatten(0, (E, -1)) for name in names]  # [E, r, in]
    b = [
        (wrapper.lora_B[name].weight * wrapper.scaling[name]).unflatten(1, (-1, E)).permute(2, 0, 1) for name in names
    ]  # [E, out, r]
    return LowRank(torch.cat(a, dim=1), torch.cat(b, dim=2))
