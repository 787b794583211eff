"""Named model sizes, one JSON file each in `presets/`: the fields of a text model, in some with a vision tower beside it."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from .checks import ONLY_VALUE
from .configuration_moe_lc import MoeLcConfig, MoeLcTextConfig, MoeLcVisionConfig


# What a configuration takes beside its fields.
BESIDE = {"attn_implementation", "experts_implementation", "output_attentions", "quantization_config", "torch_dtype"}
FOLDER = Path(__file__).parent / "presets"
MULTIMODAL_FIELDS = ("vision_config", "media_placeholder_token_id")


def preset_names() -> list[str]:
    """The presets that ship with the package, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def multimodal_preset_names() -> list[str]:
    """Those that have a vision tower."""
    return [name for name in preset_names() if "vision_config" in _fields(name)]


def load_preset(name: str, **overrides) -> MoeLcTextConfig:
    """The text configuration called `name`, with some fields replaced.

    Raises `ValueError` for an unknown name, naming the known ones, and for an unknown field.
    """
    _check_fields(MoeLcTextConfig, overrides, BESIDE.union(ONLY_VALUE))
    fields = {key: value for key, value in _fields(name).items() if key not in MULTIMODAL_FIELDS}
    return MoeLcTextConfig(**{**fields, **overrides})


def load_multimodal_preset(
    name: str,
    *,
    vision_config: dict[str, Any] | None = None,
    media_placeholder_token_id: int | None = None,
    **overrides,
) -> MoeLcConfig:
    """The preset called `name` with its vision tower, with some fields of the tower and of the text model replaced.

    Raises `ValueError` for a preset that is unknown or has no tower, naming those that have one, and for an unknown field.
    """
    if name not in multimodal_preset_names():
        raise ValueError(f"preset: expected one of {multimodal_preset_names()}, got {name!r}")
    _check_fields(MoeLcVisionConfig, vision_config or {}, BESIDE, "vision_config.")
    fields = _fields(name)
    token = fields["media_placeholder_token_id"] if media_placeholder_token_id is None else media_placeholder_token_id
    return MoeLcConfig(
        text_config=load_preset(name, **overrides),
        vision_config={**fields["vision_config"], **(vision_config or {})},
        media_placeholder_token_id=token,
    )


def _fields(name: str) -> dict[str, Any]:
    if name not in preset_names():
        raise ValueError(f"preset: expected one of {preset_names()}, got {name!r}")
    return json.loads((FOLDER / f"{name}.json").read_text())


def unknown_fields(kind: type[PreTrainedConfig], names: Iterable[str]) -> list[str]:
    """Those of `names` that are no fields of a configuration, which would keep them and never read them."""
    known = {field.name for field in dataclasses.fields(kind)}
    return [name for name in names if name not in known]


def _check_fields(kind: type[PreTrainedConfig], given: Iterable[str], beside: set[str], prefix: str = "") -> None:
    for name in unknown_fields(kind, given):
        if name not in beside and name not in kind.attribute_map:
            raise ValueError(f"{prefix}{name}: expected a field of the configuration, got an unknown one")
