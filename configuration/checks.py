"""Checks of the configuration: every inconsistent value raises `ValueError` with the field, what was expected, what came."""

import functools
from typing import Any

from huggingface_hub.errors import StrictDataclassError


# Fields of related architectures: a graph without them must not accept them.
ONLY_VALUE = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "sliding_window": None,
    "rope_scaling": None,
    "swiglu_limit": None,
    "final_logit_softcapping": None,
    "aux_loss_alpha": 0.0,
}
BALANCE_METHODS = ("quantile", "load_quantile", "sign", "none")


def expect(condition: bool, field: str, expected: str, got: Any) -> None:
    if not condition:
        raise ValueError(f"{field}: expected {expected}, got {got!r}")


def strict_errors_as_value_errors(cls: type) -> type:
    """Class decorator: what `@strict` refuses (wrong types) surfaces as `ValueError`, like our own checks."""

    def translate(method):
        @functools.wraps(method)
        def wrapper(self, *args, **kwargs):
            try:
                return method(self, *args, **kwargs)
            except StrictDataclassError as error:
                raise ValueError(f"{cls.__name__}: {error}") from error

        return wrapper

    for name in ("__init__", "__setattr__"):
        setattr(cls, name, translate(getattr(cls, name)))
    return cls


def check_released_constants(config, extra: dict[str, Any]) -> None:
    """Released fields with one implemented value, and fields of other architectures that arrive as extra keys."""
    expect(config.mla_use_nope, "mla_use_nope", "True (MLA has no positions)", config.mla_use_nope)
    expect(config.num_nextn_predict_layers == 0, "num_nextn_predict_layers", "0", config.num_nextn_predict_layers)
    function = config.moe_router_activation_func
    expect(function == "sigmoid", "moe_router_activation_func", "'sigmoid'", function)
    expect(config.topk_method == "noaux_tc", "topk_method", "'noaux_tc'", config.topk_method)
    for field, only in ONLY_VALUE.items():
        if field in extra:
            value = extra.pop(field)
            expect(value == only, field, f"{only!r} (this architecture has no such term)", value)


def check_sizes(config) -> None:
    positive = (
        "vocab_size hidden_size num_hidden_layers intermediate_size num_attention_heads kv_lora_rank qk_nope_head_dim "
        "v_head_dim num_experts num_experts_per_token moe_intermediate_size moe_layer_freq num_expert_group topk_group "
        "max_position_embeddings rms_norm_eps routed_scaling_factor"
    )
    for field in positive.split():
        expect(getattr(config, field) > 0, field, "a positive number", getattr(config, field))
    for field in ("attn_res_block_size", "q_lora_rank", "routed_expert_hidden_size", "loss_chunk_size"):
        value = getattr(config, field)
        expect(value is None or value > 0, field, "a positive number or None", value)
    for field in ("first_k_dense_replace", "qk_rope_head_dim", "initializer_range"):
        expect(getattr(config, field) >= 0, field, "a number that is not negative", getattr(config, field))
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    expect(kv_heads == heads, "num_key_value_heads", f"num_attention_heads ({heads}): MLA shares no heads", kv_heads)
    for field in ("pad_token_id", "bos_token_id"):
        value = getattr(config, field)
        expect(value is None or 0 <= value < config.vocab_size, field, f"an id below {config.vocab_size}", value)


