"""The sigmoid gate on a GPU: one launch forward, one backward, both bound by memory."""

import torch
import triton
import triton.language as tl

from ..dispatch import on_device_of
from ..launch import launched


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 2048
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(z):
    return 1.0 / (1.0 + tl.exp2(-z * LOG2E))


@launched
@triton.jit(do_not_specialize=("total",))
def sigmoid_gate_fwd_kernel(
    o, gate, y,  # [total]
    total,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < total
    s = sigmoid(tl.load(gate + place, mask=there, other=0.0).to(tl.float32))
    x = tl.load(o + place, mask=there, other=0.0).to(tl.float32)
    tl.store(y + place, (x * s).to(y.dtype.element_ty), mask=there)


@launched
@triton.jit(do_not_specialize=("total",))
def sigmoid_gate_bwd_kernel(
    o, gate, dy, d_o, d_gate,  # [total]
    total,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < total
    s = sigmoid(tl.load(gate + place, mask=there, other=0.0).to(tl.float32))
    x = tl.load(o + place, mask=there, other=0.0).to(tl.float32)
    d = tl.load(dy + place, mask=there, other=0.0).to(tl.float32) * s
    tl.store(d_o + place, d.to(d_o.dtype.element_ty), mask=there)
    tl.store(d_gate + place, (d * x * (1.0 - s)).to(d_gate.dtype.element_ty), mask=there)


def supports(o: torch.Tensor, gate: torch.Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None when they can."""
    for name, tensor in (("o", o), ("gate", gate)):
        if tensor.dtype not in DTYPES:
            return f"{name}: expected bfloat16, float16 or float32, got {tensor.dtype}"
    return None


def _launch(kernel, *tensors: torch.Tensor) -> None:
    total = tensors[0].numel()
    if total:
        kernel[(triton.cdiv(total, BLOCK),)](*tensors, total, BLOCK=BLOCK, num_warps=4)


def _forward(o: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    o, gate = o.contiguous(), gate.contiguous()
    y = torch.empty_like(o)
    _launch(sigmoid_gate_fwd_kernel, o, gate, y)
    return y


def _backward(o: torch.Tensor, gate: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    o, gate = o.contiguous(), gate.contiguous()
    d_o, d_gate = torch.empty_like(o), torch.empty_like(gate)
    _launch(sigmoid_gate_bwd_kernel, o, gate, dy.contiguous(), d_o, d_gate)
    return d_o, d_gate


class _SigmoidGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o, gate):
        ctx.save_for_backward(o, gate)
        return _forward(o, gate)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        o, gate = ctx.saved_tensors
        return _backward(o, gate, dy)


def sigmoid_gate_fused(o, gate):
    """Arguments and results as in `api.sigmoid_gate`."""
    with on_device_of(o):
        return _SigmoidGate.apply(o, gate)
