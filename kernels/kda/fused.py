"""KDA on a GPU: launches of the Triton kernels and their `autograd.Function`.

Nothing but the inputs and `o` is kept for the backward pass: the chunk quantities are computed again, and both scans run
over groups of heads, so that the workspace stays under `WORKSPACE_BYTES` however long the sequence is.
"""

import math

import torch
import triton

from .fused_backward import kda_bwd_kernel_gradients, kda_bwd_kernel_pairs, kda_bwd_kernel_scan
from .fused_forward import kda_fwd_kernel_scan, kda_fwd_kernel_scores, kda_fwd_kernel_solve


CHUNK = 64
# Measured on an H200 with Triton 3.6.0: with BF16 inputs the products of K or V below 64 are miscompiled. FP16 has not the
# range of the factored decays.
HEAD_DIMS = {
    torch.bfloat16: (64, 128),
    torch.float32: (16, 32, 64, 128),
}
# 32 rows of decay, half before and half after the shift, must fit FP32: 16 * 5.4 nats = e^86.4.
STEEPEST_BOUND = -5.4
WORKSPACE_BYTES = 8 << 30


def supports(q: torch.Tensor, v: torch.Tensor, lower_bound: float | None) -> str | None:
    """Why the kernels cannot take these inputs, or None when they can."""
    if q.dtype not in HEAD_DIMS:
        return f"q: expected bfloat16 or float32, got {q.dtype}"
    for name, dim in (("K", q.shape[-1]), ("V", v.shape[-1])):
        if dim not in HEAD_DIMS[q.dtype]:
            return f"{name}: expected one of {HEAD_DIMS[q.dtype]} for {q.dtype}, got {dim}"
    if lower_bound is not None and lower_bound < STEEPEST_BOUND:
        return f"lower_bound: expected at least {STEEPEST_BOUND}, got {lower_bound}"
    return None


