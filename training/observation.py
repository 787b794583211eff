"""Looks into a forward pass: how depth is mixed, what KDA forgets and keeps, how sharp MLA is, where SiTU saturates.

Hooks stand only while one looks, and what would be costly is computed for a sample of the tokens.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attn_res import AttnRes
from ..gated_mla import GatedMLA, effective_weight
from ..kda import KimiDeltaAttention
from ..latent_moe import MoeLcExperts
from ..router import _in_backward
from ..situ_glu import SiTUGLU
from .evaluate import evaluating


SAMPLE = 1024  # tokens, evenly spread
ROUTED_SAMPLE = 16  # tokens whose experts' gate matrices are read once more, one token at a time
QUERIES, SCORES = 128, 1 << 23  # of MLA, at most: queries, and queries times keys

Numbers = dict[str, Tensor]
AllReduce = Callable[[Tensor], object]
Kind = TypeVar("Kind", bound=nn.Module)


class Observation:
    """What was seen, each number in the order of the model's layers: one for each module of a kind.

    `attn_res_entropy`: mean entropy in nats of the mix over depth; ln(n) is the plain mean of n sources.
    `kda_decay`: mean factor in (0, 1) that a channel of the state keeps in one token.
    `kda_state_norm`: mean Frobenius norm of a head's state behind the last token of a sequence.
    `situ_saturation`, `situ_saturation_routed`: share of gates beyond beta, in absolute value, before the activation; of
        the dense and shared MLPs, and of the routed ones.
    `mla_max_logit`: largest attention logit, exact for the last queries (at most 128) of the longest sequence with all of
        their keys; the whole batch may hold a larger one.
    """

    def __init__(self) -> None:
        self.sums: Numbers = {}  # [places, 2]: sum and number
        self.maxima: Numbers = {}  # [places]

    def numbers(self, all_reduce: AllReduce | None = None, all_reduce_max: AllReduce | None = None) -> Numbers:
        """All numbers [places], float64, over the ranks whose sums and maxima the arguments put into a tensor; NaN where
        nothing was seen. Every rank calls this alike."""
        means = {name: sums[:, 0] / sums[:, 1] for name, sums in reduced(self.sums, all_reduce).items()}
        return means | reduced(self.maxima, all_reduce_max)

    def rows(self, name: str, places: int, device: torch.device) -> Tensor:
        self.sums[name] = torch.zeros(places, 2, dtype=torch.float64, device=device)
        return self.sums[name]


def reduced(numbers: Numbers, all_reduce: AllReduce | None) -> Numbers:
    """`numbers` as float64 over all ranks: `all_reduce` is called once, with all of them in one tensor."""
    if not numbers or all_reduce is None:
        return {name: number.double() for name, number in numbers.items()}
    flat = torch.cat([number.detach().double().flatten() for number in numbers.values()])
    all_reduce(flat)
    parts = flat.split([number.numel() for number in numbers.values()])
    return {name: part.view_as(number) for (name, number), part in zip(numbers.items(), parts, strict=True)}


def observe(model: nn.Module, inputs: dict[str, Any]) -> Observation:
    """What a forward pass of its own shows: in evaluation mode, without gradients, and eager, since compiled layers call
    no hooks. All ranks of a sharded model call it. `inputs`: one batch; its labels are left out."""
    given = {name: value for name, value in inputs.items() if name != "labels"}
    given |= {"use_cache": False, "logits_to_keep": 1}
    with evaluating(model), torch.compiler.set_stance("force_eager"), observing(model) as observation:
        model(**given)
    return observation


@contextlib.contextmanager
def observing(model: nn.Module) -> Iterator[Observation]:
    """Inside, eager forwards of `model`, in training too, are watched; the results of the model stay what they are.

    The recomputation of activation checkpointing is not counted again.
    """
    seen = Observation()
    device = next(model.parameters()).device
    with contextlib.ExitStack() as undo:
        _watch_depth_mix(modules_of(model, AttnRes), seen, device, undo)
        _watch_kda(modules_of(model, KimiDeltaAttention), seen, device, undo)
        _watch_mla(modules_of(model, GatedMLA), seen, device, undo)
        _watch_situ(model, seen, device, undo)
        yield seen


def modules_of(model: nn.Module, kind: type[Kind]) -> list[Kind]:
    """The modules of one kind, in the order of the layers."""
    return [module for module in model.modules() if isinstance(module, kind)]


def _looking(look: Callable[..., None]) -> Callable[..., None]:
    """A hook that only looks."""

    @torch.no_grad()
    def hook(*args, **kwargs) -> None:
        if not _in_backward():
            look(*args, **kwargs)

    return hook


def _sampled(x: Tensor) -> Tensor:
    """`[B, T, ...]` -> at most SAMPLE of its tokens `[n, ...]`, in FP32."""
    flat = x.flatten(0, 1)
    return flat[:: _stride(flat, SAMPLE)].float()


def _stride(tokens: Tensor, wanted: int) -> int:
    return max(1, math.ceil(len(tokens) / wanted))


def _add(row: Tensor, values: Tensor) -> None:
    row += torch.stack([values.sum(dtype=torch.float64), row.new_tensor(float(values.numel()))])


def _watch_depth_mix(sites: Sequence[AttnRes], seen: Observation, device, undo: contextlib.ExitStack) -> None:
    if not sites:
        return

    def hook(row: Tensor):
        def look(site: AttnRes, args: tuple) -> None:
            blocks, partial, _ = args
            _add(row, mix_entropy(site, [_sampled(source) for source in (*blocks, partial)]))

        return _looking(look)

    for site, row in zip(sites, seen.rows("attn_res_entropy", len(sites), device)):
        undo.callback(site.register_forward_pre_hook(hook(row)).remove)


def mix_entropy(site: AttnRes, sources: Sequence[Tensor]) -> Tensor:
    """Entropy in nats of the weights that `site` gives to `sources`, [n, D] FP32 each: [n]."""
    query = site.query[0].float() * site.key_norm.float()  # [D]
    eps = site.config.rms_norm_eps
    scores = torch.stack([(v @ query) * torch.rsqrt(v.square().mean(-1) + eps) for v in sources], dim=-1)  # [n, M]
    logs = scores.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


def _watch_kda(layers: Sequence[KimiDeltaAttention], seen: Observation, device, undo: contextlib.ExitStack) -> None:
    if not layers:
        return
    decays = seen.rows("kda_decay", len(layers), device)
    norms = seen.rows("kda_state_norm", len(layers), device)
    for layer, decay, norm in zip(layers, decays, norms):
        _watch_kda_layer(layer, decay, norm, undo)


def _watch_kda_layer(layer: KimiDeltaAttention, decay: Tensor, norm: Tensor, undo: contextlib.ExitStack) -> None:
    # Without a cache the states leave the layer nowhere, so the method that returns them is wrapped; the parameters are
    # taken on their way through the module that owns them, where a sharded model has gathered them.
    inner, gate = layer.delta_rule, []
    undo.callback(layer.decay.register_forward_hook(lambda module, args, output: gate.append(output)).remove)

    @_looking
    def look(g: Tensor, state: Tensor) -> None:
        A_log, dt_bias = gate[-1]
        _add(decay, log_decay(_sampled(g), A_log, dt_bias, layer.lower_bound).exp())
        _add(norm, torch.linalg.matrix_norm(state.float()))  # [N, H]

    def delta_rule(q, k, v, g, beta, state, cu_seqlens):
        o, state = inner(q, k, v, g, beta, state, cu_seqlens)
        look(g, state)
        gate.clear()
        return o, state

    undo.callback(_replace_delta_rule, layer, vars(layer).get("delta_rule"))
    _replace_delta_rule(layer, delta_rule)


def _replace_delta_rule(layer: KimiDeltaAttention, method: Callable | None) -> None:
    """Puts a method on this instance, where context parallelism may have one of its own already; None: takes it away."""
    if method is None:
        del layer.__dict__["delta_rule"]
    else:
        layer.__dict__["delta_rule"] = method


def log_decay(g: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Log of the decay, in nats, of raw gates `g` [..., H, K]; `A_log` [H], `dt_bias` [H, K]; see `kernels.kda.kda`."""
    rate = A_log.float().clamp(max=80.0).exp()[:, None]
    if lower_bound is None:
        return -rate * F.softplus(g + dt_bias.float())
    return lower_bound * torch.sigmoid(rate * (g + dt_bias.float()))


