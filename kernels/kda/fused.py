"""KDA on a GPU: launches of the Triton kernels and their `autograd.Function`.

What the backward pass needs of the chunks is kept from the forward pass when it is at most `KEEP_BYTES`, otherwise it is
computed again, and nothing but the inputs and `o` is saved. All launches run over groups of heads, so that the workspace
stays under `WORKSPACE_BYTES` however long the sequence is.
"""

import functools
import math

import torch
import triton

from ..dispatch import on_device_of
from .fused_backward import (
    kda_bwd_kernel_inputs,
    kda_bwd_kernel_pairs,
    kda_bwd_kernel_products,
    kda_bwd_kernel_scans,
)
from .fused_forward import kda_fwd_kernel_prepare, kda_fwd_kernel_scan
from .fused_gate import STEEP
from .fused_split import enter, enter_back, find_maps, pieces_of
from .fused_steep import kda_steep_kernel_gradients, kda_steep_kernel_scores, kda_steep_kernel_solve


CHUNK, HALF = 64, 32
# Measured on an H200 with Triton 3.6.0: with BF16 inputs the products of K or V below 64 are miscompiled. FP16 has not the
# range of the factored decays.
HEAD_DIMS = {
    torch.bfloat16: (64, 128),
    torch.float32: (16, 32, 64, 128),
}
# 32 tokens lose up to 240 bits: 120 of them grow a key, the other 120 shrink a query, and FP32 ends at 127.
STEEPEST_BOUND = -5.2
WORKSPACE_BYTES = 8 << 30
KEEP_BYTES = 3 << 30


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


def shift_of(lower_bound: float | None) -> int:
    """Bits by which the decays of a half are shifted: a key then grows by at most 120 bits."""
    if lower_bound is None:
        return int(STEEP.value) // 2
    return max(0, math.ceil(-HALF * lower_bound / math.log(2)) - 120)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


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


