"""The RMS norm on a GPU: one launch forward, one backward, both bound by memory.

A tile holds whole rows in registers: many narrow ones, or a wide one as pieces of 8 elements a thread, so that a row of any
width is read once. The backward pass computes the norm again: it reads x anyway.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..dispatch import on_device_of
from ..launch import launched


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_CHANNELS = 8192
# Up to this width a tile of 4 warps holds several rows, each in one piece; beyond, a row lies in up to MOST_PIECES.
NARROW = 1024
FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 4096, 2048
ELEMENTS = 8  # of a piece in a thread: one load of 16 bytes in 16 bits
MOST_PIECES = 5
# Programs of the backward pass walk over the rows with a fixed stride. They are as many as are resident at once on this many
# multiprocessors, which have registers for these warps, by the pieces of a row: a constant, as it decides the order of the sums
# over rows.
MULTIPROCESSORS = 132
BACKWARD_WARPS = {1: 16, 3: 16, 4: 16, 5: 12}


@triton.jit
def two_row_sums(x, y, TOGETHER: tl.constexpr):
    """TOGETHER, they take one exchange between warps; where a row lies in one warp, that would move it."""
    if TOGETHER:
        sums = tl.split(tl.sum(tl.join(x, y), axis=1))
    else:
        sums = (tl.sum(x, axis=1), tl.sum(y, axis=1))
    return sums


@triton.jit
def inverse_norm(squares, there, eps, D: tl.constexpr):
    """One where no row is: with eps = 0 it would be infinite, and zeros times it are not a number."""
    return tl.rsqrt(tl.where(there, squares * (1.0 / D) + eps, 1.0))


@triton.jit
def load_weight(weight, i, D: tl.constexpr, WIDTH: tl.constexpr):
    d = i * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)


@launched
@triton.jit(do_not_specialize=("rows",))
def rms_norm_fwd_kernel(
    x, y,  # [rows, D]
    weight,  # [D]
    rows, x_stride, eps,
    D: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
    values = ()
    squares = tl.zeros((BM, WIDTH), dtype=tl.float32)
    for i in tl.static_range(PIECES):
        d = i * WIDTH + tl.arange(0, WIDTH)[None, :]
        v = tl.load(x + r * x_stride + d, mask=(r < rows) & (d < D), other=0.0).to(tl.float32)
        values = values + (v,)
        squares += v * v
    rstd = inverse_norm(tl.sum(squares, axis=1)[:, None], r < rows, eps, D)
    for i in tl.static_range(PIECES):
        d = i * WIDTH + tl.arange(0, WIDTH)[None, :]
        w = load_weight(weight, i, D, WIDTH)
        normed = (values[i] * rstd).to(x.dtype.element_ty).to(tl.float32)
        tl.store(y + r * D + d, (normed * w).to(y.dtype.element_ty), mask=(r < rows) & (d < D))


@launched
@triton.jit(do_not_specialize=("rows",))
def rms_norm_bwd_kernel(
    x, dy, dx,  # [rows, D]
    weight,  # [D]
    d_weight,  # [programs, D] FP32
    rows, x_stride, dy_stride, eps,
    D: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    dw = ()
    for _ in tl.static_range(PIECES):
        dw = dw + (tl.zeros((BM, WIDTH), dtype=tl.float32),)
    # The weight of narrow rows stays in registers; its layout is not that of a tile, and to change it takes an exchange.
    kept = load_weight(weight, 0, D, WIDTH)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BM), tl.num_programs(0)):
        r = tl.cast(tile, tl.int64) * BM + tl.arange(0, BM)[:, None]
        values, gradients = (), ()
        squares, along = tl.zeros((BM, WIDTH), dtype=tl.float32), tl.zeros((BM, WIDTH), dtype=tl.float32)
        for i in tl.static_range(PIECES):
            d = i * WIDTH + tl.arange(0, WIDTH)[None, :]
            v = tl.load(x + r * x_stride + d, mask=(r < rows) & (d < D), other=0.0)
            g = tl.load(dy + r * dy_stride + d, mask=(r < rows) & (d < D), other=0.0)
            values, gradients = values + (v,), gradients + (g,)
            w = kept if PIECES == 1 else load_weight(weight, i, D, WIDTH)
            squares += v.to(tl.float32) * v.to(tl.float32)
            along += g.to(tl.float32) * w * v.to(tl.float32)
        squares, along = two_row_sums(squares, along, BM == 1)
        rstd = inverse_norm(squares[:, None], r < rows, eps, D)
        along = along[:, None] * (1.0 / D) * rstd
        grown = ()
        for i in tl.static_range(PIECES):
            d = i * WIDTH + tl.arange(0, WIDTH)[None, :]
            w = kept if PIECES == 1 else load_weight(weight, i, D, WIDTH)
            g, n = gradients[i].to(tl.float32), values[i].to(tl.float32) * rstd
            tl.store(dx + r * D + d, ((g * w - n * along) * rstd).to(dx.dtype.element_ty), mask=(r < rows) & (d < D))
            grown = grown + (dw[i] + g * n.to(x.dtype.element_ty).to(tl.float32),)
        dw = grown
    for i in tl.static_range(PIECES):
        d = i * WIDTH + tl.arange(0, WIDTH)
        tl.store(d_weight + tl.program_id(0).to(tl.int64) * D + d, tl.sum(dw[i], axis=0), mask=d < D)


def supports(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None when they can."""
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype not in DTYPES:
            return f"{name}: expected bfloat16, float16 or float32, got {tensor.dtype}"
    if not 1 <= x.shape[-1] <= MOST_CHANNELS:
        return f"D: expected 1 to {MOST_CHANNELS}, got {x.shape[-1]}"
    return None


