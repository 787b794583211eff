"""`moe-lc convert --bound-gate -5`: a softplus decay gate becomes a bounded one that does nearly the same on calibration text.

`gate_fit.py` has the two gates. The result is an approximation, a start for further training, and says so in `config.json`,
in its card and in `bound_gate.json`, with the output error of every layer.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoTokenizer

from ..kda import KimiDeltaAttention
from ..modeling_moe_lc import MoeLcForCausalLM
from .checkpoint_reader import Checkpoint, read_header, read_json
from .checkpoint_writer import write_atomically
from .gate_fit import Gate, fit_gate, softplus_gate, tail_match
from .layouts import GATE_LABEL


REPORT = "bound_gate.json"
ROW, FEWEST = 2048, 64  # tokens of a row of calibration text, and of all of it
LOSS_TOKENS = 256  # whose logits exist at once


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Token ids `[rows, T]` on which gates are fitted."""

    ids: torch.Tensor

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()


def bounded_config(raw: dict[str, Any], lower_bound: float, tokens: int) -> dict[str, Any]:
    """`config.json` of the same model with a bounded gate, labelled as an approximation.

    Raises ValueError where the gate is bounded already, or a bound is not below zero.
    """
    if not (math.isfinite(lower_bound) and lower_bound < 0):
        raise ValueError(f"bound_gate: expected a number below 0, got {lower_bound}")
    text = raw.get("text_config", raw)
    linear = text.get("linear_attn_config") or {}
    if linear.get("gate_lower_bound") is not None:
        raise ValueError(
            f"bound_gate: expected a softplus gate (gate_lower_bound null), got {linear['gate_lower_bound']}"
        )
    label = {"of": "a softplus gate", "gate_lower_bound": lower_bound, "calibration_tokens": tokens}
    changed = {**text, "linear_attn_config": {**linear, "gate_lower_bound": lower_bound}, GATE_LABEL: label}
    return {**raw, "text_config": changed} if "text_config" in raw else changed


def read_calibration(path: Path | None, source: Path, tokens: int, vocabulary: int) -> Calibration:
    """The first `tokens` tokens of a text file (by the tokenizer in `source`) or of a folder of `moe-lc prepare`.

    Raises ValueError where there is none, or too little, or an id that the model has not.
    """
    if path is None or not path.exists():
        raise ValueError(
            "calibration: expected a text file or a folder of `moe-lc prepare` to fit the bounded gate on "
            f"(--calibration), got {'none' if path is None else path}"
        )
    if tokens < FEWEST:
        raise ValueError(f"calibration_tokens: expected at least {FEWEST}, got {tokens}")
    ids = _prepared(path, tokens) if path.is_dir() else _tokenized(path, source, tokens)
    if len(ids) < FEWEST:
        raise ValueError(f"calibration: expected at least {FEWEST} tokens, got {len(ids)} in {path}")
    if ids.max() >= vocabulary:
        raise ValueError(f"calibration: expected ids below {vocabulary}, those of the model, got {ids.max()}")
    length = min(ROW, len(ids))
    rows = len(ids) // length
    return Calibration(torch.from_numpy(ids[: rows * length].astype(np.int64)).view(rows, length))


def _tokenized(path: Path, source: Path, tokens: int) -> np.ndarray:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"calibration: expected a tokenizer in {source} to read {path} with, or a folder of `moe-lc prepare` instead, "
            f"got none that can be used ({type(error).__name__})"
        ) from error
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(16 * tokens)
    return np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:tokens], dtype=np.int64)


def _prepared(folder: Path, tokens: int) -> np.ndarray:
    """Tokens of the first shards, documents behind one another."""
    if not (folder / "manifest.json").is_file():
        raise ValueError(f"calibration: expected a folder that `moe-lc prepare` has finished, got {folder}")
    parts, left = [], tokens
    for shard in read_json(folder / "manifest.json")["splits"]["train"]["shards"]:
        dtype = np.dtype(shard["dtype"]).newbyteorder("<")
        parts.append(np.fromfile(folder / f"{shard['name']}.tokens", dtype, min(left, shard["tokens"])))
        left -= len(parts[-1])
        if left == 0:
            break
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


