"""Adds a low-rank product to rows in expert order, in place: one pass over them, no second copy."""

import triton
import triton.language as tl

from ..experts.fused_rows import tile_of
from ..launch import launched


@launched
@triton.jit(do_not_specialize=("tiles",))
def experts_lora_kernel_add(
    z,  # descriptor [pairs, r]
    b,  # descriptor [E, columns, r]
    table,
    out,  # [pairs, width]: the columns from `column` on of z b^T are added
    tiles, r, column, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, first, rows, block = tile_of(table, tiles, tl.cdiv(width, BN))
    if rows > 0:
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for done in tl.range(0, r, BK, num_stages=STAGES):
            right = tl.reshape(b.load([expert, column + block * BN, done]), (BN, BK))
            acc = tl.dot(z.load([first, done]), right.T, acc, input_precision=PRECISION)
        m, n = tl.arange(0, BM)[:, None], block * BN + tl.arange(0, BN)[None, :]
        place, inside = out + (first.to(tl.int64) + m) * width + n, (m < rows) & (n < width)
        total = tl.load(place, mask=inside, other=0.0).to(tl.float32) + acc
        tl.store(place, total.to(out.dtype.element_ty), mask=inside)
