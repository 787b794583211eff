"""A few tokens on packed experts, forward alone: three launches that read the codes of the experts that were hit, each once.

As `kernels/experts/fused_decode.py`: the program of the first pair of an expert has its weights, and nothing is sorted. But
four-bit weights are read so fast that products with 64 tokens would take longer: of the tokens, only those that chose the expert
are in a tile, 16 at a time, and only if there are more of them are weights read again.

Weights are the left side of a product. The tensor cores want 16 columns of it spread over four threads, whereas a thread
loads the 16 bytes of a block: with rows and columns of a tile in another order (`fragment_row`, `fragment_column`) each
thread already has what it needs, and nothing goes through shared memory once it is dequantised. The sum over columns is
in that order. Two warps are few enough that Triton takes these instructions, which have weights in registers.

Scales lie row by row, a byte each. Four at a time are what can be copied ahead without the threads: a word.
"""

import torch
import triton
import triton.language as tl

from ..dispatch import for_descriptors
from ..experts.fused_decode import expert_of, experts_fwd_kernel_decode_combine
from ..experts.fused_rows import glu
from ..launch import launched
from .fused_tile import dequantized


# Programs that keep the memory of a GPU busy: eight of two warps for each multiprocessor.
PROGRAMS = 1056


@triton.jit
def tokens_of(slot, first, K: tl.constexpr, ALL: tl.constexpr, BT: tl.constexpr):
    """Of the tokens with a slot below K, those from the `first` on: BT tokens, their slots, and which of them there are."""
    chosen = (slot < K).to(tl.int32)
    number = first + tl.arange(0, BT)
    place = tl.where(chosen > 0, tl.cumsum(chosen, axis=0) - 1, -1)
    same = (place[:, None] == number[None, :]).to(tl.int32)  # [ALL, BT]
    t = tl.sum(same * tl.arange(0, ALL)[:, None], axis=0)
    return t, tl.sum(same * slot[:, None], axis=0), number < tl.sum(chosen, axis=0)


@triton.jit
def fragment_row(n):
    """The row of a tile that is loaded as its row n: two warps load eight rows each, and multiply sixteen each."""
    return n // 32 * 32 + n // 8 % 2 * 16 + n // 16 % 2 * 8 + n % 8


@triton.jit
def fragment_column(k):
    """The column that is multiplied as column k: four threads load 32 each, and multiply eight each, four times."""
    return k // 128 * 128 + k // 8 % 4 * 32 + k // 32 % 4 * 8 + k % 8


