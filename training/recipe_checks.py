"""What a recipe must not say: values out of range, and fields that contradict each other."""

import dataclasses
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..adapters import GROUPS, PARAMETERS
from ..configuration.checks import check_router_balance
from ..configuration.configuration_moe_lc import ROUTER_BALANCE_DEFAULTS, MoeLcTextConfig, MoeLcVisionConfig
from ..configuration.presets import (
    load_multimodal_preset,
    load_preset,
    multimodal_preset_names,
    preset_names,
    unknown_fields,
)


if TYPE_CHECKING:
    from .recipe import Recipe, Stage

NAME = re.compile(r"[A-Za-z0-9_-]+")  # without a dot: it is part of dotted names
# Where each of them is said instead.
ELSEWHERE = {
    "router_balance": "router_balance",
    "loss_chunk_size": "model.loss_chunk_size",
    "dtype": "model.dtype",
}


def contradictions(recipe: "Recipe") -> Iterator[str]:
    """Everything wrong with a recipe whose types are right: `field: expected ..., got ...`."""
    out_of_range = [
        *_numbers(recipe),
        *_balance(recipe),
        *_data(recipe),
        *_chat(recipe),
        *_adapter(recipe),
        *_optimizer(recipe),
        *_trackers(recipe),
        *_stage_names(recipe),
    ]
    for number, stage in enumerate(recipe.stages):
        out_of_range += _stage(recipe, f"stages.{number}", stage)
    yield from out_of_range
    if not out_of_range:
        yield from _model(recipe)
        yield from _tokens(recipe)


def _expect(condition: bool, name: str, expected: str, got: Any) -> Iterator[str]:
    if not condition:
        yield f"{name}: expected {expected}, got {got!r}"


def _positive(values: dict[str, float | None]) -> Iterator[str]:
    for name, value in values.items():
        yield from _expect(value is None or value > 0, name, "more than 0", value)


def _numbers(recipe: "Recipe") -> Iterator[str]:
    local = bool(recipe.output_dir) and "://" not in recipe.output_dir
    yield from _expect(local, "output_dir", "a local folder (checkpoints.folder may be a URL)", recipe.output_dir)
    yield from _expect(0 <= recipe.seed < 1 << 63, "seed", "0 to 2^63 - 1", recipe.seed)
    yield from _positive(
        {
            "tokens_per_step": recipe.tokens_per_step,
            "model.loss_chunk_size": recipe.model.loss_chunk_size,
            "data.validation_tokens": recipe.data.validation_tokens,
            "checkpoints.every_minutes": recipe.checkpoints.every_minutes,
            "checkpoints.every_steps": recipe.checkpoints.every_steps,
            "checkpoints.keep": recipe.checkpoints.keep,
            "logging.every_steps": recipe.logging.every_steps,
            "logging.evaluate_every_steps": recipe.logging.evaluate_every_steps,
            "limits.max_minutes": recipe.limits.max_minutes,
        }
    )


def _balance(recipe: "Recipe") -> Iterator[str]:
    some_config = SimpleNamespace(
        router_balance=dataclasses.asdict(recipe.balance),
        num_expert_group=1,
        num_experts=2,
        num_experts_per_token=1,
    )
    try:
        check_router_balance(some_config, ROUTER_BALANCE_DEFAULTS)
    except ValueError as error:
        yield str(error)


def _data(recipe: "Recipe") -> Iterator[str]:
    folders = recipe.data.folders
    yield from _expect(bool(folders), "data.folders", "at least one", folders)
    for name, folder in folders.items():
        yield from _expect(
            bool(NAME.fullmatch(name)), f"data.folders.{name}", "letters, digits, _ and - as name", name
        )
        same = [other for other in folders if folders[other] == folder]
        yield from _expect(name == same[0], f"data.folders.{name}", f"another folder than {same[0]}", folder)


def _chat(recipe: "Recipe") -> Iterator[str]:
    chat, known = recipe.chat, ", ".join(recipe.data.folders)
    for name in chat.sources:
        here = name in recipe.data.folders
        yield from _expect(here, f"chat.sources.{name}", f"a name in data.folders ({known})", name)
    share = chat.validation_share
    yield from _expect(0 < share < 1, "chat.validation_share", "more than 0 and below 1", share)


