"""Under torch.compile each Triton implementation is one operator with the values and gradients of the eager call."""

import importlib
import sys

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from modeling_moe_lc.kernels import custom_ops
from modeling_moe_lc.kernels.dispatch import TRACED
from modeling_moe_lc.kernels.gated_norm import gated_rms_norm
from modeling_moe_lc.kernels.kda import kda, kda_step
from modeling_moe_lc.kernels.short_conv import short_conv, short_convs


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
}


@pytest.mark.parametrize("case", OPERATORS)
def test_operator_keeps_its_promises_to_torch(case):
    operator = getattr(ops, case.split(",")[0]).default
    torch.library.opcheck(operator, tuple(OPERATORS[case]()))


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
}


def outputs_and_gradients(fn, inputs):
    outputs = flat(fn(*inputs))
    cotangents = [torch.linspace(-1, 1, x.numel()).view_as(x) for x in outputs]
    leaves = [x for x in inputs if torch.is_tensor(x) and x.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, leaves, cotangents)]


@pytest.mark.parametrize("case", PUBLIC)
def test_compiled_equals_eager(case):
    fn, make = PUBLIC[case]
    inputs, compiled = make(), Recorded(fn)
    expected = outputs_and_gradients(fn, inputs)
    for ours, theirs in zip(outputs_and_gradients(compiled, inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
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
