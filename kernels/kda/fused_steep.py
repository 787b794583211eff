"""KDA with the unbounded (softplus) gate: the chunks that are too steep for the factors of `prepare` and of `products`.

No factor of a decay may grow here, so the pairs of a chunk go by halving: 32, 16, ..., 1 rows, and at every level the decay
is split where the later half begins, both exponents <= 0. That is six products and twelve cumulative sums where the others
take one product for 32 rows: exact for any decay, and several times slower. Programs of other chunks end at once.
"""

import triton
import triton.language as tl

from ..launch import launched
from .fused_gate import LOG2E, MOST, C, chunk_of, gate_rate, program_of, sigmoid, unbounded_decay


@triton.jit
def merge_inverses(M, A, s: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr):
    """Inverses of diagonal blocks of s rows -> of 2 s rows: the new corner is -M_22 A_21 M_11."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    corner = (i // (2 * s) == j // (2 * s)) & (i // s != j // s)
    Mn = M.to(DTYPE)
    AM = tl.dot(tl.where(corner, A, 0.0).to(DTYPE), Mn, input_precision=PRECISION)
    return M - tl.dot(Mn, AM.to(DTYPE), input_precision=PRECISION)


@triton.jit
def unit_lower_inverse(A, PRECISION: tl.constexpr, DTYPE: tl.constexpr):
    """(I + A)^-1 for a strictly lower triangular A [C, C], FP32; no powers of A, which may overflow."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    M = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, A, 0.0)
    for level in tl.static_range(1, 6):
        M = merge_inverses(M, A, 2**level, PRECISION, DTYPE)
    return M


