"""What the KDA kernels share: chunks, the gate, and sums of decays along the tokens."""

import triton
import triton.language as tl


C = tl.constexpr(64)
HALF = tl.constexpr(32)
LOG2E = tl.constexpr(1.4426950408889634)
MOST = tl.constexpr(87.0)  # nats that a token loses at most with the unbounded gate: beyond that nothing is left
# Bits that half a chunk may lose: halved, both factors of a pair are finite. More of them make a chunk steep.
STEEP = tl.constexpr(220.0)


@triton.jit
def program_of(FAST: tl.constexpr):
    """The places of this program among FAST that lie side by side, and beyond: one axis, as the others end at 65,535."""
    program = tl.program_id(0)
    return program % FAST, program // FAST


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
def chunks_of(sequence, first_chunk, T, TABLE: tl.constexpr):
    """The range of chunks of a sequence."""
    if TABLE:
        return tl.load(first_chunk + sequence), tl.load(first_chunk + sequence + 1)
    begin = (sequence * tl.cdiv(T, C)).to(tl.int32)
    return begin, begin + tl.cdiv(T, C)


@triton.jit
def sigmoid(x):
    """The square of an inverse root: two instructions where a division takes eight, and as exact."""
    root = tl.rsqrt(tl.exp2(-x * LOG2E) + 1.0)
    return root * root


@triton.jit
def gate_rate(A_log):
    """exp(A_log) where |A_log| <= 80: beyond it products with the gate would be infinite, or 0 times infinity."""
    return tl.exp2(tl.maximum(tl.minimum(A_log, 80.0), -80.0) * LOG2E)


@triton.jit
def bounded_decay(x, rate, bias, LOWER_BOUND: tl.constexpr):
    """Minus the log-decay in bits, -lower_bound sigmoid(rate (x + bias)) log2(e); 0 where x is -inf."""
    SCALE: tl.constexpr = -1.0 / (LOWER_BOUND * LOG2E)
    root = tl.rsqrt(tl.exp2((x + bias) * (rate * -LOG2E)) * SCALE + SCALE)
    return root * root


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
def unbounded_decay(x, rate, bias):
    """Minus the log-decay in bits, rate softplus(x + bias) log2(e), at most MOST nats. 0 where x is -inf."""
    x += bias
    softplus = tl.maximum(x, 0.0) + log1p_of_unit(tl.exp2(-tl.abs(x) * LOG2E))
    return tl.minimum(rate * softplus, MOST) * LOG2E


@triton.jit
def gate_decay(x, rate, bias, LOWER_BOUND: tl.constexpr):
    """Minus the log-decay in bits; LOWER_BOUND None is the unbounded gate."""
    if LOWER_BOUND is None:
        return unbounded_decay(x, rate, bias)
    else:  # compiled for itself: without an `else` both would be
        return bounded_decay(x, rate, bias, LOWER_BOUND)


@triton.jit
def centre_of(total):
    """The shift, in whole bits, that leaves the factors of a half that loses `total` bits as far above 1 as below it."""
    return tl.floor(total * 0.5)


@triton.jit
def sums_to(x, start):
    """x [A, R, K], tokens in order -> start plus the sums up to each token, and the sum of all tokens [K].

    R neighbours lie in one thread: only a sum for every group of them goes from thread to thread, which makes this
    several times cheaper than one cumulative sum over all rows.
    """
    groups = tl.sum(x, axis=1)  # [A, K]
    before = tl.cumsum(groups, axis=0) - groups + start
    return tl.cumsum(x, axis=1) + before[:, None, :], tl.sum(groups, axis=0)
