"""KDA backward on a GPU: `scores`, `solve` and `scan` again, the reverse scan, then every chunk for itself.

The gate gradient sums pair terms x_i k_j 2^(L_i - L_j) dP_ij with a plus at row i and a minus at row j; before both rows they
cancel. They do so to the last bit only if both sides multiply the same rounded factors, which is why `pair_gradients`
takes the rounded ones for dL: with BF16 operands that is the difference between an error of 4e-3 and of 2e-2.
"""

import triton
import triton.language as tl

from .fused_forward import HALF, LOG2E, C, activate_gate, block_pairs, chunk_of, halves_factors, halving_factors


@triton.jit
def kda_bwd_kernel_scan(
    Qh, Kt, W, P, gam,  # as in the forward pass
    do,  # [tokens, H, V]
    d_final, d_initial,  # [N, H, K, V] FP32
    dS_tape, dR_tape,  # [NT, G, K, V], [NT, G, C, V]
    first_chunk, chunks,
    T, H, first_head,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HAS_FINAL: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block, row = tl.program_id(0), tl.program_id(1)
    sequence, group = (row // G).to(tl.int64), row % G
    head = first_head + group
    DTYPE: tl.constexpr = W.dtype.element_ty
    rows, dk, dv = tl.arange(0, C), tl.arange(0, K), block * BV + tl.arange(0, BV)
    if VARLEN:
        begin, end = tl.load(first_chunk + sequence), tl.load(first_chunk + sequence + 1)
    else:
        begin = (sequence * tl.cdiv(T, C)).to(tl.int32)
        end = begin + tl.cdiv(T, C)

    state = dk[:, None] * V + dv[None, :]
    d_final += (sequence * H + head) * (K * V)
    d_initial += (sequence * H + head) * (K * V)
    dS = tl.zeros((K, BV), dtype=tl.float32)
    if HAS_FINAL:
        dS += tl.load(d_final + state)
    wide, tall = rows[:, None] * K + dk[None, :], rows[None, :] * K + dk[:, None]
    slot = (end - 1).to(tl.int64) * G + group
    for back in tl.range(0, end - begin, num_stages=STAGES):
        first, length = chunk_of(end - 1 - back, chunks, T, VARLEN)
        source = rows[:, None] * (H * V) + dv[None, :]
        d_out = tl.load(do + (first * H + head) * V + source, mask=rows[:, None] < length, other=0.0).to(
            DTYPE
        )  # [C, BV]
        dSn = dS.to(DTYPE)
        tl.store(dS_tape + slot * (K * V) + state, dSn)
        p_t = tl.load(P + slot * (C * C) + (rows[None, :] * C + rows[:, None]))  # P transposed
        dR = tl.dot(p_t, d_out, input_precision=PRECISION)
        dR += tl.dot(tl.load(Kt + slot * C * K + wide), dSn, input_precision=PRECISION)
        dRn = dR.to(DTYPE)
        tl.store(dR_tape + slot * (C * V) + (rows[:, None] * V + dv[None, :]), dRn)
        dS = dS * tl.load(gam + slot * K + dk)[:, None]
        dS += tl.dot(tl.load(Qh + slot * C * K + tall), d_out, input_precision=PRECISION)
        dS -= tl.dot(tl.load(W + slot * C * K + tall), dRn, input_precision=PRECISION)
        slot -= G
    tl.store(d_initial + state, dS)


@triton.jit
def kda_bwd_kernel_pairs(
    v, beta, o, do,  # [tokens, H, V], beta [tokens, H]
    chunks,
    Minv, R_tape, dR_tape,
    dv, dbeta,  # [tokens, H, V], [tokens, H]
    dP, dA,  # [NT, G, C, C], strictly lower
    sums,  # [NT, G, 3, C] FP32: diagonal of dP, <qs, dqs>, <kn, dkn>
    T, H, first_head,
    G: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Everything that lives in the value space: dv, dbeta, and the cotangents of the two score matrices.

    The L2 norms need <qs, dqs> and <kn, dkn> over all channels; both are known here: the first is <o, do>, since o is
    linear in q, the second 2 <dY, R> - <v, dv>, by the chunk equations.
    """
    group, chunk = tl.program_id(0), tl.program_id(1)
    head = first_head + group
    first, length = chunk_of(chunk, chunks, T, VARLEN)
    DTYPE: tl.constexpr = Minv.dtype.element_ty
    slot = chunk.to(tl.int64) * G + group
    rows, cv = tl.arange(0, C), tl.arange(0, BV)
    i, j = rows[:, None], rows[None, :]
    start_token = first * H + head
    v += start_token * V
    o += start_token * V
    do += start_token * V
    dv += start_token * V
    R_tape += slot * C * V
    dR_tape += slot * C * V
    b = tl.load(beta + start_token + rows * H, mask=rows < length, other=0.0).to(tl.float32)
    b = tl.where(rows < length, 1.0 / (1.0 + tl.exp2(-b * LOG2E)), 0.0)
    M_t = tl.load(Minv + slot * C * C + (j * C + i))  # transposed
    acc_A, acc_P = tl.zeros((C, C), dtype=tl.float32), tl.zeros((C, C), dtype=tl.float32)
    d_b, diagonal = tl.zeros((C,), dtype=tl.float32), tl.zeros((C,), dtype=tl.float32)
    along_q, v_dv = tl.zeros((C,), dtype=tl.float32), tl.zeros((C,), dtype=tl.float32)
    for start in tl.static_range(0, V, BV):
        R = tl.load(R_tape + (i * V + start + cv[None, :]))  # [C, BV]
        R_t = tl.load(R_tape + (j * V + start + cv[:, None]))  # [BV, C]
        source = i * (H * V) + (start + cv[None, :])
        d_out = tl.load(do + source, mask=i < length, other=0.0).to(DTYPE)
        dY = tl.dot(M_t, tl.load(dR_tape + (i * V + start + cv[None, :])), input_precision=PRECISION)
        d_v = b[:, None] * dY
        tl.store(dv + source, d_v.to(dv.dtype.element_ty), mask=i < length)
        v_dv += tl.sum(d_v * tl.load(v + source, mask=i < length, other=0.0).to(tl.float32), axis=1)
        along_q += tl.sum(
            d_out.to(tl.float32) * tl.load(o + source, mask=i < length, other=0.0).to(tl.float32), axis=1
        )
        d_b += tl.sum(dY * R.to(tl.float32), axis=1)
        diagonal += tl.sum(d_out.to(tl.float32) * R.to(tl.float32), axis=1)
        acc_A += tl.dot(dY.to(DTYPE), R_t, input_precision=PRECISION)
        acc_P += tl.dot(d_out, R_t, input_precision=PRECISION)
    # R is linear in beta row by row, so its cotangent gives that of the raw beta without a division.
    tl.store(dbeta + start_token + rows * H, ((1.0 - b) * d_b).to(dbeta.dtype.element_ty), mask=rows < length)
    square = i * C + j
    tl.store(dA + slot * C * C + square, tl.where(i > j, -b[:, None] * acc_A, 0.0).to(DTYPE))
    tl.store(dP + slot * C * C + square, tl.where(i > j, acc_P, 0.0).to(DTYPE))
    tl.store(sums + slot * 3 * C + rows, diagonal)
    tl.store(sums + slot * 3 * C + C + rows, along_q)
    tl.store(sums + slot * 3 * C + 2 * C + rows, 2.0 * d_b - v_dv)


@triton.jit
def pair_gradients(
    dqs,
    dkn,
    dL,
    qs,
    kn,
    row,
    col,
    dP,
    dA,
    square,
    square_t,
    mask,
    mask_t,
    PRECISION: tl.constexpr,
    DTYPE: tl.constexpr,
):
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


@triton.jit
def kda_bwd_kernel_gradients(
    q, k, g, do, dv,  # [tokens, H, .]
    A_log, dt_bias,
    chunks,
    norms, S_tape, R_tape, dS_tape, dP, dA, sums,
    dq, dk, dg,  # [tokens, H, K]
    dA_log, ddt_bias,  # partial sums [NT, H, K / BK], [NT, H, K] FP32
    T, H, first_head, scale,
    G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    LOWER_BOUND: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg of BK channels of a chunk."""
    group, chunk, k_start = tl.program_id(1), tl.program_id(2), tl.program_id(0) * BK
    head = first_head + group
    first, length = chunk_of(chunk, chunks, T, VARLEN)
    DTYPE: tl.constexpr = S_tape.dtype.element_ty
    slot = chunk.to(tl.int64) * G + group
    rows, ck, cv = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    i, j = rows[:, None], rows[None, :]
    inside = i < length
    start_token = first * H + head
    do += start_token * V
    dv += start_token * V
    S_tape += (slot * K + k_start) * V
    dS_tape += (slot * K + k_start) * V
    R_tape += slot * C * V
    dP += slot * C * C
    dA += slot * C * C
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
    x = tl.load(g + token, mask=inside, other=0.0).to(tl.float32) + bias
    decay = tl.where(inside, activate_gate(x, a_log, LOWER_BOUND), 0.0)
    if LOWER_BOUND == 0.0:
        L, total = tl.cumsum(decay, axis=0), tl.sum(decay, axis=0)
        begun, left = tl.exp2(L), tl.exp2(total[None, :] - L)
    else:
        grow, shrink, late, begun, left, total = halves_factors(decay, LOWER_BOUND, BK)
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
    if LOWER_BOUND == 0.0:
        for level in tl.static_range(0, 6):
            row, col = halving_factors(decay, 2**level, BK)
            mask, mask_t = block_pairs(i, j, 2**level), block_pairs(j, i, 2**level)
            dqs, dkn, dL = pair_gradients(
                dqs, dkn, dL, qs, kn, row, col, dP, dA, square, square_t, mask, mask_t, PRECISION, DTYPE
            )
    else:
        same = (i < HALF) == (j < HALF)
        dqs, dkn, dL = pair_gradients(
            dqs, dkn, dL, qs, kn, grow, shrink, dP, dA, square, square_t, same, same, PRECISION, DTYPE
        )
        grow *= 2.0 ** (16.0 * LOWER_BOUND * LOG2E)
        across, across_t = (i >= HALF) & (j < HALF), (i < HALF) & (j >= HALF)
        dqs, dkn, dL = pair_gradients(
            dqs, dkn, dL, qs, kn, grow, late, dP, dA, square, square_t, across, across_t, PRECISION, DTYPE
        )

    along_q = tl.load(sums + slot * 3 * C + C + rows)[:, None]
    along_k = tl.load(sums + slot * 3 * C + 2 * C + rows)[:, None]
    tl.store(dq + token, (q_norm * (scale * dqs - qs * along_q / scale)).to(dq.dtype.element_ty), mask=inside)
    tl.store(dk + token, (k_norm * (dkn - kn * along_k)).to(dk.dtype.element_ty), mask=inside)
    d_decay = tl.where(inside, tl.cumsum(dL, axis=0, reverse=True) + d_end[None, :], 0.0)  # per nat
    rate = tl.exp2(tl.minimum(a_log, 80.0) * LOG2E)
    if LOWER_BOUND == 0.0:
        dx = -rate * d_decay / (1.0 + tl.exp2(-x * LOG2E))
        d_rate = d_decay * decay / LOG2E
    else:
        opened = decay / (LOWER_BOUND * LOG2E)
        dx = rate * d_decay * LOWER_BOUND * opened * (1.0 - opened)
        d_rate = dx * x
    tl.store(dg + token, dx.to(dg.dtype.element_ty), mask=inside)
    part = chunk.to(tl.int64) * H + head
    tl.store(ddt_bias + part * K + k_start + ck, tl.sum(dx, axis=0))
    tl.store(dA_log + part * (K // BK) + k_start // BK, tl.where(a_log > 80.0, 0.0, tl.sum(d_rate)))
