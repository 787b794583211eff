"""What the operators of `custom_ops.py` do that belong to the norms, the depth mix, the experts and MLA.

For each its run, `..._fake`, `..._save` and `..._gradients`, and where an operator of torch takes other arguments than the
fused function that it stands for, `..._traced` between them.
"""

import functools
import math

import torch

from .dispatch import on_device_of


ops = torch.ops.moe_lc


def contiguous(*tensors):
    return [None if x is None else x.contiguous() for x in tensors]


def like(*tensors):
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]


def rms_norm(x, weight, eps):
    from .rms_norm.fused import _forward

    with on_device_of(x):
        return _forward(x, weight.contiguous(), eps)


def rms_norm_fake(x, weight, eps):
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))


def rms_norm_save(ctx, inputs, output):
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def rms_norm_gradients(ctx, dy):
    return *ops.rms_norm_backward(*ctx.saved_tensors, ctx.eps, dy), None


def rms_norm_backward(x, weight, eps, dy):
    from .rms_norm.fused import _backward

    with on_device_of(x):
        return _backward(x, weight.contiguous(), eps, dy)


def rms_norm_backward_fake(x, weight, eps, dy):
    return tuple(like(x, weight))


def situ_glu(gate_up, beta, linear_beta):
    from .situ_glu.fused import _forward

    with on_device_of(gate_up):
        return _forward(gate_up, beta, linear_beta)


def situ_glu_fake(gate_up, beta, linear_beta):
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def situ_glu_save(ctx, inputs, output):
    gate_up, *ctx.caps = inputs
    ctx.save_for_backward(gate_up)


def situ_glu_gradients(ctx, dy):
    return ops.situ_glu_backward(*ctx.saved_tensors, *ctx.caps, dy), None, None


def situ_glu_backward(gate_up, beta, linear_beta, dy):
    from .situ_glu.fused import _backward

    with on_device_of(gate_up):
        return _backward(gate_up, beta, linear_beta, dy)


def situ_glu_backward_fake(gate_up, beta, linear_beta, dy):
    return like(gate_up)[0]


def attn_res(sources, query, norm_weight, eps):
    """The mix, and the statistics that its backward pass needs."""
    mix, _, stats = _attn_res(sources, query, norm_weight, eps)
    stats[:, -1] = 0  # the inverse norm of the mix, which the kernel leaves unwritten: results must not be random
    return mix, stats


def attn_res_norm(sources, query, norm_weight, eps, out_norm_weight, out_eps):
    """The norm of the mix, and what its backward pass needs: the mix and the statistics."""
    mix, normed, stats = _attn_res(sources, query, norm_weight, eps, out_norm_weight, out_eps)
    return normed, mix, stats


def _attn_res(sources, query, norm_weight, eps, out_norm_weight=None, out_eps=0.0):
    from .attn_res.fused import _forward

    query, norm_weight, out_norm_weight = contiguous(query, norm_weight, out_norm_weight)
    with on_device_of(query):
        return _forward(contiguous(*sources), query, norm_weight, eps, out_norm_weight, out_eps, keep=True)


def attn_res_fake(sources, query, norm_weight, eps):
    shape = sources[0].shape
    dtype = functools.reduce(torch.promote_types, (source.dtype for source in sources))
    stats = query.new_empty(math.prod(shape[:-1]), 2 * len(sources) + 2, dtype=torch.float32)
    return query.new_empty(shape, dtype=dtype), stats


def attn_res_norm_fake(sources, query, norm_weight, eps, out_norm_weight, out_eps):
    mix, stats = attn_res_fake(sources, query, norm_weight, eps)
    return rms_norm_fake(mix, out_norm_weight, out_eps), mix, stats


def attn_res_save(ctx, inputs, output):
    sources, query, norm_weight, _ = inputs
    ctx.save_for_backward(*output, query, norm_weight, *sources)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def attn_res_norm_save(ctx, inputs, output):
    sources, query, norm_weight, _, out_norm_weight, ctx.out_eps = inputs
    ctx.save_for_backward(*output[1:], query, norm_weight, out_norm_weight, *sources)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def attn_res_gradients(ctx, dy, *_):
    mix, stats, query, norm_weight, *sources = ctx.saved_tensors
    inputs = sources, query, norm_weight, None, 0.0, mix, stats, dy
    *gradients, _ = ops.attn_res_backward(*inputs)
    return *gradients, None


