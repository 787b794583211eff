"""transformers' quantiser for released MXFP4 experts: it reads them into plain weights, or keeps them packed.

Either way `save_pretrained` writes the released field and the released bytes, of plain weights those that did not change.
`model.config.expert_quantization = None` before saving writes plain weights in the dtype of the model (a packed model is first
made plain by `model.dequantize()`); `= mxfp4_quantization()` quantises those of any model.
"""

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import Mxfp4Config

from .configuration.expert_quantization import QUANT_METHOD, mxfp4_quantization
from .packed_experts import PackedExperts
from .released_experts import with_packed_experts


class MoeLcMxfp4Config(Mxfp4Config):
    """`from_pretrained(folder, quantization_config=MoeLcMxfp4Config(dequantize=False))` keeps the experts in MXFP4.

    Args:
        dequantize: True, as without this argument: the experts become plain weights of the dtype that was asked for, and
            the model can be trained and saved like any other. False: they stay packed and frozen.
    """

    # transformers lets attributes of a few classes of its own, Mxfp4Config for one, override what the checkpoint says
    def __init__(self, dequantize: bool = True, **kwargs):
        super().__init__(dequantize=dequantize)
        self.quant_method = QUANT_METHOD


class MoeLcMxfp4Quantizer(HfQuantizer):
    """Touches the routed experts and nothing else, whatever the `ignore` list of the checkpoint says."""

    def __init__(self, quantization_config: MoeLcMxfp4Config, **kwargs):
        super().__init__(quantization_config, **kwargs)
        # The conversion mapping reads the bytes. Otherwise the loader would cast no renamed tensor (5.17), and read ahead as
        # fast as it can: now it reads one tensor of the model after the other.
        self.pre_quantized = False
        self.read: set[str] = set()  # names of the tensors of experts that the checkpoint had

    def _process_model_before_weight_loading(self, model, **kwargs):
        if getattr(model.config, "distributed_config", None) is not None:
            raise ValueError(
                "distributed_config: expected none while reading MXFP4 experts, got one; save them plain before"
            )
        if model.config.get_text_config().expert_quantization is None:
            raise ValueError(
                "quantization_config: expected a checkpoint whose experts are in MXFP4; load it plain, and pack_experts(model)"
            )
        if not self.quantization_config.dequantize:
            make_room_for_packed_experts(model)
        self.shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    def update_weight_conversions(self, weight_conversions, model=None):
        return weight_conversions if self.quantization_config.dequantize else with_packed_experts(weight_conversions)

    def postprocess_model(self, model, **kwargs):
        loaded = {name: tensor.shape for name, tensor in model.state_dict().items()}
        wrong = {name: list(shape) for name, shape in loaded.items() if shape != self.shapes.get(name, shape)}
        if wrong:  # 5.17 takes any shape when there is a quantiser
            raise ValueError(f"expected {[list(self.shapes[name]) for name in wrong]}, got {wrong}")
        if self.quantization_config.dequantize:
            return self.remove_quantization_config(model)
        wanted = {
            f"{name}.{buffer}"
            for name in experts_called(model, "PackedExperts")
            for buffer, _ in model.get_submodule(name).named_buffers()
        }
        missing = sorted(wanted - self.read)
        if missing:
            raise ValueError(f"expected the MXFP4 bytes of all experts, missing {missing}")
        super().postprocess_model(model, **kwargs)

    def _dequantize(self, model, dtype=None):
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        replace_experts(model, "PackedExperts", lambda experts: experts.unpack(dtype))
        model._weight_conversions = None
        return model

    def get_state_dict_and_metadata(self, model):
        if model.config.get_text_config().expert_quantization is None:
            raise ValueError(
                "expert_quantization: expected that of experts in MXFP4, got None; call model.dequantize() to save them plain"
            )
        return None, {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """With adapters: the gradients of activations and of router weights pass through packed experts."""
        return True

    @property
    def is_compileable(self) -> bool:
        """What `generate` asks before a step with a cache of fixed size is launched as a whole."""
        return True


def replace_experts(model: nn.Module, kind: str, make) -> None:
    """Puts `make(experts)` in the place of every module of class `kind`, one after the other."""
    for name in experts_called(model, kind):
        model.set_submodule(name, make(model.get_submodule(name)).train(model.training))


def make_room_for_packed_experts(model: nn.Module) -> None:
    """Puts packed experts, which hold nothing yet, in the place of plain ones."""
    replace_experts(model, "MoeLcExperts", lambda experts: PackedExperts(experts.config, type(experts)))


def experts_called(model: nn.Module, kind: str) -> list[str]:
    """Their names, by the name of their class: the model may come from another copy of this code, a folder's remote code."""
    return [name for name, module in model.named_modules() if type(module).__name__ == kind]


def pack_experts(model):
    """`model` with its experts in MXFP4, quantised in place layer by layer; it then saves them so. Returns the model."""
    replace_experts(model, "MoeLcExperts", PackedExperts.pack)
    if model.config.get_text_config().expert_quantization is None:
        model.config.get_text_config().expert_quantization = mxfp4_quantization()
    model._weight_conversions = with_packed_experts(get_model_conversion_mapping(model))
    model.is_quantized, model.quantization_method = True, QUANT_METHOD
    model.hf_quantizer = MoeLcMxfp4Quantizer(MoeLcMxfp4Config(dequantize=False))
    HfQuantizer.postprocess_model(model.hf_quantizer, model)
    return model


def register_quantizer() -> None:
    """Safe to call twice."""
    AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = MoeLcMxfp4Config
    AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = MoeLcMxfp4Quantizer
