"""What a configuration says about a model, as the rows of a card's tables."""

from collections import Counter

from ..configuration.configuration_moe_lc import MoeLcConfig, MoeLcTextConfig
from .count import Count
from .layouts import GATE_LABEL


Rows = list[tuple[str, str]]


def architecture_rows(config: MoeLcTextConfig | MoeLcConfig) -> Rows:
    """Sizes and choices, each under the name that the paper gives it."""
    text, linear = config.get_text_config(), config.get_text_config().linear_attn_config
    kinds = Counter(text.layer_types)
    sparse = sum(text.is_sparse_layer(layer) for layer in range(text.num_hidden_layers))
    latent = text.routed_expert_hidden_size
    rows = [
        ("layers", f"{text.num_hidden_layers}: {kinds['linear_attention']} KDA, {kinds['full_attention']} gated MLA"),
        ("hidden size", f"{text.hidden_size:,}"),
        ("KDA: heads x size", f"{linear['num_heads']} x {linear['head_dim']}"),
        ("KDA: decay", _decay(text)),
        ("MLA: heads", f"{text.num_attention_heads}, keys {_key_sizes(text)}, values {text.v_head_dim}"),
        ("MLA: latent cached per token", f"{text.kv_lora_rank} + {text.qk_rope_head_dim}"),
        ("MLA: output gate", "yes" if text.mla_use_output_gate else "no"),
        ("residuals", _residuals(text)),
        ("layers with experts / dense", f"{sparse} / {text.num_hidden_layers - sparse}"),
        ("experts: routed / chosen / shared", _experts(text)),
        ("experts: width", f"{text.moe_intermediate_size:,}"),
        ("experts: latent size", "none, they read the full width" if latent is None else f"{latent:,}"),
        ("activation", "SiTU-GLU" if text.hidden_act == "situ" else "SwiGLU"),
        ("vocabulary", f"{text.vocab_size:,}"),
        ("positions in the configuration", f"{text.max_position_embeddings:,}"),
    ]
    if text.expert_quantization:
        rows.append(("routed experts", "stored in MXFP4"))
    if isinstance(config, MoeLcConfig):
        vision = config.vision_config
        rows.append(("vision tower", f"{vision.vt_num_hidden_layers} layers of {vision.vt_hidden_size:,}"))
    return rows


def _decay(text: MoeLcTextConfig) -> str:
    bound = text.linear_attn_config["gate_lower_bound"]
    if bound is None:
        return "softplus, not bounded"
    fitted = ", fitted to a softplus gate: an approximation" if hasattr(text, GATE_LABEL) else ""
    return f"bounded, log decay above {bound:g}{fitted}"


def _key_sizes(text: MoeLcTextConfig) -> str:
    return f"{text.qk_nope_head_dim} + {text.qk_rope_head_dim} (no rotary positions)"


def _residuals(text: MoeLcTextConfig) -> str:
    size = text.attn_res_block_size
    return "ordinary" if size is None else f"attention residuals in blocks of {size} layers"


def _experts(text: MoeLcTextConfig) -> str:
    return f"{text.num_experts} / {text.num_experts_per_token} / {text.num_shared_experts or 0}"


def parameter_rows(counted: Count) -> Rows:
    """Parameters by term, the largest first, and their sums."""
    terms = sorted(counted.terms.items(), key=lambda item: (-item[1], item[0]))
    return [
        *((term, f"{number:,}") for term, number in terms),
        ("**total**", f"**{counted.total:,}**"),
        ("**active per text token** (head counted, embedding not)", f"**{counted.active:,}**"),
    ]


def memory_rows(config: MoeLcTextConfig | MoeLcConfig, counted: Count) -> Rows:
    """Bytes that a sequence needs beside the weights, and what a token costs."""
    context = config.get_text_config().max_position_embeddings
    return [
        ("state of one sequence, whatever its length", f"{counted.state_bytes:,} bytes"),
        ("cache per token", f"{counted.cache_bytes_per_token:,} bytes"),
        (f"cache at {context:,} tokens", f"{context * counted.cache_bytes_per_token:,} bytes"),
        (f"forward FLOPs per token, context {context:,}", f"{counted.flops_per_token(context):,}"),
    ]
