"""The model card of a LoRA adapter: what it is for, how big it is and how it is loaded, from its files alone."""

import json
import math
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import safe_open

from .card import MARK, TAGS, UNKNOWN, About
from .released import find_released


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

CARD = """---
{metadata}
---
{mark}

# {title}

A LoRA adapter for {base}: rank {r}, alpha {alpha}, {count:,} parameters on {targets}. It was trained with
[PEFT](https://huggingface.co/docs/peft)'s layout of files, which stock PEFT reads; on routed experts `load_lora` computes it
without building their sums.

```python
from transformers import AutoModelForCausalLM
from modeling_moe_lc import load_lora

model = AutoModelForCausalLM.from_pretrained("{base_name}")
model = load_lora(model, "{name}"{revision})
```

Licence: {license}. What it was trained on, and how good it is, nobody has said here.
"""


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def adapter_card(folder: Path, about: About = UNKNOWN, *, repo: str | None = None, revision: str | None = None) -> str:
    """The card of a folder that PEFT or `moe-lc finetune` wrote, as Markdown with the Hub's metadata.

    Args:
        about: licence, and the name of the base on the Hub (default: what the adapter says, if it is such a name).
        repo, revision: where and at which commit the adapter is, for the example.

    Raises:
        ValueError: the weights or the type of the adapter are missing, or it is no LoRA.
    """
    config = _config(folder)
    base = about.base_model or config.get("base_model_name_or_path")
    on_hub = base if base is not None and _is_repo(base) else None
    source = find_released(on_hub)
    licence = about if about.license or source is None else source
    data = ModelCardData(
        license=licence.license,
        license_name=licence.license_name,
        license_link=licence.license_link,
        base_model=on_hub,
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["lora", *TAGS],
    )
    text = CARD.format(
        metadata=data.to_yaml(),
        mark=MARK,
        title=repo.split("/")[-1] if repo else folder.resolve().name,
        base=f"[{on_hub}](https://huggingface.co/{on_hub})" if on_hub else "a model that is not named here",
        base_name=on_hub or "the folder of its base",
        r=config["r"],
        alpha=config["lora_alpha"],
        count=_count(folder / WEIGHTS),
        targets=", ".join(f"`{name}`" for name in _targets(config)) or "parts that its names say",
        name=repo or folder.resolve().name,
        revision=f', revision="{revision}"' if revision else "",
        license=licence.license or "unknown",
    )
    ModelCard(text)  # refuses metadata that the Hub could not read
    return text


def _config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{folder / CONFIG}: expected peft_type 'LORA', got {config.get('peft_type')!r}")
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"adapter: expected {WEIGHTS} in {folder}, got no such file")
    return config


def _is_repo(name: str) -> bool:
    """Whether it may be one on the Hub; a path, which says nothing to others, is none."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1 and not Path(name).exists()


def _targets(config: dict[str, Any]) -> list[str]:
    modules, parameters = config.get("target_modules") or [], config.get("target_parameters") or []
    return sorted([modules] if isinstance(modules, str) else modules) + sorted(parameters)


def _count(weights: Path) -> int:
    with safe_open(weights, "pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
