"""Gated Multi-head Latent Attention without positions (NoPE).

Keys and values of all heads come from one latent of `kv_lora_rank` channels per token, plus `qk_rope_head_dim` key channels
that the heads share (they carry a released name, but are never rotated). Only these are cached.
"""

import itertools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .backends import operator_impl
from .configuration.configuration_moe_lc import MLA_LATENT_NORM_EPS
from .kernels.mla import lower_right_attention, mla_decode
from .kernels.sigmoid_gate import sigmoid_gate
from .norm import RMSNorm
from .segments import Segments


ABSORBED_TOKENS = 16  # up to this many new tokens, reading latents costs less than expanding the whole cache


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """The definition: `[B, H, T, D]` and an additive or boolean mask -> `[B, T, H, V]` and the weights.

    Without a mask the module says whether it is causal.
    """
    scores = query @ key.transpose(-1, -2) * scaling  # [B, H, T, S]
    if attention_mask is None:
        tokens, seen = scores.shape[-2:]
        attention_mask = torch.ones(tokens, seen, dtype=torch.bool, device=scores.device)
        attention_mask = attention_mask.tril(seen - tokens) if module.is_causal else attention_mask
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def effective_weight(linear: nn.Module, inputs: torch.Tensor | None = None) -> torch.Tensor:
    """The matrix `[out, in]` that `linear` applies, also when an adapter or a quantiser stands in its place or it is offloaded.

    `inputs`: of its dtype and device are the inputs; None where the parameters are, which those of a quantised or an
    offloaded layer are not.
    """
    if type(linear) is nn.Linear and not linear.weight.is_meta:
        # Under tensor parallelism the rows of this rank: what the module's own forward applies.
        return linear.weight.to_local() if hasattr(linear.weight, "to_local") else linear.weight
    like = next(linear.parameters()) if inputs is None else inputs
    return linear(torch.eye(linear.in_features, dtype=like.dtype, device=like.device)).T


def differs_by_row(linear: nn.Module) -> bool:
    """Whether rows of a batch go through adapters of their own (`adapter_names`), which PEFT tells a layer by a hook."""
    return type(linear) is not nn.Linear and bool(linear._forward_pre_hooks)