class Tile(NamedTuple):
    """How rows of D elements lie in a program."""

    BM: int
    PIECES: int
    WIDTH: int
    num_warps: int


def _tile(D: int, narrow_elements: int) -> Tile:
    if D <= NARROW:
        width = triton.next_power_of_2(D)
        return Tile(narrow_elements // width, 1, width, 4)
    warps = 1
    while triton.cdiv(D, warps * 32 * ELEMENTS) > MOST_PIECES:
        warps *= 2
    width = warps * 32 * ELEMENTS
    return Tile(1, triton.cdiv(D, width), width, warps)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, D] with neighbouring elements of a row in neighbouring places; a view where the strides allow one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _forward(x, weight, eps):
    y = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    x, D, tile = _rows(x), x.shape[-1], _tile(x.shape[-1], FORWARD_ELEMENTS)
    rms_norm_fwd_kernel[(triton.cdiv(x.shape[0], tile.BM),)](
        x, y, weight, x.shape[0], x.stride(0), eps, D=D, **tile._asdict()
    )  # fmt: skip
    return y


def _backward(x, weight, eps, dy):
    dx = x.new_empty(x.shape)
    x, dy, D, tile = _rows(x), _rows(dy), x.shape[-1], _tile(x.shape[-1], BACKWARD_ELEMENTS)
    programs = min(triton.cdiv(x.shape[0], tile.BM), MULTIPROCESSORS * (BACKWARD_WARPS[tile.PIECES] // tile.num_warps))
    d_weight = x.new_empty(programs, D, dtype=torch.float32)
    rms_norm_bwd_kernel[(programs,)](
        x, dy, dx, weight, d_weight, x.shape[0], x.stride(0), dy.stride(0), eps, D=D, **tile._asdict()
    )  # fmt: skip
    return dx, d_weight.sum(0).to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _forward(x, weight, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return *_backward(x, weight, ctx.eps, dy), None


def rms_norm_fused(x, weight, eps):
    """Arguments and results as in `api.rms_norm`."""
    with on_device_of(x):
        return _RMSNorm.apply(x, weight.contiguous(), eps)
