"""KDA forward on a GPU, three launches: `scores` and `solve` (every chunk for itself), `scan` (the states through the chunks).

Symbols as in README.md. A chunk has C = 64 tokens, split into two halves of 32. Inside a half, decays are factored at its
beginning with a fixed shift of half the span: |exponent| <= 16 |lower_bound| nats, so that 32 rows of a gate bounded at -5
are one dense product in BF16 or FP32, and no anchor depends on a later token. Between the halves both exponents are <= 0.
An unbounded gate goes by halving: 32, 16, ..., 1 rows, both exponents <= 0 at every level.

Workspaces are chunk-major, [NT, H, 64, .], padding rows zero: no later kernel needs a mask.
"""

import triton
import triton.language as tl


C = tl.constexpr(64)
HALF = tl.constexpr(32)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def log1p_of_unit(y):
    """log(1 + y) for y in [0, 1] to FP32 accuracy: 2 atanh(y / (2 + y)); log(1 + y) itself loses small y."""
    w = y / (2.0 + y)
    w2 = w * w
    series = 1.0 / 13.0
    series = series * w2 + 1.0 / 11.0
    series = series * w2 + 1.0 / 9.0
    series = series * w2 + 1.0 / 7.0
    series = series * w2 + 1.0 / 5.0
    series = series * w2 + 1.0 / 3.0
    return 2.0 * w * (series * w2 + 1.0)


@triton.jit
def activate_gate(x, a_log, LOWER_BOUND: tl.constexpr):
    """x = raw gate + dt_bias [C, K] and A_log of the head, FP32 -> log-decay in bits, <= 0."""
    rate = tl.exp2(tl.minimum(a_log, 80.0) * LOG2E)
    if LOWER_BOUND == 0.0:
        softplus = tl.maximum(x, 0.0) + log1p_of_unit(tl.exp2(-tl.abs(x) * LOG2E))
        return -tl.minimum(rate * softplus, 87.0) * LOG2E
    z = tl.minimum(tl.maximum(rate * x, -87.0), 87.0)
    return LOWER_BOUND * LOG2E / (1.0 + tl.exp2(-z * LOG2E))


