"""Layouts of checkpoints: what `config.json` says of them, which tensors belong to them, in which shapes and dtypes.

Names, shapes and dtypes come from the model itself, built without memory and renamed by transformers' own conversion
mapping (`released_names`). A tensor's kind says what may happen to it on the way:

    plain    a weight of the model's dtype                  full     always FP32: copied (`dt_bias`)
    expert   w1, w2 or w3 of a routed expert, maybe MXFP4   a_log, conv, vector: see `released_names`
"""

import copy
import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import MergeModulelist, WeightConverter, revert_weight_conversion

from ..configuration.checks import expect
from ..configuration.configuration_moe_lc import MoeLcTextConfig, MoeLcVisionConfig, released_text_config
from ..configuration.expert_quantization import BLOCK, RELEASED, is_released_mxfp4, mxfp4_quantization
from ..modeling_moe_lc import MoeLcForCausalLM
from ..modeling_moe_lc_vl import MoeLcVisionModel
from ..released_names import ReadALog, ReadConv, ReadVector, released_mapping
from ..vision import Projector
from .checkpoint_reader import Stored


LAYOUTS = ("kimi-k3", "kimi-linear", "own")
TEXT_PREFIX = "language_model."
MODEL_TYPES = {"kimi_k3": "kimi-k3", "kimi_linear": "kimi-linear", "moe_lc_text": "own", "moe_lc": "own"}
MAX_LAYERS = 10_000
QUANTIZATION = "quantization_config"
GATE_LABEL = "gate_approximation"  # says that a bounded gate was fitted to a softplus gate
OWN_FIELDS = (
    "auto_map",
    "checkpoint_layout",
    "kda_implementation",
    "layer_types",
    "loss_chunk_size",
    "router_balance",
)
NOT_IN_KIMI_LINEAR = {
    "attn_res_block_size": None,
    "hidden_act": "silu",
    "routed_expert_hidden_size": None,
    "mla_use_output_gate": False,
}
READERS = {ReadALog: "a_log", ReadConv: "conv", ReadVector: "vector", MergeModulelist: "expert"}


@dataclasses.dataclass(frozen=True)
class Description:
    """A checkpoint by its config: `raw` is the whole `config.json`, `config` its text model, `vision` None without tower."""

    layout: str
    raw: dict[str, Any]
    config: MoeLcTextConfig
    vision: dict[str, Any] | None

    @property
    def prefix(self) -> str:
        return TEXT_PREFIX if "text_config" in self.raw else ""

    @property
    def quantized(self) -> bool:
        return self.config.expert_quantization is not None


def describe(raw: dict[str, Any]) -> Description:
    """Reads a `config.json`. Raises `ValueError` for a model type or a quantisation that is none of ours."""
    model_type = check_model_type(raw)
    for key in ("text_config", "vision_config"):
        expect(isinstance(raw.get(key, {}), dict), key, "an object", raw.get(key))
    for part in _parts(raw):
        found = part.get(QUANTIZATION)
        expect(found is None or is_released_mxfp4(found), QUANTIZATION, f"None, or one with {RELEASED}", found)
    for key, part in (("num_hidden_layers", _parts(raw)[0]), ("vt_num_hidden_layers", raw.get("vision_config", {}))):
        layers = part.get(key, 1)  # a checkpoint that one has not made oneself shall not fill the memory by its config
        expect(isinstance(layers, int) and layers <= MAX_LAYERS, key, f"at most {MAX_LAYERS}", layers)
    config = MoeLcTextConfig.from_dict(released_text_config(raw))
    return Description(MODEL_TYPES[model_type], raw, config, raw.get("vision_config"))


def check_model_type(raw: dict[str, Any], field: str = "model_type") -> str:
    """That of a `config.json`. Raises `ValueError`, which calls it `field`, for one that is none of ours."""
    found = raw.get("model_type")
    if found not in MODEL_TYPES:
        raise ValueError(f"{field}: expected one of {tuple(MODEL_TYPES)}, got {found!r}")
    return found


