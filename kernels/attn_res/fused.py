"""The attention residual mix on a GPU, alone or with the RMS norm behind it: one launch forward, one backward.

A program holds one token at a time, in registers, as pieces of 8 elements a thread. The sources come one after the other, the
next on its way while one is worked on, and each is read once: forward the softmax is online, as in flash attention;
backward <dh, h> stands for the sum over all sources, so that no gradient waits for a later source.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..dispatch import on_device_of
from ..launch import launched


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_CHANNELS = 8192
ELEMENTS = 8  # of a piece in a thread: one load of 16 bytes in 16 bits
# Programs walk over the tokens with a fixed stride. They are as many as are resident at once on this many multiprocessors: a
# constant, as it decides the order of the sums over tokens. The tables hold the warps that one has registers for, for rows of
# 1, 2, ... pieces of one dtype, or mixed; with more pieces there would be spills.
MULTIPROCESSORS = 132
FORWARD_WARPS = (32, 28, 19, 14, 12, 9, 9)
BACKWARD_WARPS = (32, 25, 17, 13, 12, 8, 8)
BACKWARD_NORM_WARPS = (28, 20, 13, 9, 9)
MIXED_WARPS = (20, 14, 8, 8)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_row(row, D: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr):
    """A row of D elements as a tuple of pieces; zeros where it ends."""
    pieces = ()
    for i in tl.static_range(PIECES):
        d = i * WIDTH + tl.arange(0, WIDTH)
        if (i + 1) * WIDTH <= D:
            pieces = pieces + (tl.load(row + d),)
        else:
            pieces = pieces + (tl.load(row + d, mask=d < D, other=0.0),)
    return pieces


@triton.jit
def load_source(
    sources, j, token, following, D: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, MIXED: tl.constexpr
):
    """Row `token` of source j; of j = M, a row that lies ahead: source 0 of the `following` token.

    j is a run-time index and M, in the kernels, a run-time `count`, so that the loop over the sources stays one. Unrolled, its
    sums would be sunk to where they are stored, and all sources kept in registers until then.
    """
    first = sources[0] + tl.where(j < len(sources), token, following) * D
    if MIXED:
        pieces = widen(load_row(first, D, PIECES, WIDTH))
        for k in tl.static_range(1, len(sources)):
            if j == k:
                pieces = widen(load_row(sources[k] + token * D, D, PIECES, WIDTH))
    else:
        pieces = load_row(pick(sources, j, first, token * D), D, PIECES, WIDTH)
    return pieces


@triton.jit
def pick(tensors, j, first, offset):
    chosen = first
    for k in tl.static_range(1, len(tensors)):
        chosen = tl.where(j == k, tensors[k] + offset, chosen)
    return chosen


@triton.jit
def store_row(row, pieces, D: tl.constexpr, WIDTH: tl.constexpr):
    for i in tl.static_range(len(pieces)):
        d = i * WIDTH + tl.arange(0, WIDTH)
        if (i + 1) * WIDTH <= D:
            tl.store(row + d, pieces[i].to(row.dtype.element_ty))
        else:
            tl.store(row + d, pieces[i].to(row.dtype.element_ty), mask=d < D)


@triton.jit
def store_gradient(
    d_sources, passed, given, j, token, dh, p, v, back, ds, weighted_query, dwq,
    D: tl.constexpr, WIDTH: tl.constexpr, MIXED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Stores p dh + back v + ds weighted_query, piece by piece to spare registers; returns dwq + ds v.

    ADD: plus row `token` of passed[j], where bit j of `given` is set.
    """
    pieces = ()
    for i in tl.static_range(len(v)):
        d = i * WIDTH + tl.arange(0, WIDTH)
        wq = tl.load(weighted_query + d, mask=d < D, other=0.0)
        dv = dh[i] * p + v[i] * back + wq * ds
        if ADD:
            later = pick(passed, j, passed[0] + token * D, token * D)
            dv += tl.load(later + d, mask=d < ((given >> j) % 2) * D, other=0.0).to(tl.float32)
        if MIXED:
            for k in tl.static_range(len(d_sources)):
                if j == k:
                    tl.store(d_sources[k] + token * D + d, dv.to(d_sources[k].dtype.element_ty), mask=d < D)
        else:
            row = pick(d_sources, j, d_sources[0] + token * D, token * D)
            tl.store(row + d, dv.to(row.dtype.element_ty), mask=d < D)
        pieces = pieces + (dwq[i] + v[i] * ds,)
    return pieces


