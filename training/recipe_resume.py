"""What a checkpoint rests on, and so may not change before it is resumed: its state must fit, its position in the data must
mean the same. Everything else may, and holds from the next step on: speed, logging, learning rates, stages to come."""

import bisect
import hashlib
import json
from dataclasses import asdict
from typing import Any

from .recipe import Recipe


FIXED = {
    "model": ("base", "start", "config", "vision", "dtype"),
    "optimizer": ("kind", "betas", "router_on_muon"),
}


def forbidden_changes(before: Recipe, now: Recipe, step: int) -> list[str]:
    """What forbids that a run of `before`, of which `step` steps are done, goes on as `now`: `field: expected ..., got ...`."""
    finished, begun = _stages_at(before, step)
    old, new = _fixed(before, finished, begun), _fixed(now, finished, begun)
    changes = [
        f"{name}: expected {old.get(name)!r}, as the run began with, got {new.get(name)!r}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]
    if not changes and begun > finished and now.ends[finished] <= step:
        done = step - sum(before.steps[:finished])
        got = now.stages[finished].tokens
        changes.append(f"stages.{finished}.tokens: expected more than the {done} steps that are done, got {got}")
    return changes


def fingerprint(recipe: Recipe, step: int) -> str:
    """Differs when anything does that must not change once `step` steps of the run are done."""
    fixed = _fixed(recipe, *_stages_at(recipe, step))
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()


def _stages_at(recipe: Recipe, step: int) -> tuple[int, int]:
    """How many stages are finished, and how many have begun."""
    finished = bisect.bisect_right(recipe.ends, step)
    return finished, finished + (step > sum(recipe.steps[:finished]))


def _fixed(recipe: Recipe, finished: int, begun: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"seed": recipe.seed}
    for section, names in FIXED.items():
        fields |= {f"{section}.{name}": getattr(getattr(recipe, section), name) for name in names}
    fields |= {f"router_balance.{name}": value for name, value in asdict(recipe.balance).items()}
    fields |= {"optimizer.momentum": recipe.momentum, "optimizer.embedding_rate": recipe.embedding_rate}
    fields["adapter"] = recipe.adapter and asdict(recipe.adapter)
    for number, stage in enumerate(recipe.stages[:begun]):
        weights = stage.mixture or dict.fromkeys(recipe.data.folders, 1.0)
        own = {
            "name": stage.name,
            "sequence_length": stage.sequence_length,
            "mixture": dict(sorted(weights.items())),
            "long_documents": stage.long_documents and asdict(stage.long_documents),
            "tokens_per_step": recipe.step_tokens(number),
        }
        if number < finished:
            own["tokens"] = stage.tokens
        fields |= {f"stages.{number}.{name}": value for name, value in own.items()}
    return fields
