"""The model that a run begins with: built once, on the first process, and handed out in shards."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from ..adapters import add_lora, freeze_packed_experts, lora_targets
from ..configuration.configuration_moe_lc import MoeLcConfig, MoeLcTextConfig
from ..configuration.presets import load_multimodal_preset, load_preset, preset_names
from ..conversion.layouts import check_model_type
from ..modeling_moe_lc import MoeLcDecoderLayer, MoeLcForCausalLM
from ..modeling_moe_lc_vl import MoeLcForConditionalGeneration
from ..quantizer_mxfp4 import MoeLcMxfp4Config, make_room_for_packed_experts
from .checkpointing import checkpoint_activations
from .low_precision import LowPrecision
from .optim import adamw, initialise, muon
from .processes import Processes, shard
from .random_state import seed_all
from .recipe import Recipe


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
Config = MoeLcTextConfig | MoeLcConfig
Model = MoeLcForCausalLM | MoeLcForConditionalGeneration
COMPILED_VARIANTS = 64  # of one layer function: kinds of layers x blocks before them x lengths of stages


def model_config(recipe: Recipe) -> Config:
    """The configuration of the base with the recipe's fields in place of its own.

    Raises:
        ValueError: fields that do not fit together; a folder with an adapter, or with another model; a base without experts
            in MXFP4 where these are to stay packed.
    """
    _check_base(recipe.model.base)
    base, overrides = recipe.model.base, recipe.config_overrides
    config: Config
    try:
        if recipe.model.vision is not None:
            config = _multimodal_config(base, overrides, recipe.model.vision)
        elif base in preset_names():
            config = load_preset(base, **overrides)
        else:
            config = MoeLcTextConfig.from_pretrained(base, **overrides)
    except OSError as error:  # of transformers, in many lines
        known = "a preset, a folder or a model of the Hub that can be reached"
        raise ValueError(f"model.base: expected {known}, got {base!r}: {str(error).splitlines()[0]}") from error
    if not recipe.model.dequantize and config.get_text_config().expert_quantization is None:
        raise ValueError(
            f"model.dequantize: expected true for {base}, whose experts are not in MXFP4 "
            f"(`moe-lc convert {base} OUT --dtype mxfp4` makes a base whose experts are), got False"
        )
    if recipe.model.attn_implementation is not None:
        config._attn_implementation = recipe.model.attn_implementation
    if recipe.model.experts_implementation is not None:
        config._experts_implementation = recipe.model.experts_implementation
    return config


def _check_base(base: str) -> None:
    """Of a folder: without a `config.json` transformers would make up a model of tens of billions of parameters."""
    folder = Path(base)
    if base in preset_names() or not folder.is_dir():
        return
    if not (folder / "config.json").is_file():
        is_adapter = (folder / "adapter_config.json").is_file()
        got = f"an adapter in {base} (`moe-lc merge BASE {base} OUT` makes a model)" if is_adapter else base
        raise ValueError(f"model.base: expected a folder with a config.json, got {got}")
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    check_model_type(raw, f"model.base: model_type of {base}")


def _multimodal_config(base: str, overrides: dict[str, Any], vision: dict[str, Any]) -> MoeLcConfig:
    if base in preset_names():
        return load_multimodal_preset(base, vision_config=vision, **overrides)
    fields = MoeLcConfig.from_pretrained(base).to_dict()
    for part, changes in (("text_config", overrides), ("vision_config", vision)):
        fields[part] = {**fields[part], **changes}
    return MoeLcConfig(**fields)


def model_class(config: Config) -> type[Model]:
    return MoeLcForConditionalGeneration if isinstance(config, MoeLcConfig) else MoeLcForCausalLM


def build_model(recipe: Recipe, config: Config, processes: Processes) -> Model:
    """The model of a recipe for training, sharded over all processes if there are several. What is trained is in FP32 (FP64
    where it computes in FP64), what an adapter freezes in the dtype of the computation. All hold nothing yet: `fill_model` or
    a checkpoint does that."""
    dtype = DTYPES[recipe.model.dtype]
    with torch.device("meta"), _default_dtype(_begun_with(recipe)):
        model = model_class(config)(config)
        if not recipe.model.dequantize:
            make_room_for_packed_experts(model)
    _adapt(model, recipe)
    freeze_packed_experts(model)
    if processes.count > 1:
        shard(model, processes.mesh(1)["data"], dtype)
    model.to_empty(device=processes.device)
    model.tie_weights()
    _zero_counters(model)
    if recipe.model.activation_checkpointing:
        checkpoint_activations(model, keep_attention=not recipe.model.compile, random=_has_dropout(recipe))
    if recipe.model.compile:
        torch._dynamo.config.recompile_limit = COMPILED_VARIANTS
        for layer in model.modules():
            if isinstance(layer, MoeLcDecoderLayer):
                layer.compile()
    return model.train()


def fill_model(model: Model, recipe: Recipe, processes: Processes) -> None:
    """Gives every process its shards of the parameters and buffers that the run begins with, and a random state."""
    source = _whole(recipe, model.config) if processes.is_main else None
    if source is not None:
        _adapt(source, recipe)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, {} if source is None else source.state_dict(), options=options)
    seed_all(recipe.seed, 0, processes.rank)


def low_precision(recipe: Recipe, model: nn.Module, processes: Processes) -> LowPrecision:
    """What a model that one process has for itself computes in; FSDP2 has seen to that where it is shared."""
    return LowPrecision(model, DTYPES[recipe.model.dtype] if processes.count == 1 else _stored(recipe))


def use_graphs(recipe: Recipe, processes: Processes, *, pictures: bool) -> bool:
    """Whether the parts of a step become CUDA graphs.

    Raises:
        ValueError: they were asked for, but another device, another dtype or backend (some of whose operators wait for the
            device), pictures, context parallelism or dropout do not allow it.
    """
    model, device = recipe.model, processes.device.type
    obstacles = {
        device: device != "cuda",
        model.dtype: model.dtype != "bfloat16",
        f"{model.attn_implementation} attention": model.attn_implementation in ("eager", "moe_lc_reference"),
        "pictures": pictures,
        "context parallelism": any(stage.context_parallel > 1 for stage in recipe.stages),
        "dropout": _has_dropout(recipe),
    }
    got = [name for name, is_there in obstacles.items() if is_there]
    if model.cuda_graphs and got:
        raise ValueError(
            "model.cuda_graphs: expected bfloat16 on a CUDA device, text, a sequence on one GPU and no dropout, "
            f"got {', '.join(got)}"
        )
    return not got and not model.compile if model.cuda_graphs is None else model.cuda_graphs


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


def is_partly_frozen(model: nn.Module) -> bool:
    return any(not parameter.requires_grad for parameter in model.parameters())


def _stored(recipe: Recipe) -> torch.dtype:
    """Of what is trained, and of the optimiser."""
    return torch.promote_types(DTYPES[recipe.model.dtype], torch.float32)


def _has_dropout(recipe: Recipe) -> bool:
    return recipe.adapter is not None and recipe.adapter.dropout > 0


def _begun_with(recipe: Recipe) -> torch.dtype:
    """Of the model before an adapter is put on it."""
    return _stored(recipe) if recipe.adapter is None else DTYPES[recipe.model.dtype]


def _adapt(model: Model, recipe: Recipe) -> None:
    """Puts the adapter of the recipe on `model`, in place: the same one, whenever this is called."""
    settings = recipe.adapter
    if settings is None:
        return
    from peft import LoraConfig

    torch.manual_seed(recipe.seed)
    targets = lora_targets(*settings.targets, config=model.config)
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        task_type="CAUSAL_LM",
        **targets,
    )
    add_lora(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(_stored(recipe))  # packed experts have no dtype that PEFT could take
    config.base_model_name_or_path = recipe.model.base  # PEFT knows it of models that were loaded, not built


def _whole(recipe: Recipe, config: Config) -> Model:
    """On the CPU of one process."""
    if recipe.model.start == "continue":
        packed = {} if recipe.model.dequantize else {"quantization_config": MoeLcMxfp4Config(dequantize=False)}
        kind, dtype = model_class(config), _begun_with(recipe)
        model, report = kind.from_pretrained(
            recipe.model.base, config=config, dtype=dtype, output_loading_info=True, **packed
        )
        # Parts that the recipe adds to the base begin anew.
        if (missing := sorted(report["missing_keys"])) and not (
            recipe.model.config or recipe.model.vision is not None
        ):
            raise ValueError(
                f"model.base: expected all weights in {recipe.model.base}, got none for {', '.join(missing)}"
            )
        return model
    torch.manual_seed(recipe.seed)
    with _default_dtype(_stored(recipe)):
        model = model_class(config)(config)
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
