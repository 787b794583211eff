"""The model, assembled from one file per paper term: read a forward pass here, follow a name into its file.

hidden_states  the running sum of the current block (with ordinary residuals: the residual stream)  [B, T, D]
blocks         finished blocks of the attention residuals, the first is the embedding               [B, T, D] each
"""

import math
from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attn_res import AttnRes, Borrowed, OrdinaryResidual
from .backends import operator_impl
from .configuration.configuration_moe_lc import MoeLcTextConfig
from .decoding import Decoding
from .gated_mla import ABSORBED_TOKENS, GatedMLA
from .inputs import check_attention_mask, check_cache, check_tokens, mask_of_first_tokens
from .kda import Decay, KimiDeltaAttention, ShortConv
from .latent_moe import LatentMoE, MoeLcExperts
from .loss import chunked_causal_lm_loss, keep_logits
from .norm import GatedRMSNorm, RMSNorm
from .parallel_plans import expert_parallel_plan
from .registration import register_backends
from .released_names import in_own_names, register_released_names
from .router import Router
from .segments import Segments, has_right_padding, packed_segments, padded_segments
from .situ_glu import SiTUGLU


class MoeLcDecoderLayer(GradientCheckpointingLayer):
    """Attention and MLP, each fed by its own mix over depth."""

    def __init__(self, config: MoeLcTextConfig, layer_idx: int):
        super().__init__()
        kda = config.layer_types[layer_idx] == "linear_attention"
        self.self_attn = KimiDeltaAttention(config, layer_idx) if kda else GatedMLA(config, layer_idx)
        if config.is_sparse_layer(layer_idx):
            self.block_sparse_moe = LatentMoE(config)
        else:
            self.mlp = SiTUGLU(config, config.intermediate_size)
        self.is_sparse = config.is_sparse_layer(layer_idx)
        self.input_layernorm = RMSNorm(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config, config.hidden_size)
        block_size = config.attn_res_block_size
        self.starts_block = block_size is not None and layer_idx % block_size == 0
        self.self_attention_res = OrdinaryResidual() if block_size is None else AttnRes(config)
        self.mlp_res = OrdinaryResidual() if block_size is None else AttnRes(config)

    def forward(self, hidden_states: torch.Tensor, *blocks: torch.Tensor, token_mask=None, **kwargs):
        mixed, blocks, hidden_states = self.self_attention_res(blocks, hidden_states, Borrowed(self.input_layernorm))
        attn_output, _ = self.self_attn(mixed, **kwargs)  # [B, T, D]
        if self.starts_block:
            blocks, hidden_states = (*blocks, hidden_states), attn_output
        else:
            hidden_states = hidden_states + attn_output
        mixed, blocks, hidden_states = self.mlp_res(blocks, hidden_states, Borrowed(self.post_attention_layernorm))
        mlp_output = self.block_sparse_moe(mixed, token_mask) if self.is_sparse else self.mlp(mixed)
        return hidden_states + mlp_output, *blocks


class MoeLcPreTrainedModel(PreTrainedModel):
    """What transformers asks of every model class."""

    config: MoeLcTextConfig
    config_class = MoeLcTextConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MoeLcDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _is_stateful = True  # a recurrent state cannot be rolled back: refuses assisted decoding
    _keep_in_fp32_modules_strict = ["decay", "q_conv1d", "k_conv1d", "v_conv1d", "o_norm", "e_score_correction_bias"]
    _keys_to_ignore_on_load_unexpected = [r"^vision_tower\.", r"^mm_projector\."]  # a K3 checkpoint, read as text
    _can_record_outputs = {
        "hidden_states": OutputRecorder(MoeLcDecoderLayer, index=0),
        "attentions": OutputRecorder(GatedMLA, index=1),
        "router_logits": OutputRecorder(Router, index=0),
    }

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # transformers looks for this in the source of this file; ours is in gated_mla.py

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # likewise, latent_moe.py

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """Our own experts unless another backend is asked for by name."""
        return super().get_correct_experts_implementation(requested_experts or "eager")

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """As in torch; released names, those of a saved file, are read as well: `Trainer` resumes by this alone."""
        absent: list[str] = []
        if not state_dict.keys() <= self.state_dict().keys():
            state_dict, absent = in_own_names(self, state_dict, complete=not strict)
        result = super().load_state_dict(state_dict, strict, assign)
        result.missing_keys.extend(absent)
        return result

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.get_text_config().initializer_range
        if isinstance(module, (nn.Linear, nn.Embedding)):
            init.normal_(module.weight, std=std)
        elif isinstance(module, (RMSNorm, GatedRMSNorm)):
            init.ones_(module.weight)
        elif isinstance(module, AttnRes):
            init.zeros_(module.query)
            init.ones_(module.key_norm)
        elif isinstance(module, MoeLcExperts):
            init.normal_(module.gate_up_proj, std=std)
            init.normal_(module.down_proj, std=std)
        elif isinstance(module, Router):
            init.normal_(module.weight, std=std)
            init.zeros_(module.e_score_correction_bias)
            init.zeros_(module.counts)
        elif isinstance(module, MoeLcTextModel):
            init.zeros_(module.documents_seen)
        elif isinstance(module, ShortConv):
            bound = module.weight.shape[-1] ** -0.5
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, Decay):
            if self.config.linear_attn_config["gate_lower_bound"] is not None:
                init.zeros_(module.A_log)
            else:
                init.copy_(module.A_log, torch.empty_like(module.A_log).uniform_(1.0, 16.0).log())
            dt = torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp().clamp_min(1e-4)
            init.copy_(module.dt_bias, dt + torch.log(-torch.expm1(-dt)))  # inverse softplus


