"""Operators of torch that stand for the Triton implementations under `torch.compile` and `torch.export`, each one node.

An operator is what runs, its outputs' shapes (`..._fake`), what its backward pass needs (`..._save`) and that pass
(`..._gradients`), whose launches are an operator too. Nothing here imports Triton before it is called. Those that are not
in this file are in `custom_ops_moe.py`; the table below holds all.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from . import custom_ops_moe as moe
from .custom_ops_moe import contiguous, like
from .dispatch import TRACED, on_device_of
from .sigmoid_gate.reference import sigmoid_gate_reference


ops = torch.ops.moe_lc


def _copy(state):
    """A state may be that of a cache, which the layer overwrites before the backward pass."""
    return None if state is None else state.clone()


def kda(q, k, v, g, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens):
    from .kda.fused import Call, launch_forward

    with on_device_of(q):
        q, k, v, g, beta, initial_state = contiguous(q, k, v, g, beta, initial_state)
        call = Call(q, k, v, g, beta, A_log, dt_bias, lower_bound, cu_seqlens)
        o, final_state, _ = launch_forward(call, initial_state, keep=False)
    return o, final_state


def kda_fake(q, k, v, g, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens):
    return *like(v), _kda_states(q, v, cu_seqlens)


def _kda_states(q, v, cu_seqlens):
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return q.new_empty(sequences, q.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)


def kda_save(ctx, inputs, output):
    *tensors, ctx.lower_bound, initial_state, cu_seqlens = inputs
    ctx.save_for_backward(*tensors, _copy(initial_state), cu_seqlens, output[0])
    ctx.set_materialize_grads(False)


def kda_gradients(ctx, do, d_final):
    *tensors, initial_state, cu_seqlens, o = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    inputs = *tensors, ctx.lower_bound, initial_state, cu_seqlens
    *gradients, d_initial = ops.kda_backward(*inputs, o, do, d_final)
    return *gradients, None, None if initial_state is None else d_initial, None


def kda_backward(q, k, v, g, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, o, do, d_final):
    from .kda.fused import Call, launch_backward

    with on_device_of(q):
        q, k, v, g, beta = contiguous(q, k, v, g, beta)
        initial_state, o, do, d_final = contiguous(initial_state, o, do, d_final)
        call = Call(q, k, v, g, beta, A_log, dt_bias, lower_bound, cu_seqlens)
        *gradients, dA_log, ddt_bias, d_initial = launch_backward(call, initial_state, o, do, d_final, None)
    return *gradients, dA_log.to(A_log.dtype), ddt_bias.to(dt_bias.dtype), d_initial


def kda_backward_fake(q, k, v, g, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, o, do, d_final):
    return *like(q, k, v, g, beta, A_log, dt_bias), _kda_states(q, v, cu_seqlens)


def kda_step(q, k, v, g, beta, A_log, dt_bias, lower_bound, state):
    from .kda.fused_step import kda_step_fused

    with on_device_of(q):
        return kda_step_fused(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, state=state)


def kda_step_fake(q, k, v, g, beta, A_log, dt_bias, lower_bound, state):
    return like(v)[0]


@torch.no_grad()
def kda_step_traced(*args, **kwargs):
    """`kda_step` has no gradients, but without `no_grad` autograd would promise some."""
    return ops.kda_step(*args, **kwargs)


def short_convs(xs, weights, states, cu_seqlens):
    from .short_conv.fused import Call, launch_forward

    with on_device_of(xs[0]):
        return launch_forward(Call(xs, weights, states, cu_seqlens))


def short_convs_fake(xs, weights, states, cu_seqlens):
    rows, _, channels = xs[0].shape
    sequences = rows if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return like(*xs), xs[0].new_empty(sequences, len(xs) * channels, weights[0].shape[-1] - 1)


def short_convs_save(ctx, inputs, output):
    xs, weights, states, cu_seqlens = inputs
    ctx.save_for_backward(_copy(states), cu_seqlens, *xs, *weights)
    ctx.set_materialize_grads(False)


def short_convs_gradients(ctx, dys, d_new_states):
    states, cu_seqlens, *tensors = ctx.saved_tensors
    xs, weights = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
    dys = [torch.zeros_like(x) if dy is None else dy for dy, x in zip(dys, xs, strict=True)]
    dxs, dweights, d_states = ops.short_convs_backward(xs, weights, states, cu_seqlens, dys, d_new_states)
    dweights = [dw[:, None].to(weight.dtype) for dw, weight in zip(dweights, weights, strict=True)]  # [C, 1, 4]
    return dxs, dweights, None if states is None else d_states, None


def short_convs_backward(xs, weights, states, cu_seqlens, dys, d_new_states):
    from .short_conv.fused import Call, launch_backward

    with on_device_of(xs[0]):
        *dys, d_new_states = contiguous(*dys, d_new_states)
        dxs, dweights, d_states = launch_backward(Call(xs, weights, states, cu_seqlens), dys, d_new_states)
    return dxs, dweights, dweights.new_empty(0) if states is None else d_states


def short_convs_backward_fake(xs, weights, states, cu_seqlens, dys, d_new_states):
    channels, _, taps = weights[0].shape
    dweights = xs[0].new_empty(len(xs), channels, taps, dtype=torch.float32)
    return like(*xs), dweights, dweights.new_empty(0) if states is None else like(states)[0]


def gated_rms_norm(o, gate, weight, eps):
    from .gated_norm.fused import launch_forward

    with on_device_of(o):
        o, gate, weight = contiguous(o, gate, weight)
        return launch_forward(o, gate, weight, eps)


def gated_rms_norm_fake(o, gate, weight, eps):
    return like(o)[0]


def gated_rms_norm_save(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def gated_rms_norm_gradients(ctx, dy):
    return *ops.gated_rms_norm_backward(*ctx.saved_tensors, ctx.eps, dy), None


def gated_rms_norm_backward(o, gate, weight, eps, dy):
    from .gated_norm.fused import launch_backward

    with on_device_of(o):
        o, gate, weight, dy = contiguous(o, gate, weight, dy)
        return launch_backward(o, gate, weight, eps, dy)


def gated_rms_norm_backward_fake(o, gate, weight, eps, dy):
    return tuple(like(o, gate, weight))


class Operator(NamedTuple):
    schema: str
    run: Callable
    fake: Callable
    save: Callable | None = None
    gradients: Callable | None = None
    mutates: tuple[str, ...] = ()


# Written out and not inferred from annotations, since a backward pass takes the arguments of its operator and more.
_GATE = "Tensor A_log, Tensor dt_bias, float? lower_bound"
_KDA = f"Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, {_GATE}"
_SEQUENCES = f"{_KDA}, Tensor? initial_state, Tensor? cu_seqlens"
_CONVS = "Tensor[] xs, Tensor[] weights, Tensor? states, Tensor? cu_seqlens"
_GATED_NORM = "Tensor o, Tensor gate, Tensor weight, float eps"
_NORM = "Tensor x, Tensor weight, float eps"
_CAPS = "float? beta, float? linear_beta"
_MIX = "Tensor[] sources, Tensor query, Tensor norm_weight"
_ROUTED = "Tensor x, Tensor indices, Tensor weights"
_EXPERTS = f"{_ROUTED}, Tensor gate_up_proj, Tensor down_proj, {_CAPS}"
_PACKED = "Tensor gate_up_packed, Tensor gate_up_scales, Tensor down_packed, Tensor down_scales"

OPERATORS = {
    "kda": Operator(f"({_SEQUENCES}) -> (Tensor, Tensor)", kda, kda_fake, kda_save, kda_gradients),
    "kda_backward": Operator(
        f"({_SEQUENCES}, Tensor o, Tensor do, Tensor? d_final) -> ({', '.join(8 * ['Tensor'])})",
        kda_backward,
        kda_backward_fake,
    ),
    "kda_step": Operator(f"({_KDA}, Tensor(a!) state) -> Tensor", kda_step, kda_step_fake, mutates=("state",)),
    "short_convs": Operator(
        f"({_CONVS}) -> (Tensor[], Tensor)",
        short_convs,
        short_convs_fake,
        short_convs_save,
        short_convs_gradients,
    ),
    "short_convs_backward": Operator(
        f"({_CONVS}, Tensor[] dys, Tensor? d_new_states) -> (Tensor[], Tensor, Tensor)",
        short_convs_backward,
        short_convs_backward_fake,
    ),
    "gated_rms_norm": Operator(
        f"({_GATED_NORM}) -> Tensor",
        gated_rms_norm,
        gated_rms_norm_fake,
        gated_rms_norm_save,
        gated_rms_norm_gradients,
    ),
    "gated_rms_norm_backward": Operator(
        f"({_GATED_NORM}, Tensor dy) -> (Tensor, Tensor, Tensor)",
        gated_rms_norm_backward,
        gated_rms_norm_backward_fake,
    ),
    "rms_norm": Operator(
        f"({_NORM}) -> Tensor", moe.rms_norm, moe.rms_norm_fake, moe.rms_norm_save, moe.rms_norm_gradients
    ),
    "rms_norm_backward": Operator(
        f"({_NORM}, Tensor dy) -> (Tensor, Tensor)", moe.rms_norm_backward, moe.rms_norm_backward_fake
    ),
    "situ_glu": Operator(
        f"(Tensor gate_up, {_CAPS}) -> Tensor",
        moe.situ_glu,
        moe.situ_glu_fake,
        moe.situ_glu_save,
        moe.situ_glu_gradients,
    ),
    "situ_glu_backward": Operator(
        f"(Tensor gate_up, {_CAPS}, Tensor dy) -> Tensor", moe.situ_glu_backward, moe.situ_glu_backward_fake
    ),
    "attn_res": Operator(
        f"({_MIX}, float eps) -> (Tensor, Tensor)",
        moe.attn_res,
        moe.attn_res_fake,
        moe.attn_res_save,
        moe.attn_res_gradients,
    ),
    "attn_res_norm": Operator(
        f"({_MIX}, float eps, Tensor out_norm_weight, float out_eps) -> (Tensor, Tensor, Tensor)",
        moe.attn_res_norm,
        moe.attn_res_norm_fake,
        moe.attn_res_norm_save,
        moe.attn_res_norm_gradients,
    ),
    "attn_res_backward": Operator(
        f"({_MIX}, Tensor? out_norm_weight, float out_eps, Tensor mix, Tensor stats, Tensor dy) "
        "-> (Tensor[], Tensor, Tensor, Tensor)",
        moe.attn_res_backward,
        moe.attn_res_backward_fake,
    ),
    "route": Operator(
        "(Tensor logits, Tensor bias, SymInt top_k, bool renormalize, float scaling, Tensor? token_mask, SymInt bins) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        moe.route,
        moe.route_fake,
        moe.route_save,
        moe.route_gradients,
    ),
    "route_backward": Operator(
        "(Tensor indices, Tensor scores, Tensor d_weights, SymInt num_experts, ScalarType dtype, bool renormalize, "
        "float scaling) -> Tensor",
        moe.route_backward,
        moe.route_backward_fake,
    ),
    "expert_mlp": Operator(
        f"({_EXPERTS}, bool gradients) -> Tensor",
        moe.expert_mlp,
        moe.expert_mlp_fake,
        moe.expert_mlp_save,
        moe.expert_mlp_gradients,
    ),
    "expert_mlp_backward": Operator(
        f"({_EXPERTS}, Tensor dy) -> (Tensor, Tensor, Tensor, Tensor)",
        moe.expert_mlp_backward,
        moe.expert_mlp_backward_fake,
    ),
    "expert_mlp_mxfp4": Operator(
        f"({_ROUTED}, {_PACKED}, {_CAPS}, bool gradients) -> Tensor",
        moe.expert_mlp_mxfp4,
        moe.expert_mlp_mxfp4_fake,
        moe.expert_mlp_mxfp4_save,
        moe.expert_mlp_mxfp4_gradients,
    ),
    "expert_mlp_mxfp4_backward": Operator(
        f"({_ROUTED}, {_PACKED}, {_CAPS}, Tensor dy) -> (Tensor, Tensor)",
        moe.expert_mlp_mxfp4_backward,
        moe.expert_mlp_mxfp4_backward_fake,
    ),
    "mla_decode": Operator(
        "(Tensor q_latent, Tensor q_rope, Tensor latent, Tensor k_rope, float scale, Tensor? mask) -> Tensor",
        moe.mla_decode,
        moe.mla_decode_fake,
    ),
}


def register_operators() -> None:
    """Registers the operators with torch, and as what `dispatch.traceable` returns.

    Their names hold for the whole process: where an earlier import of the package took them, its operators serve.
    """
    for name, operator in OPERATORS.items():
        if not hasattr(ops, name):
            _register(name, operator)
    TRACED.update(
        kda=ops.kda,
        kda_step=kda_step_traced,
        short_convs=ops.short_convs,
        gated_rms_norm=ops.gated_rms_norm,
        rms_norm=ops.rms_norm,
        sigmoid_gate=sigmoid_gate_reference,  # a compiler makes one kernel of it
        situ_glu=ops.situ_glu,
        attn_res=moe.attn_res_traced,
        attn_res_norm=moe.attn_res_norm_traced,
        route=moe.route_traced,
        expert_mlp=moe.expert_mlp_traced,
        expert_mlp_mxfp4=moe.expert_mlp_mxfp4_traced,
        mla_decode=moe.mla_decode_traced,
    )


def _register(name: str, operator: Operator) -> None:
    registered = torch.library.custom_op(
        f"moe_lc::{name}", operator.run, mutates_args=operator.mutates, schema=operator.schema
    )
    registered.register_fake(operator.fake)
    if operator.gradients is not None:
        registered.register_autograd(operator.gradients, setup_context=operator.save)
