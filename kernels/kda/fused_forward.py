"""KDA forward on a GPU, two launches: `prepare` (every chunk for itself) and `scan` (the states through the chunks).

Symbols as in README.md. A chunk has C = 64 tokens, split into two halves of 32. Inside a half, decays are factored at its
beginning with a fixed shift of SHIFT bits, so that 32 rows of a gate bounded at -5 are one dense product in BF16 or FP32,
and no anchor depends on a later token. Between the halves both exponents are <= 0. With the unbounded gate a chunk may be too
steep for that: `prepare` says so, and what it computes of such a chunk is replaced (`fused_steep.py`).

Workspaces are chunk-major, [NT, G, 64, .], padding rows zero: no later kernel needs a mask.
"""

import triton
import triton.language as tl

from ..launch import launched
from .fused_gate import (
    HALF,
    STEEP,
    C,
    centre_of,
    chunk_of,
    chunks_of,
    gate_decay,
    gate_rate,
    program_of,
    sigmoid,
    sums_to,
)


@triton.jit
def inverse_norm(x, inside, ROWS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """1 / |x| of each token, [A, R]."""
    square = tl.zeros((HALF // ROWS, ROWS), dtype=tl.float32)
    for c in tl.static_range(0, K, BK):
        y = tl.load(x + c, mask=inside, other=0.0).to(tl.float32)
        square += tl.sum(y * y, axis=2)
    return tl.rsqrt(square + 1e-6)


@triton.jit
def scaled(x, inside, norm):
    return tl.load(x, mask=inside, other=0.0).to(tl.float32) * norm[:, :, None]


@triton.jit
def decays(g, inside, rate, bias, LOWER_BOUND: tl.constexpr, SHIFT: tl.constexpr):
    """Bits lost since the half began, up to each token, less SHIFT [A, R, K], and in the whole half [K]."""
    x = tl.load(g, mask=inside, other=float("-inf")).to(tl.float32)
    return sums_to(gate_decay(x, rate, bias, LOWER_BOUND), -SHIFT)


@triton.jit
def operand(x, BK: tl.constexpr, DTYPE: tl.constexpr):
    """[A, R, BK] -> [32, BK], the tokens in order."""
    return tl.reshape(x.to(DTYPE), (HALF, BK))


@triton.jit
def corner(N, s: tl.constexpr, DTYPE: tl.constexpr):
    """What of N [32, 32] joins the two diagonal blocks of s rows in a block of 2 s."""
    i, j = tl.arange(0, HALF)[:, None], tl.arange(0, HALF)[None, :]
    return tl.where((i // (2 * s) == j // (2 * s)) & (i // s != j // s), N, 0.0).to(DTYPE)


@triton.jit
def inverses(N0, N1, PRECISION: tl.constexpr, DTYPE: tl.constexpr):
    """(I - N)^-1 of two strictly lower triangular N [32, 32] FP32, together, so that every product has another beside it.

    From diagonal blocks of s rows to those of 2 s: the new corner is M_22 N_21 M_11. Powers of N are not used: for nearly
    equal keys they overflow where the inverse does not.
    """
    i, j = tl.arange(0, HALF)[:, None], tl.arange(0, HALF)[None, :]
    M0 = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, N0, 0.0))
    M1 = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, N1, 0.0))
    for level in tl.static_range(1, 5):
        x0, x1 = M0.to(DTYPE), M1.to(DTYPE)
        y0 = tl.dot(corner(N0, 2**level, DTYPE), x0, input_precision=PRECISION).to(DTYPE)
        y1 = tl.dot(corner(N1, 2**level, DTYPE), x1, input_precision=PRECISION).to(DTYPE)
        M0 = tl.dot(x0, y0, M0, input_precision=PRECISION)
        M1 = tl.dot(x1, y1, M1, input_precision=PRECISION)
    return M0, M1


@launched
@triton.jit
def kda_fwd_kernel_prepare(
    q, k, v, g, beta,  # [tokens, H, .], beta [tokens, H]
    A_log, dt_bias,  # [H], [H, K] FP32
    chunks,  # [NT, 2] first token and length of each chunk (VARLEN)
    Qh, Kt, W, U, P, gam,  # [NT, G, C, .], P [NT, G, C, C], gam [NT, G, K] FP32
    Minv, norms, rows, keys, totals,  # for the backward pass (SAVE)
    steep,  # [NT, G] int32 (LOWER_BOUND None): whether a half loses more bits than the factors bear
    T, H: tl.constexpr, first_head, scale,
    G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
    LOWER_BOUND: tl.constexpr, SHIFT: tl.constexpr, VARLEN: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles are [A, R, BK], token = R a + r (`sums_to` says why); BK channels at a time, to fit registers.

    SAVE: Minv [NT, G, C, C], the inverse norms of q and k [NT, G, 2, C], and the factors of the scores as the products
    take them: rows [NT, G, 2 C, K], the grown q and below them the grown k; keys [NT, G, C + 32, K], the shrunk k and below
    them the late k of the first half; the bits lost in each half [NT, G, 2, K]. Here each half and channel has a shift of its own,
    `centre_of` the bits that it loses, so that cotangents, which are small, stay in range: by powers of two, with the same digits.
    """
    UNSHIFT: tl.constexpr = 2.0**-SHIFT
    A: tl.constexpr = HALF // ROWS
    group, chunk = program_of(G)
    head = first_head + group
    first, length = chunk_of(chunk, chunks, T, VARLEN)
    DTYPE: tl.constexpr = Qh.dtype.element_ty
    slot = chunk.to(tl.int64) * G + group
    start = first * H + head
    token_of = tl.arange(0, HALF)
    i, j = token_of[:, None], token_of[None, :]
    tok = ROWS * tl.arange(0, A)[:, None, None] + tl.arange(0, ROWS)[None, :, None]  # [A, R, 1]
    ck = tl.arange(0, BK)[None, None, :]
    low, high = tok < length, tok < length - HALF
    token, wide = tok * (H * K) + ck, tok * K + ck
    q += start * K + token
    k += start * K + token
    g += start * K + token
    v += start * V
    dt_bias += head * K + ck
    next_half = HALF * H * K
    Qh += slot * C * K + wide
    Kt += slot * C * K + wide
    Kh = W + slot * C * K + wide  # K h waits in W for the inverse
    W += slot * C * K
    U += slot * C * V
    P += slot * C * C
    gam += slot * K + tl.arange(0, BK)
    rate = gate_rate(tl.load(A_log + head))
    k_norm0, k_norm1 = inverse_norm(k, low, ROWS, K, BK), inverse_norm(k + next_half, high, ROWS, K, BK)
    q_norm0, q_norm1 = inverse_norm(q, low, ROWS, K, BK), inverse_norm(q + next_half, high, ROWS, K, BK)
    if SAVE:
        norms += slot * 2 * C + ROWS * tl.arange(0, A)[:, None] + tl.arange(0, ROWS)[None, :]
        tl.store(norms, q_norm0)
        tl.store(norms + HALF, q_norm1)
        tl.store(norms + C, k_norm0)
        tl.store(norms + C + HALF, k_norm1)
        rows += slot * 2 * C * K + wide
        keys += slot * (C + HALF) * K + wide
        totals += slot * 2 * K + tl.arange(0, BK)

    most = tl.zeros((BK,), dtype=tl.float32)
    A00, A11 = tl.zeros((HALF, HALF), dtype=tl.float32), tl.zeros((HALF, HALF), dtype=tl.float32)
    P00, P11 = tl.zeros((HALF, HALF), dtype=tl.float32), tl.zeros((HALF, HALF), dtype=tl.float32)
    A10, P10 = tl.zeros((HALF, HALF), dtype=tl.float32), tl.zeros((HALF, HALF), dtype=tl.float32)
    for c in tl.static_range(0, K, BK):
        bias = tl.load(dt_bias + c)
        inner, total0 = decays(g + c, low, rate, bias, LOWER_BOUND, SHIFT)
        grow = tl.exp2(-inner)
        if SAVE:
            recentre = (centre_of(total0) - SHIFT)[None, None, :]
        # q before k: of the first half only the shrunk key outlives the products.
        grown = scaled(q + c, low, q_norm0 * scale) * grow
        tl.store(Qh + c, (grown * UNSHIFT).to(DTYPE))
        if SAVE:
            tl.store(rows + c, (grown * tl.exp2(recentre)).to(DTYPE))
        xq = operand(grown, BK, DTYPE)
        kn = scaled(k + c, low, k_norm0)
        shrunk, grown = kn * tl.exp2(inner), kn * grow
        tl.store(Kh + c, (grown * UNSHIFT).to(DTYPE))
        if SAVE:
            tl.store(rows + C * K + c, (grown * tl.exp2(recentre)).to(DTYPE))
            tl.store(keys + c, (shrunk * tl.exp2(-recentre)).to(DTYPE))
        xk, y = operand(grown, BK, DTYPE), tl.trans(operand(shrunk, BK, DTYPE))
        A00 = tl.dot(xk, y, A00, input_precision=PRECISION)
        P00 = tl.dot(xq, y, P00, input_precision=PRECISION)

        inner, total1 = decays(g + next_half + c, high, rate, bias, LOWER_BOUND, SHIFT)
        tl.store(gam + c, tl.exp2(-total0 - total1))
        if LOWER_BOUND is None:
            most = tl.maximum(most, tl.maximum(total0, total1))
        late = shrunk * tl.exp2(-total0 + SHIFT)[None, None, :]
        tl.store(Kt + c, (late * tl.exp2(-total1)[None, None, :]).to(DTYPE))
        if SAVE:
            recentre = (centre_of(total1) - SHIFT)[None, None, :]
            tl.store(keys + C * K + c, (late * tl.exp2(-centre_of(total1))[None, None, :]).to(DTYPE))
            tl.store(totals + c, total0)
            tl.store(totals + K + c, total1)
        z = tl.trans(operand(late, BK, DTYPE))
        grow, begun = tl.exp2(-inner), tl.exp2(-total0)[None, None, :]
        kn = scaled(k + next_half + c, high, k_norm1)
        shrunk, grown = kn * tl.exp2(inner), kn * grow
        tl.store(Kt + HALF * K + c, (shrunk * tl.exp2(-total1 + SHIFT)[None, None, :]).to(DTYPE))
        tl.store(Kh + HALF * K + c, (grown * UNSHIFT * begun).to(DTYPE))
        if SAVE:
            tl.store(rows + (C + HALF) * K + c, (grown * tl.exp2(recentre)).to(DTYPE))
            tl.store(keys + HALF * K + c, (shrunk * tl.exp2(-recentre)).to(DTYPE))
        xk, y = operand(grown, BK, DTYPE), tl.trans(operand(shrunk, BK, DTYPE))
        grown = scaled(q + next_half + c, high, q_norm1 * scale) * grow
        tl.store(Qh + HALF * K + c, (grown * UNSHIFT * begun).to(DTYPE))
        if SAVE:
            tl.store(rows + HALF * K + c, (grown * tl.exp2(recentre)).to(DTYPE))
        xq = operand(grown, BK, DTYPE)
        A11 = tl.dot(xk, y, A11, input_precision=PRECISION)
        A10 = tl.dot(xk, z, A10, input_precision=PRECISION)
        P11 = tl.dot(xq, y, P11, input_precision=PRECISION)
        P10 = tl.dot(xq, z, P10, input_precision=PRECISION)
    if LOWER_BOUND is None:
        tl.store(steep + slot, (tl.max(most, axis=0) > STEEP).to(tl.int32))
    square, below = i * C + j, HALF * C
    empty = tl.zeros((HALF, HALF), dtype=DTYPE)
    tl.store(P + square, tl.where(i >= j, P00, 0.0).to(DTYPE))
    tl.store(P + HALF + square, empty)
    tl.store(P + below + square, (P10 * UNSHIFT).to(DTYPE))
    tl.store(P + below + HALF + square, tl.where(i >= j, P11, 0.0).to(DTYPE))

    beta += start + token_of * H
    b0 = sigmoid(tl.load(beta, mask=token_of < length, other=0.0).to(tl.float32))
    b1 = sigmoid(tl.load(beta + HALF * H, mask=token_of < length - HALF, other=0.0).to(tl.float32))
    N00, N11 = tl.where(i > j, -b0[:, None] * A00, 0.0), tl.where(i > j, -b1[:, None] * A11, 0.0)
    M00, M11 = inverses(N00, N11, PRECISION, DTYPE)
    M10 = tl.dot((A10 * (-b1 * UNSHIFT)[:, None]).to(DTYPE), M00.to(DTYPE), input_precision=PRECISION)
    M10 = tl.dot(M11.to(DTYPE), M10.to(DTYPE), input_precision=PRECISION)
    if SAVE:
        Minv += slot * C * C + square
        tl.store(Minv, M00.to(DTYPE))
        tl.store(Minv + HALF, empty)
        tl.store(Minv + below, M10.to(DTYPE))
        tl.store(Minv + below + HALF, M11.to(DTYPE))
    M00, M10, M11 = (M00 * b0[None, :]).to(DTYPE), (M10 * b0[None, :]).to(DTYPE), (M11 * b1[None, :]).to(DTYPE)
    tl.debug_barrier()  # other threads wrote K h
    for c in tl.static_range(0, K, BK):
        place = W + c + (i * K + tl.arange(0, BK)[None, :])
        x0, x1 = tl.load(place), tl.load(place + HALF * K)
        w0 = tl.dot(M00, x0, input_precision=PRECISION)
        w1 = tl.dot(M11, x1, tl.dot(M10, x0, input_precision=PRECISION), input_precision=PRECISION)
        tl.store(place, w0.to(DTYPE))
        tl.store(place + HALF * K, w1.to(DTYPE))
    for c in tl.static_range(0, V, BV):
        cv = c + tl.arange(0, BV)[None, :]
        value, place = i * (H * V) + cv, U + (i * V + cv)
        x0 = tl.load(v + value, mask=i < length, other=0.0).to(DTYPE)
        x1 = tl.load(v + HALF * H * V + value, mask=i < length - HALF, other=0.0).to(DTYPE)
        u0 = tl.dot(M00, x0, input_precision=PRECISION)
        u1 = tl.dot(M11, x1, tl.dot(M10, x0, input_precision=PRECISION), input_precision=PRECISION)
        tl.store(place, u0.to(U.dtype.element_ty))
        tl.store(place + HALF * V, u1.to(U.dtype.element_ty))


@triton.jit
def scan_states(
    Qh, Kt, W, U, P, gam, o, S_tape, R_tape, chunks,
    S, begin, end, group, head, dk, dv,
    T, H, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    VARLEN: tl.constexpr, VALUES: tl.constexpr, OUTPUT: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The state S [K, BV] through the chunks begin ... end; returns the last one.

    OUTPUT: outputs into `o`. SAVE: states and R of every chunk. Not VALUES: what becomes of S alone, as if U were 0.
    """
    DTYPE: tl.constexpr = W.dtype.element_ty
    rows = tl.arange(0, C)
    state, wide = dk[:, None] * V + dv[None, :], rows[:, None] * K + dk[None, :]
    values = rows[:, None] * V + dv[None, :]
    slot = begin.to(tl.int64) * G + group
    for chunk in tl.range(begin, end, num_stages=STAGES):
        Sn = S.to(DTYPE)
        R = -tl.dot(tl.load(W + slot * C * K + wide), Sn, input_precision=PRECISION)
        if VALUES:
            R += tl.load(U + slot * C * V + values).to(tl.float32)
        Rn = R.to(DTYPE)
        if SAVE:
            tl.store(S_tape + slot * (K * V) + state, Sn)
            tl.store(R_tape + slot * C * V + values, Rn)
        if OUTPUT:
            out = tl.dot(tl.load(Qh + slot * C * K + wide), Sn, input_precision=PRECISION)
            square = rows[:, None] * C + rows[None, :]
            out += tl.dot(tl.load(P + slot * C * C + square), Rn, input_precision=PRECISION)
            first, length = chunk_of(chunk, chunks, T, VARLEN)
            target = rows[:, None] * (H * V) + dv[None, :]
            tl.store(o + (first * H + head) * V + target, out.to(o.dtype.element_ty), mask=rows[:, None] < length)
        kt = tl.load(Kt + slot * C * K + (rows[None, :] * K + dk[:, None]))  # [K, C]
        S = S * tl.load(gam + slot * K + dk)[:, None] + tl.dot(kt, Rn, input_precision=PRECISION)
        slot += G
    return S


@launched
@triton.jit
def kda_fwd_kernel_scan(
    Qh, Kt, W, U, P, gam,  # as in prepare
    o,  # [tokens, H, V]
    initial_state, final_state,  # [N, H, K, V] FP32
    S_tape, R_tape,  # [NT, G, K, V], [NT, G, C, V] (SAVE)
    first_chunk,  # [N + 1] (TABLE)
    chunks,
    T, H, first_head,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HAS_INITIAL: tl.constexpr, TABLE: tl.constexpr, VARLEN: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A sequence here is what is scanned in one go: a row, a document, or a piece of one (`fused_split.py`)."""
    block, row = program_of(V // BV)
    sequence, group = (row // G).to(tl.int64), row % G
    head = first_head + group
    dk, dv = tl.arange(0, K), block * BV + tl.arange(0, BV)
    begin, end = chunks_of(sequence, first_chunk, T, TABLE)
    state = (sequence * H + head) * (K * V) + (dk[:, None] * V + dv[None, :])
    S = tl.zeros((K, BV), dtype=tl.float32)
    if HAS_INITIAL:
        S += tl.load(initial_state + state)
    S = scan_states(
        Qh, Kt, W, U, P, gam, o, S_tape, R_tape, chunks, S, begin, end, group, head, dk, dv,
        T, H, G, K, V, VARLEN, True, True, SAVE, PRECISION, STAGES,
    )  # fmt: skip
    tl.store(final_state + state, S)
