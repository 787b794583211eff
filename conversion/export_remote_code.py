"""A checkpoint with the model's code beside its weights, for `from_pretrained(..., trust_remote_code=True)`.

The exported folder loads, generates and saves in an environment that has transformers and torch but not this package.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files

from .import_closure import flat_name, import_closure


PACKAGE = __package__.split(".")[0]

# model_type -> Auto class -> class, by its dotted path inside the package.
AUTO_CLASSES = {
    "moe_lc_text": {
        "AutoConfig": "configuration.configuration_moe_lc.MoeLcTextConfig",
        "AutoModel": "modeling_moe_lc.MoeLcTextModel",
        "AutoModelForCausalLM": "modeling_moe_lc.MoeLcForCausalLM",
    },
    "moe_lc": {
        "AutoConfig": "configuration.configuration_moe_lc.MoeLcConfig",
        "AutoModel": "modeling_moe_lc_vl.MoeLcModel",
        "AutoModelForCausalLM": "modeling_moe_lc_vl.MoeLcForConditionalGeneration",
        "AutoModelForImageTextToText": "modeling_moe_lc_vl.MoeLcForConditionalGeneration",
        "AutoModelForMultimodalLM": "modeling_moe_lc_vl.MoeLcForConditionalGeneration",
    },
}

# Where `processor_config.json` names our processor: the part of that file -> Auto class -> class.
PROCESSOR, PROCESSOR_FILE = "MoeLcProcessor", "processor_config.json"
PROCESSOR_CLASSES = {
    None: {"AutoProcessor": "processing_moe_lc.MoeLcProcessor"},
    "image_processor": {"AutoImageProcessor": "image_processing_moe_lc.MoeLcImageProcessor"},
}

# What save_pretrained and the tokenizers write; pickles and the code of an earlier export are left behind.
CARRIED_SUFFIXES = {".json", ".safetensors", ".jinja", ".md", ".txt", ".model", ".tiktoken"}
CARRIED_NAMES = {"LICENSE", "NOTICE"}
MAY_BRING_CODE = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


def export_remote_code(checkpoint: str | Path, out: str | Path, *, overwrite: bool = False) -> Path:
    """Write `out`: the checkpoint's files, its model's code as flat Python files, and `auto_map` in `config.json`.

    Args:
        checkpoint: folder written by `save_pretrained`. Weights become hard links where the file system allows it.
        out: folder to make. It appears whole or not at all.
        overwrite: replace `out` if it is an earlier export.

    Returns:
        The path of `out`.

    Raises:
        ValueError: for a checkpoint without config.json or safetensors weights, or of an unknown model type; for an
            `out` that is not empty (with `overwrite`: that has no config.json, or that holds the checkpoint); for code
            that transformers' loader cannot follow (`import_closure`).
    """
    checkpoint, out = Path(checkpoint).resolve(), Path(out).resolve()
    config = _checked_config(checkpoint)
    _check_out(out, checkpoint, overwrite=overwrite)
    auto_classes = AUTO_CLASSES[config["model_type"]]
    processor = _processor_config(checkpoint)
    paths = [
        *auto_classes.values(),
        *(path for part in PROCESSOR_CLASSES.values() for path in part.values() if processor),
    ]
    entries = {path.rpartition(".")[0] for path in paths}
    sources = import_closure(PACKAGE, sys.modules[PACKAGE].__path__, sorted(entries))
    config["auto_map"] = {auto: _class_reference(path) for auto, path in auto_classes.items()}

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        staged = Path(scratch, "staged")
        staged.mkdir()
        for file in _carried_files(checkpoint):
            _link_or_copy(file, staged / file.name)
        templates = checkpoint / "additional_chat_templates"
        if templates.is_dir():
            shutil.copytree(templates, staged / templates.name)
        for name, source in sources.items():
            (staged / name).write_bytes(source.encode())
        (staged / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if processor:
            (staged / PROCESSOR_FILE).write_text(json.dumps(processor, indent=2) + "\n", encoding="utf-8")
        if out.exists():
            out.rename(Path(scratch, "replaced"))
        staged.rename(out)
    return out


def _carried_files(checkpoint: Path) -> set[Path]:
    files = {file for file in checkpoint.iterdir() if file.suffix in CARRIED_SUFFIXES or file.name in CARRIED_NAMES}
    for settings in files & {checkpoint / name for name in MAY_BRING_CODE}:
        auto_map = json.loads(settings.read_text(encoding="utf-8")).get("auto_map", {})
        for classes in auto_map.values() if isinstance(auto_map, dict) else [auto_map]:
            for reference in [classes] if isinstance(classes, str) else classes:
                if reference and "--" not in reference:
                    code = checkpoint / f"{reference.split('.')[0]}.py"
                    if not code.is_file():
                        raise ValueError(f"{settings}: auto_map: expected {code.name} beside it, got no such file")
                    files |= {code, *map(Path, get_relative_import_files(code))}
    return {file for file in files if file.is_file()}


def _processor_config(checkpoint: Path) -> dict | None:
    """Our processor's settings with an `auto_map`, or None where the checkpoint has no processor of ours."""
    file = checkpoint / PROCESSOR_FILE
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if settings.get("processor_class") != PROCESSOR:
        return None
    for part, classes in PROCESSOR_CLASSES.items():
        here = settings if part is None else settings[part]
        here["auto_map"] = {auto: _class_reference(path) for auto, path in classes.items()}
    return settings


def _class_reference(path: str) -> str:
    module, _, name = path.rpartition(".")
    return f"{flat_name(module)}.{name}"


def _checked_config(checkpoint: Path) -> dict:
    file = checkpoint / "config.json"
    if not file.is_file():
        raise ValueError(f"checkpoint: expected a folder with config.json, got {checkpoint}")
    config = json.loads(file.read_text(encoding="utf-8"))
    if config.get("model_type") not in AUTO_CLASSES:
        raise ValueError(f"{file}: expected model_type in {sorted(AUTO_CLASSES)}, got {config.get('model_type')!r}")
    if not any(checkpoint.glob("*.safetensors")):
        raise ValueError(f"checkpoint: expected weights in *.safetensors, got none in {checkpoint}")
    return config


def _check_out(out: Path, checkpoint: Path, *, overwrite: bool) -> None:
    if out == checkpoint or out in checkpoint.parents:
        raise ValueError(f"out: expected a folder that does not hold the checkpoint {checkpoint}, got {out}")
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: expected a folder, got the file {out}")
    if out.exists() and any(out.iterdir()):
        if not overwrite:
            raise ValueError(f"out: expected a new or empty folder (or overwrite), got {out}, which has files")
        if not (out / "config.json").is_file():
            raise ValueError(f"out: expected an earlier export to overwrite, got {out}, which has no config.json")


def _link_or_copy(source: Path, target: Path) -> None:
    source = source.resolve()  # a Hub snapshot holds symbolic links, which would dangle elsewhere
    if source.suffix == ".safetensors":
        try:
            os.link(source, target)
            return
        except OSError:
            pass
    shutil.copyfile(source, target)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="folder written by save_pretrained")
    parser.add_argument("out", type=Path, help="folder to write, ready to load with trust_remote_code=True or to push")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is an earlier export")


def run(args: argparse.Namespace) -> None:
    out = export_remote_code(args.checkpoint, args.out, overwrite=args.overwrite)
    code = sorted(file.name for file in out.glob("*.py"))
    print(f"{out}: {len(code)} Python files ({', '.join(code)})")
