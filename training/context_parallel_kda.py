"""KDA over a sequence that lies on several ranks: one small all-gather in the forward pass, one in the backward pass.

Through a stretch of tokens the state goes by an affine map, S -> Phi S + Psi, and its cotangent by dS -> Phi^T dS + Omega.
Neither depends on the length, so that what the ranks exchange is K x (K + V) numbers a head, whatever the sequence.

Forward: a rank whose last document goes on to the right sends the map of its piece of it; folding the maps from the left
gives each rank the state that its first piece begins with, and `kda` runs from there.

Backward: a rank needs the cotangent D of the state that it hands to the right before its own `kda` goes back, and D depends
on the output cotangents of the ranks to the right. Outputs are affine in the first state, o_t = (o_t without it) + G_t S,
where the rows G_t = q_t Phi_t are the outputs of a run from the unit matrix without values. So Omega = sum_t G_t^T do_t
and Phi come from one more forward of the first piece, and folding the maps (Phi^T, Omega) from the right gives D. With it
`kda` goes back once, as it does on one rank.
"""

import torch
from torch import distributed as dist

from ..kernels.dispatch import compute_dtype
from ..kernels.kda import kda, kda_state_map
from .context_shard import ContextShard, of_all_ranks


TOKENS_AT_ONCE = 8192  # of the sum over tokens in Omega: bounds its copies in full precision


def context_parallel_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None = -5.0,
    initial_state: torch.Tensor | None = None,
    shard: ContextShard,
    group: dist.ProcessGroup,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kda` of the tokens of this rank, t of them in N pieces of documents, as part of the whole sequence.

    Forward and backward are collective: every rank of `group` calls them in the same order.

    Args:
        q, k, g: [1, t, H, K]; v: [1, t, H, V]; beta: [1, t, H]; raw, as in `kda`; so are the others.
        initial_state: [N, H, K, V]; what it holds for a piece that continues a document from the left is not read.
        shard: where the tokens lie.

    Returns:
        o [1, t, H, V] and the states after every piece [N, H, K, V], for a document that goes on that at the border.
        Differentiable as in `kda`; gradients of `A_log` and `dt_bias` are this rank's part of a sum over the ranks.

    Raises:
        ValueError: as in `kda`.
    """
    gate = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound, "impl": impl}
    if initial_state is None:
        pieces = len(shard.borders) - 1
        initial_state = v.new_zeros(pieces, *q.shape[2:], v.shape[-1], dtype=compute_dtype(q))
    entering = _entering_state(k, v, g, beta, gate, initial_state, shard, group)
    if shard.before:
        initial_state = torch.cat([entering, initial_state[1:]])
    o, states = kda(q, k, v, g, beta, **gate, initial_state=initial_state, cu_seqlens=shard.cu_seqlens)
    return _CotangentFromTheRight.apply(o, states, q, k, g, beta, A_log, dt_bias, lower_bound, impl, shard, group)


@torch.no_grad()
def _entering_state(k, v, g, beta, gate, initial_state, shard, group):
    """[1, H, K, V] the state before the first token of this rank. Its gradient goes another way: see the top."""
    tokens = slice(shard.borders[-2], None)
    H, K, V = initial_state.shape[1:]
    maps = k.new_zeros(H, K, K + V, dtype=compute_dtype(k))  # [Phi | Psi]
    if shard.goes_on:
        phi, psi = kda_state_map(k[:, tokens], v[:, tokens], g[:, tokens], beta[:, tokens], **gate)
        if shard.passes_through:
            maps = torch.cat([phi[0], psi[0]], dim=-1)
        else:
            maps[..., K:] = _through(phi[0], psi[0], initial_state[-1])
    return _fold(of_all_ranks(maps, group)[: dist.get_rank(group)], K)[None]


class _CotangentFromTheRight(torch.autograd.Function):
    """Hands o [1, t, H, V] and the states [N, H, K, V] on; backward adds the cotangent of the state at the right border."""

    @staticmethod
    def forward(ctx, o, states, q, k, g, beta, A_log, dt_bias, lower_bound, impl, shard, group):
        ctx.save_for_backward(q, k, g, beta, A_log, dt_bias)
        ctx.lower_bound, ctx.impl, ctx.shard, ctx.group = lower_bound, impl, shard, group
        ctx.V = o.shape[-1]
        ctx.set_materialize_grads(False)
        return o.view_as(o), states.view_as(states)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, d_states):
        saved = ctx.saved_tensors  # on every rank: under activation checkpointing this runs the forward again
        q, shard = saved[0], ctx.shard
        H, K = q.shape[2:]
        maps = q.new_zeros(H, K, K + ctx.V, dtype=compute_dtype(q))  # [Phi^T | Omega]
        if shard.before:
            phi, omega = _first_piece(ctx, saved, do)
            maps[..., K:] = omega if d_states is None else _through(phi.mT, omega, d_states[0])
            if shard.passes_through:
                maps[..., :K] = phi.mT
        right = of_all_ranks(maps, ctx.group)[dist.get_rank(ctx.group) + 1 :]
        if shard.goes_on:
            if d_states is None:
                d_states = maps.new_zeros(len(shard.borders) - 1, H, K, ctx.V)
            d_states = torch.cat([d_states[:-1], d_states[-1:] + _fold(right.flip(0), K)])
        return do, d_states, *[None] * 10


def _first_piece(ctx, saved, do):
    """Phi [H, K, K] of the first piece, and Omega [H, K, V]: what `do` gives to the state before it."""
    q, k, g, beta, A_log, dt_bias = saved
    gate = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": ctx.lower_bound, "impl": ctx.impl}
    tokens = slice(0, ctx.shard.borders[1])
    q, k, g, beta = (x[:, tokens] for x in (q, k, g, beta))
    H, K = q.shape[2:]
    unit = torch.eye(K, dtype=compute_dtype(q), device=q.device).expand(1, H, K, K)
    reads, phi = kda(q, k, torch.zeros_like(k), g, beta, **gate, initial_state=unit)  # G [1, t, H, K]
    omega = unit.new_zeros(H, K, ctx.V)
    if do is not None:
        for G, d in zip(reads[0].split(TOKENS_AT_ONCE), do[0, tokens].split(TOKENS_AT_ONCE), strict=True):
            omega += torch.einsum("thk,thv->hkv", G.to(omega.dtype), d.to(omega.dtype))
    return phi[0], omega


def _fold(maps: torch.Tensor, K: int) -> torch.Tensor:
    """What maps [n, H, K, K + V], one after the other, make of a zero state: [H, K, V]."""
    state = maps.new_zeros(*maps.shape[1:-1], maps.shape[-1] - K)
    for one in maps:
        state = _through(one[..., :K], one[..., K:], state)
    return state


def _through(linear: torch.Tensor, offset: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """linear @ state + offset in FP64: FP32 products may be set to TF32, in which a chain of maps loses digits."""
    return torch.baddbmm(offset.double(), linear.double(), state.double()).to(offset.dtype)
