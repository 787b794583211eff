"""Released tensor names, shapes and dtypes on disk, ours in memory: transformers' conversion mapping, both ways.

Most names are the same. What differs: experts are one tensor per layer in memory; gate and up of an MLP are one matrix; the
parameters that stay in FP32 live in submodules; an AttnRes site is one module. Which shapes and dtypes are written is
`config.checkpoint_layout`; every released shape is read, whatever the layout.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    revert_weight_conversion,
)

from .released_experts import expert_converters


A_LOG_PADDING = 128  # K3 stores A_log padded with zeros to a multiple of this


class ReadAs(WeightRenaming):
    """A name that is read as another, and never written."""

    __slots__ = ()

    def reverse_transform(self) -> WeightRenaming:
        return WeightRenaming(r"^$", r"^$")


class MovePrefix(WeightRenaming):
    """`released.` on disk, `ours.` in memory, where a model without a head lacks the leading `model.` of `ours`."""

    __slots__ = ("ours", "released")

    def __init__(self, released: str, ours: str):
        self.released, self.ours = released, ours
        super().__init__(rf"^{re.escape(released)}\.(.+)", rf"{ours}.\1")

    def reverse_transform(self) -> WeightRenaming:
        inner = re.escape(self.ours.removeprefix("model."))
        outer = r"(?:model\.)?" if self.ours.startswith("model.") else ""
        return WeightRenaming(rf"^{outer}{inner}\.(.+)", rf"{self.released}.\1")


class _ReadReleased(ConversionOps):
    """Reads one tensor in any released form; `reverse_op` writes the form of `config.checkpoint_layout`."""

    writer: type["_WriteReleased"]

    def convert(self, input_dict, source_patterns, target_patterns, config=None, **kwargs):
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        return {target_patterns[0]: self.read(tensor, config.get_text_config(), source_patterns[0])}

    def read(self, tensor: torch.Tensor, config, name: str) -> torch.Tensor:
        return tensor

    @property
    def reverse_op(self) -> ConversionOps:
        return self.writer()


class _WriteReleased(ConversionOps):
    reader: type[_ReadReleased]

    def convert(self, input_dict, source_patterns, target_patterns, config=None, **kwargs):
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        return {target_patterns[0]: self.write(tensor, config.get_text_config())}

    def write(self, tensor: torch.Tensor, config) -> torch.Tensor:
        return in_released_dtype(tensor, config)

    @property
    def reverse_op(self) -> ConversionOps:
        return self.reader()


def in_released_dtype(tensor: torch.Tensor, config) -> torch.Tensor:
    """BF16 where the Kimi-Linear layout has BF16 and no bit is lost, else as it is."""
    if config.checkpoint_layout == "kimi_linear":
        narrow = tensor.to(torch.bfloat16)
        if torch.equal(narrow.to(tensor.dtype), tensor):
            return narrow
    return tensor.contiguous()


class ReadVector(_ReadReleased):
    """FP32 in K3, BF16 in Kimi-Linear: the weight of `o_norm`, the bias of the router."""


class WriteVector(_WriteReleased):
    reader = ReadVector


class ReadALog(_ReadReleased):
    """`[H]`, `[H]` padded with zeros, or `[1, 1, H, 1]` -> `[H]`."""

    def read(self, tensor: torch.Tensor, config, name: str) -> torch.Tensor:
        heads, flat = config.linear_attn_config["num_heads"], tensor.flatten()
        if flat.numel() < heads or flat[heads:].any():
            raise ValueError(f"{name}: expected {heads} values and zeros after them, got shape {list(tensor.shape)}")
        return flat[:heads].contiguous()


class WriteALog(_WriteReleased):
    reader = ReadALog

    def write(self, tensor: torch.Tensor, config) -> torch.Tensor:
        if config.checkpoint_layout == "kimi_linear":
            return tensor.view(1, 1, -1, 1).contiguous()
        return torch.nn.functional.pad(tensor, (0, -tensor.numel() % A_LOG_PADDING))


class ReadConv(_ReadReleased):
    """`[C, W]` or `[C, 1, W]` -> `[C, 1, W]`."""

    def read(self, tensor: torch.Tensor, config, name: str) -> torch.Tensor:
        width = config.linear_attn_config["short_conv_kernel_size"]
        if tensor.dim() not in (2, 3) or tensor.shape[-1] != width or tensor.numel() != tensor.shape[0] * width:
            raise ValueError(f"{name}: expected [C, 1, {width}] or [C, {width}], got {list(tensor.shape)}")
        return tensor.reshape(-1, 1, width)


class WriteConv(_WriteReleased):
    reader = ReadConv


ReadVector.writer, ReadALog.writer, ReadConv.writer = WriteVector, WriteALog, WriteConv


def released_mapping() -> list[WeightRenaming | WeightConverter]:
    """(released, ours) for every name that differs, in the order in which they are applied while reading."""
    return [
        ReadAs(r"^language_model\.(.+)", r"\1"),  # `MoeLcForCausalLM` writes `model.*`
        # So does transformers' own KimiLinear save its dense layers, which it reads as `mlp`.
        ReadAs(r"block_sparse_moe\.(gate|up|down)_proj\.weight", r"mlp.\1_proj.weight"),
        WeightRenaming(r"self_attn\.dt_bias", r"self_attn.decay.dt_bias"),
        WeightRenaming(r"_attention_res_proj\.weight", r"_attention_res.query"),
        WeightRenaming(r"_attention_res_norm\.weight", r"_attention_res.key_norm"),
        WeightRenaming(r"mlp_res_proj\.weight", r"mlp_res.query"),
        WeightRenaming(r"mlp_res_norm\.weight", r"mlp_res.key_norm"),
        WeightRenaming(r"output_attn_res_proj\.weight", r"output_attn_res.query"),
        WeightRenaming(r"output_attn_res_norm\.weight", r"output_attn_res.key_norm"),
        WeightConverter("self_attn.A_log", "self_attn.decay.A_log", [ReadALog()]),
        WeightConverter("q_conv1d.weight", "q_conv1d.weight", [ReadConv()]),
        WeightConverter("k_conv1d.weight", "k_conv1d.weight", [ReadConv()]),
        WeightConverter("v_conv1d.weight", "v_conv1d.weight", [ReadConv()]),
        WeightConverter("o_norm.weight", "o_norm.weight", [ReadVector()]),
        WeightConverter("e_score_correction_bias", "e_score_correction_bias", [ReadVector()]),
        WeightConverter(
            ["mlp.gate_proj.weight", "mlp.up_proj.weight"], "mlp.gate_up_proj.weight", [Concatenate(dim=0)]
        ),
        WeightConverter(
            ["shared_experts.gate_proj.weight", "shared_experts.up_proj.weight"],
            "shared_experts.gate_up_proj.weight",
            [Concatenate(dim=0)],
        ),
        *expert_converters(),
    ]


def register_released_names(model_type: str) -> None:
    """Makes `from_pretrained` and `save_pretrained` of `model_type` use the released names. Safe to call twice."""
    register_checkpoint_conversion_mapping(model_type, released_mapping(), overwrite=True)


def register_multimodal_names(model_type: str) -> None:
    """The same for a model that holds tower, projector and text model; the text model brings its own names."""
    mapping = [
        MovePrefix("language_model.lm_head", "lm_head"),  # last while saving: the next one would move it once more
        MovePrefix("language_model.model", "model.language_model"),
        MovePrefix("vision_tower", "model.vision_tower"),
        MovePrefix("mm_projector", "model.mm_projector"),
    ]
    register_checkpoint_conversion_mapping(model_type, mapping, overwrite=True)


def in_own_names(model, given: Mapping[str, Any], *, complete: bool) -> tuple[Mapping[str, torch.Tensor], list[str]]:
    """A state dict in released names as one in the names of `model`, on the CPU, and the released names that it lacks.

    Args:
        complete: what `given` lacks is taken from `model`, because a file of several may end between the experts of a layer.
            Otherwise what is missing stays missing, under our names, and no names are returned.

    Raises `RuntimeError`, as `from_pretrained`, for wrong shapes and, without `complete`, for parts of a tensor.
    """
    own, tied = model.state_dict(), model.all_tied_weights_keys
    saved = revert_weight_conversion(model, {name: own[name] for name in own.keys() - tied.keys()})
    if given.keys() & (own.keys() - tied.keys() - saved.keys()):
        return given, []  # our names, and some that nobody knows
    absent = sorted(saved.keys() - given.keys()) if complete and given.keys() & saved.keys() else []
    config = copy.deepcopy(model.config)
    quantization = config.__dict__.pop("quantization_config", None)  # of experts that stay packed: an object, no field
    read, info = type(model).from_pretrained(
        None,
        config=config,
        state_dict={**{name: saved[name] for name in absent}, **given},
        dtype=model.dtype,
        quantization_config=quantization,
        output_loading_info=True,
    )
    for name, module in read.named_modules():
        if hasattr(module, "released_scales"):
            model.get_submodule(name).released_scales = module.released_scales
    found = {name: tensor for name, tensor in read.state_dict().items() if name not in info["missing_keys"]}
    return found | dict.fromkeys(info["unexpected_keys"], torch.empty(0)), absent
