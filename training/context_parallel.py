"""Context parallelism: every rank of a group computes a contiguous shard of the tokens of one packed sequence.

Most of the model works token by token and needs nothing. Three places look back, and get from the ranks to the left:

- KDA: the state at the border (`context_parallel_kda.py`), of fixed size;
- the short convolutions before it: the last three inputs, of fixed size;
- MLA: the latents of all tokens, which grow with the sequence, but are a small part of its keys and values; and since the
  last tokens see most, the ranks share that work evenly (`context_parallel_attention.py`).
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from ..backends import operator_impl
from ..gated_mla import GatedMLA
from ..kda import KimiDeltaAttention
from ..modeling_moe_lc import MoeLcTextModel
from ..segments import Segments
from .context_parallel_attention import chunk_bounds, from_turns, own_chunks, to_turns
from .context_parallel_kda import context_parallel_kda
from .context_shard import ContextShard, of_all_ranks, pieces_between, process_group


@contextlib.contextmanager
def context_parallel(model: nn.Module, group: DeviceMesh | dist.ProcessGroup) -> Iterator[None]:
    """Inside, forward and backward of `model` are those of the whole sequence; batches come from `shard_sequence`.

    A group of one rank changes nothing, so that one loop serves every size. Backward passes belong inside as well: under
    activation checkpointing they run the forward again.

    Every rank gets its own loss, a part of a sum, and gradients that are a part of a sum: the loop sums both over the
    ranks of data and context parallelism together. What averages gradients over these W ranks, as FSDP2 and DDP do,
    needs the loss times W (or, with FSDP2, `set_gradient_divide_factor(1.0)`), exactly as with data parallelism alone, and
    `num_items_in_batch` of `shard_sequence` set to the targets of the whole step. `update_router_bias` gets an `all_reduce`
    over the same ranks. The FSDP2 mesh is data and context parallelism flattened into one dimension.

    Raises:
        ValueError: inside, for a batch that is not from `shard_sequence`, or was cut for a group of another size.
    """
    group = process_group(group)
    if dist.get_world_size(group) == 1:
        yield
        return
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            if isinstance(module, MoeLcTextModel):
                undo.callback(module.register_forward_pre_hook(_at_the_door(group), with_kwargs=True).remove)
            elif isinstance(module, KimiDeltaAttention):
                undo.callback(_KdaOnShard(module, group).remove)
            elif isinstance(module, GatedMLA):
                undo.callback(_MlaOnShard(module, group).remove)
        yield


def _at_the_door(group):
    """Checks the shard of a forward, once, and counts a document that several ranks see on the rank where it begins."""

    def before_forward(model: MoeLcTextModel, args: tuple, kwargs: dict) -> None:
        shard, size = kwargs.get("context_shard"), dist.get_world_size(group)
        if shard is None or len(shard.lengths) != size:
            got = "none" if shard is None else f"one of {len(shard.lengths)} ranks"
            raise ValueError(f"context_shard: expected that of shard_sequence for {size} ranks, got {got}")
        if model.training and shard.before:
            model.documents_seen -= 1

    return before_forward


class _OnShard:
    """An attention layer whose methods `replaced` look beyond the shard, until `remove`.

    The shard comes with the arguments of each forward, also when activation checkpointing runs it again.
    """

    replaced: tuple[str, ...]

    def __init__(self, module: nn.Module, group):
        self.module, self.group, self.rank = module, group, dist.get_rank(group)
        self.shard: ContextShard
        self.handle = module.register_forward_pre_hook(self.take_shard, with_kwargs=True)
        for name in self.replaced:
            setattr(module, name, getattr(self, name))

    def take_shard(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self.shard = kwargs.pop("context_shard")
        # Set here, because the model sees no documents in a shard of one token.
        return args, kwargs | {"segments": Segments(self.shard.cu_seqlens), "attention_mask": None}

    def remove(self) -> None:
        self.handle.remove()
        for name in self.replaced:
            delattr(self.module, name)


class _KdaOnShard(_OnShard):
    replaced = ("convolutions", "delta_rule")

    def convolutions(self, inputs, states, cu_seqlens):
        rows = self.module.config.linear_attn_config["short_conv_kernel_size"] - 1
        halo = _halo(torch.cat([x[:, -rows:] for x in inputs], dim=-1), self.shard, rows, self.group)
        later = len(self.shard.borders) - 2  # pieces that begin here, with nothing before them
        states = F.pad(halo.mT[None], (0, 0, 0, 0, 0, later))  # [N, C, W - 1]
        return type(self.module).convolutions(self.module, inputs, states, self.shard.cu_seqlens)

    def delta_rule(self, q, k, v, g, beta, state, cu_seqlens):
        config = self.module.config
        A_log, dt_bias = self.module.decay(q)
        gate = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": self.module.lower_bound}
        impl = config.kda_implementation or operator_impl(config)
        return context_parallel_kda(q, k, v, g, beta, **gate, shard=self.shard, group=self.group, impl=impl)


class _MlaOnShard(_OnShard):
    replaced = ("document_attention",)

    def document_attention(self, q, latent, k_rope, segments: Segments, **kwargs):
        """The queries of every rank with the latents of their documents, each rank its turn of the work."""
        shard = self.shard
        everyone = _gather_sequence(torch.cat([latent, k_rope], dim=-1), shard.lengths, self.group)  # [1, L, R + rope]
        bounds, chunks = chunk_bounds(shard.lengths), own_chunks(self.rank, len(shard.lengths))
        places = [(bounds[chunk], bounds[chunk + 1]) for chunk in chunks]
        queries = to_turns(q[0], shard.lengths, self.group)[None].split([end - begin for begin, end in places], dim=1)
        outputs = []
        for (begin, end), q_here in zip(places, queries, strict=True):
            if begin == end:
                continue
            pieces, before = pieces_between(shard.documents, begin, end)
            keys = everyone[:, begin - before : end]
            latent, k_rope = keys.split([latent.shape[-1], k_rope.shape[-1]], dim=-1)
            outputs.append(self.chunk_attention(q_here, latent, k_rope, pieces, before, **kwargs))
        return from_turns(torch.cat(outputs, dim=1)[0], shard.lengths, self.group)[None]  # [1, t, H, V]

    def chunk_attention(self, q, latent, k_rope, pieces: tuple[int, ...], before: int, **kwargs):
        """Of parts of documents, the first of which has `before` latents more than queries."""
        end = pieces[1]
        if not before and end < pieces[-1]:
            cu_seqlens = torch.tensor(pieces, dtype=torch.int32).to(q.device, non_blocking=True)
            alone = type(self.module).document_attention
            return alone(self.module, q, latent, k_rope, Segments(cu_seqlens), **kwargs)
        first = self.attention(q[:, :end], latent[:, : before + end], k_rope[:, : before + end], **kwargs)
        if end == pieces[-1]:
            return first
        rest, others = slice(before + end, None), tuple(border - end for border in pieces[1:])
        following = self.chunk_attention(q[:, end:], latent[:, rest], k_rope[:, rest], others, 0, **kwargs)
        return torch.cat([first, following], dim=1)

    def attention(self, q, latent, k_rope, **kwargs):
        """The last query sees the last latent: what other backends do without a mask, and SDPA with this one."""
        if self.module.is_flash(q):
            return self.module.last_queries(q, latent, k_rope)
        tokens, seen = q.shape[1], latent.shape[1]
        masked = seen > tokens and self.module.config._attn_implementation in ("sdpa", "moe_lc_triton")
        mask = torch.ones(tokens, seen, dtype=torch.bool, device=q.device).tril(seen - tokens) if masked else None
        return self.module.expanded_attention(q, latent, k_rope, mask, **kwargs)[0]


class _AllGather(torch.autograd.Function):
    """[...] of every rank: [ranks, ...]. Backward sums over the ranks what each of them gives to this rank's tensor."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return of_all_ranks(x, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_everyone):
        dx = torch.empty_like(d_everyone[0])
        dist.reduce_scatter(dx, list(d_everyone.contiguous().unbind()), group=ctx.group)
        return dx, None