def _parts(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a `config.json` that may hold fields of the text model."""
    return [raw["text_config"], raw] if "text_config" in raw else [raw]


def change(source: Description, layout: str, dtype: str | None, text_only: bool) -> Description:
    """What `source` is to become; `dtype` is that of `moe-lc convert`, None leaves everything as it is.

    Raises `ValueError` naming the fields that the layout or the dtype cannot express.
    """
    vision = None if text_only else source.vision
    quantization = source.config.expert_quantization
    if dtype is not None:
        quantization = None if dtype != "mxfp4" else quantization or mxfp4_quantization()
    if layout == "kimi-linear":
        _check_kimi_linear(source.config, vision)
    raw = copy.deepcopy(source.raw) if layout == source.layout else _new_config(source, layout, vision)
    if vision is None:
        raw.pop("vision_config", None)
    _set_quantization(raw, quantization)
    if dtype is not None:
        for part in _parts(raw):
            part.pop("torch_dtype", None)
            if part is raw or "dtype" in part:
                part["dtype"] = "float32" if dtype == "float32" else "bfloat16"
    return describe(raw)


def _set_quantization(raw: dict[str, Any], quantization: dict[str, Any] | None) -> None:
    """Leaves the field where it is, if it is there and wanted; otherwise it belongs to the text model, as released."""
    parts = _parts(raw)
    if quantization is None:
        for part in parts:
            part.pop(QUANTIZATION, None)
            part.pop("expert_quantization", None)
    elif not any(part.get(QUANTIZATION) for part in parts):
        parts[0].pop("expert_quantization", None)
        parts[0][QUANTIZATION] = copy.deepcopy(quantization)


def _new_config(source: Description, layout: str, vision: dict[str, Any] | None) -> dict[str, Any]:
    """A `config.json` of another layout than that of `source`."""
    text, outer = source.config.to_dict(), dict[str, Any]()
    if layout == "own":
        text["checkpoint_layout"] = source.layout.replace("-", "_")
        if vision is None:
            return text
        outer |= {"architectures": ["MoeLcForConditionalGeneration"], "model_type": "moe_lc"}
    else:
        text = {key: value for key, value in text.items() if key not in OWN_FIELDS}
        text.update(model_type="kimi_linear", architectures=["KimiLinearForCausalLM"])
        if layout == "kimi-linear":
            return text
        outer |= {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3"}
    shared = ("dtype", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    kept = ("ignore_index", "image_placeholder", "media_placeholder_token_id")
    outer |= {key: text[key] for key in shared if text.get(key) is not None}
    outer |= {key: source.raw[key] for key in kept if key in source.raw} | {"text_config": text}
    if vision is not None:
        outer["vision_config"] = {key: copy.deepcopy(value) for key, value in vision.items() if key != "model_type"}
    return outer


def _check_kimi_linear(config: MoeLcTextConfig, vision: dict[str, Any] | None) -> None:
    linear = {"use_full_rank_gate": False, "gate_lower_bound": None}
    wrong = [
        f"{key} {getattr(config, key)!r}" for key, only in NOT_IN_KIMI_LINEAR.items() if getattr(config, key) != only
    ]
    wrong += [f"{key} {config.linear_attn_config[key]!r}" for key, only in linear.items()
              if config.linear_attn_config[key] != only]  # fmt: skip
    wrong += [] if vision is None else ["vision_config (leave it out with --text-only)"]
    if wrong:
        raise ValueError(f"layout: expected what kimi-linear can express, got {', '.join(wrong)}")


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """A tensor that belongs to a model: its kind and its shape in memory, experts one by one; see the top of this file."""

    kind: str
    shape: tuple[int, ...]


def expected_tensors(config: MoeLcTextConfig) -> dict[str, Expected]:
    """Released name, without prefix -> kind and shape, for every tensor of the text model. Nothing is allocated."""
    config = copy.deepcopy(config)
    config.checkpoint_layout = "kimi_k3"  # the other one chooses dtypes by values, and there are none
    config.expert_quantization = None
    with _without_memory():
        model = MoeLcForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        released = revert_weight_conversion(model, model.state_dict())
    if config.tie_word_embeddings:
        for name in MoeLcForCausalLM._tied_weights_keys:
            released.pop(name)
    kinds = _kinds()
    return {name: Expected(_kind(name, tensor, kinds), tuple(tensor.shape)) for name, tensor in released.items()}


@contextmanager
def _without_memory() -> Iterator[None]:
    try:
        with torch.device("meta"):
            yield
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ValueError(f"config.json: expected sizes that a model can have, got: {error}") from error


def _kinds() -> list[tuple[re.Pattern, str]]:
    kinds = []
    for converter in released_mapping():
        operations = converter.operations if isinstance(converter, WeightConverter) else []
        for kind in [READERS[type(one)] for one in operations if type(one) in READERS]:
            for pattern in converter.source_patterns:
                name = re.escape(pattern).replace(r"\*", "[0-9]+")
                kinds.append((re.compile(rf"(?:^|\.){name}$"), kind))
    return kinds


def _kind(name: str, tensor: torch.Tensor, kinds: list[tuple[re.Pattern, str]]) -> str:
    for pattern, kind in kinds:
        if pattern.search(name):
            return kind
    return "full" if tensor.dtype == torch.float32 else "plain"


def expected_vision(vision: dict[str, Any]) -> dict[str, Expected]:
    """Released name -> kind and shape of the vision tower and its projector, which pass as they are."""
    config = MoeLcVisionConfig.from_dict(vision)
    expect(config.text_hidden_size is not None, "vision_config.text_hidden_size", "a number", None)
    with _without_memory():
        parts: dict[str, nn.Module] = {"vision_tower": MoeLcVisionModel(config), "mm_projector": Projector(config)}
    return {
        f"{prefix}.{name}": Expected("vision", tuple(tensor.shape))
        for prefix, module in parts.items()
        for name, tensor in module.state_dict().items()
    }


def mismatch(stored: Stored, expected: Expected, config: MoeLcTextConfig) -> str | None:
    """What is wrong with the shape or dtype of a tensor that is not packed; None: nothing.

    Every released shape of `A_log` and of convolutions is right in every layout; BF16 vectors are Kimi-Linear's alone.
    """
    shapes = [expected.shape]
    if expected.kind == "a_log":
        heads = config.linear_attn_config["num_heads"]
        shapes += [(heads,), (1, 1, heads, 1)]
    elif expected.kind == "conv":
        shapes.append((expected.shape[0], expected.shape[2]))
    dtypes: tuple[str, ...] = ("BF16", "F16", "F32")
    if expected.kind in ("a_log", "full"):
        dtypes = ("F32",)
    elif expected.kind in ("conv", "vector"):
        dtypes = ("F32", "BF16") if config.checkpoint_layout == "kimi_linear" else ("F32",)
    if stored.shape in shapes and stored.dtype in dtypes:
        return None
    wanted = " or ".join(str(list(shape)) for shape in shapes)
    return f"expected {'/'.join(dtypes)} {wanted}, got {stored.dtype} {list(stored.shape)}"


def packed_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Suffix -> shape of the two `uint8` tensors that hold an expert's `weight` `[out, in]` as MXFP4."""
    return {"weight_packed": (shape[0], shape[1] // 2), "weight_scale": (shape[0], shape[1] // BLOCK)}


def rewritten(
    tensor: torch.Tensor, kind: str, name: str, source: MoeLcTextConfig, target: MoeLcTextConfig
) -> torch.Tensor:
    """A tensor of kind `a_log`, `conv` or `vector` in the form of another layout, by way of the form in memory (FP32)."""
    reader = next(one for one, its in READERS.items() if its == kind)()
    return reader.reverse_op.write(reader.read(tensor, source, name).float(), target)