def _adapter(recipe: "Recipe") -> Iterator[str]:
    adapter, model = recipe.adapter, recipe.model
    if recipe.finetunes:
        yield from _expect(model.start == "continue", "model.start", "'continue' in fine-tuning", model.start)
    if not model.dequantize:
        alone = "true without an adapter, since packed experts are frozen"
        yield from _expect(adapter is not None, "model.dequantize", alone, False)
        implementation, packed = model.experts_implementation, "null, 'eager' or 'moe_lc_triton' with packed experts"
        known = implementation in (None, "eager", "moe_lc_triton")
        yield from _expect(known, "model.experts_implementation", packed, implementation)
    if adapter is None:
        return
    yield from _positive({"adapter.r": adapter.r, "adapter.alpha": adapter.alpha})
    yield from _expect(bool(adapter.targets), "adapter.targets", f"some of {', '.join(GROUPS)}", adapter.targets)
    for number, group in enumerate(adapter.targets):
        yield from _expect(group in GROUPS, f"adapter.targets.{number}", f"one of {', '.join(GROUPS)}", group)
    dropout, without = adapter.dropout, " and ".join(group for group in PARAMETERS if group in adapter.targets)
    yield from _expect(0 <= dropout < 1, "adapter.dropout", "at least 0 and below 1", dropout)
    if dropout < 1:
        yield from _expect(not (dropout and without), "adapter.dropout", f"0 on {without}", dropout)
    method, kind = recipe.balance.method, recipe.optimizer.kind
    kept = "'none' with an adapter, whose files do not hold the routers' biases"
    yield from _expect(method == "none", "router_balance.method", kept, method)
    yield from _expect(kind == "adamw", "optimizer.kind", "'adamw' with an adapter", kind)
    yield from _expect(not model.compile, "model.compile", "false with an adapter", model.compile)


def _optimizer(recipe: "Recipe") -> Iterator[str]:
    settings = recipe.optimizer
    yield from _positive(
        {
            "optimizer.learning_rate": settings.learning_rate,
            "optimizer.clip_norm": settings.clip_norm,
            "optimizer.embedding_rate": settings.embedding_rate,
        }
    )
    shares = {"betas.0": settings.betas[0], "betas.1": settings.betas[1], "warmup_share": settings.warmup_share}
    for name, value in {**shares, "momentum": settings.momentum}.items():
        yield from _expect(value is None or 0 <= value < 1, f"optimizer.{name}", "at least 0 and below 1", value)
    decay, end, share = settings.weight_decay, settings.end_factor, settings.decay_share
    yield from _expect(decay >= 0, "optimizer.weight_decay", "at least 0", decay)
    yield from _expect(0 <= end <= 1, "optimizer.end_factor", "0 to 1: the rate falls", end)
    yield from _expect(share is None or 0 < share <= 1, "optimizer.decay_share", "more than 0, at most 1", share)
    if settings.schedule != "wsd":
        yield from _expect(share is None, "optimizer.decay_share", "null unless schedule is 'wsd'", share)
    if settings.kind != "muon":
        momentum, router = settings.momentum, settings.router_on_muon
        yield from _expect(momentum is None, "optimizer.momentum", "null unless kind is 'muon'", momentum)
        yield from _expect(not router, "optimizer.router_on_muon", "false unless kind is 'muon'", router)


def _trackers(recipe: "Recipe") -> Iterator[str]:
    if not recipe.logging.trackers:
        return
    from accelerate.utils import LoggerType  # takes a second to import

    known = [one.value for one in LoggerType]
    for number, name in enumerate(recipe.logging.trackers):
        yield from _expect(name in known, f"logging.trackers.{number}", f"one of {', '.join(known)}", name)


def _stage_names(recipe: "Recipe") -> Iterator[str]:
    yield from _expect(bool(recipe.stages), "stages", "at least one", recipe.stages)
    names = [stage.name for stage in recipe.stages]
    for number, name in enumerate(names):
        field = f"stages.{number}.name"
        yield from _expect(bool(NAME.fullmatch(name)), field, "letters, digits, _ and -", name)
        yield from _expect(name not in names[:number], field, "a name of its own", name)