def check_layers(config) -> tuple[dict[str, Any], list[str]]:
    """Completes `linear_attn_config` (1-based lists, as released) and derives the 0-based `layer_types` from it."""
    linear = dict(config.linear_attn_config or {})
    known = {"num_heads", "head_dim", "short_conv_kernel_size", "use_full_rank_gate", "gate_lower_bound"}
    unknown = set(linear) - known - {"kda_layers", "full_attn_layers"}
    expect(not unknown, "linear_attn_config", f"only the keys {sorted(known)} and the two lists", sorted(unknown))
    linear.setdefault("num_heads", config.num_attention_heads)
    linear.setdefault("head_dim", 128)
    linear.setdefault("short_conv_kernel_size", 4)
    linear.setdefault("use_full_rank_gate", False)
    linear.setdefault("gate_lower_bound", None)
    for key in ("num_heads", "head_dim", "short_conv_kernel_size"):
        value = linear[key]
        expect(isinstance(value, int) and value > 0, f"linear_attn_config.{key}", "a positive integer", value)
    kernel = linear["short_conv_kernel_size"]
    expect(kernel > 1, "linear_attn_config.short_conv_kernel_size", "at least 2", kernel)
    bound = linear["gate_lower_bound"]
    is_number = isinstance(bound, (int, float)) and bound < 0
    expect(bound is None or is_number, "linear_attn_config.gate_lower_bound", "None or a negative number", bound)
    full_rank = linear["use_full_rank_gate"]
    expect(isinstance(full_rank, bool), "linear_attn_config.use_full_rank_gate", "true or false", full_rank)
    layers = range(1, config.num_hidden_layers + 1)
    if ("kda_layers" in linear) != ("full_attn_layers" in linear):
        raise ValueError("linear_attn_config: expected kda_layers and full_attn_layers together, got one of them")
    for key in ("kda_layers", "full_attn_layers"):
        listed = linear.get(key, [])
        fits = isinstance(listed, (list, tuple)) and all(isinstance(layer, int) for layer in listed)
        expect(fits, f"linear_attn_config.{key}", "a list of layers", listed)
    if "kda_layers" not in linear:
        full = _full_layers_without_lists(config)
        linear["full_attn_layers"] = full
        linear["kda_layers"] = [layer for layer in layers if layer not in full]
    named = sorted(linear["kda_layers"] + linear["full_attn_layers"])
    expect(
        named == list(layers),
        "linear_attn_config.kda_layers and full_attn_layers",
        f"every layer from 1 to {config.num_hidden_layers} exactly once",
        named,
    )
    expect(
        len(linear["full_attn_layers"]) > 0,
        "linear_attn_config.full_attn_layers",
        "at least one layer (the length of a cache is read from a full-attention layer)",
        linear["full_attn_layers"],
    )
    full = set(linear["full_attn_layers"])
    types = ["full_attention" if layer in full else "linear_attention" for layer in layers]
    given = config.layer_types
    expect(given is None or given == types, "layer_types", f"what the lists of linear_attn_config say, {types}", given)
    return linear, types