class MoeLcTextModel(MoeLcPreTrainedModel):
    """The decoder without a head."""

    _ep_plan = expert_parallel_plan("layers.*.block_sparse_moe.experts", "layers.*.block_sparse_moe.gate")

    def __init__(self, config: MoeLcTextConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([MoeLcDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.output_attn_res = OrdinaryResidual() if config.attn_res_block_size is None else AttnRes(config)
        self.norm = RMSNorm(config, config.hidden_size)
        self.register_buffer("documents_seen", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        segments: Segments | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoeModelOutputWithPast:
        r"""
        Args:
            attention_mask: `[B, past + T]`, 1 for real tokens; padding may stand left or right, with a cache only left;
                a single token is never padding. Or what `generate` makes, masks by kind of layer. Documents are told by the
                arguments below, not by a 4-D mask.
            position_ids: `[B, T]`; there are no positions in this model: they only tell where packed documents begin.
            use_cache: None follows `config.use_cache`, but never in training and never for packed or right-padded rows.
            cu_seq_lens_q: `[N + 1]` borders of packed documents over the flattened batch.
            seq_idx: `[B, T]` number of the document of each token.
            segments: the documents of a packed batch, in place of all that describes them; they are taken as they are, and
                nothing waits for the device.

        Raises `ValueError` for other shapes, for a cache made without the config, and when a packed batch or a right-padded
        prefill comes together with a cache.
        """
        check_tokens(input_ids, inputs_embeds)
        check_cache(past_key_values, self.config)
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds  # [B, T, D]
        check_attention_mask(attention_mask, hidden_states, past_key_values)
        attention_mask = mask_of_first_tokens(
            attention_mask, hidden_states.shape[1], past_key_values, self.config.layer_types
        )
        segments, past_key_values = self._segments_and_cache(
            hidden_states, attention_mask, position_ids, past_key_values, use_cache, cu_seq_lens_q, seq_idx, segments
        )
        token_mask = _token_mask(attention_mask, hidden_states.shape[1], segments)
        if self.training:
            self.documents_seen += hidden_states.shape[0] if segments is None else segments.documents()
        mask, tokens_before = self._causal_mask(hidden_states, attention_mask, past_key_values, segments)
        kwargs.update(
            attention_mask=mask,
            tokens_before=tokens_before,
            token_mask=token_mask,
            segments=segments,
            past_key_values=past_key_values,
        )

        blocks: tuple[torch.Tensor, ...] = ()
        for layer in self.layers[: self.config.num_hidden_layers]:
            hidden_states, *blocks = layer(hidden_states, *blocks, **kwargs)
        hidden_states, _, _ = self.output_attn_res(blocks, hidden_states, Borrowed(self.norm))

        return MoeModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=past_key_values)

    def _segments_and_cache(self, x, attention_mask, position_ids, cache, use_cache, cu_seq_lens_q, seq_idx, segments):
        """Documents of a packed or padded batch, and the cache to fill: the given one, a new one or None."""
        batch, length, _ = x.shape
        mask = attention_mask.get("linear_attention") if isinstance(attention_mask, dict) else attention_mask
        asked = use_cache or cache is not None
        given, segments = segments, padded_segments(mask, length)
        padded = segments is not None
        if given is not None and not padded:
            segments = given
        elif not padded and length > 1:
            by_generate = isinstance(attention_mask, dict)  # whose positions jump at padding, and tell of no documents
            positions = None if by_generate else position_ids
            segments = packed_segments(cu_seq_lens_q, seq_idx, positions, batch=batch, length=length)
        elif padded and not (cu_seq_lens_q is None and seq_idx is None and given is None):
            raise ValueError(
                "attention_mask: expected no padding in a packed batch (cu_seq_lens_q, seq_idx or segments), got some"
            )
        wrong_side = padded and has_right_padding(mask, length)
        if asked and segments is not None and not padded:
            raise ValueError("past_key_values, use_cache: expected no cache with a packed batch, got one")
        if asked and wrong_side:
            raise ValueError("attention_mask: expected padding on the left with a cache, got padding on the right")
        wanted = self.config.use_cache if use_cache is None else use_cache
        if cache is None and wanted and not self.training and not wrong_side and (segments is None or padded):
            cache = DynamicCache(config=self.config)
        return segments, cache

    def _causal_mask(self, x, attention_mask, cache, segments: Segments | None):
        """For MLA, and how many tokens stand before these where that is told by their number alone."""
        if segments is not None and segments.packed:
            return None, 0  # GatedMLA goes document by document
        tokens_before = self._tokens_before(x, cache)
        if tokens_before and _is_unpadded(attention_mask):
            return None, tokens_before  # MLA has kernels that need no [T, S] mask for that
        if isinstance(attention_mask, dict):
            return attention_mask["full_attention"], 0
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=cache
        )
        return mask, 0

    def _tokens_before(self, x, cache) -> int:
        """In the cache, where these are many, and on a device where MLA has kernels for them; else 0."""
        attention = [layer.self_attn for layer in self.layers if isinstance(layer.self_attn, GatedMLA)]
        if (
            cache is None
            or x.shape[1] <= ABSORBED_TOKENS
            or not attention
            or not all(a.is_flash(x) for a in attention)
        ):
            return 0
        if cache.is_compileable and torch.compiler.is_compiling():  # what a static cache holds stands on the device
            return 0
        return int(cache.get_seq_length(attention[0].layer_idx))


def _is_unpadded(attention_mask: torch.Tensor | dict | None) -> bool:
    if isinstance(attention_mask, dict):
        return "linear_attention" in attention_mask and attention_mask["linear_attention"] is None
    return attention_mask is None or attention_mask.ndim == 2 and bool(attention_mask.all())


def _token_mask(attention_mask, length: int, segments: Segments | None) -> torch.Tensor | None:
    """`[B * T]` tokens for the statistics of the router, of a padded batch the real ones; None: all are."""
    if segments is None or segments.packed:
        return None if segments is None else segments.counted
    mask = attention_mask["linear_attention"] if isinstance(attention_mask, dict) else attention_mask
    return mask[:, -length:].flatten().bool()


class LanguageModelHead(Decoding):
    """What models with an `lm_head` share."""

    config: Any
    training: bool
    lm_head: nn.Module
    loss_function: Callable

    def with_head(
        self, outputs: MoeModelOutputWithPast, labels, logits_to_keep, **kwargs
    ) -> MoeCausalLMOutputWithPast:
        """Logits and loss from what the decoder returned."""
        config = self.config.get_text_config()
        hidden_states = outputs.last_hidden_state  # [B, T, D]
        logits = loss = None
        if self.training and labels is not None and config.loss_chunk_size is not None:
            chosen: dict[str, Any] = {"impl": operator_impl(config)}
            chosen |= {k: kwargs[k] for k in ("num_items_in_batch", "shift_labels", "ignore_index") if k in kwargs}
            loss = chunked_causal_lm_loss(hidden_states, self.lm_head, labels, config.loss_chunk_size, **chosen)
        else:
            logits = self.lm_head(keep_logits(hidden_states, logits_to_keep))  # [B, T, vocabulary]
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=config.vocab_size, **kwargs)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )


class MoeLcForCausalLM(LanguageModelHead, MoeLcPreTrainedModel, GenerationMixin):
    """The decoder with its language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: MoeLcTextConfig):
        super().__init__(config)
        self.model = MoeLcTextModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoeCausalLMOutputWithPast:
        r"""
        Args:
            labels: `[B, T]`, -100 where no loss is wanted; shifted inside.
            logits_to_keep: the last n positions (0: all), or the positions, that get logits.

        With `config.loss_chunk_size`, in training with labels, `logits` is None. Other arguments: [`MoeLcTextModel`].
        """
        outputs: MoeModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return self.with_head(outputs, labels, logits_to_keep, **kwargs)


register_backends()
register_released_names(MoeLcTextConfig.model_type)