class _Layout:
    """Chunks of a batch: `count` slots, N sequences; the tables are only there for packed documents.

    A packed batch gets as many slots as its total length could need, without asking the device: those left over have
    no tokens.
    """

    def __init__(self, q: torch.Tensor, cu_seqlens: torch.Tensor | None):
        B, self.T = q.shape[:2]
        self.packed = cu_seqlens is not None
        if cu_seqlens is None:
            self.sequences, self.count = B, B * triton.cdiv(self.T, CHUNK)
            self.chunks = self.first_chunk = q.new_empty(2, dtype=torch.int32)
            return
        self.sequences = len(cu_seqlens) - 1
        self.count = self.T // CHUNK + self.sequences
        lengths = cu_seqlens.diff()
        first = torch.nn.functional.pad(((lengths + CHUNK - 1) // CHUNK).cumsum(0), (1, 0))
        slot = torch.arange(self.count, device=q.device)
        document = torch.searchsorted(first[1:], slot, right=True).clamp_max(self.sequences - 1)
        inside = (slot - first[document]) * CHUNK
        tokens = (lengths[document] - inside).clamp(0, CHUNK) * (slot < first[-1])
        start = (cu_seqlens[document] + inside) * (tokens > 0)
        self.chunks = torch.stack([start, tokens], dim=-1).to(torch.int32).contiguous()
        self.first_chunk = first.to(torch.int32)


def _groups(heads: int, bytes_per_head: int):
    """Ranges of heads whose workspace fits: equal sizes, so that no kernel is compiled twice."""
    size = max(1, min(heads, WORKSPACE_BYTES // max(1, bytes_per_head)))
    while heads % size:
        size -= 1
    return size, range(0, heads, size)


class _Call:
    """What all launches of one call share."""

    def __init__(self, q, k, v, g, beta, A_log, dt_bias, lower_bound, cu_seqlens):
        self.q, self.k, self.v, self.g, self.beta = q, k, v, g, beta
        self.A_log, self.dt_bias = A_log.float().contiguous(), dt_bias.float().contiguous()
        self.layout = _Layout(q, cu_seqlens)
        (_, self.T, self.H, self.K), self.V = q.shape, v.shape[-1]
        self.lower_bound = 0.0 if lower_bound is None else float(lower_bound)
        # FP32 inputs get products of FP32 accuracy; for the others the operands are 16 bits wide anyway.
        self.precision = "tf32x3" if q.dtype == torch.float32 else "tf32"
        self.scale = 1.0 / math.sqrt(self.K)

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.q.dtype, device=self.q.device)

    def prepare(self, head: int, G: int, save: bool) -> dict[str, torch.Tensor]:
        """`scores` and `solve` for heads head ... head + G."""
        n, K, V, layout = self.layout.count, self.K, self.V, self.layout
        work = {name: self.new(n, G, CHUNK, K) for name in ("Qh", "Kt", "W")}
        work |= {"U": self.new(n, G, CHUNK, V), "P": self.new(n, G, CHUNK, CHUNK), "M": self.new(n, G, CHUNK, CHUNK)}
        work["gam"] = self.new(n, G, K, dtype=torch.float32)
        work["norms"] = self.new(n, G, 2, CHUNK, dtype=torch.float32) if save else work["gam"]
        kda_fwd_kernel_scores[(G, n)](
            self.q, self.k, self.g, self.beta, self.A_log, self.dt_bias, layout.chunks,
            work["Qh"], work["Kt"], work["W"], work["P"], work["M"], work["gam"], work["norms"],
            self.T, self.H, head, self.scale, G=G, K=K, BK=min(K, 32), LOWER_BOUND=self.lower_bound,
            VARLEN=layout.packed, SAVE=save, PRECISION=self.precision, num_warps=4,
        )  # fmt: skip
        kda_fwd_kernel_solve[(G, n)](
            self.v, self.beta, layout.chunks, work["M"], work["W"], work["U"], self.T, self.H, head,
            G=G, K=K, V=V, BN=min(K, V), VARLEN=layout.packed, PRECISION=self.precision, num_warps=4,
        )  # fmt: skip
        return work

    def scan(self, work, head, G, o, initial_state, final_state, tapes) -> None:
        """States through the chunks: outputs into `o`, or states and R into `tapes` for the backward pass."""
        S_tape, R_tape = tapes or (work["P"], work["P"])
        BV = min(self.V, 64)
        kda_fwd_kernel_scan[(self.V // BV, self.layout.sequences * G)](
            work["Qh"], work["Kt"], work["W"], work["U"], work["P"], work["gam"], o,
            final_state if initial_state is None else initial_state, final_state, S_tape, R_tape,
            self.layout.first_chunk, self.layout.chunks, self.T, self.H, head, G=G, K=self.K, V=self.V, BV=BV,
            HAS_INITIAL=initial_state is not None, VARLEN=self.layout.packed, OUTPUT=tapes is None,
            SAVE=tapes is not None, PRECISION=self.precision, STAGES=3, num_warps=4,
        )  # fmt: skip


def _forward(call: _Call, initial_state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    H, K, V = call.H, call.K, call.V
    o = call.new(*call.v.shape, dtype=call.v.dtype)
    final_state = call.new(call.layout.sequences, H, K, V, dtype=torch.float32)
    size, heads = _groups(H, call.layout.count * CHUNK * (3 * K + V + 2 * CHUNK) * call.q.element_size())
    for head in heads:
        work = call.prepare(head, size, save=False)
        call.scan(work, head, size, o, initial_state, final_state, None)
    return o, final_state


def _backward(call: _Call, initial_state, o, do, d_final):
    n, H, K, V = call.layout.count, call.H, call.K, call.V
    f32, layout = torch.float32, call.layout
    BK, BV = min(K, 64), min(V, 64)
    dq, dk, dv, dg = (torch.empty_like(x) for x in (call.q, call.k, call.v, call.g))
    dbeta = torch.empty_like(call.beta)
    dA_log, ddt_bias = call.new(n, H, K // BK, dtype=f32), call.new(n, H, K, dtype=f32)
    d_initial = call.new(layout.sequences, H, K, V, dtype=f32)
    ignored = torch.empty_like(d_initial)
    values = CHUNK * (3 * K + 2 * V + 4 * CHUNK) + 2 * K * V
    size, heads = _groups(H, n * values * call.q.element_size())
    for head in heads:
        work = call.prepare(head, size, save=True)
        S_tape, dS_tape = call.new(n, size, K, V), call.new(n, size, K, V)
        R_tape, dR_tape = work["U"], call.new(n, size, CHUNK, V)  # R takes the place of U
        call.scan(work, head, size, dv, initial_state, ignored, (S_tape, R_tape))
        kda_bwd_kernel_scan[(V // BV, layout.sequences * size)](
            work["Qh"], work["Kt"], work["W"], work["P"], work["gam"], do,
            ignored if d_final is None else d_final, d_initial, dS_tape, dR_tape, layout.first_chunk, layout.chunks,
            call.T, H, head, G=size, K=K, V=V, BV=BV, HAS_FINAL=d_final is not None, VARLEN=layout.packed,
            PRECISION=call.precision, STAGES=3, num_warps=4,
        )  # fmt: skip
        dP, dA = call.new(n, size, CHUNK, CHUNK), call.new(n, size, CHUNK, CHUNK)
        sums = call.new(n, size, 3, CHUNK, dtype=f32)
        kda_bwd_kernel_pairs[(size, n)](
            call.v, call.beta, o, do, layout.chunks, work["M"], R_tape, dR_tape, dv, dbeta, dP, dA, sums,
            call.T, H, head, G=size, V=V, BV=BV, VARLEN=layout.packed, PRECISION=call.precision, num_warps=4,
        )  # fmt: skip
        kda_bwd_kernel_gradients[(K // BK, size, n)](
            call.q, call.k, call.g, do, dv, call.A_log, call.dt_bias, layout.chunks, work["norms"], S_tape, R_tape,
            dS_tape, dP, dA, sums, dq, dk, dg, dA_log, ddt_bias, call.T, H, head, call.scale, G=size, K=K, BK=BK, V=V,
            BV=BV, LOWER_BOUND=call.lower_bound, VARLEN=layout.packed, PRECISION=call.precision, num_warps=8,
        )  # fmt: skip
    return dq, dk, dv, dg, dbeta, dA_log.sum((0, 2)), ddt_bias.sum(0), d_initial


class _KDA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens):
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        initial_state = None if initial_state is None else initial_state.contiguous()
        o, state = _forward(_Call(q, k, v, g, beta, A_log, dt_bias, lower_bound, cu_seqlens), initial_state)
        ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, o)
        ctx.lower_bound = lower_bound
        ctx.set_materialize_grads(False)
        return o, state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, d_final):
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, o = ctx.saved_tensors
        call = _Call(q, k, v, g, beta, A_log, dt_bias, ctx.lower_bound, cu_seqlens)
        do = torch.zeros_like(o) if do is None else do.contiguous()
        d_final = None if d_final is None else d_final.contiguous()
        dq, dk, dv, dg, dbeta, dA_log, ddt_bias, d_initial = _backward(call, initial_state, o, do, d_final)
        d_initial = None if initial_state is None else d_initial
        return dq, dk, dv, dg, dbeta, dA_log.to(A_log.dtype), ddt_bias.to(dt_bias.dtype), None, d_initial, None


def kda_fused(q, k, v, g, beta, *, A_log, dt_bias, lower_bound=-5.0, initial_state=None, cu_seqlens=None):
    """Arguments and results as in `api.kda`."""
    return _KDA.apply(q, k, v, g, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens)