def _full_layers_without_lists(config) -> list[int]:
    if config.layer_types is not None:
        count = len(config.layer_types)
        expect(count == config.num_hidden_layers, "layer_types", f"{config.num_hidden_layers} entries", count)
        for kind in config.layer_types:
            allowed = ("full_attention", "linear_attention")
            expect(kind in allowed, "layer_types", f"entries in {allowed}", kind)
        return [i + 1 for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    last = config.num_hidden_layers
    return sorted({*range(4, last + 1, 4), last})


def check_residuals(config) -> None:
    block, layers = config.attn_res_block_size, config.num_hidden_layers
    expect(block is None or block <= layers, "attn_res_block_size", f"at most num_hidden_layers ({layers})", block)


def check_mla(config) -> None:
    qk_rope = config.qk_rope_head_dim
    expect(qk_rope > 0, "qk_rope_head_dim", "a positive number (the shared part of the key)", qk_rope)


def check_moe(config) -> None:
    acts = ("situ", "silu")
    expect(config.hidden_act in acts, "hidden_act", f"one of {acts}", config.hidden_act)
    for field in ("activation_situ_beta", "activation_situ_linear_beta"):
        value = getattr(config, field)
        expect(value is None or config.hidden_act == "situ", field, "None unless hidden_act is 'situ'", value)
        expect(value is None or value > 0, field, "a positive number or None", value)
    experts, top_k = config.num_experts, config.num_experts_per_token
    expect(top_k <= experts, "num_experts_per_token", f"at most num_experts ({experts})", top_k)
    shared = config.num_shared_experts
    expect(shared is None or shared >= 0, "num_shared_experts", "a number that is not negative, or None", shared)
    expect(
        config.routed_expert_hidden_size is not None or not config.latent_moe_use_norm,
        "latent_moe_use_norm",
        "False when routed_expert_hidden_size is None (there is no latent to norm)",
        config.latent_moe_use_norm,
    )
    groups, kept = config.num_expert_group, config.topk_group
    expect(experts % groups == 0, "num_expert_group", f"a divisor of num_experts ({experts})", groups)
    expect(kept <= groups, "topk_group", f"at most num_expert_group ({groups})", kept)
    reachable = experts // groups * kept
    expect(
        top_k <= reachable, "topk_group", f"groups that hold at least num_experts_per_token ({top_k}) experts", kept
    )
    expect(config.use_grouped_topk or groups == 1, "use_grouped_topk", "True when num_expert_group > 1", False)


def check_router_balance(config, defaults: dict[str, Any]) -> dict[str, Any]:
    given = config.router_balance or {}
    unknown = set(given) - set(defaults)
    expect(not unknown, "router_balance", f"only the keys {sorted(defaults)}", sorted(unknown))
    balance = {**defaults, **given}
    if "method" not in given and (config.num_expert_group > 1 or config.num_experts_per_token == config.num_experts):
        balance["method"] = "none"
    method, ema, bins = balance["method"], balance["ema"], balance["bins"]
    expect(method in BALANCE_METHODS, "router_balance.method", f"one of {BALANCE_METHODS}", method)
    in_range = ema == "auto" or (isinstance(ema, (int, float)) and 0 <= ema < 1)
    expect(in_range, "router_balance.ema", "a number in [0, 1) or 'auto'", ema)
    expect(isinstance(bins, int) and bins > 1, "router_balance.bins", "an integer above 1", bins)
    expect(balance["eta"] > 0, "router_balance.eta", "a positive number", balance["eta"])
    low, high = balance["low"], balance["high"]
    expect(0 <= low < high <= 1, "router_balance.low, high", "0 <= low < high <= 1", (low, high))
    grouped = config.num_expert_group > 1
    expect(
        not (grouped and method == "quantile"), "router_balance.method", "not 'quantile' with expert groups", method
    )
    whole = config.num_experts_per_token == config.num_experts
    expect(not (whole and method == "quantile"), "router_balance.method", "not 'quantile' with all experts on", method)
    return balance


VISION_CONSTANTS = {  # released fields that choose between modules, with the one that is implemented
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
}


def check_vision(config) -> None:
    for field, only in VISION_CONSTANTS.items():
        expect(getattr(config, field) == only, field, repr(only), getattr(config, field))
    positive = (
        "patch_size init_pos_emb_height init_pos_emb_width init_pos_emb_time vt_num_attention_heads "
        "vt_num_hidden_layers vt_hidden_size vt_intermediate_size qkv_hidden_size projector_ln_eps rms_norm_eps"
    )
    for field in positive.split():
        expect(getattr(config, field) > 0, field, "a positive number", getattr(config, field))
    heads, width, qkv = config.vt_num_attention_heads, config.vt_hidden_size, config.qkv_hidden_size
    whole = qkv % heads == 0 and qkv // heads % 4 == 0
    expect(whole, "qkv_hidden_size", f"{heads} heads (vt_num_attention_heads) of a multiple of 4 channels", qkv)
    expect(width % 2 == 0, "vt_hidden_size", "an even number (sines and cosines of the time table)", width)
    expect(config.mm_hidden_size == width, "mm_hidden_size", f"vt_hidden_size ({width})", config.mm_hidden_size)
    kernel = config.merge_kernel_size
    fits = len(kernel) == 2 and all(isinstance(side, int) and side > 0 for side in kernel)
    expect(fits, "merge_kernel_size", "two positive integers, rows and columns", kernel)


def check_multimodal(config) -> None:
    """Fields of a text, a vision and an outer configuration that must agree."""
    text, vision = config.text_config, config.vision_config
    width = vision.text_hidden_size
    expect(width == text.hidden_size, "vision_config.text_hidden_size", f"hidden_size ({text.hidden_size})", width)
    token, size = config.media_placeholder_token_id, text.vocab_size
    expect(0 <= token < size, "media_placeholder_token_id", f"an id below vocab_size ({size})", token)
    expect(config.ignore_index == -100, "ignore_index", "-100", config.ignore_index)
    for field in ("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"):
        inner, outer = getattr(text, field), getattr(config, field)
        expect(outer == inner, field, f"that of text_config ({inner!r})", outer)