@triton.jit
def chunk_of(chunk, chunks, T, VARLEN: tl.constexpr):
    """First token (over the flattened batch) and number of tokens of a chunk; 0 tokens for a chunk that is not there."""
    if VARLEN:
        first = tl.load(chunks + 2 * chunk).to(tl.int64)
        return first, tl.load(chunks + 2 * chunk + 1)
    per_row = tl.cdiv(T, C)
    start = (chunk % per_row) * C
    return (chunk // per_row).to(tl.int64) * T + start, tl.minimum(T - start, C)


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
    """(I + A)^-1 for a strictly lower triangular A [C, C], FP32."""
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


@triton.jit
def halves_factors(decay, LOWER_BOUND: tl.constexpr, K: tl.constexpr):
    """Factors of a bounded gate, [C, K] each, from the log-decays in bits.

    grow, shrink: the decay since a half began and its inverse, shifted by half the span, so that both fit FP32 and BF16;
    late: what a token of the first half keeps until that half ends, 0 in the second; begun, left: the decay since the chunk
    began and until it ends; total [K]: over the chunk.
    """
    SHIFT: tl.constexpr = -16.0 * LOWER_BOUND * LOG2E
    halves = tl.reshape(decay, (2, HALF, K))
    inner = tl.reshape(tl.cumsum(halves, axis=1), (C, K))
    low = tl.arange(0, C)[:, None] < HALF
    first = tl.sum(tl.where(low, decay, 0.0), axis=0)
    second = tl.sum(tl.where(low, 0.0, decay), axis=0)
    grow, shrink = tl.exp2(inner + SHIFT), tl.exp2(-inner - SHIFT)
    to_end = shrink * tl.where(low, tl.exp2(first + SHIFT)[None, :], tl.exp2(second + SHIFT)[None, :])
    late = tl.where(low, to_end, 0.0)
    begun = grow * tl.where(low, 2.0 ** (16.0 * LOWER_BOUND * LOG2E), tl.exp2(first - SHIFT)[None, :])
    left = to_end * tl.where(low, tl.exp2(second)[None, :], 1.0)
    return grow, shrink, late, begun, left, first + second


@triton.jit
def kda_fwd_kernel_scores(
    q, k, g, beta,  # [tokens, H, K], beta [tokens, H]
    A_log, dt_bias,  # [H], [H, K] FP32
    chunks,  # [NT, 2] first token and length of each chunk (VARLEN)
    Qh, Kt, W, P, A, gam,  # [NT, G, C, K] x3 (W holds beta Kh for now), [NT, G, C, C] x2, gam [NT, G, K] FP32
    norms,  # [NT, G, 2, C] FP32, for the backward pass (SAVE)
    T, H, first_head, scale,
    G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    LOWER_BOUND: tl.constexpr, VARLEN: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    group, chunk = tl.program_id(0), tl.program_id(1)
    head = first_head + group
    first, length = chunk_of(chunk, chunks, T, VARLEN)
    DTYPE: tl.constexpr = Qh.dtype.element_ty
    slot = chunk.to(tl.int64) * G + group
    start = first * H + head
    rows, ck = tl.arange(0, C), tl.arange(0, BK)
    i, j = rows[:, None], rows[None, :]
    inside = i < length
    a_log = tl.load(A_log + head)
    b = tl.load(beta + start + rows * H, mask=rows < length, other=0.0).to(tl.float32)
    b = tl.where(rows < length, 1.0 / (1.0 + tl.exp2(-b * LOG2E)), 0.0)[:, None]
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
        x = tl.load(g + token, mask=inside, other=0.0).to(tl.float32) + tl.load(dt_bias + c + ck)[None, :]
        decay = tl.where(inside, activate_gate(x, a_log, LOWER_BOUND), 0.0)
        kn = tl.load(k + token, mask=inside, other=0.0).to(tl.float32) * k_norm[:, None]
        qn = tl.load(q + token, mask=inside, other=0.0).to(tl.float32) * (q_norm * scale)[:, None]
        if LOWER_BOUND == 0.0:
            As += halving_scores(kn, kn, decay, PRECISION, DTYPE, BK)
            Ps += halving_scores(qn, kn, decay, PRECISION, DTYPE, BK)
            Ps += tl.where(i == j, tl.sum(qn * kn, axis=1)[:, None], 0.0)
            L, total = tl.cumsum(decay, axis=0), tl.sum(decay, axis=0)
            begun, left = tl.exp2(L), tl.exp2(total[None, :] - L)
        else:
            grow, shrink, late, begun, left, total = halves_factors(decay, LOWER_BOUND, BK)
            same, ACROSS = (i < HALF) == (j < HALF), 2.0 ** (16.0 * LOWER_BOUND * LOG2E)
            ka, kb = tl.trans((kn * shrink).to(DTYPE)), tl.trans((kn * late).to(DTYPE))
            x = kn * grow
            near = tl.dot(x.to(DTYPE), ka, input_precision=PRECISION)
            As += tl.where(same, near, tl.dot((x * ACROSS).to(DTYPE), kb, input_precision=PRECISION))
            x = qn * grow
            near = tl.dot(x.to(DTYPE), ka, input_precision=PRECISION)
            Ps += tl.where(same, near, tl.dot((x * ACROSS).to(DTYPE), kb, input_precision=PRECISION))
        tl.store(Qh + wide, (qn * begun).to(DTYPE))
        tl.store(Kt + wide, (kn * left).to(DTYPE))
        tl.store(W + wide, (b * kn * begun).to(DTYPE))
        tl.store(gam + c + ck, tl.exp2(total))
    square = slot * C * C + (i * C + j)
    tl.store(P + square, tl.where(i >= j, Ps, 0.0).to(DTYPE))
    tl.store(A + square, tl.where(i > j, As * b, 0.0).to(DTYPE))


@triton.jit
def kda_fwd_kernel_solve(
    v, beta,  # [tokens, H, V], [tokens, H]
    chunks,
    A, W, U,  # A becomes (I + A)^-1 in place, W M beta Kh; U [NT, G, C, V]
    T, H, first_head,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    group, chunk = tl.program_id(0), tl.program_id(1)
    head = first_head + group
    first, length = chunk_of(chunk, chunks, T, VARLEN)
    DTYPE: tl.constexpr = W.dtype.element_ty
    slot = chunk.to(tl.int64) * G + group
    rows, cn = tl.arange(0, C), tl.arange(0, BN)
    i, j = rows[:, None], rows[None, :]
    A += slot * C * C
    W += slot * C * K
    U += slot * C * V
    v += (first * H + head) * V
    b = tl.load(beta + first * H + head + rows * H, mask=rows < length, other=0.0).to(tl.float32)
    b = tl.where(rows < length, 1.0 / (1.0 + tl.exp2(-b * LOG2E)), 0.0)[:, None]
    M = unit_lower_inverse(tl.load(A + (i * C + j)).to(tl.float32), PRECISION, DTYPE).to(DTYPE)
    tl.store(A + (i * C + j), M)
    for c in tl.static_range(0, K, BN):
        place = W + (i * K + c + cn[None, :])
        tl.store(place, tl.dot(M, tl.load(place), input_precision=PRECISION).to(DTYPE))
    for c in tl.static_range(0, V, BN):
        vb = b * tl.load(v + (i * (H * V) + c + cn[None, :]), mask=i < length, other=0.0).to(tl.float32)
        tl.store(U + (i * V + c + cn[None, :]), tl.dot(M, vb.to(DTYPE), input_precision=PRECISION).to(DTYPE))


@triton.jit
def kda_fwd_kernel_scan(
    Qh, Kt, W, U, P, gam,  # as in prepare
    o,  # [tokens, H, V]
    initial_state, final_state,  # [N, H, K, V] FP32
    S_tape, R_tape,  # [NT, G, K, V], [NT, G, C, V], for the backward pass (SAVE)
    first_chunk,  # [N + 1] (VARLEN)
    chunks,
    T, H, first_head,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HAS_INITIAL: tl.constexpr, VARLEN: tl.constexpr, OUTPUT: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
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
    initial_state += (sequence * H + head) * (K * V)
    final_state += (sequence * H + head) * (K * V)
    S = tl.zeros((K, BV), dtype=tl.float32)
    if HAS_INITIAL:
        S += tl.load(initial_state + state)
    wide = rows[:, None] * K + dk[None, :]
    values = rows[:, None] * V + dv[None, :]
    slot = begin.to(tl.int64) * G + group
    for chunk in tl.range(begin, end, num_stages=STAGES):
        Sn = S.to(DTYPE)
        R = tl.load(U + slot * C * V + values).to(tl.float32)
        R -= tl.dot(tl.load(W + slot * C * K + wide), Sn, input_precision=PRECISION)
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
    tl.store(final_state + state, S)
