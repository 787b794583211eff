"""modeling_moe_lc: long-context sparse models as ordinary Hugging Face models. Importing it registers everything."""

from pathlib import Path


_checkout = Path(__file__).resolve().parent.parent
if (
    _checkout / "model_cards"
).is_dir():  # a checkout: configuration/, kernels/, conversion/, training/ stand beside this folder
    __path__.append(str(_checkout))

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .backends import KDAInterface
from .configuration.configuration_moe_lc import MoeLcTextConfig
from .kernels.custom_ops import register_operators
from .modeling_moe_lc import MoeLcForCausalLM, MoeLcPreTrainedModel, MoeLcTextModel
from .router import update_router_bias


__version__ = "0.1.0"
__all__ = [
    "KDAInterface",
    "MoeLcForCausalLM",
    "MoeLcPreTrainedModel",
    "MoeLcTextConfig",
    "MoeLcTextModel",
    "update_router_bias",
]

register_operators()  # here and not beside `register_backends`: exported remote code must not register them
AutoConfig.register(MoeLcTextConfig.model_type, MoeLcTextConfig, exist_ok=True)
AutoModel.register(MoeLcTextConfig, MoeLcTextModel, exist_ok=True)
AutoModelForCausalLM.register(MoeLcTextConfig, MoeLcForCausalLM, exist_ok=True)
