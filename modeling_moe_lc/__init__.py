"""modeling_moe_lc: long-context sparse models as ordinary Hugging Face models. Importing it registers everything."""

from pathlib import Path


_checkout = Path(__file__).resolve().parent.parent
if (
    _checkout / "model_cards"
).is_dir():  # a checkout: configuration/, kernels/, conversion/, training/ stand beside this folder
    __path__.append(str(_checkout))

from contextlib import suppress

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoProcessor,
)
from transformers.models.auto.image_processing_auto import (
    AutoImageProcessor,  # `transformers` before 5.23 hides it where there is no torchvision
)

from .adapters import add_lora, load_lora, lora_targets, register_lora_defaults
from .backends import KDAInterface
from .configuration.configuration_moe_lc import (
    KimiK3Config,
    MoeLcConfig,
    MoeLcTextConfig,
    MoeLcVisionConfig,
)
from .image_processing_moe_lc import MoeLcImageProcessor
from .kernels.custom_ops import register_operators
from .modeling_moe_lc import MoeLcForCausalLM, MoeLcPreTrainedModel, MoeLcTextModel
from .modeling_moe_lc_vl import MoeLcForConditionalGeneration, MoeLcModel, MoeLcVisionModel, freeze_vision
from .processing_moe_lc import MoeLcProcessor
from .quantizer_mxfp4 import MoeLcMxfp4Config, pack_experts
from .router import update_router_bias


__version__ = "0.1.0"
__all__ = [
    "KDAInterface",
    "MoeLcConfig",
    "MoeLcForCausalLM",
    "MoeLcForConditionalGeneration",
    "MoeLcImageProcessor",
    "MoeLcModel",
    "MoeLcMxfp4Config",
    "MoeLcPreTrainedModel",
    "MoeLcProcessor",
    "MoeLcTextConfig",
    "MoeLcTextModel",
    "MoeLcVisionConfig",
    "MoeLcVisionModel",
    "add_lora",
    "freeze_vision",
    "load_lora",
    "lora_targets",
    "pack_experts",
    "update_router_bias",
]

register_operators()  # here and not beside `register_backends`: exported remote code must not register them
AutoConfig.register(MoeLcTextConfig.model_type, MoeLcTextConfig, exist_ok=True)
AutoModel.register(MoeLcTextConfig, MoeLcTextModel, exist_ok=True)
AutoModelForCausalLM.register(MoeLcTextConfig, MoeLcForCausalLM, exist_ok=True)

AutoConfig.register(MoeLcVisionConfig.model_type, MoeLcVisionConfig, exist_ok=True)
AutoConfig.register(MoeLcConfig.model_type, MoeLcConfig, exist_ok=True)
with suppress(ValueError):  # a transformers that brings its own model of this type keeps it
    AutoConfig.register(KimiK3Config.model_type, KimiK3Config)
AutoModel.register(MoeLcVisionConfig, MoeLcVisionModel, exist_ok=True)
AutoModel.register(MoeLcConfig, MoeLcModel, exist_ok=True)
for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM):
    auto_class.register(MoeLcConfig, MoeLcForConditionalGeneration, exist_ok=True)

# Under both names, or a transformers beside a torchvision would warn that it takes the PIL one.
backends = {"pil": MoeLcImageProcessor, "torchvision": MoeLcImageProcessor}
AutoImageProcessor.register(MoeLcConfig, image_processor_classes=backends, exist_ok=True)
AutoProcessor.register(MoeLcConfig, MoeLcProcessor, exist_ok=True)

register_lora_defaults(config.model_type for config in (MoeLcTextConfig, MoeLcConfig, KimiK3Config))
