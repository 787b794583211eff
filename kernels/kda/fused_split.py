"""Long sequences of few heads on a GPU: cut into pieces that are scanned at the same time, exactly.

Through a piece the state goes by an affine map, S -> Phi S + Psi, and its cotangent by dS -> Phi^T dS + Omega. `maps` finds
Phi and Psi of all pieces at once (Psi is the scan from a zero state, Phi what becomes of the unit matrix), `fold` goes
from piece to piece, and then all pieces are scanned from the states that they really begin with. No state is dropped.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launched
from .fused_backward import scan_cotangents
from .fused_forward import scan_states
from .fused_gate import chunks_of, program_of


@launched
@triton.jit
def kda_split_kernel_maps(
    Qh, Kt, W, U, P, gam,  # as in prepare
    Phi, Psi,  # [P, H, K, K], [P, H, K, V] FP32
    first_chunk,  # [P + 1] (TABLE)
    T, H, first_head,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    TABLE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The first V / BV programs of a piece find columns of Psi, the others of Phi."""
    block, row = program_of((K + V) // BV)
    piece, group = (row // G).to(tl.int64), row % G
    head = first_head + group
    begin, end = chunks_of(piece, first_chunk, T, TABLE)
    dk = tl.arange(0, K)
    S = tl.zeros((K, BV), dtype=tl.float32)
    if block < V // BV:
        dv = block * BV + tl.arange(0, BV)
        S = scan_states(
            Qh, Kt, W, U, P, gam, Psi, P, P, first_chunk, S, begin, end, group, head, dk, dv,
            T, H, G, K, V, False, True, False, False, PRECISION, STAGES,
        )  # fmt: skip
        tl.store(Psi + (piece * H + head) * (K * V) + (dk[:, None] * V + dv[None, :]), S)
    else:
        dv = (block - V // BV) * BV + tl.arange(0, BV)
        S += tl.where(dk[:, None] == dv[None, :], 1.0, 0.0)
        S = scan_states(
            Qh, Kt, W, U, P, gam, Phi, P, P, first_chunk, S, begin, end, group, head, dk, dv,
            T, H, G, K, V, False, False, False, False, PRECISION, STAGES,
        )  # fmt: skip
        tl.store(Phi + (piece * H + head) * (K * K) + (dk[:, None] * K + dv[None, :]), S)


@launched
@triton.jit
def kda_split_kernel_omega(
    Qh, Kt, W, P, gam,
    do,  # [tokens, H, V]
    Omega,  # [P, H, K, V] FP32
    first_chunk,  # [P + 1]
    chunks,
    T, H, first_head,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    TABLE: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Omega: the cotangents that a piece gives to the state before it, when none comes from behind."""
    block, row = program_of(V // BV)
    piece, group = (row // G).to(tl.int64), row % G
    head = first_head + group
    begin, end = chunks_of(piece, first_chunk, T, TABLE)
    dk, dv = tl.arange(0, K), block * BV + tl.arange(0, BV)
    dS = tl.zeros((K, BV), dtype=tl.float32)
    dS = scan_cotangents(
        Qh, Kt, W, P, gam, do, P, P, chunks, dS, begin, end, group, head, dk, dv,
        T, H, G, K, V, VARLEN, False, PRECISION, STAGES,
    )  # fmt: skip
    tl.store(Omega + (piece * H + head) * (K * V) + (dk[:, None] * V + dv[None, :]), dS)


@launched
@triton.jit
def kda_split_kernel_fold(
    Phi, offset,  # [P, H, K, K], [P, H, K, V] FP32: Psi, or Omega (BACK)
    first, last,  # [N, H, K, V]: the state (cotangent) before the first piece, and after the last
    between,  # [P, H, K, V]: with what each piece begins
    first_piece,  # [N + 1]
    H, first_head,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, HAS_FIRST: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """From piece to piece of a sequence, in FP32; BACK: from the last to the first, with Phi transposed."""
    block, row = program_of(V // BV)
    sequence, group = (row // G).to(tl.int64), row % G
    head = first_head + group
    begin, end = tl.load(first_piece + sequence), tl.load(first_piece + sequence + 1)
    dk, dv = tl.arange(0, K), block * BV + tl.arange(0, BV)
    state = dk[:, None] * V + dv[None, :]
    S = tl.zeros((K, BV), dtype=tl.float32)
    if HAS_FIRST:
        S += tl.load(first + (sequence * H + head) * (K * V) + state)
    for step in tl.range(0, end - begin, num_stages=1):
        if BACK:
            piece = (end - 1 - step).to(tl.int64) * H + head
            phi = tl.load(Phi + piece * (K * K) + (dk[None, :] * K + dk[:, None]))
        else:
            piece = (begin + step).to(tl.int64) * H + head
            phi = tl.load(Phi + piece * (K * K) + (dk[:, None] * K + dk[None, :]))
        tl.store(between + piece * (K * V) + state, S)
        S = tl.load(offset + piece * (K * V) + state) + tl.dot(phi, S, input_precision="tf32x3")
    tl.store(last + (sequence * H + head) * (K * V) + state, S)


# Chunks of a piece, at least: the maps cost V + K columns of a scan for the V that a sequence has anyway.
SHORTEST_PIECE = 16
FEWEST_PIECES = 3


class Pieces(NamedTuple):
    """Pieces of sequences: how many there are, their bounds among the chunks [number + 1], those of each sequence [N + 1].

    A packed batch gets as many as its chunks could need, without asking the device: those left over have no chunks.
    """

    number: int
    first_chunk: torch.Tensor
    first_piece: torch.Tensor


def _cut(first_chunk: torch.Tensor, count: int, size: int) -> Pieces:
    """`size` chunks of a sequence at a time."""
    sequences, device = len(first_chunk) - 1, first_chunk.device
    needed = (first_chunk.diff() + (size - 1)) // size
    first_piece = torch.nn.functional.pad(needed.cumsum(0), (1, 0))
    piece = torch.arange(count + 1, device=device)
    sequence = torch.searchsorted(first_piece[1:], piece, right=True)
    begin = torch.nn.functional.pad(first_chunk[:-1] - first_piece[:-1] * size, (0, 1))[sequence] + piece * size
    bounds = torch.where(sequence < sequences, begin, first_chunk[-1])
    return Pieces(count, bounds.to(torch.int32), first_piece.to(torch.int32))


@functools.lru_cache(256)
def _cut_rows(sequences: int, per_sequence: int, size: int, device: torch.device) -> Pieces:
    """Of a batch whose rows are equally long: kept, since a dozen small launches take longer than a scan."""
    rows = torch.arange(sequences + 1, device=device, dtype=torch.int32)
    return _cut(rows * per_sequence, sequences * triton.cdiv(per_sequence, size), size)


def pieces_of(layout, T: int, programs: int, processors: int) -> Pieces | None:
    """How to cut, or None where `programs` for each sequence and value block use a quarter of the GPU or more."""
    per_sequence = layout.count if layout.packed else triton.cdiv(T, 64)
    size = max(SHORTEST_PIECE, triton.cdiv(per_sequence, max(1, processors // max(1, programs))))
    if 4 * programs > processors or triton.cdiv(per_sequence, size) < FEWEST_PIECES:
        return None
    if layout.packed:
        return _cut(layout.first_chunk, layout.count // size + layout.sequences, size)
    device = layout.first_chunk.device
    # What is computed while a CUDA graph is captured belongs to that graph.
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    cut = _cut_rows.__wrapped__ if captured else _cut_rows
    return cut(layout.sequences, per_sequence, size, device)


def find_maps(call, work, first_chunk: torch.Tensor, count: int, table: bool, head: int, G: int):
    """Phi [P, H, K, K] and Psi [P, H, K, V], FP32, of `count` ranges of chunks; filled for heads head ... head + G."""
    K, V, f32 = call.K, call.V, torch.float32
    Phi, Psi = call.new(count, call.H, K, K, dtype=f32), call.new(count, call.H, K, V, dtype=f32)
    BV = min(K, V, 32 if K >= 64 and V >= 64 else 64)
    kda_split_kernel_maps[((K + V) // BV * count * G,)](
        *(work[name] for name in ("Qh", "Kt", "W", "U", "P", "gam")), Phi, Psi, first_chunk, call.T, call.H, head,
        G=G, K=K, V=V, BV=BV, TABLE=table, PRECISION=call.common["PRECISION"], STAGES=3, num_warps=4,
    )  # fmt: skip
    return Phi, Psi


def _fold(call, pieces, Phi, offset, first, last, head, G, back):
    between = torch.empty_like(offset)
    K, V = call.K, call.V
    BV = min(V, 32)
    kda_split_kernel_fold[(V // BV * (len(pieces.first_piece) - 1) * G,)](
        Phi, offset, last if first is None else first, last, between, pieces.first_piece, call.H, head,
        G=G, K=K, V=V, BV=BV, HAS_FIRST=first is not None, BACK=back, num_warps=4,
    )  # fmt: skip
    return between


def enter(call, work, pieces, head, G, initial_state, final_state):
    """The states [P, H, K, V] that the pieces begin with; `final_state` [N, H, K, V] is filled. Keeps Phi in `work`."""
    work["Phi"], Psi = find_maps(call, work, pieces.first_chunk, pieces.number, True, head, G)
    return _fold(call, pieces, work["Phi"], Psi, initial_state, final_state, head, G, back=False)


def enter_back(call, work, pieces, head, G, do, d_final, d_initial):
    """The cotangents [P, H, K, V] of the states that the pieces end with; `d_initial` [N, H, K, V] is filled."""
    Omega = call.new(pieces.number, call.H, call.K, call.V, dtype=torch.float32)
    BV = min(call.V, 32 if call.V >= 64 else 64)
    kda_split_kernel_omega[(call.V // BV * pieces.number * G,)](
        *(work[name] for name in ("Qh", "Kt", "W", "P", "gam")), do, Omega, pieces.first_chunk, call.layout.chunks,
        call.T, call.H, head, G=G, K=call.K, V=call.V, BV=BV, TABLE=True, **call.common, STAGES=3, num_warps=4,
    )  # fmt: skip
    return _fold(call, pieces, work["Phi"], Omega, d_final, d_initial, head, G, back=True)
