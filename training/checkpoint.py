"""Checkpoints of a run: written whole or not at all, and read back."""

import json
import shutil
from pathlib import Path

import torch
from torch import nn


def save_checkpoint(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict) -> Path:
    """Writes `folder`/step-NNNNNN with the model (released layout, with router biases), the optimiser, torch's random
    state and `state` (JSON: data position, history).

    Everything goes to a temporary folder first, which is renamed at the end: a crash leaves no half checkpoint.
    """
    target = folder / f"step-{step:06d}"
    temporary = folder / f".step-{step:06d}.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    torch.save({"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}, temporary / "training.pt")
    (temporary / "state.json").write_text(json.dumps(state))
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    return target


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    return sorted(folder.glob("step-*"))


def prune(folder: Path, keep: set[int]) -> None:
    """Deletes all checkpoints but the newest one and those of the steps in `keep`."""
    for path in checkpoints(folder)[:-1]:
        if int(path.name.removeprefix("step-")) not in keep:
            shutil.rmtree(path)


def read_state(checkpoint: Path) -> dict:
    """The `state` of `save_checkpoint`."""
    return json.loads((checkpoint / "state.json").read_text())


def restore(checkpoint: Path, optimizer: torch.optim.Optimizer) -> None:
    """Loads the optimiser and torch's random state; the model itself is read by `from_pretrained`."""
    saved = torch.load(checkpoint / "training.pt", weights_only=True)
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["rng"])
