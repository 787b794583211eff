"""The gradients of the projections: products of two tensors of rows, summed over the rows of each expert."""

import torch
import triton
import triton.language as tl
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged

from ..launch import launched


@launched
@triton.jit
def experts_bwd_kernel_weights(
    gathered,  # dy [T, M] (GATHER_A), or x [T, N]
    ordered,  # ragged descriptor of p h [pairs, N] (GATHER_A), or of paired gradients [pairs, M]
    order,
    offsets,  # [E + 1]
    out,  # [E, out_rows, out_columns]
    M, N, out_rows, out_columns, begin,
    K: tl.constexpr, GATHER_A: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """a^T b over the rows of an expert, a of M columns and b of N; zeros without rows. EVEN: no tile of `gathered` juts out.

    GATHER_A: d W_down of the channels from `begin` on; otherwise d W_gate_up, of the same.
    Behind the last row of an expert are those of another, which may not be finite. The rows that lie in order end there for
    the copy engine, which fills up with zeros; those that are gathered repeat the last one. So no load has a mask of rows.
    """
    blocks = tl.cdiv(M, BM)
    per_expert = blocks * tl.cdiv(N, BN)
    expert, within = tl.program_id(0) // per_expert, tl.program_id(0) % per_expert
    first, rows = tl.load(offsets + expert), tl.load(offsets + expert + 1) - tl.load(offsets + expert)
    at_m, at_n = within % blocks * BM, within // blocks * BN
    m, n = at_m + tl.arange(0, BM), at_n + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    if rows > 0:
        for done in tl.range(0, rows, BK, num_stages=STAGES):
            row = tl.minimum(done + tl.arange(0, BK), rows - 1)
            # Without a sign the division is one shift.
            token = (tl.load(order + first + row).to(tl.uint32) // K).to(tl.int64)
            if GATHER_A:
                pointers = gathered + m[:, None] + token[None, :] * M
                tile_a = tl.load(pointers) if EVEN else tl.load(pointers, mask=(m < M)[:, None], other=0.0)
                tile_b = load_ragged(ordered, first, rows, [done, at_n])
            else:
                pointers = gathered + n[None, :] + token[:, None] * N
                tile_a = load_ragged(ordered, first, rows, [done, at_m]).T
                tile_b = tl.load(pointers) if EVEN else tl.load(pointers, mask=(n < N)[None, :], other=0.0)
            total = tl.dot(tile_a, tile_b, total, input_precision=PRECISION)
    place = m if GATHER_A else (m % 2) * (out_rows // 2) + begin + m // 2
    column = n + begin if GATHER_A else n
    out += expert.to(tl.int64) * out_rows * out_columns
    tl.store(
        out + place.to(tl.int64)[:, None] * out_columns + column[None, :], total.to(out.dtype.element_ty),
        mask=(m[:, None] < M) & (n[None, :] < N),
    )  # fmt: skip


def launch_weights(
    a: torch.Tensor, b: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, begin: int,
    tile, precision: str, *, k: int, gather_a: bool,
) -> None:  # fmt: skip
    """out[e] = a^T b over the rows of expert e; of a [., M] and b [., N] one has its rows in order, the other one has tokens."""
    M, N = a.shape[1], b.shape[1]
    gathered, ordered, width, side = (a, b, tile.BN, M % tile.BM) if gather_a else (b, a, tile.BM, N % tile.BN)
    experts_bwd_kernel_weights[(out.shape[0] * triton.cdiv(M, tile.BM) * triton.cdiv(N, tile.BN),)](
        gathered, create_ragged_descriptor(ordered, [tile.BK, width]), order, offsets, out, M, N, *out.shape[1:], begin,
        K=k, GATHER_A=gather_a, EVEN=side == 0, PRECISION=precision, **tile._asdict(),
    )  # fmt: skip
