"""What the folder of a run tells a model card: the recipe's stages and the losses in its log. Paths stay at home."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..configuration.presets import preset_names


RECIPE, LOG, RESULTS, MODELS = "recipe.yaml", "log.jsonl", "results.json", "models"


@dataclass(frozen=True)
class StageFacts:
    """A stage that is over. `train_loss`: of its last logged step; losses in nats per predicted token, None: not logged.
    `tokens_seen`: of the whole run by its end; `tokens_per_step`, `sequence_length`: tokens."""

    name: str
    sequence_length: int
    tokens_per_step: int
    tokens_seen: int
    train_loss: float | None
    held_out: dict[str, float]


@dataclass(frozen=True)
class RunFacts:
    """A run up to the model that the card is about. `start`: the preset, or None where it began with other weights.
    `machine`, `bits_per_byte`: of a demo's results, else empty."""

    start: str | None
    from_scratch: bool
    seed: int
    optimizer: dict[str, Any]
    balancing: str
    dtype: str
    data: list[str]
    stages: list[StageFacts]
    machine: dict[str, str]
    held_out_bytes: int
    bits_per_byte: dict[str, float]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that was trained on."""
        return max(stage.sequence_length for stage in self.stages)


def find_run(checkpoint: Path) -> Path | None:
    """The folder of the run that saved `checkpoint` in its models/, or None."""
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == MODELS and (folder.parent / LOG).is_file() else None


def read_run(folder: Path, checkpoint: Path) -> RunFacts:
    """Reads the run in `folder`, up to the stage that `checkpoint` is the model of, or to the last that is over.

    Raises ValueError for a folder without the files of a run, or without a stage that is over.
    """
    for name in (RECIPE, LOG):
        if not (folder / name).is_file():
            raise ValueError(f"run: expected a folder with {name}, got {folder}")
    recipe = yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8"))
    records = _records(folder / LOG)
    over = [record["stage"] for record in records if record["kind"] == "stage"]
    if not over:
        raise ValueError(f"run: expected a stage that is over, got none in {folder / LOG}")
    last = checkpoint.name if checkpoint.name in over and find_run(checkpoint) == folder.resolve() else over[-1]
    names = [stage["name"] for stage in recipe["stages"]]
    stages = recipe["stages"][: names.index(last) + 1]
    results = _results(folder) if last == names[-1] else {}
    base = recipe["model"]["base"]
    mixtures = [stage.get("mixture") for stage in stages]
    return RunFacts(
        start=base if base in preset_names() else None,
        from_scratch=recipe["model"].get("start", "scratch") == "scratch",
        seed=recipe["seed"],
        optimizer={name: recipe["optimizer"][name] for name in ("kind", "learning_rate", "schedule")},
        balancing=recipe["router_balance"]["method"],
        dtype=recipe["model"]["dtype"],
        data=[name for name in recipe["data"]["folders"] if any(not used or name in used for used in mixtures)],
        stages=[_stage(stage, recipe, records) for stage in stages],
        machine=results.get("machine", {}),
        held_out_bytes=results.get("held_out", {}).get("bytes", 0),
        bits_per_byte=results.get("bits_per_byte", {}),
    )


def _stage(stage: dict, recipe: dict, records: list[dict]) -> StageFacts:
    own = [record for record in records if record["stage"] == stage["name"]]
    steps = [record for record in own if record["kind"] == "step"]
    validations = [record for record in own if record["kind"] == "validation"]
    return StageFacts(
        name=stage["name"],
        sequence_length=int(stage["sequence_length"]),
        tokens_per_step=int(stage.get("tokens_per_step") or recipe["tokens_per_step"]),
        tokens_seen=max(record["tokens"] for record in own),
        train_loss=steps[-1]["loss"] if steps else None,
        held_out=validations[-1]["losses"] if validations else {},
    )


def _records(log: Path) -> list[dict]:
    """Of a log, without a last line that a crash cut off."""
    lines = log.read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def _results(folder: Path) -> dict:
    file = folder / RESULTS
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