@triton.jit
def fragments(codes, words, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """[ROWS, COLUMNS] of codes [ROWS, COLUMNS / 2] and words of four scales [ROWS / 4, COLUMNS / 32].

    Rows come in the order of `fragment_row` and leave in theirs; columns leave in the order of `fragment_column`.
    """
    shift = 8 * tl.arange(0, 4)[None, :, None]
    scales = tl.reshape((words[:, None, :] >> shift) & 255, (ROWS, COLUMNS // 32))
    tile = dequantized(codes, scales, ROWS, COLUMNS, DTYPE)
    tile = tl.reshape(tile, (ROWS // 32, 2, 2, 8, COLUMNS // 128, 4, 4, 8))
    return tl.reshape(tl.permute(tile, (0, 2, 1, 3, 4, 6, 5, 7)), (ROWS, COLUMNS))


@launched
@triton.jit(do_not_specialize=("T",))
def mxfp4_fwd_kernel_decode_gate_up(
    x,  # [T, D]
    indices,  # [T, K]
    codes,  # [E, 2I, width]
    scales,  # [E, D / 32, 2I / 4] words
    h,  # [T, K, I]: in the first slot of every token and expert
    T, D, I, E, width,
    K: tl.constexpr, KP: tl.constexpr, PAIRS: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
    ALL: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The rows of a tile are BN / 2 gate rows, and the up rows of the same channels. EVEN: D is a multiple of BK."""
    expert, slots = expert_of(indices, T * K, E, T, K, KP, PAIRS, ALL)
    if expert >= 0:
        BC: tl.constexpr = BN // 2
        first = tl.program_id(1) * BC
        n, byte, group = fragment_row(tl.arange(0, BN)), tl.arange(0, BK // 2), tl.arange(0, BK // 32)
        word, k = fragment_row(4 * tl.arange(0, BN // 4)), fragment_column(tl.arange(0, BK))
        # I is a multiple of four: of the rows of a word either all or none are there.
        row = n // BC * I + tl.minimum(first + n % BC, I - 1)
        row_word = word // BC * (I // 4) + tl.minimum(first + word % BC, I - 4) // 4
        first_codes = codes + (expert * 2 * I + row).to(tl.int64)[:, None] * width + byte[None, :]
        first_words = scales + (expert.to(tl.int64) * (D // 32) + group)[None, :] * (I // 2) + row_word[:, None]
        for some in tl.range(0, tl.sum((slots < K).to(tl.int32), axis=0), BT):
            t, slot, there = tokens_of(slots, some, K, ALL, BT)
            left, factor, right = first_codes, first_words, x + t[None, :] * D + k[:, None]
            acc = tl.zeros((BN, BT), dtype=tl.float32)
            for done in tl.range(0, D, BK, num_stages=STAGES):
                if EVEN:
                    packed, four, tokens = (
                        tl.load(left),
                        tl.load(factor),
                        tl.load(right, mask=there[None, :], other=0.0),
                    )
                else:
                    packed = tl.load(left, mask=byte[None, :] < (D - done) // 2, other=0)
                    four = tl.load(factor, mask=group[None, :] < (D - done) // 32, other=0)
                    tokens = tl.load(right, mask=there[None, :] & (k[:, None] < D - done), other=0.0)
                tile = fragments(packed, four, BN, BK, x.dtype.element_ty)
                acc = tl.dot(tile, tokens, acc, input_precision=PRECISION)
                left += BK // 2
                factor += (BK // 32) * (I // 2)
                right += BK
            halves = tl.reshape(acc.to(h.dtype.element_ty), (2, BC, BT))
            gate, up = tl.split(tl.permute(halves, (1, 2, 0)))
            c = first + tl.arange(0, BC)
            place = h + (t * K + slot)[None, :] * I + c[:, None]
            value = glu(gate.to(tl.float32), up.to(tl.float32), BETA, LINEAR_BETA).to(h.dtype.element_ty)
            tl.store(place, value, mask=there[None, :] & (c[:, None] < I))


@launched
@triton.jit(do_not_specialize=("T",))
def mxfp4_fwd_kernel_decode_down(
    h,  # [T, K, I]
    indices,  # [T, K]
    codes,  # [E, D, width]
    scales,  # [E, I / 32, D / 4] words
    rows,  # [parts, T, K, D] FP32: each part sums over 2 half of the I channels
    T, D, I, E, width, half,
    K: tl.constexpr, KP: tl.constexpr, PAIRS: tl.constexpr,
    ALL: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """EVEN: I is the sum of the parts, and each is a multiple of BK."""
    expert, slots = expert_of(indices, T * K, E, T, K, KP, PAIRS, ALL)
    if expert >= 0:
        part, first = tl.program_id(2), tl.program_id(1) * BN
        begin = 2 * part * half
        n, byte, group = fragment_row(tl.arange(0, BN)), tl.arange(0, BK // 2), tl.arange(0, BK // 32)
        word, k = fragment_row(4 * tl.arange(0, BN // 4)), fragment_column(tl.arange(0, BK))
        row, row_word = tl.minimum(first + n, D - 1), tl.minimum(first + word, D - 4) // 4
        first_codes = codes + part * half + (expert * D + row).to(tl.int64)[:, None] * width + byte[None, :]
        first_words = scales + (expert.to(tl.int64) * (I // 32) + begin // 32 + group)[None, :] * (D // 4)
        for some in tl.range(0, tl.sum((slots < K).to(tl.int32), axis=0), BT):
            t, slot, there = tokens_of(slots, some, K, ALL, BT)
            left, factor = first_codes, first_words + row_word[:, None]
            right = h + (t * K + slot)[None, :] * I + (begin + k)[:, None]
            acc = tl.zeros((BN, BT), dtype=tl.float32)
            for done in tl.range(0, 2 * half, BK, num_stages=STAGES):
                if EVEN:
                    packed, four, tokens = (
                        tl.load(left),
                        tl.load(factor),
                        tl.load(right, mask=there[None, :], other=0.0),
                    )
                else:
                    rest = I - begin - done
                    packed = tl.load(left, mask=byte[None, :] < rest // 2, other=0)
                    four = tl.load(factor, mask=group[None, :] < rest // 32, other=0)
                    tokens = tl.load(right, mask=there[None, :] & (k[:, None] < rest), other=0.0)
                tile = fragments(packed, four, BN, BK, h.dtype.element_ty)
                acc = tl.dot(tile, tokens, acc, input_precision=PRECISION)
                left += BK // 2
                factor += (BK // 32) * (D // 4)
                right += BK
            c = first + tl.arange(0, BN)
            place = rows + ((part * T + t) * K + slot).to(tl.int64)[None, :] * D + c[:, None]
            tl.store(place, acc, mask=there[None, :] & (c[:, None] < D))


def tiles(pairs: int, D: int, I: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Rows of a program in the first and in the second product, and parts of the second sum."""
    wide = (dtype != torch.float32 and pairs * triton.cdiv(rows, 64) >= PROGRAMS for rows in (2 * I, D))
    first, second = (64 if it_is else 32 for it_is in wide)
    parts = 1
    while parts < 8 and pairs * triton.cdiv(D, second) * parts < PROGRAMS // 2 and 2 * parts * 256 <= I:
        parts *= 2
    return first, second, parts


def launch_decode(tensors: list[torch.Tensor], beta, linear_beta, precision: str) -> torch.Tensor:
    """x, indices, weights, then bytes and scales of both projections, contiguous."""
    x, indices, weights, gate_up, _, down, _ = tensors
    words = [for_descriptors(tensors[i]).flatten().view(torch.int32) for i in (4, 6)]
    (T, D), k, (E, _, width) = x.shape, indices.shape[1], down.shape
    I, BK = 2 * width, 128
    first, second, parts = tiles(T * k, D, I, x.dtype)
    depth = triton.cdiv(triton.cdiv(I, parts), BK) * BK
    h, y = x.new_empty(T, k, I), torch.empty_like(x)
    rows = x.new_empty(parts, T, k, D, dtype=torch.float32)
    KP = triton.next_power_of_2(k)
    whom = {"K": k, "KP": KP, "PAIRS": triton.next_power_of_2(T * k), "ALL": max(16, triton.next_power_of_2(T))}
    in_fp32 = x.dtype == torch.float32
    tile = {
        "BT": 16,
        "BK": BK,
        "PRECISION": precision,
        "STAGES": 1 if in_fp32 else 5,
        "num_warps": 4 if in_fp32 else 2,
    }
    mxfp4_fwd_kernel_decode_gate_up[(T * k, triton.cdiv(2 * I, first))](
        x, indices, gate_up, words[0], h, T, D, I, E, D // 2,
        BETA=beta, LINEAR_BETA=linear_beta, BN=first, EVEN=D % BK == 0, **whom, **tile,
    )  # fmt: skip
    mxfp4_fwd_kernel_decode_down[(T * k, triton.cdiv(D, second), parts)](
        h, indices, down, words[1], rows, T, D, I, E, width, depth // 2,
        BN=second, EVEN=depth * parts == I, **whom, **tile,
    )  # fmt: skip
    BC = min(1024, triton.next_power_of_2(D))
    experts_fwd_kernel_decode_combine[(T, triton.cdiv(D, BC))](
        rows, indices, weights, y, T, D, E, K=k, KP=KP, PARTS=parts, BC=BC, num_warps=4
    )  # fmt: skip
    return y