class GatedMLA(nn.Module):
    """MLA with an optional low-rank query and an optional sigmoid gate on its output."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.num_key_value_groups, self.is_causal = 1, True  # what transformers' attention functions ask for
        self.num_heads, self.rank = config.num_attention_heads, config.kv_lora_rank
        self.nope_dim, self.rope_dim, self.v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.scaling = (self.nope_dim + self.rope_dim) ** -0.5
        width, q_width = config.hidden_size, self.num_heads * (self.nope_dim + self.rope_dim)
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(width, q_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config, config.q_lora_rank, MLA_LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, q_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, self.rank + self.rope_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(config, self.rank, MLA_LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(self.rank, self.num_heads * (self.nope_dim + self.v_dim), bias=False)
        if config.mla_use_output_gate:
            self.g_proj = nn.Linear(width, self.num_heads * self.v_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.v_dim, width, bias=False)

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        segments: Segments | None = None,
        past_key_values=None,
        tokens_before: int = 0,
        **kwargs,
    ):
        config = self.config
        if config.q_lora_rank is None:
            q = self.q_proj(hidden_states)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q = q.unflatten(-1, (-1, self.nope_dim + self.rope_dim))  # [B, T, H, nope + rope]
        latent, k_rope = self.kv_a_proj_with_mqa(hidden_states).split([self.rank, self.rope_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)  # [B, T, R]

        # Not with gradients: tensor parallelism sums those of the latent over the ranks in the forward of `kv_b_proj`.
        absorbed = past_key_values is not None and not torch.is_grad_enabled()
        absorbed = absorbed and config._attn_implementation != "eager" and not differs_by_row(self.kv_b_proj)
        if past_key_values is not None:
            # One dtype for both, as a static cache has it: under autocast the norm's is another.
            cached = past_key_values.update(latent[:, None], k_rope.to(latent.dtype)[:, None], self.layer_idx)
            # Without a mask, many tokens are the last ones that a static cache holds; the rest of it is empty.
            is_last = attention_mask is None and q.shape[1] > 1 and past_key_values.is_compileable
            held = tokens_before + q.shape[1] if is_last else None
            latent, k_rope = (x[:, 0, :held] for x in cached)  # [B, S, R], [B, S, rope]
        if absorbed and q.shape[1] <= ABSORBED_TOKENS:
            o, weights = self.absorbed_attention(q, latent, k_rope, attention_mask), None  # [B, T, H, V]
        elif segments is not None and segments.packed:
            o, weights = self.document_attention(q, latent, k_rope, segments, **kwargs), None
        elif attention_mask is None and latent.shape[1] > q.shape[1] > 1:
            o, weights = self.last_queries(q, latent, k_rope), None
        else:
            o, weights = self.expanded_attention(q, latent, k_rope, attention_mask, **kwargs)
        o = o.flatten(-2)
        if config.mla_use_output_gate:
            o = sigmoid_gate(o, self.g_proj(hidden_states), impl=operator_impl(config))
        return self.o_proj(o), weights  # [B, T, D]

    def expanded_attention(self, q, latent, k_rope, attention_mask, **kwargs):
        """Keys and values of every head from the latents `[B, S, R]`, through transformers' attention functions."""
        q, k, v = (x.transpose(1, 2) for x in (q, *self.keys_and_values(latent, k_rope)))  # [B, H, T or S, ...]
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        return attention(self, q, k, v, attention_mask, scaling=self.scaling, dropout=0.0, **kwargs)

    def keys_and_values(self, latent, k_rope):
        """Those of every head, `[B, S, H, nope + rope]` and `[B, S, H, V]`, from the latents `[B, S, R]`."""
        kv = self.kv_b_proj(latent).unflatten(-1, (-1, self.nope_dim + self.v_dim))
        k_nope, v = kv.split([self.nope_dim, self.v_dim], dim=-1)
        return torch.cat([k_nope, k_rope[:, :, None].expand(-1, -1, kv.shape[2], -1)], dim=-1), v

    def absorbed_attention(self, q, latent, k_rope, attention_mask):
        """The same numbers from the latents alone: the key and value projections move onto query and output."""
        q_nope, q_rope = q.split([self.nope_dim, self.rope_dim], dim=-1)
        kv_b = effective_weight(self.kv_b_proj, latent).view(
            -1, self.nope_dim + self.v_dim, self.rank
        )  # [H, nope + V, R]
        w_k, w_v = kv_b.split([self.nope_dim, self.v_dim], dim=1)
        q_latent = torch.einsum("bthd,hdr->bthr", q_nope, w_k)
        impl = operator_impl(self.config)
        o_latent = mla_decode(q_latent, q_rope, latent, k_rope, scale=self.scaling, mask=attention_mask, impl=impl)
        return torch.einsum("bthr,hvr->bthv", o_latent, w_v)

    def document_attention(self, q, latent, k_rope, segments: Segments, **kwargs):
        """Each document of a packed batch for itself: memory stays linear in the number of tokens."""
        batch, length = q.shape[:2]
        q, latent, k_rope = (x.flatten(0, 1)[None] for x in (q, latent, k_rope))  # [1, B * T, ...]
        if self.is_flash(q):
            return self.flash_documents(q, latent, k_rope, segments).unflatten(0, (batch, length))
        borders = segments.cu_seqlens.tolist()
        outputs = [
            self.expanded_attention(q[:, a:b], latent[:, a:b], k_rope[:, a:b], None, **kwargs)[0]
            for a, b in itertools.pairwise(borders)
            if b > a
        ]
        return torch.cat(outputs, dim=1).unflatten(1, (batch, length))[0]  # [B, T, H, V]

    def last_queries(self, q, latent, k_rope):
        """Causal, `[B, T, H, V]`: the last of T queries sees the last of S latents. For what `is_flash` is true of."""
        q, k, v = (x.transpose(1, 2) for x in (q, *self.keys_and_values(latent, k_rope)))  # [B, H, T or S, ...]
        return lower_right_attention(q, k, v, self.scaling).transpose(1, 2)

    def is_flash(self, q: torch.Tensor) -> bool:
        width = self.nope_dim + self.rope_dim
        fits = q.dtype in (torch.bfloat16, torch.float16) and self.v_dim <= width <= 256 and width % 8 == 0
        return q.is_cuda and fits and operator_impl(self.config) != "reference"

    def flash_documents(self, q, latent, k_rope, segments: Segments):
        """All documents `[1, L, ...]` in one launch of the FlashAttention in torch, which wants values as wide as keys."""
        k, v = self.keys_and_values(latent, k_rope)
        v = F.pad(v, (0, k.shape[-1] - self.v_dim))
        borders, longest = segments.cu_seqlens, segments.longest or q.shape[1]
        o = torch.ops.aten._flash_attention_forward(
            q[0], k[0], v[0], borders, borders, longest, longest, 0.0, True, False, scale=self.scaling
        )[0]
        return o[..., : self.v_dim]  # [L, H, V]
