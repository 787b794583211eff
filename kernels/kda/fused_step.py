"""One token of KDA on a GPU, one launch: the FP32 state is read once and written once, which is nearly all of the time.

A program takes a tile of value channels of one row and head, with all K key channels, so that both sums over K stay inside
it. o = q S' for the new state S' = S + k^T r is q S + (q k^T) r: both sums are over the decayed S and need not wait for r.
"""

import torch
import triton
import triton.language as tl

from ..dispatch import on_device_of
from ..launch import launched
from .fused_gate import bounded_decay, gate_rate, sigmoid, unbounded_decay


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (16, 32, 64, 128)
# Pairs of a row and a head from which on wide tiles win on an H200 (README.md).
MANY = 256


def supports(q, k, v, g, beta, state) -> str | None:
    """Why the kernel cannot take these inputs, or None when it can."""
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        if x.dtype not in DTYPES:
            return f"{name}: expected one of {DTYPES}, got {x.dtype}"
    for name, dim in (("K", q.shape[2]), ("V", v.shape[2])):
        if dim not in HEAD_DIMS:
            return f"{name}: expected one of {HEAD_DIMS}, got {dim}"
    if not state.is_contiguous():
        return f"state: expected a contiguous tensor, got strides {state.stride()}"
    return None


def tile(heads: int, V: int) -> tuple[int, int]:
    """Value channels of a program and its warps, for `heads` pairs of a row and a head.

    Few pairs: narrow tiles, so that every SM has work, of one warp, whose sums need no barrier. Many: whole lines of
    memory, and the gate is computed for fewer tiles.
    """
    return (16, 1) if heads < MANY or V < 64 else (64, 4)


@launched
@triton.jit
def kda_step_kernel(
    q, k, v, g, beta,  # [B, H, K], [B, H, K], [B, H, V], [B, H, K], [B, H]
    A_log, dt_bias,  # [H], [H, K]
    state,  # [B, H, K, V] FP32, updated in place
    o,  # [B, H, V]
    q_row, k_row, v_row, g_row, beta_row,  # strides of B
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, LOWER_BOUND: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    pair = program // (V // BV)
    row, head = (pair // H).to(tl.int64), pair % H
    ck, cv = tl.arange(0, K), program % (V // BV) * BV + tl.arange(0, BV)
    # The state first, since it comes from far: without the barrier the compiler asks for it after the norms and the gate.
    state += pair.to(tl.int64) * (K * V) + ck[:, None] * V + cv[None, :]
    S = tl.load(state)  # [K, BV]
    tl.debug_barrier()
    kn, qn = tl.load(k + row * k_row + head * K + ck), tl.load(q + row * q_row + head * K + ck)  # [K]
    x, bias = tl.load(g + row * g_row + head * K + ck), tl.load(dt_bias + head * K + ck)
    rate = gate_rate(tl.load(A_log + head).to(tl.float32))
    r, b = tl.load(v + row * v_row + head * V + cv), tl.load(beta + row * beta_row + head)
    kn, qn, r, b = kn.to(tl.float32), qn.to(tl.float32), r.to(tl.float32), b.to(tl.float32)
    if LOWER_BOUND == 0.0:
        lost = unbounded_decay(x.to(tl.float32), rate, bias.to(tl.float32))
    else:
        lost = bounded_decay(x.to(tl.float32), rate, bias.to(tl.float32), LOWER_BOUND)
    kn *= tl.rsqrt(tl.sum(kn * kn) + 1e-6)
    qn *= tl.rsqrt(tl.sum(qn * qn) + 1e-6) * K**-0.5
    S *= tl.exp2(-lost)[:, None]
    r = (r - tl.sum(kn[:, None] * S, axis=0)) * sigmoid(b)
    out = tl.sum(qn[:, None] * S, axis=0) + tl.sum(qn * kn) * r
    tl.store(state, S + kn[:, None] * r[None, :])
    tl.store(o + pair.to(tl.int64) * V + cv, out.to(o.dtype.element_ty))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [B, H, ...] with each row in one piece; rows may lie apart, as in a slice of fused projections."""
    return x if x.is_contiguous() or x[0].is_contiguous() else x.contiguous()


def kda_step_fused(q, k, v, g, beta, *, A_log, dt_bias, lower_bound=-5.0, state):
    """Arguments and results as in `api.kda_step`."""
    B, H, K, V = state.shape
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not state.numel():
        return o
    q, k, v, g, beta = _rows(q), _rows(k), _rows(v), _rows(g), _rows(beta)
    BV, warps = tile(B * H, V)
    with on_device_of(state):
        kda_step_kernel[(B * H * (V // BV),)](
            q, k, v, g, beta, A_log.contiguous(), dt_bias.contiguous(), state, o,
            q.stride(0), k.stride(0), v.stride(0), g.stride(0), beta.stride(0),
            H=H, K=K, V=V, BV=BV, LOWER_BOUND=0.0 if lower_bound is None else float(lower_bound), num_warps=warps,
        )  # fmt: skip
    return o