class _Fitter:
    """Hook of KDA layers: fits their gates one after the other, as a forward of the unchanged model comes to them.

    So there are never activations of more than one layer. What is fitted is kept in `folder`, a file a layer, and not again.
    """

    def __init__(self, lower_bound: float, folder: Path, bar: tqdm):
        self.lower_bound, self.folder, self.bar = lower_bound, folder, bar

    def __call__(self, layer: KimiDeltaAttention, args, output) -> None:
        path = layer_file(self.folder, layer.layer_idx)
        if not path.exists():
            # In FP32, or what BF16 rounds away would pass for an error of the gate.
            exact, hidden = type(layer)(layer.config, layer.layer_idx).to(args[0].device), args[0].float()
            exact.load_state_dict(layer.state_dict())
            gate, below = fitted(exact, hidden, self.lower_bound)
            wanted = exact.forward(hidden)[0]
            with bounded(exact, gate, self.lower_bound):
                made = exact.forward(hidden)[0]
            self.keep(path, layer.layer_idx, gate, ((made - wanted).norm() / wanted.norm()).item(), below)
        self.bar.update()

    def keep(self, path: Path, index: int, gate: Gate, error: float, below: float) -> None:
        name = f"model.layers.{index}.self_attn."
        tensors = {f"{name}A_log": gate.A_log.cpu(), f"{name}dt_bias": gate.dt_bias.flatten().cpu()}
        measured = {"layer": str(index), "output_error": f"{error:.3e}", "below_bound": f"{below:.3e}"}
        write_atomically(path, save(tensors, {"format": "pt", **measured}))
        self.bar.set_postfix_str(f"layer {index}: output error {error:.1e}")


def fitted(layer: KimiDeltaAttention, hidden: torch.Tensor, lower_bound: float) -> tuple[Gate, float]:
    """The bounded gate for the inputs [rows, T, D] of `layer`, in FP32, and the share of its decays that are below the bound."""
    x = layer.f_b_proj(layer.f_a_proj(hidden)).unflatten(-1, (-1, layer.head_dim)).flatten(0, -3).double()  # [N, H, K]
    A_log, dt_bias = (parameter.double() for parameter in layer.decay(hidden))
    log_decay = softplus_gate(x, A_log, dt_bias)
    gate = fit_gate(x, log_decay, lower_bound, tail_match(A_log, dt_bias, lower_bound))
    return Gate(*(tensor.float() for tensor in gate)), (log_decay < lower_bound).double().mean().item()


def layer_file(folder: Path, index: int) -> Path:
    return folder / f"layer-{index:05d}.safetensors"


@contextlib.contextmanager
def bounded(layer: KimiDeltaAttention, gate: Gate, lower_bound: float) -> Iterator[None]:
    """`layer` with a bounded gate, for a while."""
    kept = layer.lower_bound, layer.decay.A_log.clone(), layer.decay.dt_bias.clone()
    layer.lower_bound = lower_bound
    layer.decay.A_log.copy_(gate.A_log)
    layer.decay.dt_bias.copy_(gate.dt_bias.flatten())
    try:
        yield
    finally:
        layer.lower_bound = kept[0]
        layer.decay.A_log.copy_(kept[1])
        layer.decay.dt_bias.copy_(kept[2])


def gates_folder(destination: Path) -> Path:
    """Where fitted gates are until the conversion into `destination` is over: beside it."""
    destination = destination.absolute()
    return destination.with_name(f".{destination.name}.bound_gate")


