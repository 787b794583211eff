"""A LoRA adapter added to the weights of its base, or written with the names that serving engines read."""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..adapter_names import is_released, per_expert_adapter
from ..adapters import load_lora
from ..modeling_moe_lc import MoeLcForCausalLM
from ..modeling_moe_lc_vl import MoeLcForConditionalGeneration
from .checkpoint_reader import read_json, side_files
from .layouts import Description, describe


# Of the adapter, in place of those of its base: it may have been trained with a template, or with tokens, of its own.
TOKENIZER = (
    "*.jinja",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
)


def merge_adapter(base: str | Path, adapter: str | Path, out: str | Path, *, dtype: str = "auto") -> Path:
    """Write `out`: the base with the adapter in its weights, as `save_pretrained` writes it, and the files beside them:
    those of the base, but tokenizer and chat template of the adapter where it brings them.

    Args:
        base: folder of the model. Experts in MXFP4 are read as plain weights and stay plain in `out`: their sums with an
            update are no MXFP4 values (`moe-lc convert` makes some of them).
        adapter: folder that PEFT wrote, or one with released names.
        out: folder to make; it appears whole or not at all.
        dtype: of the merged weights; "auto" is that of the base. The sums are rounded to it once.

    Raises:
        ValueError: `out` exists; no such dtype; the base is none of our models, or no adapter is in its folder; it is for
            another architecture; a sum is not finite.
    """
    out, base, adapter = new_folder(out), Path(base), adapter_folder(adapter)
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype: expected auto or one of torch, such as bfloat16, got {dtype!r}")
    beside = [*side_files(base), *(file for pattern in TOKENIZER for file in adapter.glob(pattern))]
    # Not by `AutoModelForCausalLM`: a folder that calls itself `kimi_linear` is transformers' own class there.
    kind = MoeLcForCausalLM if described(base).vision is None else MoeLcForConditionalGeneration
    model = kind.from_pretrained(base, dtype=dtype)
    text = model.config.get_text_config()
    text.expert_quantization = None
    merged = load_lora(model, str(adapter)).merge_and_unload(safe_merge=True, progressbar=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        staged = Path(scratch, "merged")
        merged.save_pretrained(staged)
        for file in beside:
            shutil.copy2(file, staged / file.name)
        staged.rename(out)
    return out


def export_adapter(base: str | Path, adapter: str | Path, out: str | Path) -> Path:
    """Write `out`: the adapter with released names, expert by expert, as vLLM and SGLang read it. Of `base` only the config
    is read. `load_lora` reads it, too, unless it adapts only one kind of attention: ends of names do not say which.

    Raises:
        ValueError: `out` exists; no adapter is in its folder; it has other parts than LoRA's A and B, or released names
            already.
    """
    from peft import LoraConfig
    from peft.utils import load_peft_weights

    out, adapter, experts = new_folder(out), adapter_folder(adapter), described(Path(base)).config.num_experts
    state, config = load_peft_weights(str(adapter), device="cpu"), LoraConfig.from_pretrained(str(adapter))
    if is_released(state, config):
        raise ValueError(f"adapter: expected one in PEFT's layout, got released names in {adapter}")
    tensors, config = per_expert_adapter(state, config, experts)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        staged = Path(scratch, "adapter")
        staged.mkdir()
        save_file(tensors, staged / "adapter_model.safetensors", metadata={"format": "pt"})
        text = json.dumps(config, indent=2, sort_keys=True, default=sorted_or_text)
        (staged / "adapter_config.json").write_text(f"{text}\n", encoding="utf-8")
        staged.rename(out)
    return out


def new_folder(out: str | Path) -> Path:
    out = Path(out).absolute()
    if out.exists():
        raise ValueError(f"out: expected a folder that is not there yet, got {out}")
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


def described(base: Path) -> Description:
    return describe(read_json(base / "config.json"))


def adapter_folder(adapter: str | Path) -> Path:
    adapter = Path(adapter)
    if not (adapter / "adapter_config.json").is_file():
        raise ValueError(f"adapter: expected a folder with adapter_config.json, got {adapter}")
    return adapter


def sorted_or_text(value):
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", help="folder of the model that the adapter was trained on")
    parser.add_argument("adapter", help="folder with adapter_config.json and adapter_model.safetensors")
    parser.add_argument("out", help="folder to make")
    parser.add_argument(
        "--dtype", default="auto", help="of the merged weights: auto (default), bfloat16, float32, ..."
    )
    parser.add_argument(
        "--adapter-only",
        action="store_true",
        help="merge nothing: write the adapter with per-expert names for vLLM, SGLang",
    )


def run(args: argparse.Namespace) -> int:
    if args.adapter_only:
        out = export_adapter(args.base, args.adapter, args.out)
    else:
        out = merge_adapter(args.base, args.adapter, args.out, dtype=args.dtype)
    print(f"wrote {out}")
    return 0
