"""Kimi Delta Attention (KDA): linear attention with a delta rule and a decay per channel."""

import torch
from torch import nn

from .backends import kda_backend, operator_impl
from .cache import read_linear_state, write_linear_state
from .kernels.kda import kda_step
from .kernels.short_conv import short_convs
from .norm import FullPrecision, GatedRMSNorm, full_precision_dtype
from .segments import Segments


class ShortConv(FullPrecision):
    """The taps of a depthwise causal convolution over the last `kernel_size` tokens, always in full precision.

    Its forward hands them out, as `Decay` does, so that the convolutions of q, k and v are one launch. What shards a layer
    must hold them until its last module has run: these modules and `o_norm` as one unit, or no resharding after forward.
    """

    def __init__(self, channels: int, kernel_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size, dtype=full_precision_dtype()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: the input of the layer, unused. FSDP2 fails where checkpointing runs a unit again without any argument."""
        return self.weight  # [C, 1, W]


class Decay(FullPrecision):
    """Parameters of the decay gate: a rate per head and a bias per channel, always in full precision."""

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(num_heads, dtype=full_precision_dtype()))
        self.dt_bias = nn.Parameter(torch.empty(num_heads * head_dim, dtype=full_precision_dtype()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`x`: as of `ShortConv`."""
        return self.A_log, self.dt_bias.view(self.A_log.shape[0], -1)  # [H], [H, K]


class KimiDeltaAttention(nn.Module):
    """q, k, v through short convolutions, a low-rank decay gate, the delta rule, a gated norm per head."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        linear = config.linear_attn_config
        self.num_heads, self.head_dim = linear["num_heads"], linear["head_dim"]
        self.lower_bound = linear["gate_lower_bound"]
        width, inner = config.hidden_size, self.num_heads * self.head_dim
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, inner, bias=False)
        self.v_proj = nn.Linear(width, inner, bias=False)
        self.q_conv1d = ShortConv(inner, linear["short_conv_kernel_size"])
        self.k_conv1d = ShortConv(inner, linear["short_conv_kernel_size"])
        self.v_conv1d = ShortConv(inner, linear["short_conv_kernel_size"])
        self.f_a_proj = nn.Linear(width, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, inner, bias=False)
        self.b_proj = nn.Linear(width, self.num_heads, bias=False)
        self.decay = Decay(self.num_heads, self.head_dim)
        self.full_rank_gate = linear["use_full_rank_gate"]
        if self.full_rank_gate:
            self.g_proj = nn.Linear(width, inner, bias=False)
        else:
            self.g_a_proj = nn.Linear(width, self.head_dim, bias=False)
            self.g_b_proj = nn.Linear(self.head_dim, inner, bias=False)
        self.o_norm = GatedRMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(inner, width, bias=False)

    def output_gate(self, x: torch.Tensor) -> torch.Tensor:
        return self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x))

    def forward(self, hidden_states, segments: Segments | None = None, past_key_values=None, **kwargs):
        batch, length, _ = hidden_states.shape
        cu_seqlens = None if segments is None else segments.cu_seqlens
        x = hidden_states if segments is None else segments.pack(hidden_states)
        conv_state, state = read_linear_state(past_key_values, self.layer_idx)
        impl = operator_impl(self.config)

        inputs = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        (q, k, v), tails = self.convolutions(inputs, conv_state, cu_seqlens)
        g = self.f_b_proj(self.f_a_proj(x))
        q, k, v, g = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v, g))  # [B, T, H, K]
        o, state = self.delta_rule(q, k, v, g, self.b_proj(x), state, cu_seqlens)  # [B, T, H, V]
        if past_key_values is not None:
            write_linear_state(past_key_values, self.layer_idx, tails, state)

        o = self.o_norm(o, self.output_gate(x).view_as(o), impl)
        output = self.o_proj(o.flatten(-2))  # [B, T, D]
        return output if segments is None else segments.unpack(output, batch, length), None

    def convolutions(self, inputs, states, cu_seqlens):
        taps = tuple(conv(inputs[0]) for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d))
        return short_convs(inputs, taps, states=states, cu_seqlens=cu_seqlens, impl=operator_impl(self.config))

    def delta_rule(self, q, k, v, g, beta, state, cu_seqlens):
        A_log, dt_bias = self.decay(q)
        gate = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": self.lower_bound}
        if q.shape[1] == 1 and state is not None and cu_seqlens is None and not torch.is_grad_enabled():
            one = (y[:, 0] for y in (q, k, v, g, beta))
            return kda_step(*one, **gate, state=state, impl=operator_impl(self.config))[:, None], state
        return kda_backend(self.config)(q, k, v, g, beta, **gate, initial_state=state, cu_seqlens=cu_seqlens)
