"""Under torch.compile each Triton implementation is one operator with the values and gradients of the eager call."""

import importlib
import sys

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from modeling_moe_lc.kernels import custom_ops
from modeling_moe_lc.kernels.attn_res import attn_res, attn_res_norm
from modeling_moe_lc.kernels.dispatch import TRACED
from modeling_moe_lc.kernels.experts import expert_mlp
from modeling_moe_lc.kernels.gated_norm import gated_rms_norm
from modeling_moe_lc.kernels.kda import kda, kda_step
from modeling_moe_lc.kernels.mla import mla_decode
from modeling_moe_lc.kernels.mxfp4 import expert_mlp_mxfp4, quantize_mxfp4
from modeling_moe_lc.kernels.rms_norm import rms_norm
from modeling_moe_lc.kernels.router import route
from modeling_moe_lc.kernels.short_conv import short_conv, short_convs
from modeling_moe_lc.kernels.situ_glu import situ_glu


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these shapes run under the interpreter on a CPU")
ops = torch.ops.moe_lc


def leaf(*shape):
    return torch.randn(shape).requires_grad_()


def documents(*bounds):
    return torch.tensor(bounds, dtype=torch.int32)


def tokens(T, *, rows=1):
    """q, k, v, g, beta, A_log and dt_bias of one head."""
    return *(leaf(rows, T, 1, 16) for _ in range(4)), leaf(rows, T, 1), leaf(1), leaf(1, 16)


def states(count):
    return leaf(count, 1, 16, 16)


def detached(values):
    return [detached(x) if isinstance(x, list) else x.detach() if torch.is_tensor(x) else x for x in values]


def flat(outputs):
    return [outputs] if torch.is_tensor(outputs) else [x for part in outputs for x in flat(part)]


def kda_backward_arguments():
    inputs = *tokens(3), -5.0, None, None
    return detached([*inputs, ops.kda(*inputs)[0], leaf(1, 3, 1, 16), states(1)])


def xs_and_weights(count, rows=1, C=4):
    return [leaf(rows, 3, C) for _ in range(count)], [leaf(C, 1, 4) for _ in range(count)]


def sources(*dtypes):
    return [torch.randn(2, 3, 16, dtype=dtype).requires_grad_() for dtype in dtypes or 2 * [torch.float32]]


def attn_res_backward_arguments(*out_norm):
    inputs = sources(), leaf(16), leaf(16)
    kept = (ops.attn_res_norm(*inputs, 1e-5, *out_norm) if out_norm else ops.attn_res(*inputs, 1e-5))[-2:]
    return detached([*inputs, *(out_norm or (None, 0.0)), *kept, leaf(2, 3, 16)])


def logits_and_bias():
    return leaf(5, 8), 0.1 * torch.randn(8)


def routed(dtype=torch.float32):
    """x, indices, one of them past the last of 3 experts, their weights and the projections."""
    indices = torch.tensor([[0, 2], [2, 1], [3, 0], [2, 0]])
    gate_up_proj = torch.randn(3, 16, 16, dtype=dtype).requires_grad_()
    return leaf(4, 16), indices, leaf(4, 2), gate_up_proj, leaf(3, 16, 8)


def routed_packed():
    """As `routed`, 32 channels wide, with the codes and the scales of both projections."""
    _, indices, weights, _, _ = routed()
    packed = []
    for rows in (64, 32):
        codes, scales = quantize_mxfp4(torch.randn(3, rows, 32))
        packed += [codes, scales.mT.contiguous()]
    return leaf(4, 32), indices, weights, *packed


def queries_and_cache():
    return torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 4), torch.randn(2, 5, 16), torch.randn(2, 5, 4)


