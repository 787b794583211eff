"""Routed experts on disk, one by one and plain or in MXFP4, and in memory: all of a layer in one tensor, plain or packed."""

from concurrent.futures import Future

import torch
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    SplitModulelist,
    Transpose,
    WeightConverter,
)

from .kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4, requantize_mxfp4


EXPERTS = "block_sparse_moe.experts"
PROJECTIONS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}  # ours, and the released ones that are its rows


def released(projection: str, *suffixes: str) -> list[str]:
    """Patterns of the released names: `...experts.*.w1.weight_packed` and so on, by suffix within each projection."""
    return [f"{EXPERTS}.*.{name}.weight{suffix}" for name in PROJECTIONS[projection] for suffix in suffixes]


class PlainExperts(ConversionOps):
    """Leaves plain experts as they are; its reverse writes them in the format that `config.expert_quantization` names."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        return input_dict

    @property
    def reverse_op(self) -> ConversionOps:
        return WriteExperts()


class WriteExperts(ConversionOps):
    """Single experts, by released name -> the same, or their MXFP4 bytes.

    Weights that came out of MXFP4 and did not change get back the bytes that they had: the experts remember their scales.
    """

    @torch.no_grad()
    def convert(self, input_dict, source_patterns, target_patterns, full_layer_name, model, config, **kwargs):
        if config.get_text_config().expert_quantization is None:
            return input_dict
        prefix = full_layer_name.partition(target_patterns[0])[0]  # whole names from here on: they get suffixes
        scales = experts_of(model, prefix).released_scales
        written = {}
        for name, weight in input_dict.items():
            kept = scales.get(name.removeprefix(f"{EXPERTS}."))
            packed, scale = (
                quantize_mxfp4(weight) if kept is None else requantize_mxfp4(weight, kept.to(weight.device))
            )
            written[f"{prefix}{name}_packed"], written[f"{prefix}{name}_scale"] = packed, scale
        return written

    @property
    def reverse_op(self) -> ConversionOps:
        return PlainExperts()


def experts_of(model, prefix: str):
    """The routed experts of the layer that `prefix` ends with; what stands before it is ours or, in 5.17, released."""
    end = f".{prefix}{EXPERTS}"[-len(f".layers.{prefix.rstrip('.').rpartition('.')[2]}.{EXPERTS}") :]
    return next(module for name, module in model.named_modules() if f".{name}".endswith(end))


class ReadMxfp4(ConversionOps):
    """MXFP4 bytes -> one plain tensor for the layer, which is filled expert by expert in the dtype of the parameter."""

    @torch.no_grad()
    def convert(self, input_dict, source_patterns, target_patterns, full_layer_name, model, **kwargs):
        parameter = model.get_parameter(full_layer_name)
        if hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"{full_layer_name}: expected no tensor or expert parallelism while reading MXFP4 experts"
            )
        path, _, projection = full_layer_name.rpartition(".")
        names, scales = PROJECTIONS[projection], model.get_submodule(path).released_scales
        E, rows = parameter.shape[0], parameter.shape[1] // len(names)
        whole = None
        for e in range(E):
            for part, name in enumerate(names):
                pattern = f"{EXPERTS}.*.{name}.weight"
                packed, scale = (
                    as_bytes(input_dict[pattern + end][e], pattern + end) for end in ("_packed", "_scale")
                )
                values = dequantize_mxfp4(packed, scale, parameter.dtype)  # [rows, in]
                if values.shape != (rows, parameter.shape[2]):
                    raise ValueError(
                        f"{pattern}_packed of expert {e}: expected {rows} x {parameter.shape[2]}, got {list(values.shape)}"
                    )
                if whole is None:
                    whole = values.new_empty(parameter.shape)  # [E, names * rows, in]
                whole[e, part * rows : (part + 1) * rows] = values
                scales[f"{e}.{name}.weight"] = scale.to("cpu", copy=True)
        return {target_patterns[0]: whole}

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError("Mxfp4Converter reverses as a whole")


def as_bytes(source, name: str) -> torch.Tensor:
    """A tensor of bytes, read only now; the loader may have cast it to the dtype of the parameter, which loses nothing."""
    tensor = source.result() if isinstance(source, Future) else source() if callable(source) else source
    if tensor.dtype == torch.uint8:
        return tensor
    found = tensor.to(torch.uint8)
    if not torch.equal(found.to(tensor.dtype), tensor):
        raise ValueError(f"{name}: expected bytes (uint8), got other values")
    return found


class StackExperts(MergeModulelist):
    """`MergeModulelist` whose reverse leaves alone a dimension of size 1: one block of scales for each row."""

    @property
    def reverse_op(self) -> ConversionOps:
        return UnstackExperts(self.dim)


class UnstackExperts(SplitModulelist):
    @torch.no_grad()
    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        pieces = {}
        for pattern, found in input_dict.items():
            tensor = found[0] if isinstance(found, list) else found
            names = self.get_target_patterns(input_dict, pattern, target_patterns, tensor.shape[self.dim])
            pieces |= zip(names, tensor.unbind(self.dim), strict=True)
        return pieces

    @property
    def reverse_op(self) -> ConversionOps:
        return StackExperts(self.dim)


class ExpertsConverter(WeightConverter):
    """A converter that wants every tensor of every expert, and names those that the checkpoint lacks."""

    __slots__ = ()

    def convert(self, layer_name, model=None, config=None, hf_quantizer=None, loading_info=None):
        if loading_info is not None:
            self.refuse_gaps(layer_name, model)
            getattr(hf_quantizer, "read", set()).add(layer_name)
        return super().convert(layer_name, model, config, hf_quantizer, loading_info)

    def refuse_gaps(self, layer_name: str, model) -> None:
        path = layer_name.rpartition(".")[0]
        wanted = [
            f".{EXPERTS}.{pattern.removeprefix(f'{EXPERTS}.').replace('*', str(e))}"
            for pattern in self._original_source_patterns
            for e in range(model.get_submodule(path).num_experts)
        ]
        present = {f".{EXPERTS}{key.partition(EXPERTS)[2]}" for keys in self.layer_targets.values() for key in keys}
        missing = [f"{path.removesuffix(f'.{EXPERTS}')}{name}" for name in wanted if name not in present]
        if missing or len(present) != len(wanted):
            raise ValueError(
                f"{layer_name}: expected {len(wanted)} MXFP4 tensors, missing {missing}, "
                f"got in addition {sorted(present - set(wanted))}"
            )


class Mxfp4Converter(ExpertsConverter):
    """Reads MXFP4 experts one after the other; written they are as plain ones are: as the config says."""

    __slots__ = ()

    def materialize_tensors(self):
        return {pattern: self.collected_tensors.pop(pattern) for pattern in list(self.collected_tensors)}

    def reverse_transform(self) -> WeightConverter:
        plain = plain_converter(self._original_target_patterns[0].rpartition(".")[2])
        return same_scope(self, plain).reverse_transform()


def plain_converter(projection: str) -> WeightConverter:
    merge = [PlainExperts(), MergeModulelist(dim=0)]
    if projection == "gate_up_proj":
        merge.append(Concatenate(dim=1))
    return WeightConverter(released(projection, ""), f"{EXPERTS}.{projection}", merge)


def expert_converters() -> list[WeightConverter]:
    """For experts that are plain in memory. MXFP4 first: in 5.17 `w1.weight` is found in `w1.weight_packed` as well."""
    packed = [
        Mxfp4Converter(released(projection, "_packed", "_scale"), f"{EXPERTS}.{projection}", [ReadMxfp4()])
        for projection in PROJECTIONS
    ]
    return packed + [plain_converter(projection) for projection in PROJECTIONS]


def packed_converters() -> list[WeightConverter]:
    """For experts that stay packed in memory: released bytes, stacked; the scales transposed, see `PackedExperts`."""
    converters = []
    for projection in PROJECTIONS:
        merge = [StackExperts(dim=0), Concatenate(dim=1)] if projection == "gate_up_proj" else [StackExperts(dim=0)]
        for suffix, transpose in (("_packed", []), ("_scale", [Transpose(1, 2)])):
            target = f"{EXPERTS}.{projection}{suffix}"
            converters.append(ExpertsConverter(released(projection, suffix), target, merge + transpose))
    return converters


def with_packed_experts(conversions: list) -> list:
    """A conversion mapping with `packed_converters` in place of those for plain experts."""
    targets = {f"{EXPERTS}.{projection}" for projection in PROJECTIONS}
    plain = [c for c in conversions if isinstance(c, WeightConverter) and c._original_target_patterns[0] in targets]
    kept = [conversion for conversion in conversions if conversion not in plain]
    return kept + [same_scope(plain[0], converter) for converter in packed_converters()] if plain else kept


def same_scope(model: WeightConverter, converter: WeightConverter) -> WeightConverter:
    """`converter`, for the part of a composite model that `model` is for."""
    converter.scope_prefix, converter.base_model_prefix = model.scope_prefix, model.base_model_prefix
    return converter
