"""Absorbed MLA on a GPU: attention over the latent cache, cut into pieces of the context; no gradients.

A program takes 64 rows (a row is one head of one query) and one piece of the context. A tile of latents is read once and
multiplied twice: as keys, together with the shared key part, and as values. A second launch merges the pieces in a fixed
order. The queries of up to 64 rows then cost one reading of the cache, which at few heads is all the time there is.
"""

import torch
import triton
import triton.language as tl

from ..dispatch import on_device_of
from ..launch import launched


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MASK_DTYPES = (torch.bool, *DTYPES)
MOST_LATENT, MOST_SHARED, MOST_QUERIES = 512, 64, 16
# Programs that run at a time: one on each multiprocessor of an H200, whose shared memory it fills.
PROGRAMS = 132
# Rounds of them among which the pieces of the context are chosen, the tiles whose time a program's start and end take, and
# the keys below which a piece is not worth its merge.
MOST_ROUNDS, OVERHEAD_TILES, LEAST_KEYS = 4, 3, 128
# Pieces that a program of the merge reads at a time.
MERGED = 256
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(pointer, offset, columns, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """[rows, PADDED] from rows at the offsets [rows], zeros beyond WIDTH; unmasked where nothing is padded."""
    place = pointer + (offset[:, None] + columns[None, :])
    if WIDTH == PADDED:
        return tl.load(place)
    return tl.load(place, mask=columns[None, :] < WIDTH, other=0.0)


@triton.jit
def hide_keys(scores, n, query, value, keys, T: tl.constexpr, LOWEST: tl.constexpr, MASK: tl.constexpr):
    """Scores [BM, BN] in powers of two, with -inf where a query must not see a key.

    n [1, BN] counts from the first key of the tile, which is that of the mask's `value`; `keys` are left from there on.
    """
    if MASK == "causal":
        return tl.where(n < keys - (T - 1) + query, scores, float("-inf"))
    if MASK == "bool":
        return tl.where((n < keys) & (value != 0), scores, float("-inf"))
    value = value.to(tl.float32)
    return tl.where((n < keys) & (value > LOWEST), scores + value * LOG2E, float("-inf"))


@triton.jit
def tile_scores(q, q_shared, c, shared, scale, always, P: tl.constexpr, PRECISION: tl.constexpr):
    """[BM, BN] in powers of two, from q [BM, RP], q_shared [BM, PP], c [RP, BN], shared [PP, BN].

    Triton gives a product that it sees to be used by another all its warps along the rows, and eight have 128 rows where
    there are 64: both halves would compute the same. It does not look through a conditional; `always` is true. For the same
    reason the two products do not share their sums.
    """
    scores = tl.zeros((q.shape[0], c.shape[1]), dtype=tl.float32)
    if always:
        scores = tl.dot(q, c, input_precision=PRECISION) * scale
        if P > 0:
            scores += tl.dot(q_shared, shared, input_precision=PRECISION) * scale
    return scores


@launched
@triton.jit(do_not_specialize=("S", "piece", "splits", "apart"))
def mla_decode_kernel(
    q_latent, q_rope,  # [B, apart, rows, R], [B, apart, rows, P]; a row is one of H heads of one of T queries
    latent, k_rope,  # [B, S, R], [B, S, P]
    mask,  # [B, 1, apart, S] unless causal
    o,  # [B, apart, splits, rows, R]: FP32, or with one split the result
    lse,  # [B, apart, splits, rows] FP32, of powers of two
    S, piece, splits, apart, scale,
    stride_latent_b, stride_latent_s, stride_rope_b, stride_rope_s, stride_mask_b, stride_mask_t, stride_mask_s,
    T: tl.constexpr, H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, RP: tl.constexpr, PP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, LOWEST: tl.constexpr, MASK: tl.constexpr, FINAL: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = T * H
    BLOCKS: tl.constexpr = (ROWS + BM - 1) // BM
    # Blocks of rows, then queries next to each other: they read the same keys at the same time.
    block, part = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    t, part = (part % apart).to(tl.int64), part // apart
    split, b = part % splits, (part // splits).to(tl.int64)
    sequence = b * apart + t
    m, n = block * BM + tl.arange(0, BM), tl.arange(0, BN)
    query = (m // H)[:, None] if T > 1 else tl.zeros((1, 1), dtype=tl.int32)
    r, p = tl.arange(0, RP), tl.arange(0, PP)
    # Rows and keys beyond the end read the last ones; their results are not stored, their scores hidden.
    row = tl.minimum(m, ROWS - 1)
    q = load_rows(q_latent + sequence * ROWS * R, row * R, r, R, RP)  # [BM, RP]
    q_shared = q
    if P > 0:
        q_shared = load_rows(q_rope + sequence * ROWS * P, row * P, p, P, PP)  # [BM, PP]
    top = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM, BN), dtype=tl.float32)  # of every BN-th key
    acc = tl.zeros((BM, RP), dtype=tl.float32)
    first = split * piece
    for start in tl.range(first, tl.minimum(first + piece, S), BN, num_stages=STAGES):
        at = tl.cast(start, tl.int64)
        key = tl.minimum(n, S - start - 1)
        tile = latent + (b * stride_latent_b + at * stride_latent_s)
        c = load_rows(tile, key * stride_latent_s, r, R, RP)  # [BN, RP]
        shared = tl.trans(c)
        if P > 0:
            shared_tile = k_rope + (b * stride_rope_b + at * stride_rope_s)
            shared = tl.trans(load_rows(shared_tile, key * stride_rope_s, p, P, PP))  # [PP, BN]
        value = n[None, :]
        if MASK != "causal":
            mask_tile = mask + (b * stride_mask_b + t * stride_mask_t + at * stride_mask_s)
            value = tl.load(mask_tile + n[None, :] * stride_mask_s, mask=n[None, :] < S - start, other=0)
        # Always true. Triton starts the loads of the next tile before a conditional, but after all else of a step: the next
        # step would wait for them at once. There is no room for a third tile.
        if start < S:
            scores = tile_scores(q, q_shared, tl.trans(c), shared, scale, splits > 0, P, PRECISION)
            scores = hide_keys(scores, n[None, :], query, value, S - start, T, LOWEST, MASK)
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            # Rows that have seen nothing: any finite number in place of -inf, whose difference from itself is not a number.
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(scores - shift[:, None])
            fade = tl.exp2(top - shift)
            total = total * fade[:, None] + weight
            acc = acc * fade[:, None]
            acc = tl.dot(weight.to(c.dtype), c, acc, input_precision=PRECISION)
            top = new_top
    total = tl.sum(total, axis=1)
    acc = acc * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]  # zeros where no key was seen
    to = (sequence * splits + split) * ROWS + m
    there = m < ROWS
    tl.store(o + to[:, None] * R + r[None, :], acc.to(o.dtype.element_ty), mask=there[:, None] & (r < R)[None, :])
    if not FINAL:
        tl.store(lse + to, top + tl.log2(total), mask=there)


@launched
@triton.jit(do_not_specialize=("rows", "splits"))
def mla_merge_kernel(
    parts,  # [sequences, splits, rows, R] FP32
    lse,  # [sequences, splits, rows] FP32, of powers of two
    o,  # [sequences, rows, R]
    rows, splits,
    R: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    row, r = tl.program_id(0), tl.program_id(1) * BR + tl.arange(0, BR)
    b = (row // rows).to(tl.int64)
    first = b * splits * rows + row % rows
    every = tl.arange(0, SP)
    sizes = tl.load(lse + first + every * rows, mask=every < splits, other=float("-inf"))
    top = tl.max(sizes, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(sizes - top), axis=0)
    acc = tl.zeros((BR,), dtype=tl.float32)
    for start in range(0, splits, BS):
        split = start + tl.arange(0, BS)
        place = first + split * rows
        weight = tl.exp2(tl.load(lse + place, mask=split < splits, other=float("-inf")) - top)
        inside = (split < splits)[:, None] & (r < R)[None, :]
        acc += tl.sum(
            weight[:, None] * tl.load(parts + place[:, None] * R + r[None, :], mask=inside, other=0.0), axis=0
        )
    acc = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(o + row.to(tl.int64) * R + r, acc.to(o.dtype.element_ty), mask=r < R)


def supports(q_latent, q_rope, latent, k_rope, mask) -> str | None:
    """Why the kernels cannot take these inputs, or None when they can."""
    tensors = {"q_latent": q_latent, "q_rope": q_rope, "latent": latent, "k_rope": k_rope}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.dtype != q_latent.dtype:
            return f"{name}: expected bfloat16, float16 or float32 like all others, got {tensor.dtype}"
    for name, tensor in tensors.items() if torch.is_grad_enabled() else ():
        if tensor.requires_grad:
            return f"{name}: expected a tensor without gradient, since the kernels have no backward pass"
    T, R, P = q_latent.shape[1], q_latent.shape[3], q_rope.shape[3]
    for name, size, most in (("R", R, MOST_LATENT), ("P", P, MOST_SHARED), ("T", T, MOST_QUERIES)):
        if size > most:
            return f"{name}: expected at most {most}, got {size}"
    if mask is not None and mask.dtype not in MASK_DTYPES:
        return f"mask: expected bool, bfloat16, float16 or float32, got {mask.dtype}"
    return None


def _tiles(dtype: torch.dtype, R: int, P: int) -> dict:
    """Sizes of the tiles. BF16 products below 64 in any direction are miscompiled by Triton 3.6."""
    if dtype == torch.float32:
        widths = {"RP": max(16, triton.next_power_of_2(R)), "PP": max(16, triton.next_power_of_2(P))}
        return widths | {"BM": 16, "BN": 16, "PRECISION": "ieee", "STAGES": 1, "num_warps": 4}
    widths = {"RP": max(64, triton.next_power_of_2(R)), "PP": max(64, triton.next_power_of_2(P))}
    warps = 8 if widths["RP"] > 128 else 4  # at most 128 registers of sums in each thread
    return widths | {"BM": 64, "BN": 64, "PRECISION": "tf32", "STAGES": 2, "num_warps": warps}


def _pieces(S: int, programs: int, BN: int) -> tuple[int, int]:
    """Keys of a piece and number of pieces, where `programs` share each: a few full rounds of programs, or one piece."""

    def time(splits):
        return triton.cdiv(programs * splits, PROGRAMS) * (triton.cdiv(tiles, splits) + OVERHEAD_TILES)

    tiles, most = triton.cdiv(S, BN), max(1, S // LEAST_KEYS)
    rounds = (max(1, min(most, n * PROGRAMS // programs)) for n in range(1, MOST_ROUNDS + 1))
    piece = triton.cdiv(tiles, min([1, *rounds], key=time)) * BN
    return piece, triton.cdiv(S, piece)


def launch(q_latent, q_rope, latent, k_rope, scale, mask):
    """o_latent [B, T, H, R]."""
    B, T, H, R = q_latent.shape
    S, P = latent.shape[1], k_rope.shape[2]
    if q_latent.numel() == 0 or S == 0:
        return torch.zeros_like(q_latent)
    # Under a mask every query is a sequence of its own: a program would else load [64, 64] of it for each tile of keys.
    together = T if mask is None else 1
    apart, rows = T // together, together * H
    tiles = _tiles(q_latent.dtype, R, P)
    blocks = B * apart * triton.cdiv(rows, tiles["BM"])
    piece, splits = _pieces(S, blocks, tiles["BN"])
    o = torch.empty_like(q_latent)
    parts = o if splits == 1 else o.new_empty(B * apart, splits, rows, R, dtype=torch.float32)
    lse = o.new_empty(B * apart, splits, rows, dtype=torch.float32)
    strides = (0, 0, 0) if mask is None else (mask.stride(0), mask.stride(2), mask.stride(3))
    form = "causal" if mask is None else "bool" if mask.dtype == torch.bool else "additive"
    mla_decode_kernel[(splits * blocks,)](
        q_latent, q_rope, latent, k_rope, q_latent if mask is None else mask, parts, lse,
        S, piece, splits, apart, scale * LOG2E.value, *latent.stride()[:2], *k_rope.stride()[:2], *strides,
        T=together, H=H, R=R, P=P, LOWEST=torch.finfo(mask.dtype).min if form == "additive" else 0.0, MASK=form,
        FINAL=splits == 1, **tiles,
    )  # fmt: skip
    if splits > 1:
        BR, SP = min(32, tiles["RP"]), triton.next_power_of_2(splits)
        BS = min(MERGED, SP)
        mla_merge_kernel[(B * apart * rows, triton.cdiv(R, BR))](
            parts, lse, o, rows, splits, R=R, BR=BR, BS=BS, SP=SP, num_warps=max(1, BS // 32)
        )
    return o


def _readable(x: torch.Tensor) -> torch.Tensor:
    """A cache may have any strides, but neighbouring channels must be neighbours."""
    return x if x.stride(-1) == 1 else x.contiguous()


def mla_decode_fused(q_latent, q_rope, latent, k_rope, *, scale, mask=None):
    """Arguments and results as in `api.mla_decode`."""
    with on_device_of(q_latent):
        return launch(
            q_latent.contiguous(), q_rope.contiguous(), _readable(latent), _readable(k_rope), float(scale), mask
        )