OPERATORS = {
    "kda": lambda: (*tokens(3), -5.0, states(2), documents(0, 2, 3)),
    "kda_backward": kda_backward_arguments,
    "kda_step": lambda: detached([*(x[:, 0] for x in tokens(1, rows=2)[:5]), leaf(1), leaf(1, 16), None, states(2)]),
    "short_convs": lambda: (*xs_and_weights(2, rows=2), leaf(2, 8, 3), None),
    "short_convs, packed": lambda: (*xs_and_weights(1), None, documents(0, 2, 3)),
    "short_convs_backward": lambda: detached(
        [*xs_and_weights(2, rows=2), leaf(2, 8, 3), None, [leaf(2, 3, 4), leaf(2, 3, 4)], leaf(2, 8, 3)]
    ),
    "short_convs_backward, packed": lambda: detached(
        [*xs_and_weights(1), None, documents(0, 2, 3), [leaf(1, 3, 4)], None]
    ),
    "gated_rms_norm": lambda: (leaf(2, 3, 16), leaf(2, 3, 16), leaf(16), 1e-5),
    "gated_rms_norm_backward": lambda: detached([leaf(2, 3, 16), leaf(2, 3, 16), leaf(16), 1e-5, leaf(2, 3, 16)]),
    "rms_norm": lambda: (leaf(2, 3, 16), leaf(16), 1e-5),
    "rms_norm, mixed": lambda: (torch.randn(2, 3, 16, dtype=torch.bfloat16).requires_grad_(), leaf(16), 1e-5),
    "rms_norm_backward": lambda: detached([leaf(2, 3, 16), leaf(16), 1e-5, leaf(2, 3, 16)]),
    "situ_glu": lambda: (leaf(2, 3, 16), 4.0, None),
    "situ_glu_backward": lambda: detached([leaf(2, 3, 16), 4.0, 25.0, leaf(2, 3, 8)]),
    "attn_res": lambda: (sources(torch.bfloat16, torch.float32), leaf(16), leaf(16), 1e-5),
    "attn_res_norm": lambda: (sources(), leaf(16), leaf(16), 1e-5, leaf(16), 1e-6),
    "attn_res_backward": attn_res_backward_arguments,
    "attn_res_backward, with the norm": lambda: attn_res_backward_arguments(leaf(16), 1e-6),
    "route": lambda: (*logits_and_bias(), 2, True, 2.5, torch.arange(5) > 0, 4),
    "route_backward": lambda: detached(
        [torch.tensor([[0, 2], [1, 3]]), torch.rand(2, 2), leaf(2, 2), 8, torch.float32, True, 2.5]
    ),
    "expert_mlp": lambda: (*routed(), 4.0, 25.0, True),
    "expert_mlp, without gradients": lambda: detached([*routed(), None, None, False]),
    "expert_mlp_backward": lambda: detached([*routed(), 4.0, 25.0, leaf(4, 16)]),
    "expert_mlp_mxfp4": lambda: (*routed_packed(), 4.0, 25.0, True),
    "expert_mlp_mxfp4, without gradients": lambda: detached([*routed_packed(), None, None, False]),
    "expert_mlp_mxfp4_backward": lambda: detached([*routed_packed(), 4.0, 25.0, leaf(4, 32)]),
    "mla_decode": lambda: (*queries_and_cache(), 0.25, None),
}


@pytest.mark.parametrize("case", OPERATORS)
def test_operator_keeps_its_promises_to_torch(case):
    operator = getattr(ops, case.split(",")[0]).default
    torch.library.opcheck(operator, tuple(OPERATORS[case]()))


LEARNING = [
    case for case in OPERATORS if case.split(",")[0] + "_backward" in custom_ops.OPERATORS and "without" not in case
]


@pytest.mark.parametrize("case", LEARNING)
def test_gradients_scale_with_their_cotangents(case):
    """A step of many tokens has small ones."""
    inputs = OPERATORS[case]()
    outputs = [x for x in flat(getattr(ops, case.split(",")[0])(*inputs)) if x.requires_grad]
    leaves = [x for x in flat([x for x in inputs if torch.is_tensor(x) or isinstance(x, list)]) if x.requires_grad]
    cotangents, scale = [torch.randn_like(x) for x in outputs], 2.0**-40
    of_one = torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True)
    of_small = torch.autograd.grad(outputs, leaves, [scale * x for x in cotangents])
    for gradient, small in zip(of_one, of_small, strict=True):
        assert gradient.any()
        torch.testing.assert_close(small / scale, gradient, rtol=1e-5, atol=1e-6 * gradient.abs().max().item())


def test_every_operator_is_checked():
    assert {case.split(",")[0] for case in OPERATORS} == set(custom_ops.OPERATORS)


class Recorded:
    """`fn` compiled in one graph; `operators` are ours in that graph."""

    def __init__(self, fn, **kwargs):
        self.operators = []
        torch.compiler.reset()
        self.compiled = torch.compile(fn, backend=self.backend, fullgraph=True, **kwargs)

    def backend(self, graph, inputs):
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        self.operators += [target for target in targets if target.startswith("moe_lc")]
        return lookup_backend("aot_eager")(graph, inputs)

    def __call__(self, *args, **kwargs):
        return self.compiled(*args, **kwargs)