@triton.jit
def halving_factors(decay, s: tl.constexpr, K: tl.constexpr):
    """Decay since a token's block of s rows began, and until it ends, both <= 0: [C, K] in bits."""
    blocks = tl.reshape(decay, (C // s, s, K))
    inner = tl.reshape(tl.cumsum(blocks, axis=1), (C, K))
    rest = tl.reshape(tl.cumsum(blocks, axis=1, reverse=True), (C, K)) - decay
    return tl.exp2(inner), tl.exp2(rest)


@triton.jit
def block_pairs(i, j, s: tl.constexpr):
    """Whether row j is in a block of s rows and row i in the one that follows it, both in the same block of 2 s."""
    return (i // (2 * s) == j // (2 * s)) & (i // s == j // s + 1)


@triton.jit
def halving_scores(x, k, decay, PRECISION: tl.constexpr, DTYPE: tl.constexpr, K: tl.constexpr):
    """sum_d x_id k_jd 2^(L_id - L_jd) for i > j, [C, C], any decay."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    out = tl.zeros((C, C), dtype=tl.float32)
    for level in tl.static_range(0, 6):
        row, col = halving_factors(decay, 2**level, K)
        scores = tl.dot((x * row).to(DTYPE), tl.trans((k * col).to(DTYPE)), input_precision=PRECISION)
        out += tl.where(block_pairs(i, j, 2**level), scores, 0.0)
    return out


@launched
@triton.jit
def kda_steep_kernel_scores(
    q, k, g, beta,  # [tokens, H, K], beta [tokens, H]
    A_log, dt_bias,  # [H], [H, K] FP32
    chunks,  # [NT, 2] first token and length of each chunk (VARLEN)
    steep,  # [NT, G], as from `prepare`
    Qh, Kt, W, P, A, gam,  # [NT, G, C, K] x3 (W holds beta Kh for now), [NT, G, C, C] x2, gam [NT, G, K] FP32
    norms,  # [NT, G, 2, C] FP32, for the backward pass (SAVE)
    T, H, first_head, scale,
    G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    VARLEN: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    group, chunk = program_of(G)
    head = first_head + group
    first, length = chunk_of(chunk, chunks, T, VARLEN)
    DTYPE: tl.constexpr = Qh.dtype.element_ty
    slot = chunk.to(tl.int64) * G + group
    if tl.load(steep + slot) == 0:
        return
    start = first * H + head
    rows, ck = tl.arange(0, C), tl.arange(0, BK)
    i, j = rows[:, None], rows[None, :]
    inside = i < length
    rate = gate_rate(tl.load(A_log + head))
    b = tl.load(beta + start + rows * H, mask=rows < length, other=0.0).to(tl.float32)
    b = tl.where(rows < length, sigmoid(b), 0.0)[:, None]
    q += start * K
    k += start * K
    g += start * K
    dt_bias += head * K
    Qh += slot * C * K
    Kt += slot * C * K
    W += slot * C * K
    gam += slot * K
    q_norm, k_norm = tl.zeros((C,), dtype=tl.float32), tl.zeros((C,), dtype=tl.float32)
    for c in tl.range(0, K, BK):
        x = tl.load(q + (i * (H * K) + c + ck[None, :]), mask=inside, other=0.0).to(tl.float32)
        q_norm += tl.sum(x * x, axis=1)
        x = tl.load(k + (i * (H * K) + c + ck[None, :]), mask=inside, other=0.0).to(tl.float32)
        k_norm += tl.sum(x * x, axis=1)
    q_norm, k_norm = tl.rsqrt(q_norm + 1e-6), tl.rsqrt(k_norm + 1e-6)
    if SAVE:
        tl.store(norms + slot * 2 * C + rows, q_norm)
        tl.store(norms + slot * 2 * C + C + rows, k_norm)

    As, Ps = tl.zeros((C, C), dtype=tl.float32), tl.zeros((C, C), dtype=tl.float32)
    for c in tl.range(0, K, BK):
        token, wide = i * (H * K) + c + ck[None, :], i * K + c + ck[None, :]
        x = tl.load(g + token, mask=inside, other=0.0).to(tl.float32)
        decay = tl.where(inside, -unbounded_decay(x, rate, tl.load(dt_bias + c + ck)[None, :]), 0.0)
        kn = tl.load(k + token, mask=inside, other=0.0).to(tl.float32) * k_norm[:, None]
        qn = tl.load(q + token, mask=inside, other=0.0).to(tl.float32) * (q_norm * scale)[:, None]
        As += halving_scores(kn, kn, decay, PRECISION, DTYPE, BK)
        Ps += halving_scores(qn, kn, decay, PRECISION, DTYPE, BK)
        Ps += tl.where(i == j, tl.sum(qn * kn, axis=1)[:, None], 0.0)
        L, total = tl.cumsum(decay, axis=0), tl.sum(decay, axis=0)
        # From the end: a difference of long sums has not the digits of a short one.
        begun, left = tl.exp2(L), tl.exp2(tl.cumsum(decay, axis=0, reverse=True) - decay)
        tl.store(Qh + wide, (qn * begun).to(DTYPE))
        tl.store(Kt + wide, (kn * left).to(DTYPE))
        tl.store(W + wide, (b * kn * begun).to(DTYPE))
        tl.store(gam + c + ck, tl.exp2(total))
    square = slot * C * C + (i * C + j)
    tl.store(P + square, tl.where(i >= j, Ps, 0.0).to(DTYPE))
    tl.store(A + square, tl.where(i > j, As * b, 0.0).to(DTYPE))


@launched
@triton.jit
def kda_steep_kernel_solve(
    v, beta,  # [tokens, H, V], [tokens, H]
    chunks, steep,
    A, W, U,  # A becomes (I + A)^-1 in place, W M beta Kh; U [NT, G, C, V]
    T, H, first_head,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    group, chunk = program_of(G)
    head = first_head + group
    first, length = chunk_of(chunk, chunks, T, VARLEN)
    DTYPE: tl.constexpr = W.dtype.element_ty
    slot = chunk.to(tl.int64) * G + group
    if tl.load(steep + slot) == 0:
        return
    rows, cn = tl.arange(0, C), tl.arange(0, BN)
    i, j = rows[:, None], rows[None, :]
    A += slot * C * C
    W += slot * C * K
    U += slot * C * V
    v += (first * H + head) * V
    b = tl.load(beta + first * H + head + rows * H, mask=rows < length, other=0.0).to(tl.float32)
    b = tl.where(rows < length, sigmoid(b), 0.0)[:, None]
    M = unit_lower_inverse(tl.load(A + (i * C + j)).to(tl.float32), PRECISION, DTYPE).to(DTYPE)
    tl.store(A + (i * C + j), M)
    for c in tl.static_range(0, K, BN):
        place = W + (i * K + c + cn[None, :])
        tl.store(place, tl.dot(M, tl.load(place), input_precision=PRECISION).to(DTYPE))
    for c in tl.static_range(0, V, BN):
        vb = b * tl.load(v + (i * (H * V) + c + cn[None, :]), mask=i < length, other=0.0).to(tl.float32)
        u = tl.dot(M, vb.to(DTYPE), input_precision=PRECISION)
        tl.store(U + (i * V + c + cn[None, :]), u.to(U.dtype.element_ty))


@triton.jit
def pair_gradients(
    dqs, dkn, dL, qs, kn, row, col, dP, dA, square, square_t, mask, mask_t, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Adds what the pairs (i, j) of `mask` give: scores sum_d x_id k_jd row_id col_jd with cotangents dP (x = qs), dA (kn)."""
    xq, xk, y = (qs * row).to(DTYPE), (kn * row).to(DTYPE), (kn * col).to(DTYPE)
    by_q = tl.dot(tl.load(dP + square, mask=mask, other=0.0), y, input_precision=PRECISION)
    dqs += row * by_q
    dL += xq.to(tl.float32) * by_q
    by_k = tl.dot(tl.load(dA + square, mask=mask, other=0.0), y, input_precision=PRECISION)
    dkn += row * by_k
    dL += xk.to(tl.float32) * by_k
    by_col = tl.dot(tl.load(dP + square_t, mask=mask_t, other=0.0), xq, input_precision=PRECISION)
    by_col += tl.dot(tl.load(dA + square_t, mask=mask_t, other=0.0), xk, input_precision=PRECISION)
    dkn += col * by_col
    dL -= y.to(tl.float32) * by_col
    return dqs, dkn, dL


@launched
@triton.jit
def kda_steep_kernel_gradients(
    q, k, g, do, dv,  # [tokens, H, .]
    A_log, dt_bias,
    chunks, steep,
    norms, S_tape, R_tape, dS_tape, dscores, sums,
    dq, dk, dg,  # [tokens, H, K]
    dA_log, ddt_bias,  # partial sums [NT, H, K / BK], [NT, H, K] FP32
    T, H, first_head, scale,
    G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg of BK channels of a chunk."""
    k_block, row = program_of(K // BK)
    group, chunk, k_start = row % G, row // G, k_block * BK
    head = first_head + group
    first, length = chunk_of(chunk, chunks, T, VARLEN)
    DTYPE: tl.constexpr = S_tape.dtype.element_ty
    slot = chunk.to(tl.int64) * G + group
    if tl.load(steep + slot) == 0:
        return
    rows, ck, cv = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    i, j = rows[:, None], rows[None, :]
    inside = i < length
    start_token = first * H + head
    do += start_token * V
    dv += start_token * V
    S_tape += (slot * K + k_start) * V
    dS_tape += (slot * K + k_start) * V
    R_tape += slot * C * V
    dP = dscores + slot * 2 * C * C
    dA = dP + C * C
    dQh, dKh = tl.zeros((C, BK), dtype=tl.float32), tl.zeros((C, BK), dtype=tl.float32)
    dKt, d_end = tl.zeros((C, BK), dtype=tl.float32), tl.zeros((BK,), dtype=tl.float32)
    for start in tl.range(0, V, BV):
        source = i * (H * V) + (start + cv[None, :])
        across = ck[None, :] * V + (start + cv[:, None])  # states transposed, [BV, BK]
        S_t, dS_t = tl.load(S_tape + across), tl.load(dS_tape + across)
        d_out = tl.load(do + source, mask=inside, other=0.0).to(DTYPE)
        dQh += tl.dot(d_out, S_t, input_precision=PRECISION)
        d_v = tl.load(dv + source, mask=inside, other=0.0).to(DTYPE)
        dKh -= tl.dot(d_v, S_t, input_precision=PRECISION)
        R = tl.load(R_tape + (i * V + start + cv[None, :]))
        dKt += tl.dot(R, dS_t, input_precision=PRECISION)
        d_end += tl.sum(S_t.to(tl.float32) * dS_t.to(tl.float32), axis=0)

    token = i * (H * K) + ck[None, :]
    q += start_token * K + k_start
    k += start_token * K + k_start
    g += start_token * K + k_start
    dq += start_token * K + k_start
    dk += start_token * K + k_start
    dg += start_token * K + k_start
    bias = tl.load(dt_bias + head * K + k_start + ck)[None, :]
    a_log = tl.load(A_log + head)
    rate = gate_rate(a_log)
    x = tl.load(g + token, mask=inside, other=0.0).to(tl.float32)
    decay = tl.where(inside, -unbounded_decay(x, rate, bias), 0.0)
    L, total = tl.cumsum(decay, axis=0), tl.sum(decay, axis=0)
    begun, left = tl.exp2(L), tl.exp2(tl.cumsum(decay, axis=0, reverse=True) - decay)
    q_norm, k_norm = tl.load(norms + slot * 2 * C + rows)[:, None], tl.load(norms + slot * 2 * C + C + rows)[:, None]
    kn = tl.load(k + token, mask=inside, other=0.0).to(tl.float32) * k_norm
    qs = tl.load(q + token, mask=inside, other=0.0).to(tl.float32) * (q_norm * scale)
    diagonal = tl.load(sums + slot * 3 * C + rows)[:, None]

    dKt *= left
    d_end = d_end * tl.exp2(total) + tl.sum(kn * dKt, axis=0)
    dqs = begun * dQh + diagonal * kn
    dkn = begun * dKh + dKt + diagonal * qs
    dL = begun * (qs * dQh + kn * dKh) - kn * dKt
    square, square_t = i * C + j, j * C + i
    for level in tl.static_range(0, 6):
        row, col = halving_factors(decay, 2**level, BK)
        mask, mask_t = block_pairs(i, j, 2**level), block_pairs(j, i, 2**level)
        dqs, dkn, dL = pair_gradients(
            dqs, dkn, dL, qs, kn, row, col, dP, dA, square, square_t, mask, mask_t, PRECISION, DTYPE
        )

    along_q = tl.load(sums + slot * 3 * C + C + rows)[:, None]
    along_k = tl.load(sums + slot * 3 * C + 2 * C + rows)[:, None]
    tl.store(dq + token, (q_norm * (scale * dqs - qs * along_q / scale)).to(dq.dtype.element_ty), mask=inside)
    tl.store(dk + token, (k_norm * (dkn - kn * along_k)).to(dk.dtype.element_ty), mask=inside)
    d_decay = tl.cumsum(dL, axis=0, reverse=True) + d_end[None, :]  # per nat
    d_decay = tl.where(inside & (decay > -MOST * LOG2E), d_decay, 0.0)
    dx = -rate * d_decay * sigmoid(x + bias)
    d_rate = d_decay * decay / LOG2E
    tl.store(dg + token, dx.to(dg.dtype.element_ty), mask=inside)
    part = chunk.to(tl.int64) * H + head
    tl.store(ddt_bias + part * K + k_start + ck, tl.sum(dx, axis=0))
    tl.store(dA_log + part * (K // BK) + k_start // BK, tl.where(a_log > 80.0, 0.0, tl.sum(d_rate)))
