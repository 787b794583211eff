"""KDA backward on a GPU: both scans in one launch, then every chunk for itself.

`scans` runs the states forward (unless the forward pass kept them) and their cotangents backward: neither needs the other.
`pairs` does what lives in the value space, `products` the products in the key space, `inputs` the rest, which is
elementwise: three launches, because one that does it all spills registers and takes two and a half times as long.

The gate gradient sums pair terms x_i k_j 2^(L_i - L_j) dP_ij with a plus at row i and a minus at row j; before both rows they
cancel. They do so to the last bit only if both sides multiply the same rounded factors, which is why `products` takes the
rounded ones that `prepare` kept: with BF16 operands that is the difference between an error of 4e-3 and of 2e-2.
"""

import triton
import triton.language as tl

from ..launch import launched
from .fused_forward import scan_states
from .fused_gate import (
    HALF,
    LOG2E,
    MOST,
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
def scan_cotangents(
    Qh, Kt, W, P, gam, do, dS_tape, dR_tape, chunks,
    dS, begin, end, group, head, dk, dv,
    T, H, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    VARLEN: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The cotangent dS [K, BV] of the state through the chunks end ... begin; returns the last one. SAVE: dS and dR."""
    DTYPE: tl.constexpr = W.dtype.element_ty
    rows = tl.arange(0, C)
    state, values = dk[:, None] * V + dv[None, :], rows[:, None] * V + dv[None, :]
    wide, tall = rows[:, None] * K + dk[None, :], rows[None, :] * K + dk[:, None]
    slot = (end - 1).to(tl.int64) * G + group
    for back in tl.range(0, end - begin, num_stages=STAGES):
        first, length = chunk_of(end - 1 - back, chunks, T, VARLEN)
        source = do + (first * H + head) * V + (rows[:, None] * (H * V) + dv[None, :])
        d_out = tl.load(source, mask=rows[:, None] < length, other=0.0).to(DTYPE)  # [C, BV]
        dSn = dS.to(DTYPE)
        p_t = tl.load(P + slot * (C * C) + (rows[None, :] * C + rows[:, None]))  # P transposed
        dR = tl.dot(p_t, d_out, input_precision=PRECISION)
        dR += tl.dot(tl.load(Kt + slot * C * K + wide), dSn, input_precision=PRECISION)
        dRn = dR.to(DTYPE)
        if SAVE:
            tl.store(dS_tape + slot * (K * V) + state, dSn)
            tl.store(dR_tape + slot * (C * V) + values, dRn)
        dS = dS * tl.load(gam + slot * K + dk)[:, None]
        dS += tl.dot(tl.load(Qh + slot * C * K + tall), d_out, input_precision=PRECISION)
        dS -= tl.dot(tl.load(W + slot * C * K + tall), dRn, input_precision=PRECISION)
        slot -= G
    return dS


@launched
@triton.jit
def kda_bwd_kernel_scans(
    Qh, Kt, W, U, P, gam,  # as in the forward pass
    do,  # [tokens, H, V]
    initial_state, d_final, d_initial,  # [N, H, K, V] FP32
    S_tape, R_tape, dS_tape, dR_tape,  # [NT, G, K, V], [NT, G, C, V], and again
    first_chunk, chunks,
    T, H, first_head,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, TABLE: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs [., 0] run the cotangents, programs [., 1], where there are any, the states."""
    block, row = program_of(V // BV)
    sequence, group = (row // G).to(tl.int64), row % G
    head = first_head + group
    dk, dv = tl.arange(0, K), block * BV + tl.arange(0, BV)
    begin, end = chunks_of(sequence, first_chunk, T, TABLE)
    state = (sequence * H + head) * (K * V) + (dk[:, None] * V + dv[None, :])
    S = tl.zeros((K, BV), dtype=tl.float32)
    if tl.program_id(1) == 0:
        if HAS_FINAL:
            S += tl.load(d_final + state)
        S = scan_cotangents(
            Qh, Kt, W, P, gam, do, dS_tape, dR_tape, chunks, S, begin, end, group, head, dk, dv,
            T, H, G, K, V, VARLEN, True, PRECISION, STAGES,
        )  # fmt: skip
        tl.store(d_initial + state, S)
    else:
        if HAS_INITIAL:
            S += tl.load(initial_state + state)
        scan_states(
            Qh, Kt, W, U, P, gam, do, S_tape, R_tape, chunks, S, begin, end, group, head, dk, dv,
            T, H, G, K, V, VARLEN, True, False, True, PRECISION, STAGES,
        )  # fmt: skip


@launched
@triton.jit
def kda_bwd_kernel_pairs(
    v, beta, o, do,  # [tokens, H, V], beta [tokens, H]
    chunks,
    Minv, R_tape, dR_tape,
    dv, dbeta,  # [tokens, H, V], [tokens, H]
    dscores,  # [NT, G, 2, C, C]: dP, dA, strictly lower
    sums,  # [NT, G, 3, C] FP32: diagonal of dP, <qs, dqs>, <kn, dkn>
    T, H, first_head,
    G: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Everything that lives in the value space: dv, dbeta, and the cotangents of the two score matrices.

    The L2 norms need <qs, dqs> and <kn, dkn> over all channels; both are known here: the first is <o, do>, since o is
    linear in q, the second 2 <dY, R> - <v, dv>, by the chunk equations.
    """
    group, chunk = program_of(G)
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
    b = tl.where(rows < length, sigmoid(b), 0.0)
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
    dscores += slot * 2 * C * C + (i * C + j)
    tl.store(dscores, tl.where(i > j, acc_P, 0.0).to(DTYPE))
    tl.store(dscores + C * C, tl.where(i > j, -b[:, None] * acc_A, 0.0).to(DTYPE))
    tl.store(sums + slot * 3 * C + rows, diagonal)
    tl.store(sums + slot * 3 * C + C + rows, along_q)
    tl.store(sums + slot * 3 * C + 2 * C + rows, 2.0 * d_b - v_dv)


@triton.jit
def sums_from(x, PRECISION: tl.constexpr, DTYPE: tl.constexpr):
    """Sums of the rows i ... 63 of x [C, K] FP32, as products with ones; BF16 operands: x in three terms, all its bits."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    ones = tl.where(j >= i, 1.0, 0.0).to(DTYPE)
    if DTYPE.primitive_bitwidth == 32:
        return tl.dot(ones, x, input_precision=PRECISION)
    high = x.to(DTYPE)
    rest = x - high.to(tl.float32)
    middle = rest.to(DTYPE)
    low = (rest - middle.to(tl.float32)).to(DTYPE)
    return tl.dot(ones, low, tl.dot(ones, middle, tl.dot(ones, high)))


@launched
@triton.jit
def kda_bwd_kernel_products(
    rows, keys, totals,  # as `prepare` kept them
    do, dv,  # [tokens, H, V]
    S_tape, R_tape, dS_tape,  # [NT, G, K, V], [NT, G, C, V], [NT, G, K, V]
    dscores,  # as from `pairs`
    chunks,
    by_q, by_k, by_col,  # [NT, G, C, K]
    d_decay,  # [tokens, H, K]
    T, H, first_head,
    G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    VARLEN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Cotangents of the factors of BK channels: by_q and by_k of the grown rows, by_col of the shrunk key; of the log-decay.

    The loop subtracts its products: one that is added becomes an accumulating one, of which several stay under way, while
    Triton 3.6 already fills the buffers of loads beyond the end of the loop with zeros. A subtracted one is awaited.
    """
    k_block, row = program_of(K // BK)
    group, chunk, k_start = row % G, row // G, k_block * BK
    head = first_head + group
    first, length = chunk_of(chunk, chunks, T, VARLEN)
    DTYPE: tl.constexpr = S_tape.dtype.element_ty
    slot = chunk.to(tl.int64) * G + group
    start_token = first * H + head
    i, j, ck = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.arange(0, BK)[None, :]
    cv, ct = tl.arange(0, BV)[None, :], tl.arange(0, BV)[:, None]
    low, inside = i < HALF, i < length
    # Pairs in one half take the shrunk key, pairs across the late key of the first half.
    near, far, far_t = low == (j < HALF), (i >= HALF) & (j < HALF), low & (j >= HALF)
    do += start_token * V
    dv += start_token * V
    S_tape += (slot * K + k_start) * V
    dS_tape += (slot * K + k_start) * V
    R_tape += slot * C * V
    dscores += slot * 2 * C * C
    rows += slot * 2 * C * K + k_start + (i * K + ck)
    keys += slot * (C + HALF) * K + k_start + (i * K + ck)
    totals += slot * 2 * K + k_start + ck

    d_end = tl.zeros((BK,), dtype=tl.float32)
    rows_q, rows_k = tl.zeros((C, BK), dtype=tl.float32), tl.zeros((C, BK), dtype=tl.float32)
    cols = tl.zeros((C, BK), dtype=tl.float32)
    for c in tl.range(0, V, BV, num_stages=STAGES):
        source, across = i * (H * V) + (c + cv), ck * V + (c + ct)  # states transposed, [BV, BK]
        S_t, dS_t = tl.load(S_tape + across), tl.load(dS_tape + across)
        d_end += tl.sum(S_t.to(tl.float32) * dS_t.to(tl.float32), axis=0)
        rows_q -= tl.dot(tl.load(do + source, mask=inside, other=0.0).to(DTYPE), S_t, input_precision=PRECISION)
        rows_k -= tl.dot(tl.load(dv + source, mask=inside, other=0.0).to(DTYPE), S_t, input_precision=PRECISION)
        cols -= tl.dot(tl.load(R_tape + (i * V + (c + cv))), dS_t, input_precision=PRECISION)

    total0, total1 = tl.load(totals), tl.load(totals + K)
    unshift = tl.where(low, tl.exp2(-centre_of(total0)), tl.exp2(-centre_of(total1) - total0))
    rows_q, rows_k = rows_q * -unshift, rows_k * unshift
    shrunk, late = tl.load(keys), tl.load(keys + C * K, mask=low, other=0.0)
    square, square_t = dscores + (i * C + j), dscores + (i + j * C)  # dP, and transposed; C * C further dA
    rows_q = tl.dot(tl.load(square, mask=near, other=0.0), shrunk, rows_q, input_precision=PRECISION)
    rows_q = tl.dot(tl.load(square, mask=far, other=0.0), late, rows_q, input_precision=PRECISION)
    rows_k = tl.dot(tl.load(square + C * C, mask=near, other=0.0), shrunk, rows_k, input_precision=PRECISION)
    rows_k = tl.dot(tl.load(square + C * C, mask=far, other=0.0), late, rows_k, input_precision=PRECISION)
    tl.store(by_q + slot * C * K + k_start + (i * K + ck), rows_q.to(DTYPE))
    tl.store(by_k + slot * C * K + k_start + (i * K + ck), rows_k.to(DTYPE))
    grown_q, grown_k = tl.load(rows), tl.load(rows + C * K)
    dL = grown_q.to(tl.float32) * rows_q + grown_k.to(tl.float32) * rows_k

    # What the end of the chunk gives to the keys of the first half goes the way of the pairs across.
    total0, total1 = tl.load(totals), tl.load(totals + K)  # again: registers are short
    centre0, centre1 = centre_of(total0), centre_of(total1)
    cols *= -tl.exp2(centre1 - total1)
    d_end *= tl.exp2(-tl.reshape(total0 + total1, (BK,)))
    d_end += tl.sum(tl.where(low, late, shrunk).to(tl.float32) * cols, axis=0)
    cols_far, cols = tl.where(low, cols, 0.0), tl.where(low, 0.0, cols)
    cols_far = tl.dot(tl.load(square_t, mask=far_t, other=0.0), grown_q, cols_far, input_precision=PRECISION)
    cols_far = tl.dot(tl.load(square_t + C * C, mask=far_t, other=0.0), grown_k, cols_far, input_precision=PRECISION)
    cols = tl.dot(tl.load(square_t, mask=near, other=0.0), grown_q, cols, input_precision=PRECISION)
    cols = tl.dot(tl.load(square_t + C * C, mask=near, other=0.0), grown_k, cols, input_precision=PRECISION)
    dL -= late.to(tl.float32) * cols_far + shrunk.to(tl.float32) * cols
    by_col += slot * C * K + k_start + (i * K + ck)
    # Two factors: their product may be less than any number.
    tl.store(by_col, (cols + cols_far * tl.exp2(-centre1) * tl.exp2(centre0 - total0)).to(DTYPE))
    back = sums_from(dL, PRECISION, DTYPE) + d_end[None, :]
    d_decay += start_token * K + k_start + (i * (H * K) + ck)
    tl.store(d_decay, back.to(d_decay.dtype.element_ty), mask=inside)


@launched
@triton.jit
def kda_bwd_kernel_inputs(
    q, k, g,  # [tokens, H, K]
    A_log, dt_bias, chunks,
    norms, totals, sums, by_q, by_k, by_col,
    dq, dk, dg,  # [tokens, H, K]; dg holds the cotangent of the log-decay
    dA_log, ddt_bias,  # partial sums [NT, H, K / BK], [NT, H, K] FP32
    T, H, first_head, scale,
    G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    LOWER_BOUND: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """From the cotangents of the factors to those of q, k and g; tiles as in `prepare`, one half after the other."""
    A: tl.constexpr = HALF // ROWS
    k_block, row = program_of(K // BK)
    group, chunk, k_start = row % G, row // G, k_block * BK
    head = first_head + group
    first, length = chunk_of(chunk, chunks, T, VARLEN)
    slot = chunk.to(tl.int64) * G + group
    start, place = (first * H + head) * K + k_start, slot * C * K + k_start
    tok = ROWS * tl.arange(0, A)[:, None, None] + tl.arange(0, ROWS)[None, :, None]
    ck = tl.arange(0, BK)[None, None, :]
    bias = tl.load(dt_bias + head * K + k_start + ck)
    a_log = tl.load(A_log + head)
    rate = gate_rate(a_log)
    d_bias, d_rate = tl.zeros((1, 1, BK), dtype=tl.float32), tl.zeros((A, ROWS, BK), dtype=tl.float32)
    for half in tl.static_range(2):
        row = tok + half * HALF
        inside = row < length
        token, wide = start + (row * (H * K) + ck), place + (row * K + ck)
        # All loads of a half at once, each would be waited for alone; but that of `totals`, for want of registers.
        x, d_decay = tl.load(g + token, mask=inside, other=0.0), tl.load(dg + token, mask=inside, other=0.0)
        qs, kn = tl.load(q + token, mask=inside, other=0.0), tl.load(k + token, mask=inside, other=0.0)
        rows_q, rows_k, cols = tl.load(by_q + wide), tl.load(by_k + wide), tl.load(by_col + wide)
        q_norm, k_norm = tl.load(norms + slot * 2 * C + row) * scale, tl.load(norms + slot * 2 * C + C + row)
        along = sums + slot * 3 * C + row
        diagonal, along_q, along_k = tl.load(along), tl.load(along + C), tl.load(along + 2 * C)
        x = x.to(tl.float32)
        decay = tl.where(inside, gate_decay(x, rate, bias, LOWER_BOUND), 0.0)
        inner, _ = sums_to(decay, 0.0)
        inner -= centre_of(tl.load(totals + (slot * 2 + half) * K + k_start + ck))
        grow, shrink = tl.exp2(-inner), tl.exp2(inner)
        qs, kn = qs.to(tl.float32) * q_norm, kn.to(tl.float32) * k_norm
        dqs = grow * rows_q.to(tl.float32) + diagonal * kn
        d_q = q_norm * (dqs - qs * (along_q / (scale * scale)))
        tl.store(dq + token, d_q.to(dq.dtype.element_ty), mask=inside)
        dkn = grow * rows_k.to(tl.float32) + diagonal * qs
        dkn += shrink * cols.to(tl.float32)
        tl.store(dk + token, (k_norm * (dkn - kn * along_k)).to(dk.dtype.element_ty), mask=inside)
        if LOWER_BOUND is None:
            d_decay = tl.where(decay < MOST * LOG2E, d_decay.to(tl.float32), 0.0)
            dx = d_decay * sigmoid(x + bias) * -rate
            d_rate -= d_decay * decay / LOG2E
        else:
            opened = decay * (-1.0 / (LOWER_BOUND * LOG2E))
            dx = d_decay.to(tl.float32) * (opened * (1.0 - opened)) * (rate * LOWER_BOUND)
            d_rate += dx * (x + bias)
        tl.store(dg + token, dx.to(dg.dtype.element_ty), mask=inside)
        d_bias += tl.sum(tl.sum(dx, axis=1, keep_dims=True), axis=0, keep_dims=True)
    part = chunk.to(tl.int64) * H + head
    tl.store(ddt_bias + part * K + k_start + ck, d_bias)
    total = tl.sum(tl.sum(tl.sum(d_rate, axis=2), axis=1), axis=0)
    tl.store(dA_log + part * (K // BK) + k_start // BK, tl.where(a_log > 80.0, 0.0, total))
