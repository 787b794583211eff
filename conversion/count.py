"""`moe-lc count`: parameters, state, cache and FLOPs of a configuration, counted on the real model without weights."""

import argparse
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..configuration.configuration_moe_lc import MoeLcConfig, MoeLcTextConfig
from ..configuration.presets import load_multimodal_preset, load_preset, multimodal_preset_names, preset_names
from ..modeling_moe_lc import MoeLcForCausalLM
from ..modeling_moe_lc_vl import MoeLcForConditionalGeneration
from .layouts import check_model_type


VISION_TERMS = (("vision_tower.", "vision tower"), ("mm_projector.", "projector"))
TERMS = (  # first fragment found in a tensor's name wins
    *VISION_TERMS,
    ("embed_tokens", "embedding"),
    ("lm_head", "head"),
    ("block_sparse_moe.experts", "routed experts"),
    ("shared_experts", "shared experts"),
    ("routed_expert_", "latent projections"),
    ("block_sparse_moe.gate", "router"),
    ("mlp.", "dense MLP"),
    ("_res.", "attention residuals"),
    ("norm", "norms"),
)
CHUNK = 64  # tokens per chunk of the KDA algorithm that the FLOPs are counted for


@dataclass(frozen=True)
class Count:
    """Parameters by term (the persistent router bias included), bytes per sequence and forward FLOPs per token."""

    terms: dict[str, int]
    total: int
    active: int
    state_bytes: int
    cache_bytes_per_token: int
    matmul_flops: int
    kda_flops: int
    mla_flops_per_context_token: int

    def flops_per_token(self, context: int) -> int:
        """Forward FLOPs per token, averaged over a causal context of `context` tokens; training costs three times that."""
        return self.matmul_flops + self.kda_flops + self.mla_flops_per_context_token * context // 2


def count(config: MoeLcTextConfig | MoeLcConfig) -> Count:
    """Counts the model that `config` describes; nothing is allocated.

    Active parameters are those a text token meets: the head but not the embedding, `num_experts_per_token` experts, and
    nothing of a vision tower.
    State: FP32 recurrent state and 16-bit convolution inputs of all KDA layers. Cache: 16-bit latents of all MLA layers.
    """
    with torch.device("meta"):
        model = (MoeLcForConditionalGeneration if isinstance(config, MoeLcConfig) else MoeLcForCausalLM)(config)
    config = config.get_text_config()
    terms: Counter[str] = Counter()
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        terms[_term(name, config)] += tensor.numel()
    routed = terms["routed experts"]
    total = terms.total()
    head = terms["embedding"] if config.tie_word_embeddings else 0
    used = routed // config.num_experts * config.num_experts_per_token
    unseen = terms["embedding"] + sum(terms[term] for _, term in VISION_TERMS)
    active = total - unseen + head - routed + used

    kinds, linear = Counter(config.layer_types), config.linear_attn_config
    heads, dim = linear["num_heads"], linear["head_dim"]
    kda_layers, mla_layers = kinds["linear_attention"], kinds["full_attention"]
    conv = 3 * heads * dim * (linear["short_conv_kernel_size"] - 1)
    qk_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    return Count(
        terms=dict(terms),
        total=total,
        active=active,
        state_bytes=kda_layers * (heads * dim * dim * 4 + conv * 2),
        cache_bytes_per_token=mla_layers * (config.kv_lora_rank + config.qk_rope_head_dim) * 2,
        matmul_flops=2 * active,
        kda_flops=kda_layers * heads * (6 * dim * dim + 8 * CHUNK * dim),
        mla_flops_per_context_token=mla_layers * 2 * config.num_attention_heads * (qk_dim + config.v_head_dim),
    )


def _term(name: str, config: MoeLcTextConfig) -> str:
    if "self_attn." in name:
        layer = int(name.split("layers.")[1].split(".")[0])
        return "KDA" if config.layer_types[layer] == "linear_attention" else "MLA"
    return next((term for fragment, term in TERMS if fragment in name), "other")


def config_from_path(path: Path) -> MoeLcTextConfig | MoeLcConfig:
    """The configuration in a folder or file, with its vision tower where it has one. Raises `ValueError` for another model."""
    file = path / "config.json" if path.is_dir() else path
    raw = json.loads(file.read_text(encoding="utf-8"))
    model_type = check_model_type(raw, f"model_type of {file}")
    multimodal = model_type == MoeLcConfig.model_type or raw.get("vision_config") is not None
    return (MoeLcConfig if multimodal else MoeLcTextConfig).from_pretrained(path)


def config_from_preset(name: str) -> MoeLcTextConfig | MoeLcConfig:
    """The preset called `name`, with its vision tower where it has one. Raises `ValueError` for an unknown name."""
    return load_multimodal_preset(name) if name in multimodal_preset_names() else load_preset(name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", help=f"a preset ({', '.join(preset_names())}) or a folder or file with a config.json"
    )
    parser.add_argument("--context", type=int, nargs="+", default=[8192, 65536, 262144, 1048576], help="tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    if shortest := [context for context in args.context if context < 1]:
        raise ValueError(f"context: expected 1 token or more, got {shortest[0]}")
    path = Path(args.config)
    counted = count(config_from_path(path) if path.exists() else config_from_preset(args.config))
    flops = {context: counted.flops_per_token(context) for context in args.context}
    if args.json:
        print(json.dumps({**asdict(counted), "flops_per_token": flops}))
        return
    for term, number in sorted(counted.terms.items(), key=lambda item: -item[1]):
        print(f"{term:<22}{number:>22,}")
    print(f"{'total':<22}{counted.total:>22,}")
    print(f"{'active per token':<22}{counted.active:>22,}   (head counted, embedding not)")
    print(f"{'state per sequence':<22}{counted.state_bytes:>22,}   bytes (KDA: FP32 state, 16-bit conv inputs)")
    print(f"{'cache per token':<22}{counted.cache_bytes_per_token:>22,}   bytes (MLA: 16-bit latents)")
    for context, number in flops.items():
        print(f"{'forward FLOPs/token':<22}{number:>22,}   at context {context:,}")
