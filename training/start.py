"""The model that a run begins with: built once, on the first process, and handed out in shards."""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from ..configuration.configuration_moe_lc import MoeLcTextConfig
from ..configuration.presets import load_preset, preset_names
from ..modeling_moe_lc import MoeLcForCausalLM
from .optim import adamw, initialise, muon
from .processes import Processes, shard
from .recipe import Recipe


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def start_model(recipe: Recipe, processes: Processes) -> MoeLcForCausalLM:
    """The model of a recipe, sharded over all processes, with FP32 parameters (FP64 where it computes in FP64).

    Raises:
        ValueError: a config that does not fit together.
    """
    dtype = DTYPES[recipe.model.dtype]
    stored = torch.promote_types(dtype, torch.float32)
    config = model_config(recipe)
    with torch.device("meta"), _default_dtype(stored):
        model = MoeLcForCausalLM(config)
    shard(model, processes.mesh(1)["data"], dtype)
    model.to_empty(device=processes.device)
    source = _whole(recipe, config, stored) if processes.is_main else None
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, {} if source is None else source.state_dict(), options=options)
    _zero_counters(model)
    model.tie_weights()
    if recipe.model.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if recipe.model.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    return model.train()


def start_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    settings = recipe.optimizer
    common = {"weight_decay": settings.weight_decay, "betas": settings.betas, "embedding_rate": recipe.embedding_rate}
    if settings.kind == "adamw":
        return adamw(model, **common)
    return muon(model, **common, momentum=recipe.momentum, router_on_muon=settings.router_on_muon)


def model_config(recipe: Recipe) -> MoeLcTextConfig:
    """The configuration of the base with the recipe's fields in place of its own."""
    base, overrides = recipe.model.base, recipe.config_overrides
    is_preset = base in preset_names()
    config = load_preset(base, **overrides) if is_preset else MoeLcTextConfig.from_pretrained(base, **overrides)
    if recipe.model.attn_implementation is not None:
        config._attn_implementation = recipe.model.attn_implementation
    if recipe.model.experts_implementation is not None:
        config._experts_implementation = recipe.model.experts_implementation
    return config


def _whole(recipe: Recipe, config: MoeLcTextConfig, dtype: torch.dtype) -> MoeLcForCausalLM:
    """On the CPU of one process."""
    if recipe.model.start == "continue":
        return MoeLcForCausalLM.from_pretrained(recipe.model.base, config=config, dtype=dtype)
    torch.manual_seed(recipe.seed)
    with _default_dtype(dtype):
        model = MoeLcForCausalLM(config)
    initialise(model)
    return model


def _zero_counters(model: nn.Module) -> None:
    """What is not saved: no state dict fills it."""
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            buffer = getattr(module, name)
            if buffer is not None:
                buffer.zero_()


class _default_dtype:
    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)