def attn_res_norm_gradients(ctx, dy, *_):
    mix, stats, query, norm_weight, out_norm_weight, *sources = ctx.saved_tensors
    inputs = sources, query, norm_weight, out_norm_weight, ctx.out_eps, mix, stats, dy
    *gradients, d_out_norm_weight = ops.attn_res_backward(*inputs)
    return *gradients, None, d_out_norm_weight, None


def attn_res_backward(sources, query, norm_weight, out_norm_weight, out_eps, mix, stats, dy):
    """Without `out_norm_weight` its gradient is empty."""
    from .attn_res.fused import _backward

    query, norm_weight, out_norm_weight, dy = contiguous(query, norm_weight, out_norm_weight, dy)
    inputs = contiguous(*sources), query, norm_weight, out_norm_weight, out_eps, mix, stats, dy
    with on_device_of(query):
        *gradients, dw = _backward(*inputs)
    return *gradients, query.new_empty(0) if dw is None else dw


def attn_res_backward_fake(sources, query, norm_weight, out_norm_weight, out_eps, mix, stats, dy):
    dw = query.new_empty(0) if out_norm_weight is None else like(out_norm_weight)[0]
    return like(*sources), *like(query, norm_weight), dw


def attn_res_traced(sources, query, norm_weight, eps):
    return ops.attn_res(sources, query, norm_weight, eps)[0]


def attn_res_norm_traced(sources, query, norm_weight, eps, out_norm_weight, out_eps):
    return ops.attn_res_norm(sources, query, norm_weight, eps, out_norm_weight, out_eps)[0]


def route(logits, bias, top_k, renormalize, scaling, token_mask, bins):
    """weights, indices, counts, cutoff, what these tokens add to a histogram of so many bins, and the chosen scores."""
    from .router.fused import launch_forward

    with on_device_of(logits):
        logits, bias, token_mask = contiguous(logits, bias, token_mask)
        added = torch.zeros(logits.shape[1], bins, dtype=torch.int64, device=logits.device)
        histogram = added if bins else None
        results = launch_forward(logits, bias, top_k, renormalize, scaling, token_mask, histogram)
    indices, weights, counts, cutoff, scores = results
    return weights, indices, counts, cutoff, added, scores


def route_fake(logits, bias, top_k, renormalize, scaling, token_mask, bins):
    (N, E), integer, real = logits.shape, {"dtype": torch.int64}, {"dtype": torch.float32}
    indices, weights = logits.new_empty(N, top_k, **integer), logits.new_empty(N, top_k, **real)
    counts, cutoff = logits.new_empty(E, **integer), logits.new_empty(N, **real)
    return weights, indices, counts, cutoff, logits.new_empty(E, bins, **integer), torch.empty_like(weights)


def route_save(ctx, inputs, output):
    logits, _, _, renormalize, scaling, _, _ = inputs
    _, indices, counts, cutoff, added, scores = output
    ctx.save_for_backward(indices, scores)
    ctx.rule = logits.shape[1], logits.dtype, renormalize, scaling
    ctx.mark_non_differentiable(indices, counts, cutoff, added, scores)
    ctx.set_materialize_grads(False)


def route_gradients(ctx, d_weights, *_):
    d_logits = None if d_weights is None else ops.route_backward(*ctx.saved_tensors, d_weights, *ctx.rule)
    return d_logits, *(None,) * 6


def route_backward(indices, scores, d_weights, num_experts, dtype, renormalize, scaling):
    from .router.fused import launch_backward

    with on_device_of(scores):
        return launch_backward(indices, scores, d_weights.contiguous(), num_experts, dtype, renormalize, scaling)


def route_backward_fake(indices, scores, d_weights, num_experts, dtype, renormalize, scaling):
    return scores.new_empty(scores.shape[0], num_experts, dtype=dtype)


def route_traced(
    logits,
    bias,
    top_k,
    *,
    num_groups=1,
    topk_group=1,
    renormalize=True,
    scaling=1.0,
    token_mask=None,
    histogram=None,
):
    """The histogram is added to outside the operator, since torch has no gradients for one that changes its inputs."""
    bins = 0 if histogram is None else histogram.shape[1]
    results = ops.route(logits, bias.detach(), top_k, renormalize, float(scaling), token_mask, bins)
    weights, indices, counts, cutoff, added, _ = results
    if histogram is not None:
        histogram.add_(added)
    return indices, weights, counts, cutoff