def _gather_sequence(x: torch.Tensor, lengths: tuple[int, ...], group) -> torch.Tensor:
    """[1, t, C] of every rank, of different lengths: [1, L, C]."""
    longest = max(lengths)
    everyone = _AllGather.apply(F.pad(x[0], (0, 0, 0, longest - x.shape[1])), group)  # [ranks, longest, C]
    return torch.cat([one[:length] for one, length in zip(everyone, lengths, strict=True)])[None]


def _halo(tail: torch.Tensor, shard: ContextShard, rows: int, group) -> torch.Tensor:
    """The last `rows` tokens of this rank [1, <= rows, C] to those before the shard in its document, zeros without: [rows, C].

    Every rank uses what was gathered, if only an empty part of it: a backward pass with a collective needs them all.
    """
    everyone = _AllGather.apply(F.pad(tail[0], (0, 0, rows - tail.shape[1], 0)), group)  # [ranks, rows, C]
    missing = min(rows, shard.before)
    parts = [everyone[0, :0]]
    for left in reversed(range(dist.get_rank(group))):
        taken = min(missing, shard.lengths[left])
        parts.append(everyone[left, rows - taken :])
        missing -= taken
    found = torch.cat(parts[::-1])
    return F.pad(found, (0, 0, rows - len(found), 0))
