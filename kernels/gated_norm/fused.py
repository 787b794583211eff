"""The gated RMSNorm on a GPU: one launch forward, one backward, both bound by memory.

A tile holds whole rows, so that a row's sums stay inside a warp or a few. The backward pass computes the norm again: it
reads o anyway, and a saved one would be read as well.
"""

import torch
import triton
import triton.language as tl

from ..dispatch import on_device_of
from ..launch import launched


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = tuple(2**power for power in range(11))
# Four loads of 16 bytes from every input are under way in each of 128 threads.
TILE_BYTES = 8192
# Programs of the backward pass, and rows of partial weight gradients: more than a GPU holds at a time, few to sum.
MOST_PARTS = 1024
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(z):
    return 1.0 / (1.0 + tl.exp2(-z * LOG2E))


@launched
@triton.jit(do_not_specialize=("rows",))
def gated_norm_fwd_kernel(
    o, gate, y,  # [rows, V]
    weight,  # [V]
    rows, eps,
    V: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BM
    m, v = tl.arange(0, BM)[:, None], tl.arange(0, V)[None, :]
    place, there = first * V + (m * V + v), m < rows - first
    # Ones where no row is: zeros times the inverse of their norm are not a number where eps = 0.
    x = tl.load(o + place, mask=there, other=1.0).to(tl.float32)  # [BM, V]
    s = sigmoid(tl.load(gate + place, mask=there, other=0.0).to(tl.float32))
    w = tl.load(weight + v).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / V) + eps)[:, None]
    tl.store(y + place, (x * rstd * w * s).to(y.dtype.element_ty), mask=there)


@launched
@triton.jit(do_not_specialize=("rows",))
def gated_norm_bwd_kernel(
    o, gate, dy, d_o, d_gate,  # [rows, V]
    weight,  # [V]
    d_weight,  # [programs, V] FP32
    rows, eps,
    V: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    m, v = tl.arange(0, BM)[:, None], tl.arange(0, V)[None, :]
    w = tl.load(weight + v).to(tl.float32)
    dw = tl.zeros((BM, V), dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BM), tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * BM
        place, there = first * V + (m * V + v), m < rows - first
        x = tl.load(o + place, mask=there, other=1.0).to(tl.float32)  # [BM, V]; ones: as in the forward pass
        s = sigmoid(tl.load(gate + place, mask=there, other=0.0).to(tl.float32))
        g = tl.load(dy + place, mask=there, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / V) + eps)[:, None]
        x *= rstd
        g *= s
        dw += g * x
        g *= w  # the gradient of the normalised row
        tl.store(d_gate + place, (g * x * (1.0 - s)).to(d_gate.dtype.element_ty), mask=there)
        along = tl.sum(g * x, axis=1)[:, None] * (1.0 / V)
        tl.store(d_o + place, ((g - x * along) * rstd).to(d_o.dtype.element_ty), mask=there)
    tl.store(d_weight + tl.program_id(0) * V + tl.arange(0, V), tl.sum(dw, axis=0))


def supports(o: torch.Tensor, gate: torch.Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None when they can."""
    for name, tensor in (("o", o), ("gate", gate)):
        if tensor.dtype not in DTYPES:
            return f"{name}: expected bfloat16, float16 or float32, got {tensor.dtype}"
    if o.shape[-1] not in WIDTHS:
        return f"V: expected a power of two up to {WIDTHS[-1]}, got {o.shape[-1]}"
    return None


def _tiles(o: torch.Tensor) -> tuple[int, int, int]:
    """Rows, rows of a tile, tiles."""
    V = o.shape[-1]
    rows, BM = o.numel() // V, TILE_BYTES // o.element_size() // V
    return rows, BM, triton.cdiv(rows, BM)


def launch_forward(o: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty_like(o)
    rows, BM, tiles = _tiles(o)
    gated_norm_fwd_kernel[(tiles,)](o, gate, y, weight, rows, eps, V=o.shape[-1], BM=BM, num_warps=4)
    return y


def launch_backward(o: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, dy: torch.Tensor):
    V = o.shape[-1]
    rows, BM, tiles = _tiles(o)
    parts = min(tiles, MOST_PARTS)
    d_o, d_gate = torch.empty_like(o), torch.empty_like(gate)
    d_weight = o.new_empty(parts, V, dtype=torch.float32)
    gated_norm_bwd_kernel[(parts,)](o, gate, dy, d_o, d_gate, weight, d_weight, rows, eps, V=V, BM=BM, num_warps=4)
    return d_o, d_gate, d_weight.sum(0).to(weight.dtype)


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o, gate, weight, eps):
        o, gate, weight = o.contiguous(), gate.contiguous(), weight.contiguous()
        ctx.save_for_backward(o, gate, weight)
        ctx.eps = eps
        return launch_forward(o, gate, weight, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        o, gate, weight = ctx.saved_tensors
        return *launch_backward(o, gate, weight, ctx.eps, dy.contiguous()), None


def gated_rms_norm_fused(o, gate, weight, eps):
    """Arguments and results as in `api.gated_rms_norm`."""
    with on_device_of(o):
        return _GatedRMSNorm.apply(o, gate, weight, eps)
