"""The files beside the weights of an export: tokenizer, chat template, settings for generation and pictures, their code."""

import json
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

from .checkpoint_reader import read_json, side_files
from .layouts import Description


CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
PICTURES, PROCESSOR = "preprocessor_config.json", "processor_config.json"
IMAGE_PROCESSOR = "MoeLcImageProcessor"
MEDIA_FIELDS = (  # of `media_proc_cfg` in the released `preprocessor_config.json`; the others have no effect on ours
    "patch_size",
    "merge_kernel_size",
    "in_patch_limit",
    "patch_limit_on_one_side",
    "image_mean",
    "image_std",
    "in_patch_limit_each_frame",
    "in_patch_limit_video",
    "sample_fps",
    "temporal_merge_kernel_size",
)


def files_beside(folder: Path, source: Description, target: Description) -> dict[str, bytes]:
    """File name -> content, `config.json` last.

    Files of a release stay as they are. In those of ours, what names this package gets the form that engines read; code
    comes along where a file names it, and a name whose code is not there goes.
    """
    files = {path.name: path.read_bytes() for path in side_files(folder)}
    files.pop(CONFIG, None)
    if source.layout == "own":
        files = _in_released_form(folder, files, target)
    if GENERATION not in files and (settings := _generation(target)):
        files[GENERATION] = _json(settings)
    config = _without_missing_code(target.raw, folder)
    if "text_config" in config:
        config["text_config"] = _without_missing_code(config["text_config"], folder)
    return files | {CONFIG: _json(config)}


def _in_released_form(folder: Path, files: dict[str, bytes], target: Description) -> dict[str, bytes]:
    code = {name: files.pop(name) for name in list(files) if name.endswith(".py")}
    settings = {name: read_json(folder / name) for name in (PICTURES, PROCESSOR) if files.pop(name, None)}
    if TOKENIZER in files:
        tokenizer = _without_missing_code(_tokenizer(read_json(folder / TOKENIZER)), folder)
        files[TOKENIZER] = _json(tokenizer)
        named = [file for reference in _references(tokenizer) for file in _code(folder, reference)]
        files |= {name: code[name] for name in sorted({file.name for file in named})}
    if target.vision is not None:
        found = {**settings.get(PROCESSOR, {}).get("image_processor", {}), **settings.get(PICTURES, {})}
        if found.get("image_processor_type") == IMAGE_PROCESSOR:
            media = {name: found[name] for name in MEDIA_FIELDS if name in found} | {"fixed_output_tokens": None}
            files[PICTURES] = _json({"media_proc_cfg": media})
    return files


def _tokenizer(settings: dict[str, Any]) -> dict[str, Any]:
    """`tokenizer_config.json` in the words that transformers 4 and 5 both read; engines are at either."""
    kept = {key: value for key, value in settings.items() if key not in ("backend", "processor_class")}
    if kept.get("tokenizer_class") == "TokenizersBackend":
        kept["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(kept.get("extra_special_tokens"), list):
        kept["additional_special_tokens"] = kept.pop("extra_special_tokens")
    return kept


def _generation(target: Description) -> dict[str, Any]:
    config = target.config
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    known = {name: value for name, value in ids.items() if value is not None}
    return known and {**known, "max_length": config.max_position_embeddings}


def _without_missing_code(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`settings` without an `auto_map` that names code which is not in `folder`: loaders would ask for it, or fail."""
    local = all((folder / f"{reference.partition('.')[0]}.py").is_file() for reference in _references(settings))
    return settings if local else {key: value for key, value in settings.items() if key != "auto_map"}


def _references(settings: dict[str, Any]) -> list[str]:
    """`module.Class` of every entry of an `auto_map` that is not in another repository."""
    auto_map = settings.get("auto_map") or {}
    entries = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    names = [name for entry in entries for name in ([entry] if isinstance(entry, str) else entry or [])]
    return [name for name in names if name and "--" not in name]


def _code(folder: Path, reference: str) -> list[Path]:
    file = folder / f"{reference.partition('.')[0]}.py"
    return [file, *map(Path, get_relative_import_files(file))]


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