@torch.no_grad()
def fit_model(source: Path, lower_bound: float, calibration: Calibration, destination: Path, *, resume: bool) -> bytes:
    """Fits all gates of the model in `source`, keeps them beside `destination`, and returns the report, JSON.

    Raises ValueError where that was begun before without `resume`, or with other settings.
    """
    folder = gates_folder(destination)
    _begin(folder, {"bound_gate": lower_bound, "calibration": calibration.sha256, "source": _state(source)}, resume)
    if (folder / REPORT).exists():
        return (folder / REPORT).read_bytes()
    model = MoeLcForCausalLM.from_pretrained(source, dtype="auto").eval()
    model = model.cuda() if torch.cuda.is_available() else model
    ids = calibration.ids.to(model.device)
    layers = [module for module in model.modules() if isinstance(module, KimiDeltaAttention)]
    with tqdm(desc="fitting gates", total=len(layers), unit="layer") as bar:
        fitter = _Fitter(lower_bound, folder, bar)
        handles = [layer.register_forward_hook(fitter) for layer in layers]
        before = _loss(model, ids)
    for handle in handles:
        handle.remove()
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(bounded(layer, _load(layer, folder), lower_bound))
        after = _loss(model, ids)
    report = {
        "approximation": f"of a softplus gate by one bounded at {lower_bound:g}: a start for further training",
        "gate_lower_bound": lower_bound,
        "calibration": {"tokens": calibration.ids.numel(), "sha256": calibration.sha256},
        "loss": {"softplus": float(f"{before:.5f}"), "bounded": float(f"{after:.5f}")},
        "layers": [_measured(layer_file(folder, layer.layer_idx)) for layer in layers],
    }
    write_atomically(folder / REPORT, (json.dumps(report, indent=2) + "\n").encode())
    return (folder / REPORT).read_bytes()


def _begin(folder: Path, settings: dict[str, Any], resume: bool) -> None:
    begun = folder / "settings.json"
    if not begun.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(begun, json.dumps(settings).encode())
        return
    if not resume:
        raise ValueError(f"destination: expected --resume to go on with the gates fitted in {folder}")
    for name, value in json.loads(begun.read_text()).items():
        if settings[name] != value:
            raise ValueError(f"{name}: expected {value!r}, with which {folder} was begun, got {settings[name]!r}")
    for path in folder.glob(".*.partial"):
        path.unlink()


def _state(source: Path) -> list[list]:
    files = sorted(source.glob("*.safetensors"))
    return [[path.name, (status := path.stat()).st_size, status.st_mtime_ns] for path in files]


def _load(layer: KimiDeltaAttention, folder: Path) -> Gate:
    with safe_open(layer_file(folder, layer.layer_idx), "pt") as file:
        name = f"model.layers.{layer.layer_idx}.self_attn."
        return Gate(file.get_tensor(f"{name}A_log"), file.get_tensor(f"{name}dt_bias"))


def _measured(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        said = file.metadata()
    return {"layer": int(said["layer"]), **{name: float(said[name]) for name in ("output_error", "below_bound")}}


def _loss(model: MoeLcForCausalLM, ids: torch.Tensor) -> float:
    """Mean over the next tokens of all rows."""
    hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]  # [rows, T - 1, D]
    total, targets = 0.0, ids[:, 1:]
    for part, wanted in zip(hidden.split(LOSS_TOKENS, dim=1), targets.split(LOSS_TOKENS, dim=1), strict=True):
        logits = model.lm_head(part).float()
        total += F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum").item()
    return total / targets.numel()


def use_fitted(checkpoint: Checkpoint, prefix: str, destination: Path) -> None:
    """Puts the gates that were fitted for it in the place of those of `checkpoint`, whose names begin with `prefix`."""
    for path in sorted(gates_folder(destination).glob("layer-*.safetensors")):
        checkpoint.tensors.update({prefix + name: stored for name, stored in read_header(path).items()})
        checkpoint.files.append(path)


def report_lines(report: bytes) -> Iterator[str]:
    """The report in words: the output error of every layer, and that it is an approximation."""
    said = json.loads(report)
    yield f"approximation {said['approximation']}"
    yield f"{'layer':>5} {'output error':>13} {'decays below the bound':>24}"
    for layer in said["layers"]:
        yield f"{layer['layer']:5} {layer['output_error']:13.1e} {layer['below_bound']:24.2%}"
    loss = said["loss"]
    yield f"loss on the calibration text: {loss['softplus']:.4f} with the softplus gate, {loss['bounded']:.4f} bounded"


def remove_fitted(destination: Path) -> None:
    """They are in the converted checkpoint now."""
    shutil.rmtree(gates_folder(destination), ignore_errors=True)