def _watch_mla(layers: Sequence[GatedMLA], seen: Observation, device, undo: contextlib.ExitStack) -> None:
    if not layers:
        return
    seen.maxima["mla_max_logit"] = torch.full((len(layers),), -torch.inf, dtype=torch.float64, device=device)
    for layer, place in zip(layers, seen.maxima["mla_max_logit"].split(1)):
        _watch_mla_layer(layer, place, undo)


def _watch_mla_layer(layer: GatedMLA, place: Tensor, undo: contextlib.ExitStack) -> None:
    found: dict[str, Tensor] = {}
    query = layer.q_proj if layer.config.q_lora_rank is None else layer.q_b_proj
    projections = {"q": query, "latent": layer.kv_a_layernorm, "latent_and_rope": layer.kv_a_proj_with_mqa}

    def keep(name: str):
        return lambda module, args, output: found.__setitem__(name, output)

    def look(module: GatedMLA, args: tuple, kwargs: dict, output) -> None:
        tensors = found["q"], found["latent"], found["latent_and_rope"][..., layer.rank :]
        segments = kwargs.get("segments")
        if segments is None:
            q, latent, k_rope = (x[0] for x in tensors)
        else:
            borders = segments.cu_seqlens
            longest = int(borders.diff().argmax())
            first, last = borders[longest : longest + 2].tolist()
            q, latent, k_rope = (segments.pack(x)[0, first:last] for x in tensors)
        found.clear()
        torch.maximum(place, max_logit(layer, q, latent, k_rope), out=place)

    for name, module in projections.items():
        undo.callback(module.register_forward_hook(keep(name)).remove)
    undo.callback(layer.register_forward_hook(_looking(look), with_kwargs=True).remove)


