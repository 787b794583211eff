"""Named model sizes, one JSON file each in `presets/`."""

import json
from pathlib import Path

from .configuration_moe_lc import MoeLcTextConfig


FOLDER = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """The presets that ship with the package, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_preset(name: str, **overrides) -> MoeLcTextConfig:
    """The configuration called `name`, with some fields replaced.

    Raises `ValueError` for an unknown name, naming the known ones.
    """
    if name not in preset_names():
        raise ValueError(f"preset: expected one of {preset_names()}, got {name!r}")
    fields = json.loads((FOLDER / f"{name}.json").read_text())
    return MoeLcTextConfig(**{**fields, **overrides})