class Call:
    """What all launches of one call share."""

    def __init__(self, q, k, v, g, beta, A_log, dt_bias, lower_bound, cu_seqlens):
        self.q, self.k, self.v, self.g, self.beta = q, k, v, g, beta
        self.A_log, self.dt_bias = A_log.float().contiguous(), dt_bias.float().contiguous()
        self.layout = _Layout(q, cu_seqlens)
        (_, self.T, self.H, self.K), self.V = q.shape, v.shape[-1]
        self.lower_bound = lower_bound
        self.processors = _processors(q.device)
        # FP32 inputs get products of FP32 accuracy; for the others the operands are 16 bits wide anyway.
        precision = "tf32x3" if q.dtype == torch.float32 else "tf32"
        self.common = {"VARLEN": self.layout.packed, "PRECISION": precision}
        self.scale = 1.0 / math.sqrt(self.K)
        bound = None if lower_bound is None else float(lower_bound)
        self.gate: dict[str, float | None] = {"LOWER_BOUND": bound, "SHIFT": shift_of(bound)}

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.q.dtype, device=self.q.device)

    def bytes_per_head(self, backward: bool) -> int:
        """Of the workspace, roughly: what is not [C, .] per chunk is small."""
        K, V = self.K, self.V
        values = CHUNK * (3 * K + V + CHUNK)
        if self.lower_bound is None and not backward:
            values += CHUNK * CHUNK
        if backward:
            values += CHUNK * (V + 3 * CHUNK) + 2 * K * V + 7 * HALF * K
        return self.layout.count * values * self.q.element_size()

    def pieces(self, G: int):
        """How long sequences of few heads are cut (`fused_split.py`), or None."""
        return pieces_of(self.layout, self.T, self.layout.sequences * G * max(1, self.V // 32), self.processors)

    def value_block(self, programs: int) -> int:
        """Value channels of a program of the scans: fewer where that fills a GPU that would stand half empty."""
        wide = min(self.V, 64)
        return 32 if wide == 64 and programs * self.V // 32 <= self.processors else wide

    def prepare(self, head: int, G: int, save: bool) -> dict[str, torch.Tensor]:
        """The chunk quantities of heads head ... head + G; with `save` what the backward pass needs of them."""
        n, K, V, f32 = self.layout.count, self.K, self.V, torch.float32
        work = {name: self.new(n, G, CHUNK, K) for name in ("Qh", "Kt", "W")}
        # With narrow keys R is a small difference of U and what the state holds already: rounded to BF16, U alone takes the
        # error of o from 4.8e-3 to 5.2e-3 under slow gates.
        work["U"] = self.new(n, G, CHUNK, V, dtype=f32 if K < 128 else None)
        work["P"] = self.new(n, G, CHUNK, CHUNK)
        work["gam"] = self.new(n, G, K, dtype=f32)
        if save or self.lower_bound is None:
            work["Minv"] = self.new(n, G, CHUNK, CHUNK)
        if self.lower_bound is None:
            work["steep"] = self.new(n, G, dtype=torch.int32)
        if save:
            work["norms"] = self.new(n, G, 2, CHUNK, dtype=f32)
            work |= {"rows": self.new(n, G, 2 * CHUNK, K), "keys": self.new(n, G, CHUNK + HALF, K)}
            work["totals"] = self.new(n, G, 2, K, dtype=f32)
        saved = [work[name if save else "gam"] for name in ("Minv", "norms", "rows", "keys", "totals")]
        kda_fwd_kernel_prepare[(G * n,)](
            self.q, self.k, self.v, self.g, self.beta, self.A_log, self.dt_bias, self.layout.chunks,
            work["Qh"], work["Kt"], work["W"], work["U"], work["P"], work["gam"], *saved, work.get("steep"),
            self.T, self.H, head, self.scale, G=G, K=K, BK=min(K, 64), V=V, BV=min(V, 64), ROWS=_rows(K), SAVE=save,
            **self.gate, **self.common, num_warps=4, maxnreg=168,
        )  # fmt: skip
        if self.lower_bound is None:
            self._prepare_steep(work, head, G, save)
        return work

    def _prepare_steep(self, work, head, G, save):
        n, K, V, layout = self.layout.count, self.K, self.V, self.layout
        kda_steep_kernel_scores[(G * n,)](
            self.q, self.k, self.g, self.beta, self.A_log, self.dt_bias, layout.chunks, work["steep"],
            work["Qh"], work["Kt"], work["W"], work["P"], work["Minv"], work["gam"], work["norms" if save else "gam"],
            self.T, self.H, head, self.scale, G=G, K=K, BK=min(K, 32), SAVE=save, **self.common, num_warps=4,
        )  # fmt: skip
        kda_steep_kernel_solve[(G * n,)](
            self.v, self.beta, layout.chunks, work["steep"], work["Minv"], work["W"], work["U"], self.T, self.H, head,
            G=G, K=K, V=V, BN=min(K, V), **self.common, num_warps=4,
        )  # fmt: skip

    def scan(self, work, head, G, o, initial_state, final_state) -> None:
        """The states through the chunks: outputs into `o`; what `prepare` saved gets the tapes S and R beside it."""
        save = "norms" in work
        if save:
            n = self.layout.count
            work |= {"S": self.new(n, G, self.K, self.V), "R": self.new(n, G, CHUNK, self.V)}
        pieces, sequences, table = self.pieces(G), self.layout.sequences, self.layout.first_chunk
        if pieces:
            initial_state = enter(self, work, pieces, head, G, initial_state, final_state)
            # The states after the pieces are known by now, as those before the next ones.
            final_state = torch.empty_like(initial_state)
            sequences, table = pieces.number, pieces.first_chunk
        BV = self.value_block(sequences * G)
        kda_fwd_kernel_scan[(self.V // BV * sequences * G,)](
            work["Qh"], work["Kt"], work["W"], work["U"], work["P"], work["gam"], o,
            final_state if initial_state is None else initial_state, final_state,
            work["S" if save else "U"], work["R" if save else "U"], table, self.layout.chunks,
            self.T, self.H, head, G=G, K=self.K, V=self.V, BV=BV, HAS_INITIAL=initial_state is not None,
            TABLE=bool(pieces) or self.layout.packed, SAVE=save, **self.common, STAGES=3, num_warps=4,
        )  # fmt: skip


def _rows(K: int) -> int:
    """Neighbouring tokens in a thread that the tiles [A, R, BK] have with four warps and 16 bytes of BF16 a thread."""
    return max(1, min(K, 64) // 32)


def launch_forward(call: Call, initial_state: torch.Tensor | None, keep: bool):
    """Outputs, final states, and the workspace of all heads when `keep` (and it is small enough), else None."""
    o = call.new(*call.v.shape, dtype=call.v.dtype)
    final_state = call.new(call.layout.sequences, call.H, call.K, call.V, dtype=torch.float32)
    if keep and call.H * call.bytes_per_head(backward=True) <= KEEP_BYTES:
        work = call.prepare(0, call.H, save=True)
        call.scan(work, 0, call.H, o, initial_state, final_state)
        return o, final_state, work
    size, heads = _groups(call.H, call.bytes_per_head(backward=False))
    for head in heads:
        call.scan(call.prepare(head, size, save=False), head, size, o, initial_state, final_state)
    return o, final_state, None


def launch_backward(call: Call, initial_state, o, do, d_final, kept):
    H, K, V, f32 = call.H, call.K, call.V, torch.float32
    dq, dk, dv, dg = (torch.empty_like(x) for x in (call.q, call.k, call.v, call.g))
    dbeta = torch.empty_like(call.beta)
    dA_log = call.new(call.layout.count, H, K // min(K, 64), dtype=f32)
    ddt_bias = call.new(call.layout.count, H, K, dtype=f32)
    d_initial = call.new(call.layout.sequences, H, K, V, dtype=f32)
    size, heads = (H, range(1)) if kept else _groups(H, call.bytes_per_head(backward=True))
    for head in heads:
        work = kept or call.prepare(head, size, save=True)
        _backward_scans(call, work, head, size, do, initial_state, d_final, d_initial)
        _backward_pairs(call, work, head, size, o, do, dv, dbeta)
        gradients = dq, dk, dg, dA_log, ddt_bias
        _backward_keys(call, work, head, size, do, dv, *gradients)
        if call.lower_bound is None:
            _backward_keys_steep(call, work, head, size, do, dv, *gradients)
    return dq, dk, dv, dg, dbeta, dA_log.sum((0, 2)), ddt_bias.sum(0), d_initial


def _backward_scans(call, work, head, G, do, initial_state, d_final, d_initial):
    n, K, V, layout = call.layout.count, call.K, call.V, call.layout
    directions = 1 if "S" in work else 2
    if directions == 2:
        # R takes the place of U, if that is as wide.
        R = work["U"] if work["U"].dtype == call.q.dtype else call.new(n, G, CHUNK, V)
        work |= {"S": call.new(n, G, K, V), "R": R}
    work |= {"dS": call.new(n, G, K, V), "dR": call.new(n, G, CHUNK, V)}
    pieces, sequences, table = call.pieces(G), layout.sequences, layout.first_chunk
    if pieces:
        if directions == 2:
            initial_state = enter(call, work, pieces, head, G, initial_state, torch.empty_like(d_initial))
        d_final = enter_back(call, work, pieces, head, G, do, d_final, d_initial)
        d_initial = torch.empty_like(d_final)
        sequences, table = pieces.number, pieces.first_chunk
    BV = call.value_block(directions * sequences * G)
    kda_bwd_kernel_scans[(V // BV * sequences * G, directions)](
        *(work[name] for name in ("Qh", "Kt", "W", "U", "P", "gam")), do,
        d_initial if initial_state is None else initial_state, d_initial if d_final is None else d_final, d_initial,
        *(work[name] for name in ("S", "R", "dS", "dR")), table, layout.chunks,
        call.T, call.H, head, G=G, K=K, V=V, BV=BV, HAS_INITIAL=initial_state is not None,
        HAS_FINAL=d_final is not None, TABLE=bool(pieces) or layout.packed, **call.common, STAGES=3, num_warps=4,
    )  # fmt: skip


def _backward_pairs(call, work, head, G, o, do, dv, dbeta):
    n = call.layout.count
    work["dscores"] = call.new(n, G, 2, CHUNK, CHUNK)
    work["sums"] = call.new(n, G, 3, CHUNK, dtype=torch.float32)
    kda_bwd_kernel_pairs[(G * n,)](
        call.v, call.beta, o, do, call.layout.chunks, work["Minv"], work["R"], work["dR"], dv, dbeta,
        work["dscores"], work["sums"], call.T, call.H, head, G=G, V=call.V, BV=min(call.V, 64),
        **call.common, num_warps=4,
    )  # fmt: skip


def _backward_keys(call, work, head, G, do, dv, dq, dk, dg, dA_log, ddt_bias):
    n, K, V, layout = call.layout.count, call.K, call.V, call.layout
    BK = min(K, 64)
    factors = [work[name] for name in ("Qh", "Kt", "W")]  # the scans are done with them
    kda_bwd_kernel_products[(K // BK * G * n,)](
        work["rows"], work["keys"], work["totals"], do, dv,
        work["S"], work["R"], work["dS"], work["dscores"], layout.chunks, *factors, dg, call.T, call.H, head,
        G=G, K=K, BK=BK, V=V, BV=min(V, 64), **call.common,
        STAGES=3 if call.q.dtype == torch.bfloat16 else 1, num_warps=4,
    )  # fmt: skip
    kda_bwd_kernel_inputs[(K // BK * G * n,)](
        call.q, call.k, call.g, call.A_log, call.dt_bias, layout.chunks, work["norms"], work["totals"], work["sums"], *factors,
        dq, dk, dg, dA_log, ddt_bias, call.T, call.H, head, call.scale, G=G, K=K, BK=BK, ROWS=_rows(K),
        LOWER_BOUND=call.gate["LOWER_BOUND"], VARLEN=layout.packed, num_warps=4, maxnreg=160,
    )  # fmt: skip


def _backward_keys_steep(call, work, head, G, do, dv, dq, dk, dg, dA_log, ddt_bias):
    n, K, V = call.layout.count, call.K, call.V
    BK = min(K, 64)
    kda_steep_kernel_gradients[(K // BK * G * n,)](
        call.q, call.k, call.g, do, dv, call.A_log, call.dt_bias, call.layout.chunks, work["steep"], work["norms"], work["S"],
        work["R"], work["dS"], work["dscores"], work["sums"], dq, dk, dg, dA_log, ddt_bias,
        call.T, call.H, head, call.scale, G=G, K=K, BK=BK, V=V, BV=min(V, 64), **call.common, num_warps=8,
    )  # fmt: skip


class _KDA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens):
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        initial_state = None if initial_state is None else initial_state.contiguous()
        call = Call(q, k, v, g, beta, A_log, dt_bias, lower_bound, cu_seqlens)
        o, state, kept = launch_forward(call, initial_state, keep=any(ctx.needs_input_grad))
        # Saved like the inputs, so that activation checkpointing drops it with them.
        ctx.kept = list(kept or ())
        ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, o, *(kept or {}).values())
        ctx.lower_bound = lower_bound
        ctx.set_materialize_grads(False)
        return o, state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, d_final):
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, o, *saved = ctx.saved_tensors
        # The launches write over what was kept: a second backward pass through the same graph computes it again.
        kept = dict(zip(ctx.kept, saved, strict=False))
        ctx.kept = []
        do = torch.zeros_like(o) if do is None else do.contiguous()
        d_final = None if d_final is None else d_final.contiguous()
        with on_device_of(q):
            call = Call(q, k, v, g, beta, A_log, dt_bias, ctx.lower_bound, cu_seqlens)
            *gradients, dA_log, ddt_bias, d_initial = launch_backward(call, initial_state, o, do, d_final, kept)
        d_initial = None if initial_state is None else d_initial
        return *gradients, dA_log.to(A_log.dtype), ddt_bias.to(dt_bias.dtype), None, d_initial, None


def kda_state_map_fused(k, v, g, beta, *, A_log, dt_bias, lower_bound=-5.0, cu_seqlens=None):
    """Arguments and results as in `api.kda_state_map`."""
    k, v, g, beta = (x.contiguous() for x in (k, v, g, beta))
    with on_device_of(k):
        call = Call(k, k, v, g, beta, A_log, dt_bias, lower_bound, cu_seqlens)
        work = call.prepare(0, call.H, save=False)
        layout = call.layout
        return find_maps(call, work, layout.first_chunk, layout.sequences, layout.packed, 0, call.H)


def kda_fused(q, k, v, g, beta, *, A_log, dt_bias, lower_bound=-5.0, initial_state=None, cu_seqlens=None):
    """Arguments and results as in `api.kda`."""
    if initial_state is not None and torch.is_grad_enabled():
        # It may be that of a cache, which the layer overwrites before the backward pass.
        initial_state = initial_state.clone()
    with on_device_of(q):
        return _KDA.apply(q, k, v, g, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens)