@triton.jit
def zeros(PIECES: tl.constexpr, WIDTH: tl.constexpr):
    pieces = ()
    for _ in tl.static_range(PIECES):
        pieces = pieces + (tl.zeros((WIDTH,), dtype=tl.float32),)
    return pieces


@triton.jit
def widen(x):
    pieces = ()
    for i in tl.static_range(len(x)):
        pieces = pieces + (x[i].to(tl.float32),)
    return pieces


@triton.jit
def scaled(x, factor):
    pieces = ()
    for i in tl.static_range(len(x)):
        pieces = pieces + (x[i] * factor,)
    return pieces


@triton.jit
def times(x, y):
    pieces = ()
    for i in tl.static_range(len(x)):
        pieces = pieces + (x[i].to(tl.float32) * y[i].to(tl.float32),)
    return pieces


@triton.jit
def plus(x, factor, y):
    """x + factor y."""
    pieces = ()
    for i in tl.static_range(len(x)):
        pieces = pieces + (x[i] + y[i] * factor,)
    return pieces


@triton.jit
def rounded(x, dtype: tl.constexpr):
    pieces = ()
    for i in tl.static_range(len(x)):
        pieces = pieces + (x[i].to(dtype).to(tl.float32),)
    return pieces


@triton.jit
def product(x, y):
    """The elementwise x y summed over the pieces, so that what is left is a single sum over the threads."""
    total = x[0] * y[0]
    for i in tl.static_range(1, len(x)):
        total += x[i] * y[i]
    return total


@triton.jit
def two_sums(x, y):
    """Both in one exchange between the threads."""
    return tl.split(tl.sum(tl.join(x, y), axis=0))