def call_kda(q, k, v, g, beta, A_log, dt_bias, state=None, cu_seqlens=None):
    gate = {"A_log": A_log, "dt_bias": dt_bias}
    return kda(q, k, v, g, beta, **gate, initial_state=state, cu_seqlens=cu_seqlens, impl="triton")


def call_short_convs(x, y, first, second, state, cu_seqlens):
    return short_convs((x, y), (first, second), states=state, cu_seqlens=cu_seqlens, impl="triton")


def call_gated_rms_norm(o, gate, weight, transposed=False):
    return gated_rms_norm(o.mT if transposed else o, gate.mT if transposed else gate, weight, 1e-5, impl="triton")


def call_rms_norm(x, weight):
    return rms_norm(x, weight, 1e-5, impl="triton")


def call_attn_res(query, norm_weight, *tensors):
    return attn_res(tensors, None, query, norm_weight, 1e-5, impl="triton")


def call_attn_res_norm(query, norm_weight, out_norm_weight, *tensors):
    return attn_res_norm(tensors[:-1], tensors[-1], query, norm_weight, 1e-5, out_norm_weight, 1e-6, impl="triton")


def call_route(logits, bias, token_mask=None, histogram=None):
    return route(logits, bias, 2, scaling=2.5, token_mask=token_mask, histogram=histogram, impl="triton")


def call_expert_mlp(*tensors):
    return expert_mlp(*tensors, beta=4.0, linear_beta=25.0, impl="triton")


def call_expert_mlp_mxfp4(*tensors):
    return expert_mlp_mxfp4(*tensors, beta=4.0, linear_beta=25.0, impl="triton")


PUBLIC = {
    "kda": (call_kda, lambda: (*tokens(3, rows=2), states(2))),
    "kda of documents": (call_kda, lambda: (*tokens(3), states(2), documents(0, 2, 3))),
    "kda, only the state is used": (lambda *inputs: call_kda(*inputs)[1], lambda: tokens(3)),
    "short_conv": (lambda x, weight: short_conv(x, weight, impl="triton")[0], lambda: (leaf(1, 3, 4), leaf(4, 1, 4))),
    "short_convs": (
        call_short_convs,
        lambda: (leaf(1, 3, 4), leaf(1, 3, 4), leaf(4, 1, 4), leaf(4, 1, 4), leaf(2, 8, 3), documents(0, 2, 3)),
    ),
    "gated_rms_norm": (call_gated_rms_norm, lambda: (leaf(3, 16), leaf(3, 16), leaf(16))),
    "gated_rms_norm of a transposed input": (call_gated_rms_norm, lambda: (leaf(16, 3), leaf(16, 3), leaf(16), True)),
    "rms_norm": (call_rms_norm, lambda: (leaf(2, 3, 16), leaf(16))),
    "rms_norm of strided rows, mixed": (
        lambda x, weight: call_rms_norm(x[..., :16].bfloat16(), weight),
        lambda: (leaf(2, 3, 24), leaf(16)),
    ),
    "situ_glu": (lambda x: situ_glu(x, 4.0, 25.0, impl="triton"), lambda: [leaf(2, 3, 16)]),
    "swiglu": (lambda x: situ_glu(x, None, None, impl="triton"), lambda: [leaf(2, 3, 16)]),
    "attn_res of transposed sources": (
        lambda query, norm_weight, *tensors: call_attn_res(query, norm_weight, *(x.mT for x in tensors)),
        lambda: (leaf(3), leaf(3), *sources()),
    ),
    "attn_res_norm": (call_attn_res_norm, lambda: (leaf(16), leaf(16), leaf(16), *sources())),
    "attn_res_norm, mixed": (
        call_attn_res_norm,
        lambda: (leaf(16), leaf(16), leaf(16), *sources(torch.bfloat16, torch.float32)),
    ),
    "route": (call_route, logits_and_bias),
    "expert_mlp, mixed": (call_expert_mlp, lambda: routed(torch.bfloat16)),
    "expert_mlp_mxfp4": (call_expert_mlp_mxfp4, routed_packed),
    "expert_mlp_mxfp4 of frozen inputs": (
        lambda x, *others: call_expert_mlp_mxfp4(x.detach(), *others),
        lambda: (leaf(4, 32).detach(), *routed_packed()[1:]),
    ),
}


def outputs_and_gradients(fn, inputs):
    outputs = flat(fn(*inputs))
    differentiable = [x for x in outputs if x.requires_grad]
    cotangents = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in differentiable]
    leaves = [x for x in inputs if torch.is_tensor(x) and x.requires_grad]
    return [*outputs, *torch.autograd.grad(differentiable, leaves, cotangents)]