def expert_mlp(x, indices, weights, gate_up_proj, down_proj, beta, linear_beta, gradients):
    """Without `gradients`, a few tokens may take the path for decoding, as they do in eager mode."""
    from .experts.fused import Call, _forward, expert_mlp_fused

    tensors = x, indices, weights, gate_up_proj, down_proj
    if not gradients:
        with torch.no_grad():
            return expert_mlp_fused(*tensors, beta=beta, linear_beta=linear_beta)
    with on_device_of(x):
        call = Call(*tensors, beta, linear_beta)
        return _forward(call, call.plan(keep_bytes=0))[0]


def expert_mlp_fake(x, indices, weights, gate_up_proj, down_proj, beta, linear_beta, gradients):
    return like(x)[0]


def expert_mlp_save(ctx, inputs, output):
    *tensors, beta, linear_beta, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.caps = beta, linear_beta


def expert_mlp_gradients(ctx, dy):
    dx, *others = ops.expert_mlp_backward(*ctx.saved_tensors, *ctx.caps, dy)
    return dx, None, *others, None, None, None


def expert_mlp_backward(x, indices, weights, gate_up_proj, down_proj, beta, linear_beta, dy):
    from .experts.fused import Call, _backward

    with on_device_of(x):
        call = Call(x, indices, weights, gate_up_proj, down_proj, beta, linear_beta)
        gradients = _backward(call, None, [], dy.contiguous())
    inputs = x, weights, gate_up_proj, down_proj
    return tuple(d.to(tensor.dtype) for d, tensor in zip(gradients, inputs, strict=True))


def expert_mlp_backward_fake(x, indices, weights, gate_up_proj, down_proj, beta, linear_beta, dy):
    return tuple(like(x, weights, gate_up_proj, down_proj))


def expert_mlp_traced(x, indices, weights, gate_up_proj, down_proj, *, beta, linear_beta):
    tensors = x, indices, weights, gate_up_proj, down_proj
    gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return ops.expert_mlp(*tensors, beta, linear_beta, gradients)


def expert_mlp_mxfp4(
    x, indices, weights, gate_up_packed, gate_up_scales, down_packed, down_scales, *caps_and_gradients
):
    """As `expert_mlp`; the projections are frozen."""
    from .experts.fused import _forward
    from .mxfp4.fused_experts import PackedCall, expert_mlp_mxfp4_fused

    *caps, gradients = caps_and_gradients
    tensors = x, indices, weights, gate_up_packed, gate_up_scales, down_packed, down_scales
    if not gradients:
        with torch.no_grad():
            return expert_mlp_mxfp4_fused(*tensors, *caps)
    with on_device_of(x):
        call = PackedCall(*tensors, *caps)
        return _forward(call, call.plan(keep_bytes=0))[0]


def expert_mlp_mxfp4_fake(x, *others):
    return like(x)[0]


def expert_mlp_mxfp4_save(ctx, inputs, output):
    *tensors, beta, linear_beta, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.caps = beta, linear_beta


def expert_mlp_mxfp4_gradients(ctx, dy):
    dx, d_weights = ops.expert_mlp_mxfp4_backward(*ctx.saved_tensors, *ctx.caps, dy)
    return dx, None, d_weights, *(None,) * 7


def expert_mlp_mxfp4_backward(x, indices, weights, *packed_caps_and_dy):
    from .experts.fused import _backward
    from .mxfp4.fused_experts import PackedCall

    *packed_and_caps, dy = packed_caps_and_dy
    with on_device_of(x):
        call = PackedCall(x, indices, weights, *packed_and_caps)
        dx, d_weights, _, _ = _backward(call, None, [], dy.contiguous(), (True, True, False, False))
    return dx.to(x.dtype), d_weights.to(weights.dtype)


def expert_mlp_mxfp4_backward_fake(x, indices, weights, *others):
    return tuple(like(x, weights))


def expert_mlp_mxfp4_traced(x, indices, weights, *packed_and_caps):
    gradients = torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)
    return ops.expert_mlp_mxfp4(x, indices, weights, *packed_and_caps, gradients)


def mla_decode(q_latent, q_rope, latent, k_rope, scale, mask):
    from .mla.fused import mla_decode_fused

    return mla_decode_fused(q_latent, q_rope, latent, k_rope, scale=scale, mask=mask)


def mla_decode_fake(q_latent, q_rope, latent, k_rope, scale, mask):
    return like(q_latent)[0]


@torch.no_grad()
def mla_decode_traced(q_latent, q_rope, latent, k_rope, *, scale, mask=None):
    return ops.mla_decode(q_latent, q_rope, latent, k_rope, float(scale), mask)