def max_logit(layer: GatedMLA, q: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
    """Largest scaled logit, 0-d, of the last queries of one sequence with the keys that they see.

    `q` [T, H * (nope + rope)], `latent` [T, R], `k_rope` [T, rope]. Keys are never expanded: their projection moves onto
    the queries, as in decoding.
    """
    tokens = len(latent)
    queries = min(tokens, QUERIES, max(1, SCORES // tokens))
    q_nope, q_rope = (
        q[-queries:]
        .float()
        .unflatten(-1, (-1, layer.nope_dim + layer.rope_dim))
        .split([layer.nope_dim, layer.rope_dim], -1)
    )  # [Q, H, nope], [Q, H, rope]
    w_k = effective_weight(layer.kv_b_proj).unflatten(0, (-1, layer.nope_dim + layer.v_dim))[:, : layer.nope_dim]
    q_latent = torch.einsum("qhd,hdr->hqr", q_nope, w_k.float())
    logits = q_latent @ latent.float().T + q_rope.transpose(0, 1) @ k_rope.float().T  # [H, Q, T]
    hidden = torch.ones(queries, tokens, dtype=torch.bool, device=logits.device).triu(tokens - queries + 1)
    return logits.masked_fill(hidden, -torch.inf).amax() * layer.scaling


def _watch_situ(model: nn.Module, seen: Observation, device, undo: contextlib.ExitStack) -> None:
    mlps, experts = modules_of(model, SiTUGLU), modules_of(model, MoeLcExperts)
    betas = [mlp.config.glu_caps[0] for mlp in mlps] + [module.config.glu_caps[0] for module in experts]
    if not betas or betas[0] is None:  # SwiGLU has no cap to reach
        return
    beta = betas[0]

    def of_mlp(row: Tensor):
        def look(projection: nn.Module, args: tuple, gate_up: Tensor) -> None:
            gate, _ = _sampled(gate_up).chunk(2, dim=-1)
            _add(row, (gate.abs() > beta).double())

        return _looking(look)

    def of_experts(row: Tensor):
        def look(module: MoeLcExperts, args: tuple) -> None:
            tokens, indices, _ = args
            stride = _stride(tokens, ROUTED_SAMPLE)
            for token, chosen in zip(tokens[::stride], indices[::stride]):
                gate = module.gate_up_proj[chosen, : module.intermediate_dim] @ token.to(module.gate_up_proj.dtype)
                _add(row, (gate.abs() > beta).double())  # [k, I]

        return _looking(look)

    for mlp, row in zip(mlps, seen.rows("situ_saturation", len(mlps), device)):
        undo.callback(mlp.gate_up_proj.register_forward_hook(of_mlp(row)).remove)
    for module, row in zip(experts, seen.rows("situ_saturation_routed", len(experts), device)):
        undo.callback(module.register_forward_pre_hook(of_experts(row)).remove)