@pytest.mark.parametrize("case", PUBLIC)
def test_compiled_equals_eager(case):
    fn, make = PUBLIC[case]
    inputs, compiled = make(), Recorded(fn)
    expected = outputs_and_gradients(fn, inputs)
    for ours, theirs in zip(outputs_and_gradients(compiled, inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.requires_grad == theirs.requires_grad
    assert len(compiled.operators) == 1


def test_compiled_step_equals_eager_and_has_no_gradients():
    *inputs, A_log, dt_bias = tokens(1, rows=2)
    inputs = [x[:, 0] for x in inputs]

    def step(state):
        return kda_step(*inputs, A_log=A_log, dt_bias=dt_bias, state=state, impl="triton")

    ours, theirs = torch.ones(2, 1, 16, 16), torch.ones(2, 1, 16, 16)
    compiled = Recorded(step)
    o, expected = compiled(ours), step(theirs)
    assert not o.requires_grad and compiled.operators == ["moe_lc.kda_step"]
    torch.testing.assert_close((o, ours), (expected, theirs))


def test_compiled_route_adds_to_a_histogram():
    (logits, bias), ours, theirs = logits_and_bias(), *torch.ones(2, 8, 4, dtype=torch.int64)
    compiled = Recorded(call_route)
    results = compiled(logits, bias, torch.arange(5) > 0, ours)
    torch.testing.assert_close(results, call_route(logits, bias, torch.arange(5) > 0, theirs))
    assert torch.equal(ours, theirs) and ours.sum() == 8 * 4 + 4 * 8
    assert compiled.operators == ["moe_lc.route"]


@torch.no_grad()
@pytest.mark.parametrize("rows", [4, 70])
@pytest.mark.parametrize("call, make", [(call_expert_mlp, routed), (call_expert_mlp_mxfp4, routed_packed)])
def test_compiled_experts_without_gradients_take_the_path_of_eager_ones(call, make, rows):
    x, *others = make()
    inputs = x.repeat(18, 1)[:rows], *(tensor.repeat(18, 1)[:rows] for tensor in others[:2]), *others[2:]
    compiled = Recorded(call)
    assert torch.equal(compiled(*inputs), call(*inputs))
    assert compiled.operators == [f"moe_lc.{call.__name__.removeprefix('call_')}"]


@pytest.mark.parametrize("mask", [None, torch.arange(5).expand(2, 1, 2, 5) < 4])
def test_compiled_mla_decode_equals_eager(mask):
    q_latent, q_rope, latent, k_rope = queries_and_cache()
    cache = latent.mT.contiguous().mT, torch.cat([k_rope, k_rope], dim=-1)[..., :4]

    def decode(*inputs):
        return mla_decode(*inputs, scale=0.25, mask=mask, impl="triton")

    compiled = Recorded(decode)
    torch.testing.assert_close(compiled(q_latent, q_rope, *cache), decode(q_latent, q_rope, *cache))
    assert compiled.operators == ["moe_lc.mla_decode"]


@torch.no_grad()
def test_other_lengths_need_no_other_graph():
    compiled = Recorded(call_kda, dynamic=True)
    compiled(*tokens(4), states(2), documents(0, 2, 4))
    inputs = *tokens(5), states(3), documents(0, 1, 4, 5)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(compiled(*inputs), call_kda(*inputs))


def test_a_state_may_be_overwritten_before_the_backward_pass():
    state = states(1)
    inputs = *tokens(3), state
    expected = outputs_and_gradients(call_kda, inputs)
    outputs = flat(ops.kda(*inputs[:7], -5.0, state, None))
    cotangents = [torch.linspace(-1, 1, x.numel()).view_as(x) for x in outputs]
    state.data.zero_()
    torch.testing.assert_close([*outputs, *torch.autograd.grad(outputs, inputs, cotangents)], expected)


def test_eager_calls_go_past_the_operators(monkeypatch):
    monkeypatch.setattr("modeling_moe_lc.kernels.dispatch.TRACED", dict.fromkeys(TRACED, None))
    call_gated_rms_norm(leaf(3, 16), leaf(3, 16), leaf(16))


def test_a_second_import_leaves_the_operators_alone(monkeypatch):
    """Without Triton, too: they are registered, and nothing calls them."""
    monkeypatch.setitem(sys.modules, "triton", None)
    before = ops.kda.default
    importlib.reload(custom_ops).register_operators()
    assert ops.kda.default is before and TRACED["kda"] is ops.kda