@triton.jit
def load_piece(row, i, D: tl.constexpr, WIDTH: tl.constexpr, AGAIN: tl.constexpr):
    """Piece i in FP32. A row that is read AGAIN, from a cache, takes no registers in between."""
    d = i * WIDTH + tl.arange(0, WIDTH)
    POLICY: tl.constexpr = "evict_first" if AGAIN else "evict_last"
    return tl.load(row + d, mask=d < D, other=0.0, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def back_through_norm(dy, x, weight, rstd, D: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr):
    """The gradient of the row x, and <x, that gradient> / (rstd^2 eps); x * rstd * weight had the gradient dy."""
    g = ()
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for i in tl.static_range(PIECES):
        g = g + (load_piece(dy, i, D, WIDTH, False) * load_piece(weight, i, D, WIDTH, False),)
        total += g[i] * (load_piece(x, i, D, WIDTH, False) * rstd)
    along = tl.sum(total)
    dx = ()
    for i in tl.static_range(PIECES):
        dx = dx + ((g[i] - load_piece(x, i, D, WIDTH, True) * rstd * (along * (1.0 / D))) * rstd,)
    return dx, along


@triton.jit
def add_weight_gradient(dw, dy, x, rstd, D: tl.constexpr, WIDTH: tl.constexpr):
    pieces = ()
    for i in tl.static_range(len(dw)):
        normed = (load_piece(x, i, D, WIDTH, True) * rstd).to(x.dtype.element_ty).to(tl.float32)
        pieces = pieces + (dw[i] + load_piece(dy, i, D, WIDTH, True) * normed,)
    return pieces


@launched
@triton.jit(do_not_specialize=("tokens", "count"))
def attn_res_fwd_kernel(
    sources,  # M tensors [tokens, D]
    query, norm_weight, out_weight,  # [D]
    mix, normed,  # [tokens, D] (KEEP or not NORM; NORM)
    stats,  # [tokens, 2M + 2] (KEEP): M scores, M inverse norms, log of the sum, inverse norm of the mix; logs to base 2
    tokens, count, eps, out_eps,
    D: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr,
    MIXED: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = len(sources)
    wq = times(load_row(query, D, PIECES, WIDTH), load_row(norm_weight, D, PIECES, WIDTH))
    start = tl.program_id(0).to(tl.int64)
    x = load_source(sources, 0, start, start, D, PIECES, WIDTH, MIXED)
    for token in tl.range(start, tokens, tl.num_programs(0)):
        following = tl.minimum(token + tl.num_programs(0), tokens - 1)
        if KEEP:
            row = stats + token * (2 * M + 2)
        h = zeros(PIECES, WIDTH)
        top, total = -float("inf"), 0.0
        for j in tl.range(count):
            coming = load_source(sources, j + 1, token, following, D, PIECES, WIDTH, MIXED)
            v = widen(x)
            squares, along = two_sums(product(v, v), product(v, wq))
            rstd = tl.rsqrt(squares * (1.0 / D) + eps)
            score = along * rstd * LOG2E
            if KEEP:
                tl.store(row + j, score)
                tl.store(row + M + j, rstd)
            higher = tl.maximum(top, score)
            kept, p = tl.exp2(top - higher), tl.exp2(score - higher)
            top = higher
            total = total * kept + p
            h = plus(scaled(h, kept), p, v)
            x = coming
        h = scaled(h, 1.0 / total)
        if KEEP:
            tl.store(row + 2 * M, top + tl.log2(total))
        if KEEP or not NORM:
            store_row(mix + token * D, h, D, WIDTH)
        if NORM:
            h = rounded(h, mix.dtype.element_ty)
            rstd = tl.rsqrt(tl.sum(product(h, h)) * (1.0 / D) + out_eps)
            if KEEP:
                tl.store(row + 2 * M + 1, rstd)
            y = rounded(scaled(h, rstd), mix.dtype.element_ty)
            store_row(normed + token * D, times(y, load_row(out_weight, D, PIECES, WIDTH)), D, WIDTH)


@launched
@triton.jit(do_not_specialize=("tokens", "count", "given"))
def attn_res_bwd_kernel(
    sources, d_sources,  # M tensors [tokens, D] each
    passed, given,  # M tensors [tokens, D] to be added to the gradients of the sources; in bit j, whether the jth is (ADD)
    weighted_query,  # [D] FP32, query * norm_weight
    out_weight,  # [D]
    mix, dy,  # [tokens, D]; dy is the gradient of the mix, or of its norm (NORM)
    stats,  # [tokens, 2M + 2]
    d_weighted_query, d_out_weight,  # [programs, D] FP32
    tokens, count, out_eps,
    D: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr,
    MIXED: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = len(sources)
    dwq, dw = zeros(PIECES, WIDTH), zeros(PIECES, WIDTH)
    start = tl.program_id(0).to(tl.int64)
    x = load_source(sources, 0, start, start, D, PIECES, WIDTH, MIXED)
    for token in tl.range(start, tokens, tl.num_programs(0)):
        following = tl.minimum(token + tl.num_programs(0), tokens - 1)
        row = stats + token * (2 * M + 2)
        if NORM:
            rstd = tl.load(row + 2 * M + 1)
            dh, along = back_through_norm(dy + token * D, mix + token * D, out_weight, rstd, D, PIECES, WIDTH)
            mean = along * rstd * rstd * out_eps  # but for eps, the gradient of a norm is orthogonal to what it norms
        else:
            dh = widen(load_row(dy + token * D, D, PIECES, WIDTH))
            mean = tl.sum(product(dh, widen(load_row(mix + token * D, D, PIECES, WIDTH))))
        log_total = tl.load(row + 2 * M)
        for j in tl.range(count):
            coming = load_source(sources, j + 1, token, following, D, PIECES, WIDTH, MIXED)
            score, norm = tl.load(row + j), tl.load(row + M + j)
            v = widen(x)
            p = tl.exp2(score - log_total)
            ds = p * (tl.sum(product(dh, v)) - mean) * norm
            back = ds * norm * score * (-1.0 / (D * LOG2E))
            dwq = store_gradient(
                d_sources, passed, given, j, token, dh, p, v, back, ds, weighted_query, dwq, D, WIDTH, MIXED, ADD
            )
            x = coming
        if NORM:
            # Not before the sources: the compiler would postpone the sums, and keep both rows in registers.
            rstd = tl.load(row + 2 * M + 1)
            dw = add_weight_gradient(dw, dy + token * D, mix + token * D, rstd, D, WIDTH)
    store_row(d_weighted_query + start * D, dwq, D, WIDTH)
    if NORM:
        store_row(d_out_weight + start * D, dw, D, WIDTH)


def supports(sources, query, norm_weight, out_weight=None) -> str | None:
    """Why the kernels cannot take these inputs, or None when they can."""
    named = [(f"source {j}", source) for j, source in enumerate(sources)]
    named += [("query", query), ("norm_weight", norm_weight)]
    if out_weight is not None:
        named.append(("out_norm_weight", out_weight))
    for name, tensor in named:
        if tensor.dtype not in DTYPES:
            return f"{name}: expected bfloat16, float16 or float32, got {tensor.dtype}"
    if not 1 <= query.shape[0] <= MOST_CHANNELS:
        return f"D: expected 1 to {MOST_CHANNELS}, got {query.shape[0]}"
    return None


class Grid(NamedTuple):
    """How rows of D elements lie in programs."""

    programs: int
    warps: int
    pieces: int

    @property
    def options(self):
        """The arguments of a launch."""
        return {
            "PIECES": self.pieces,
            "WIDTH": self.warps * 32 * ELEMENTS,
            "num_warps": self.warps,
        }


def _grid(D: int, tokens: int, resident: tuple[int, ...]) -> Grid:
    """`resident` holds, for 1, 2, ... pieces, how many warps a multiprocessor has registers for."""
    warps = 1
    while triton.cdiv(D, warps * 32 * ELEMENTS) > len(resident):
        warps *= 2
    pieces = triton.cdiv(D, warps * 32 * ELEMENTS)
    programs = max(1, resident[pieces - 1] // warps)
    return Grid(min(tokens, MULTIPROCESSORS * programs), warps, pieces)


def _widest(sources) -> torch.dtype:
    return functools.reduce(torch.promote_types, (source.dtype for source in sources))


def _is_mixed(sources) -> bool:
    return len({source.dtype for source in sources}) > 1


def _forward(sources, query, norm_weight, eps, out_weight=None, out_eps=0.0, *, keep):
    """The mix of contiguous sources [..., D], its norm (None without `out_weight`), and what the backward pass needs.

    With `keep` off the statistics are None, and so is the mix if there is a norm of it.
    """
    shape, M, D = sources[0].shape, len(sources), sources[0].shape[-1]
    tokens = sources[0].numel() // D
    norm, dtype = out_weight is not None, _widest(sources)
    mix = sources[0].new_empty(shape if keep or not norm else 0, dtype=dtype)
    normed = sources[0].new_empty(shape, dtype=torch.promote_types(dtype, out_weight.dtype)) if norm else None
    stats = sources[0].new_empty(tokens, 2 * M + 2, dtype=torch.float32) if keep else None
    mixed = _is_mixed(sources)
    grid = _grid(D, tokens, MIXED_WARPS if mixed else FORWARD_WARPS)
    attn_res_fwd_kernel[(grid.programs,)](
        tuple(sources), query, norm_weight, out_weight, mix, normed, stats, tokens, M, eps, out_eps,
        D=D, MIXED=mixed, NORM=norm, KEEP=keep, **grid.options,
    )  # fmt: skip
    return mix, normed, stats


def _backward(sources, query, norm_weight, out_weight, out_eps, mix, stats, dy, passed=None):
    """Gradients of the sources, query, norm_weight and out_weight (None without one); all inputs contiguous.

    `passed`: for each source a gradient to be added to its own, or None; not with sources of several dtypes.
    """
    D = sources[0].shape[-1]
    tokens = sources[0].numel() // D
    norm = out_weight is not None
    mixed = _is_mixed(sources)
    resident = BACKWARD_NORM_WARPS if norm else BACKWARD_WARPS
    grid = _grid(D, tokens, MIXED_WARPS if mixed else resident)
    d_sources = [torch.empty_like(source) for source in sources]
    dwq = mix.new_empty(grid.programs, D, dtype=torch.float32)
    dw = torch.empty_like(dwq) if norm else None
    given = sum(1 << j for j, gradient in enumerate(passed or ()) if gradient is not None)
    added = None
    if given:  # a source in place of a gradient that is not there: a tensor of its dtype, which is not read
        added = tuple(x if gradient is None else gradient for x, gradient in zip(sources, passed, strict=True))
    attn_res_bwd_kernel[(grid.programs,)](
        tuple(sources), tuple(d_sources), added, given, query.float() * norm_weight, out_weight, mix, dy, stats, dwq, dw, tokens, len(sources), out_eps,
        D=D, MIXED=mixed, NORM=norm, ADD=given > 0, **grid.options,
    )  # fmt: skip
    dwq = dwq.sum(0)
    d_query, d_norm_weight = (dwq * norm_weight).to(query.dtype), (dwq * query).to(norm_weight.dtype)
    return d_sources, d_query, d_norm_weight, dw.sum(0).to(out_weight.dtype) if norm else None


class _AttnRes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, eps, out_eps, out_weight, query, norm_weight, *sources):
        mix, normed, stats = _forward(sources, query, norm_weight, eps, out_weight, out_eps, keep=True)
        ctx.save_for_backward(mix, stats, out_weight, query, norm_weight, *sources)
        ctx.out_eps = out_eps
        return mix if out_weight is None else normed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        mix, stats, out_weight, query, norm_weight, *sources = ctx.saved_tensors
        d_sources, d_query, d_norm_weight, d_out_weight = _backward(
            sources, query, norm_weight, out_weight, ctx.out_eps, mix, stats, dy.contiguous()
        )
        return None, None, d_out_weight, d_query, d_norm_weight, *d_sources


class _AttnResNormThrough(torch.autograd.Function):
    """`_AttnRes` that returns the sources as well, so that their later gradients are added in the same launch."""

    @staticmethod
    def forward(ctx, eps, out_eps, out_weight, query, norm_weight, *sources):
        ctx.set_materialize_grads(False)
        return _AttnRes.forward(ctx, eps, out_eps, out_weight, query, norm_weight, *sources), *sources

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, *passed):
        mix, stats, out_weight, query, norm_weight, *sources = ctx.saved_tensors
        if dy is None:
            return *5 * [None], *passed
        passed = [None if gradient is None else gradient.contiguous() for gradient in passed]
        d_sources, d_query, d_norm_weight, d_out_weight = _backward(
            sources, query, norm_weight, out_weight, ctx.out_eps, mix, stats, dy.contiguous(), passed
        )
        return None, None, d_out_weight, d_query, d_norm_weight, *d_sources


def attn_res_fused(sources, query, norm_weight, eps):
    """Arguments and results as in `reference.attn_res_reference`."""
    return attn_res_norm_fused(sources, query, norm_weight, eps, None, 0.0)


def attn_res_norm_fused(sources, query, norm_weight, eps, out_norm_weight, out_eps):
    """Arguments and results as in `reference.attn_res_norm_reference`; the mix alone where `out_norm_weight` is None."""
    sources = [source.contiguous() for source in sources]
    vectors = [None if w is None else w.contiguous() for w in (out_norm_weight, query, norm_weight)]
    out_norm_weight, query, norm_weight = vectors
    with on_device_of(query):
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*vectors, *sources)):
            return _AttnRes.apply(eps, out_eps, *vectors, *sources)
        mix, normed, _ = _forward(sources, query, norm_weight, eps, out_norm_weight, out_eps, keep=False)
        return mix if normed is None else normed


def attn_res_norm_through_fused(sources, query, norm_weight, eps, out_norm_weight, out_eps):
    """As `attn_res_norm_fused`; returns the sources as well, for what reads them later."""
    vectors = out_norm_weight, query, norm_weight
    if _is_mixed(sources) or not (torch.is_grad_enabled() and all(source.requires_grad for source in sources)):
        return attn_res_norm_fused(sources, query, norm_weight, eps, out_norm_weight, out_eps), sources
    sources, vectors = [source.contiguous() for source in sources], [w.contiguous() for w in vectors]
    with on_device_of(query):
        y, *sources = _AttnResNormThrough.apply(eps, out_eps, *vectors, *sources)
    return y, sources
