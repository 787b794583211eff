"""`config.json` of an export: the fields of the release, and which values of a model they cannot say.

What is written is read back. A value that does not return cannot be said by the target, so no list of such fields has to
be kept up to date; only values that have a field, but no code behind it, are listed.
"""

import copy
from typing import Any

from ..configuration.configuration_moe_lc import MoeLcConfig, MoeLcTextConfig, MoeLcVisionConfig
from .layouts import GATE_LABEL, OWN_FIELDS, QUANTIZATION, Description, describe


TARGETS = ("kimi-k3", "kimi-linear")
_BOTH = (
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "first_k_dense_replace",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "kv_lora_rank",
    "mla_use_nope",
    "moe_intermediate_size",
    "moe_layer_freq",
    "moe_renormalize",
    "moe_router_activation_func",
    "num_attention_heads",
    "num_expert_group",
    "num_experts",
    "num_experts_per_token",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_nextn_predict_layers",
    "num_shared_experts",
    "pad_token_id",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "rms_norm_eps",
    "routed_scaling_factor",
    "tie_word_embeddings",
    "topk_group",
    "use_cache",
    "use_grouped_topk",
    "v_head_dim",
    "vocab_size",
)
_TEXT_OF_K3 = (
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "attn_res_block_size",
    "latent_moe_use_norm",
    "max_position_embeddings",
    "mla_use_output_gate",
    "routed_expert_hidden_size",
    "topk_method",
)
_OUTER_OF_K3 = ("bos_token_id", "dtype", "eos_token_id", "pad_token_id", "tie_word_embeddings")
_PICTURES_OF_K3 = ("ignore_index", "image_placeholder", "media_placeholder_token_id")
_KDA = ("full_attn_layers", "head_dim", "kda_layers", "num_heads", "short_conv_kernel_size")
_KDA_OF_K3 = ("gate_lower_bound", "use_full_rank_gate")
_NOT_RELEASED_OF_VISION = {"rms_norm_eps", "initializer_range"}

# The layout has the fields; the classes behind them, released or in the engines, have one value.
_ONLY = {
    "kimi-k3": {},
    "kimi-linear": {"hidden_act": "silu", "q_lora_rank": None, "tie_word_embeddings": False, "moe_layer_freq": 1},
}
_WITHOUT_EFFECT = {*OWN_FIELDS, "initializer_range", "output_router_logits"}  # on what a served model computes
_REMEDY = {
    "expert_quantization": "moe-lc convert --dtype bfloat16 unpacks it",
    "vision_config": "moe-lc convert --text-only leaves it out",
}


def exported(source: Description, target: str) -> Description:
    """The description of `source` as a checkpoint of `target`, "kimi-k3" or "kimi-linear".

    Raises `ValueError` that names every field, with its value, that the target cannot express.
    """
    raw = _k3(source) if target == "kimi-k3" else _kimi_linear(source.config)
    found = describe(raw)
    lost = _lost(source, found) | _without_code(source.config, target)
    if lost:
        lines = (f"{name} {value}".strip() + (f" ({_REMEDY[name]})" if name in _REMEDY else "")
                 for name, value in lost.items())  # fmt: skip
        raise ValueError(f"checkpoint: expected what {target} can express, got {', '.join(lines)}")
    return describe(copy.deepcopy(source.raw)) if source.layout == target else found


def _lost(source: Description, target: Description) -> dict[str, str]:
    """Field -> value in `source`, where `target` reads as another."""
    lost = _differences(_text_fields(source.config), _text_fields(target.config))
    if "expert_quantization" in lost:
        lost["expert_quantization"] = "(MXFP4)"
    if source.vision is not None and target.vision is None:
        return lost | {"vision_config": ""}
    if source.vision is not None:
        before, after = (_vision_fields(one.vision) for one in (source, target))
        lost |= {f"vision_config.{name}": value for name, value in _differences(before, after).items()}
    return lost


def _differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in before.items() if value != after[name]}


def _text_fields(config: MoeLcTextConfig) -> dict[str, Any]:
    names = MoeLcTextConfig.__annotations__.keys() - _WITHOUT_EFFECT - {"linear_attn_config"}
    fields = {name: getattr(config, name) for name in sorted(names)}
    return fields | {f"linear_attn_config.{key}": value for key, value in config.linear_attn_config.items()}


def _vision_fields(vision: dict[str, Any]) -> dict[str, Any]:
    config = MoeLcVisionConfig.from_dict(vision)
    names = MoeLcVisionConfig.__annotations__.keys() - _WITHOUT_EFFECT
    return {name: getattr(config, name) for name in sorted(names)}


def _without_code(config: MoeLcTextConfig, target: str) -> dict[str, str]:
    values = {name: getattr(config, name) for name in _ONLY[target]}
    return {name: repr(value) for name, value in values.items() if value != _ONLY[target][name]}


def _kimi_linear(config: MoeLcTextConfig) -> dict[str, Any]:
    """A flat `config.json`. `head_dim` and `rope_theta` have no effect, but there are engines that want them."""
    return dict(
        sorted(
            {
                **_fields(config, _BOTH),
                "architectures": ["KimiLinearForCausalLM"],
                "head_dim": config.hidden_size // config.num_attention_heads,
                "linear_attn_config": {key: config.linear_attn_config[key] for key in _KDA},
                "model_max_length": config.max_position_embeddings,
                "model_type": "kimi_linear",
                "num_shared_experts": config.num_shared_experts or 0,
                "rope_scaling": None,
                "rope_theta": 10000.0,
            }.items()
        )
    )


def _k3(source: Description) -> dict[str, Any]:
    """A nested `config.json`; a text model has no `vision_config` and none of the fields that go with it."""
    config = source.config
    text = {
        **_fields(config, _BOTH + _TEXT_OF_K3),
        "architectures": ["KimiLinearForCausalLM"],
        "linear_attn_config": {key: config.linear_attn_config[key] for key in sorted(_KDA + _KDA_OF_K3)},
        "model_type": "kimi_linear",
    }
    if config.expert_quantization is not None:
        text[QUANTIZATION] = copy.deepcopy(config.expert_quantization)
    if hasattr(config, GATE_LABEL):
        text[GATE_LABEL] = getattr(config, GATE_LABEL)
    outer = {
        **_fields(config, _OUTER_OF_K3),
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": dict(sorted(text.items())),
    }
    if source.vision is not None:
        vision = MoeLcVisionConfig.from_dict(source.vision)
        names = MoeLcVisionConfig.__annotations__.keys() - _NOT_RELEASED_OF_VISION - {"text_hidden_size"}
        outer["vision_config"] = _fields(vision, sorted(names)) | {"text_hidden_size": config.hidden_size}
        outer |= {name: source.raw.get(name, getattr(MoeLcConfig, name)) for name in _PICTURES_OF_K3}
    return dict(sorted(outer.items()))


def _fields(config: MoeLcTextConfig | MoeLcVisionConfig, names: tuple[str, ...] | list[str]) -> dict[str, Any]:
    plain = config.to_dict()
    return {name: plain.get(name) for name in names}