def _stage(recipe: "Recipe", name: str, stage: "Stage") -> Iterator[str]:
    yield from _positive(
        {
            f"{name}.{field}": getattr(stage, field)
            for field in ("sequence_length", "tokens", "tokens_per_step", "micro_batch", "context_parallel")
        }
    )
    if stage.mixture is not None:
        yield from _expect(
            bool(stage.mixture), f"{name}.mixture", "at least one folder, or null for all", stage.mixture
        )
        for folder, weight in stage.mixture.items():
            field, known = f"{name}.mixture.{folder}", ", ".join(recipe.data.folders)
            yield from _expect(folder in recipe.data.folders, field, f"a name in data.folders ({known})", folder)
            yield from _expect(weight > 0, field, "more than 0", weight)
    if (factor := stage.learning_rate_factor) is not None:
        field = f"{name}.learning_rate_factor"
        yield from _expect(0 < factor.start <= 1, f"{field}.start", "more than 0, at most 1", factor.start)
        yield from _expect(0 <= factor.end <= factor.start, f"{field}.end", f"0 to start ({factor.start})", factor.end)


def _model(recipe: "Recipe") -> Iterator[str]:
    model = recipe.model
    unknown = unknown_fields(MoeLcTextConfig, model.config)
    for name, value in model.config.items():
        if name in ELSEWHERE:
            yield f"model.config.{name}: expected in {ELSEWHERE[name]}, got {value!r}"
        elif name in unknown:
            yield f"model.config.{name}: expected a field of the configuration, got an unknown one"
    preset = model.base in preset_names()
    if preset and model.start == "continue":
        yield f"model.start: expected 'scratch' for the preset {model.base!r}, which has no weights, got 'continue'"
    if preset and not unknown and not ELSEWHERE.keys() & model.config:
        try:
            load_preset(model.base, **recipe.config_overrides)
        except ValueError as error:
            yield f"model.config: {error}"
        else:
            yield from _vision(recipe)


def _vision(recipe: "Recipe") -> Iterator[str]:
    model = recipe.model
    if model.vision is None:
        return
    unknown = unknown_fields(MoeLcVisionConfig, model.vision)
    for name in sorted(unknown):
        yield f"model.vision.{name}: expected a field of the tower's configuration, got an unknown one"
    towers = multimodal_preset_names()
    if model.base not in towers:
        yield f"model.vision: expected null for the preset {model.base!r}, since only {', '.join(towers)} have a tower"
    elif not unknown:
        try:
            load_multimodal_preset(model.base, vision_config=model.vision, **recipe.config_overrides)
        except ValueError as error:
            yield f"model.vision: {error}"


def _tokens(recipe: "Recipe") -> Iterator[str]:
    whole = True
    for number, stage in enumerate(recipe.stages):
        name, length, ranks = f"stages.{number}", stage.sequence_length, stage.context_parallel
        step, pass_tokens = recipe.step_tokens(number), stage.sequence_length * stage.micro_batch
        field = "tokens_per_step" if stage.tokens_per_step is None else f"{name}.tokens_per_step"
        multiple = f"a multiple of {name}.sequence_length x micro_batch ({length} x {stage.micro_batch})"
        yield from _expect(step % pass_tokens == 0, field, multiple, step)
        divisor = f"a divisor of the sequence_length {length}"
        yield from _expect(length % ranks == 0, f"{name}.context_parallel", divisor, ranks)
        whole_pictures = "1 with model.vision: the patches of a sequence are not shared"
        yield from _expect(
            recipe.model.vision is None or ranks == 1, f"{name}.context_parallel", whole_pictures, ranks
        )
        yield from _expect(stage.tokens >= step, f"{name}.tokens", f"at least one step of {step}", stage.tokens)
        whole = whole and stage.tokens >= step
    if whole:
        yield from _warmup(recipe)


def _warmup(recipe: "Recipe") -> Iterator[str]:
    share, warmup = recipe.optimizer.warmup_share, recipe.warmup_steps
    first = sum(recipe.steps[stage] for stage in recipe.scheduled_with(0))
    few = f"at most the {first} steps of the first schedule for the warm-up, which is {warmup} steps"
    yield from _expect(warmup <= first, "optimizer.warmup_share", few, share)
