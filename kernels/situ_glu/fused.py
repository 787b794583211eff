"""SiTU-GLU on a GPU: one launch forward, one backward, bound by memory.

Its exponentials and inverses all come from the unit of special functions, which has an eighth of the rate of an FMA: six for
an output would take longer than its bytes. So the three fractions have one denominator, inverted as the square of an
inverse root, and the exponents are bounded, so that the product of the denominators is finite.
"""

import torch
import triton
import triton.language as tl

from ..dispatch import on_device_of
from ..launch import launched


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TILE_ELEMENTS = 2048  # of each half, in 4 warps
WIDTHS = (1024, 512, 256, 128, 64, 32, 16)
LOG2E = tl.constexpr(1.4426950408889634)
# Powers of two: beyond them 1 - tanh is below the precision of FP32, and a sigmoid adds less than 1e-19 of its factors.
# Two of the first and one of the second multiply to less than 2^127.
MOST_TANH, MOST_SIGMOID = tl.constexpr(30.0), tl.constexpr(64.0)


@triton.jit
def bounded_exp2(x, most: tl.constexpr):
    return tl.exp2(tl.minimum(x, most, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def inverse(x):
    """A division costs three more instructions than the square of an inverse root."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def gate_exponentials(g, beta, GATE_CAP: tl.constexpr, BETA_IS_4: tl.constexpr):
    """e^-g and, 0 without a cap, e^(-2g / beta): for the released beta one is the square of the other."""
    if BETA_IS_4:
        a = bounded_exp2(g * (-0.5 * LOG2E), MOST_TANH)
        return a * a, a
    e = bounded_exp2(g * -LOG2E, MOST_SIGMOID)
    if GATE_CAP:
        return e, bounded_exp2(g * (-2.0 * LOG2E / beta), MOST_TANH)
    return e, tl.zeros_like(g)


@triton.jit
def tile_of(rows, I: tl.constexpr, BM: tl.constexpr, BI: tl.constexpr):
    """Rows [BM, 1], columns [1, BI] and mask of a program's tile."""
    across: tl.constexpr = (I + BI - 1) // BI
    r = (tl.program_id(0) // across).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
    i = tl.program_id(0) % across * BI + tl.arange(0, BI)[None, :]
    return r, i, (r < rows) & (i < I)


@launched
@triton.jit(do_not_specialize=("rows",))
def situ_glu_fwd_kernel(
    gate_up,  # [rows, 2I]
    y,  # [rows, I]
    rows, stride, beta, linear_beta,
    GATE_CAP: tl.constexpr, BETA_IS_4: tl.constexpr, UP_CAP: tl.constexpr,
    I: tl.constexpr, BM: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    r, i, there = tile_of(rows, I, BM, BI)
    g = tl.load(gate_up + r * stride + i, mask=there, other=0.0).to(tl.float32)
    u = tl.load(gate_up + r * stride + (I + i), mask=there, other=0.0).to(tl.float32)
    e, a = gate_exponentials(g, beta, GATE_CAP, BETA_IS_4)
    below = 1.0 + e
    if GATE_CAP:
        g = beta - beta * a
        below *= 1.0 + a
    if UP_CAP:
        b = bounded_exp2(u * (-2.0 * LOG2E / linear_beta), MOST_TANH)
        u = linear_beta - linear_beta * b
        below *= 1.0 + b
    tl.store(y + r * I + i, (g * u * inverse(below)).to(y.dtype.element_ty), mask=there)


@launched
@triton.jit(do_not_specialize=("rows",))
def situ_glu_bwd_kernel(
    gate_up, d_gate_up,  # [rows, 2I]
    dy,  # [rows, I]
    rows, stride, dy_stride, beta, linear_beta,
    GATE_CAP: tl.constexpr, BETA_IS_4: tl.constexpr, UP_CAP: tl.constexpr,
    I: tl.constexpr, BM: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    r, i, there = tile_of(rows, I, BM, BI)
    g = tl.load(gate_up + r * stride + i, mask=there, other=0.0).to(tl.float32)
    u = tl.load(gate_up + r * stride + (I + i), mask=there, other=0.0).to(tl.float32)
    dy_i = tl.load(dy + r * dy_stride + i, mask=there, other=0.0).to(tl.float32)
    e, a = gate_exponentials(g, beta, GATE_CAP, BETA_IS_4)
    b = tl.zeros_like(u)
    if UP_CAP:
        b = bounded_exp2(u * (-2.0 * LOG2E / linear_beta), MOST_TANH)
    caps = (1.0 + a) * (1.0 + b)
    inverse_all = inverse(caps * (1.0 + e))
    sigmoid = inverse_all * caps
    inverse_all *= 1.0 + e
    gate, d_gate, up, d_up = g, 1.0, u, 1.0
    if GATE_CAP:
        x = inverse_all * (1.0 + b)  # 1 / (1 + a)
        gate = (beta - beta * a) * x
        d_gate = 4.0 * (a * x) * x  # 1 - tanh^2
    if UP_CAP:
        x = inverse_all * (1.0 + a)
        up = (linear_beta - linear_beta * b) * x
        d_up = 4.0 * (b * x) * x
    dy_i *= sigmoid
    row = d_gate_up + r * (2 * I)
    tl.store(row + i, (dy_i * up * (d_gate + gate * (e * sigmoid))).to(row.dtype.element_ty), mask=there)
    tl.store(row + (I + i), (dy_i * gate * d_up).to(row.dtype.element_ty), mask=there)


def supports(gate_up: torch.Tensor) -> str | None:
    """Why the kernels cannot take this input, or None when they can."""
    if gate_up.dtype not in DTYPES:
        return f"gate_up: expected bfloat16, float16 or float32, got {gate_up.dtype}"
    return None


def _width(I: int) -> int:
    """Columns of a tile: the most of those that leave a sixteenth of the columns empty, or as little as can be."""
    return min(WIDTHS, key=lambda width: (max(triton.cdiv(I, width) * width, 1.0625 * I), -width))


def _launch(kernel, I, rows, tensors, strides, beta, linear_beta):
    BI = _width(I)
    BM = TILE_ELEMENTS // BI
    kernel[(triton.cdiv(rows, BM) * triton.cdiv(I, BI),)](
        *tensors, rows, *strides, beta or 1.0, linear_beta or 1.0,
        GATE_CAP=beta is not None, BETA_IS_4=beta == 4.0, UP_CAP=linear_beta is not None,
        I=I, BM=BM, BI=BI, num_warps=4,
    )  # fmt: skip


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, columns] with neighbouring elements of a row in neighbouring places; a view where the strides allow one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _forward(gate_up, beta, linear_beta):
    I = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], I)
    if y.numel():
        x = _rows(gate_up)
        _launch(situ_glu_fwd_kernel, I, x.shape[0], (x, y), (x.stride(0),), beta, linear_beta)
    return y


def _backward(gate_up, beta, linear_beta, dy):
    I = dy.shape[-1]
    d_gate_up = gate_up.new_empty(gate_up.shape)
    if dy.numel():
        x, dy = _rows(gate_up), _rows(dy)
        strides = x.stride(0), dy.stride(0)
        _launch(situ_glu_bwd_kernel, I, x.shape[0], (x, d_gate_up, dy), strides, beta, linear_beta)
    return d_gate_up


class _SiTUGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, beta, linear_beta):
        ctx.save_for_backward(gate_up)
        ctx.caps = beta, linear_beta
        return _forward(gate_up, beta, linear_beta)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        (gate_up,) = ctx.saved_tensors
        beta, linear_beta = ctx.caps
        return _backward(gate_up, beta, linear_beta, dy), None, None


def situ_glu_fused(gate_up, beta, linear_beta):
    """Arguments and results as in `api.situ_glu`."""
    with on_device_of(gate_up):
        return _SiTUGLU.apply(gate_up, beta, linear_beta)
