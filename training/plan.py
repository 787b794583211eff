"""What a run is going to do: its settings, kept beside it, and the steps that fit into the time."""

import argparse
import dataclasses
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from .checkpoint_files import latest
from .mixture import StageData
from .packing import Pack, collate


CHECKPOINTS, SETTINGS = "checkpoints", "settings.json"  # in the folder of a run


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of a run, on one kind of machine to the bit. `lengths` and `steps` have one entry
    per stage; `steps` and `threads` are None until they are measured."""

    corpus: str
    held_out_share: float
    preset: str
    balance: str
    seed: int
    lengths: list[int]
    steps: list[int] | None
    tokens_per_step: int
    learning_rate: float
    warmup: int
    threads: int | None

    def __post_init__(self):
        if self.lengths != sorted(set(self.lengths)) or self.tokens_per_step % self.lengths[-1]:
            raise ValueError(
                f"lengths: expected ascending lengths, the last of which divides tokens-per-step = {self.tokens_per_step}, "
                f"got {self.lengths}"
            )
        if self.steps is not None and (len(self.steps) != len(self.lengths) or min(self.steps) < 1):
            raise ValueError(f"steps: expected a positive number for each length in {self.lengths}, got {self.steps}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads: expected at least 1, got {self.threads}")

    def command(self) -> str:
        """The command that repeats the run exactly."""
        words = ["moe-lc demo"]
        for name, value in dataclasses.asdict(self).items():
            words.append(
                f"--{name.replace('_', '-')} {' '.join(map(str, value if isinstance(value, list) else [value]))}"
            )
        return " ".join(words)


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings in the command line; what it leaves to be measured comes from the run that is already in `args.out`.

    Raises ValueError if that folder holds a run with other settings.
    """
    fields = {field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)}
    settings = Settings(**{**fields, "corpus": str(args.corpus)})
    file = args.out / SETTINGS
    if not file.exists() or latest(args.out / CHECKPOINTS) is None:
        return settings
    known = Settings(**json.loads(file.read_text()))
    measured = {name: getattr(known, name) for name in ("steps", "threads") if getattr(settings, name) is None}
    settings = dataclasses.replace(settings, **measured)
    different = [name for name, value in dataclasses.asdict(known).items() if getattr(settings, name) != value]
    if different:
        raise ValueError(
            f"{args.out} holds another run: expected "
            + ", ".join(f"{name} = {getattr(known, name)}" for name in different)
            + ", got "
            + ", ".join(f"{getattr(settings, name)}" for name in different)
            + "; give the same arguments to go on, or --restart, or another --out"
        )
    return settings


def remove_run(folder: Path) -> None:
    """Deletes a run's folder. Raises ValueError if there is something in it that is not a run."""
    if folder.exists() and any(folder.iterdir()) and not (folder / SETTINGS).exists():
        raise ValueError(f"--restart: expected a run in {folder}, got a folder without {SETTINGS}; delete it yourself")
    shutil.rmtree(folder, ignore_errors=True)


def faster_threads(model: nn.Module, batch: Sequence[Pack]) -> int:
    """One thread or as many as torch would use, whichever takes less time for a forward and backward of `batch`.

    On a machine that others use as well, threads that wait for one another can be many times slower than one alone.
    """
    every = torch.get_num_threads()
    if every == 1:
        return 1
    _seconds(model, batch)  # the first pass also allocates
    times = {}
    for threads in (1, every):
        torch.set_num_threads(threads)
        times[threads] = _seconds(model, batch)
    return min(times, key=times.__getitem__)


def fitting_steps(model: nn.Module, data: Sequence[StageData], steps: Sequence[int], seconds: float) -> list[int]:
    """`steps` of each stage of `data`, all scaled down by one factor where this machine would need more than `seconds`."""
    needed = sum(count * _seconds(model, stage[0]) for stage, count in zip(data, steps, strict=True))
    factor = min(1.0, max(seconds, 0.0) / needed)
    return [max(1, int(count * factor)) for count in steps]


def _seconds(model: nn.Module, batch: Sequence[Pack]) -> float:
    """What a forward and backward takes, in evaluation mode, so that the routers count nothing."""
    model.eval()
    begun = time.monotonic()
    model(**collate(batch), use_cache=False).loss.backward()
    model.zero_grad()
    return time.monotonic() - begun
