"""Cross-entropy on a GPU: one launch that reads the logits twice, the second time mostly from a cache, and writes once."""

import torch
import triton
import triton.language as tl

from ..dispatch import on_device_of
from ..launch import launched


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 4096
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@launched
@triton.jit
def cross_entropy_kernel(
    logits,  # [N, V]: in, logits; out, gradients
    targets,  # [N]
    nats,  # [N] FP32
    stride, V, ignore_index,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    logits += row * stride
    v = tl.arange(0, BLOCK)
    if target == ignore_index:
        tl.store(nats + row, 0.0)
        for first in tl.range(0, V, BLOCK):
            tl.store(logits + first + v, tl.zeros((BLOCK,), dtype=logits.dtype.element_ty), mask=first + v < V)
    else:
        # Before the loops: in the second one other threads write where it stands.
        chosen = tl.load(logits + target).to(tl.float32)
        top = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in tl.range(0, V, BLOCK):
            x = tl.load(logits + first + v, mask=first + v < V, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, x, propagate_nan=tl.PropagateNan.ALL)
            # Of a column that has seen nothing: any finite number for the difference of two infinities.
            shift = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp2((top - shift) * LOG2E) + tl.exp2((x - shift) * LOG2E)
            top = higher
        most = tl.max(top, axis=0)
        # Apart from the largest logit, beside which a small sum would lose its digits.
        bits = tl.log2(tl.sum(total * tl.exp2((top - most) * LOG2E), axis=0))
        tl.store(nats + row, (most - chosen) + bits * LN2)
        for first in tl.range(0, V, BLOCK):
            x = tl.load(logits + first + v, mask=first + v < V, other=-float("inf")).to(tl.float32)
            gradient = tl.exp2((x - most) * LOG2E - bits) - tl.where(first + v == target, 1.0, 0.0)
            tl.store(logits + first + v, gradient.to(logits.dtype.element_ty), mask=first + v < V)


def supports(logits: torch.Tensor) -> str | None:
    """Why the kernel cannot take these inputs, or None when it can."""
    if logits.dtype not in DTYPES:
        return f"logits: expected bfloat16, float16 or float32, got {logits.dtype}"
    if logits.stride(1) != 1:
        return f"logits: expected neighbouring logits of a token side by side, got strides {list(logits.stride())}"
    return None


def cross_entropy_with_gradient_fused(logits, targets, ignore_index):
    """Arguments and results as in `api.cross_entropy_with_gradient`."""
    N, V = logits.shape
    nats = logits.new_empty(N, dtype=torch.float32)
    if N:
        with on_device_of(logits):
            cross_entropy_kernel[(N,)](
                logits, targets.contiguous(), nats, logits.stride(0), V, ignore_index, BLOCK=BLOCK, num_warps=8
            )  # fmt: skip
    return nats, logits
