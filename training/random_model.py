"""Models of a preset's size with random weights, built on the device where they stay: the CPU holds none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..adapters import add_lora
from ..configuration.configuration_moe_lc import MoeLcTextConfig
from ..configuration.presets import load_preset
from ..modeling_moe_lc import MoeLcForCausalLM
from ..packed_experts import PackedExperts
from ..quantizer_mxfp4 import make_room_for_packed_experts


if TYPE_CHECKING:
    from peft import LoraConfig

PLAIN, PACKED = "bfloat16", "mxfp4"  # forms of the experts
SCALES = (119, 121)  # of packed experts: half the blocks 2^-8, half 2^-7, which makes their values as large as others


def first_layers(preset: str, layers: int | None, **overrides) -> MoeLcTextConfig:
    """The preset, or as many of its layers from the first on, with some fields replaced.

    A model has a layer of full attention: where the first ones have none, the last of them becomes one.

    Raises:
        ValueError: it has not so many layers; fields that do not fit together.
    """
    whole = load_preset(preset, **overrides)
    if layers is None:
        return whole
    if not 1 <= layers <= whole.num_hidden_layers:
        raise ValueError(f"layers: expected 1 to {whole.num_hidden_layers} for {preset}, got {layers}")
    kinds = ("kda_layers", "full_attn_layers")  # 1-based
    kept = {kind: [i for i in whole.linear_attn_config[kind] if i <= layers] for kind in kinds}
    if not kept["full_attn_layers"]:
        kept = {"kda_layers": kept["kda_layers"][:-1], "full_attn_layers": [layers]}
    block = whole.attn_res_block_size
    shortened = {
        "num_hidden_layers": layers,
        "linear_attn_config": {**whole.linear_attn_config, **kept},
        "attn_res_block_size": block and min(block, layers),  # the first block may be longer than all that is left
    }
    return load_preset(preset, **{**overrides, **shortened})


@torch.no_grad()
def build(
    config: MoeLcTextConfig,
    experts: str,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    lora: LoraConfig | None = None,
) -> MoeLcForCausalLM:
    """Random weights of the size of untrained ones, the same on every call.

    Args:
        experts: `PLAIN`, or `PACKED`: in MXFP4, and never in any other form.
        dtype: of all weights but those that are always in FP32.
        lora: an adapter in FP32, both of its factors random, so that both have gradients; all else is frozen then.

    Raises:
        ValueError: the adapter does not fit the model.
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        model = MoeLcForCausalLM(config)
        if experts == PACKED:
            make_room_for_packed_experts(model)
        model.to(dtype)
        if lora is not None:
            add_lora(model, lora)
    model = model.to_empty(device=device).eval()
    for module in model.modules():
        model._init_weights(module)
    for module in packed_experts(model).values():
        for buffer, stored in module.named_buffers():
            stored.random_(*SCALES) if buffer.endswith("_scale") else stored.random_(0, 256)
    return model


def packed_experts(model: torch.nn.Module) -> dict[str, PackedExperts]:
    """By name; an adapter may be on them."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedExperts)}


def random_tokens(model: MoeLcForCausalLM, count: int, seed: int) -> torch.Tensor:
    """`[1, count]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (1, count), generator=generator).to(model.device)
