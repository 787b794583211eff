"""The symmetric products of a Newton-Schulz step on a GPU: half of the tiles, each written twice."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..dispatch import for_descriptors, on_device_of
from ..launch import launched


DTYPES = (torch.bfloat16, torch.float32)


@triton.jit
def tile_of_half(t):
    """Row and column of the tile number t of those on and below the diagonal."""
    i = ((tl.sqrt(8.0 * t + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)  # the root is rounded
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    return i, t - i * (i + 1) // 2


@triton.jit
def part(x, matrix, at, k, SIDE: tl.constexpr, DEPTH: tl.constexpr, TALL: tl.constexpr):
    """[SIDE, DEPTH]: rows of a matrix, or its columns (TALL)."""
    if TALL:
        return tl.reshape(x.load([matrix, k, at]), (DEPTH, SIDE)).T
    else:
        return tl.reshape(x.load([matrix, at, k]), (SIDE, DEPTH))


@launched
@triton.jit(do_not_specialize=("a", "b", "c"))
def muon_kernel_symmetric(
    x,  # descriptor of [N, m, depth], or of [N, depth, m] (TALL)
    square,  # POLYNOMIAL: descriptor of tiles [SIDE, SIDE] of the same [N, m, m]
    out,  # [N, m, m]
    m, depth, a, b, c,
    TALL: tl.constexpr, POLYNOMIAL: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """x x^T, or x^T x (TALL); POLYNOMIAL: a I + b x + c x x^T of a symmetric x, in FP32 and rounded once."""
    blocks = tl.cdiv(m, SIDE)
    tiles = blocks * (blocks + 1) // 2
    matrix = tl.program_id(0) // tiles
    i, j = tile_of_half(tl.program_id(0) % tiles)
    total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for k in tl.range(0, depth, DEPTH, num_stages=STAGES):
        left = part(x, matrix, i * SIDE, k, SIDE, DEPTH, TALL)
        right = part(x, matrix, j * SIDE, k, SIDE, DEPTH, TALL).T
        total = tl.dot(left, right, total, input_precision=PRECISION)
    row, column = i * SIDE + tl.arange(0, SIDE), j * SIDE + tl.arange(0, SIDE)
    if POLYNOMIAL:
        here = tl.reshape(square.load([matrix, i * SIDE, j * SIDE]), (SIDE, SIDE)).to(tl.float32)
        total = c * total + b * here + tl.where(row[:, None] == column[None, :], a, 0.0)
    result = total.to(out.dtype.element_ty)
    out += matrix.to(tl.int64) * m * m
    tl.store(out + row[:, None] * m + column[None, :], result, mask=(row < m)[:, None] & (column < m)[None, :])
    if i != j:
        tl.store(out + column[:, None] * m + row[None, :], result.T, mask=(column < m)[:, None] & (row < m)[None, :])


def supports(x: torch.Tensor) -> str | None:
    """Why the kernels cannot take x, or None when they can."""
    if x.dtype not in DTYPES:
        return f"x: expected bfloat16 or float32, got {x.dtype}"
    align = 16 // x.element_size()
    if any(side % align for side in x.shape[1:]):
        return f"x: expected matrices of multiples of {align} rows and columns, got {list(x.shape[1:])}"
    return None


def _launch(x: torch.Tensor, tall: bool, polynomial: tuple[float, float, float] | None = None) -> torch.Tensor:
    count, rows, columns = x.shape
    m, depth = (columns, rows) if tall else (rows, columns)
    out = x.new_empty(count, m, m)
    narrow = x.dtype == torch.bfloat16
    SIDE, DEPTH = 128 if m > 64 and narrow else 64, 64 if narrow else 32
    blocks = triton.cdiv(m, SIDE)
    square = TensorDescriptor.from_tensor(x, [1, SIDE, SIDE]) if polynomial else None
    muon_kernel_symmetric[(count * blocks * (blocks + 1) // 2,)](
        TensorDescriptor.from_tensor(x, [1, DEPTH, SIDE] if tall else [1, SIDE, DEPTH]), square, out,
        m, depth, *(polynomial or (0.0, 0.0, 0.0)),
        TALL=tall, POLYNOMIAL=polynomial is not None, SIDE=SIDE, DEPTH=DEPTH, PRECISION="tf32" if narrow else "tf32x3",
        STAGES=3 if narrow else 1, num_warps=4,
    )  # fmt: skip
    return out


def newton_schulz_step_fused(x, a, b, c):
    """Arguments and result as in `api.newton_schulz_step`."""
    if not x.numel():
        return torch.empty_like(x)
    with on_device_of(x):
        x, tall = for_descriptors(x), x.shape[1] > x.shape[2]
        polynomial = _launch(_launch(x, tall), False, (a, b, c))
        return x @ polynomial if tall else polynomial @ x
