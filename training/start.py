"""The model that a run begins with: built once, on the first process, and handed out in shards."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from ..configuration.configuration_moe_lc import MoeLcTextConfig
from ..configuration.presets import load_preset, preset_names
from ..modeling_moe_lc import MoeLcForCausalLM
from .optim import adamw, initialise, muon
from .processes import Processes, shard
from .random_state import seed_all
from .recipe import Recipe


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
COMPILED_VARIANTS = 64  # of one layer function: kinds of layers x blocks before them x lengths of stages


def model_config(recipe: Recipe) -> MoeLcTextConfig:
    """The configuration of the base with the recipe's fields in place of its own.

    Raises:
        ValueError: fields that do not fit together.
    """
    base, overrides = recipe.model.base, recipe.config_overrides
    is_preset = base in preset_names()
    config = load_preset(base, **overrides) if is_preset else MoeLcTextConfig.from_pretrained(base, **overrides)
    if recipe.model.attn_implementation is not None:
        config._attn_implementation = recipe.model.attn_implementation
    if recipe.model.experts_implementation is not None:
        config._experts_implementation = recipe.model.experts_implementation
    return config


def build_model(recipe: Recipe, config: MoeLcTextConfig, processes: Processes) -> MoeLcForCausalLM:
    """The model of a recipe for training, sharded over all processes, with FP32 parameters (FP64 where it computes in
    FP64). They hold nothing yet: `fill_model` or a checkpoint does that."""
    dtype = DTYPES[recipe.model.dtype]
    with torch.device("meta"), _default_dtype(_stored(recipe)):
        model = MoeLcForCausalLM(config)
    shard(model, processes.mesh(1)["data"], dtype)
    model.to_empty(device=processes.device)
    model.tie_weights()
    _zero_counters(model)
    if recipe.model.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if recipe.model.compile:
        torch._dynamo.config.recompile_limit = COMPILED_VARIANTS
        for layer in model.model.layers:
            layer.compile()
    return model.train()


def fill_model(model: MoeLcForCausalLM, recipe: Recipe, processes: Processes) -> None:
    """Gives every process its shards of the parameters and buffers that the run begins with, and a random state."""
    source = _whole(recipe, model.config) if processes.is_main else None
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, {} if source is None else source.state_dict(), options=options)
    seed_all(recipe.seed, 0, processes.rank)


def start_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    settings = recipe.optimizer
    common: dict[str, Any] = {
        "weight_decay": settings.weight_decay,
        "betas": settings.betas,
        "embedding_rate": recipe.embedding_rate,
    }
    if settings.kind == "adamw":
        return adamw(model, **common)
    return muon(model, **common, momentum=recipe.momentum, router_on_muon=settings.router_on_muon)


def _stored(recipe: Recipe) -> torch.dtype:
    """Of the parameters and the optimiser."""
    return torch.promote_types(DTYPES[recipe.model.dtype], torch.float32)


def _whole(recipe: Recipe, config: MoeLcTextConfig) -> MoeLcForCausalLM:
    """On the CPU of one process."""
    if recipe.model.start == "continue":
        return MoeLcForCausalLM.from_pretrained(recipe.model.base, config=config, dtype=_stored(recipe))
    torch.manual_seed(recipe.seed)
    with _default_dtype(_stored(recipe)):
        model = MoeLcForCausalLM(config)
    initialise(model)
    return model


def _zero_counters(model: nn.Module) -> None:
    """The buffers that are not saved: neither a start nor a checkpoint fills them."""
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name not in saved:
            buffer.zero_()


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
