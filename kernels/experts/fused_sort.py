"""The (token, slot) pairs in the order of their experts: a stable counting sort on the GPU, three launches, no wait.

Integers only. Every size is a bound that shapes alone give, so that the launches fit a CUDA graph; tiles beyond those that
the experts fill have no rows, and their programs end at once. An index outside of 0 ... E - 1 belongs to no expert here:
its pair has no place.
"""

import torch
import triton
import triton.language as tl

from ..launch import launched


# Pairs of a program: their ranks come from comparing all with all, FEW of them at a time.
BLOCK = tl.constexpr(256)
FEW = tl.constexpr(32)
# Tiles of a program that fills the tile table, and experts of one that sums counts.
TABLE = tl.constexpr(64)
COLUMNS = tl.constexpr(32)
# Row tiles that share their columns of weights in L2; the table has a multiple of it.
GROUP = tl.constexpr(8)


@triton.jit
def experts_of(indices, first, pairs, E, COUNT: tl.constexpr):
    """COUNT pairs and their experts, E where there is none."""
    pair = first + tl.arange(0, COUNT)
    expert = tl.load(indices + pair, mask=pair < pairs, other=-1)
    return pair, tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@launched
@triton.jit(do_not_specialize=("pairs",))
def experts_sort_kernel_count(
    indices,  # [pairs] int64
    counts,  # [blocks, EP]
    pairs, E,
    EP: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    _, expert = experts_of(indices, block * BLOCK, pairs, E, BLOCK)
    # A bin of its own for the pairs without expert would double EP where E is a power of two.
    counted = tl.histogram(tl.minimum(expert, E - 1), EP, mask=expert < E)
    tl.store(counts + block.to(tl.int64) * EP + tl.arange(0, EP), counted)


@launched
@triton.jit(do_not_specialize=("blocks",))
def experts_sort_kernel_sum(
    counts,  # [blocks, EP]: in, counts; out, those of all blocks before
    totals,  # [EP]
    blocks,
    EP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = expert < EP
    before = tl.zeros((COLUMNS,), dtype=tl.int32)
    for first in tl.range(0, blocks, ROWS):
        block = first + tl.arange(0, ROWS)[:, None]
        place, there = block.to(tl.int64) * EP + expert[None, :], (block < blocks) & inside[None, :]
        counted = tl.load(counts + place, mask=there, other=0)  # [ROWS, COLUMNS]
        tl.store(counts + place, before[None, :] + tl.cumsum(counted, axis=0) - counted, mask=there)
        before += tl.sum(counted, axis=0)
    tl.store(totals + expert, before, mask=inside)


@launched
@triton.jit(do_not_specialize=("pairs", "blocks", "tiles"))
def experts_sort_kernel_place(
    indices,  # [pairs] int64
    before,  # [blocks, EP]
    totals,  # [EP]
    order, inverse,  # [pairs]
    offsets,  # [E + 1]
    table,  # [3, tiles]
    pairs, blocks, tiles, E,
    EP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    program, e = tl.program_id(0), tl.arange(0, EP)
    total = tl.load(totals + e)
    start = tl.cumsum(total, axis=0) - total  # [EP]
    if program < blocks:
        pair, expert = experts_of(indices, program * BLOCK, pairs, E, BLOCK)
        rank = tl.zeros((BLOCK,), dtype=tl.int32)
        for some in tl.range(program * BLOCK, program * BLOCK + BLOCK, FEW):
            others, other = experts_of(indices, some, pairs, E, FEW)
            earlier = others[None, :] < pair[:, None]
            rank += tl.sum(((expert[:, None] == other[None, :]) & earlier).to(tl.int32), axis=1)
        known = expert < E
        bounded = tl.minimum(expert, E - 1)
        place = tl.gather(start, bounded, axis=0) + rank
        place += tl.load(before + program.to(tl.int64) * EP + bounded, mask=known, other=0)
        tl.store(order + place, pair, mask=known)
        tl.store(inverse + pair, tl.where(known, place, -1), mask=pair < pairs)
    else:
        tile = (program - blocks) * TABLE + tl.arange(0, TABLE)
        filled = (total + (BM - 1)) // BM
        last = tl.cumsum(filled, axis=0)  # [EP]: tiles up to and with the expert
        of = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), axis=1)  # [TABLE]
        owner = tl.minimum(of, E - 1)
        within = (tile - tl.gather(last - filled, owner, axis=0)) * BM
        first = tl.gather(start, owner, axis=0) + within
        rows = tl.minimum(tl.gather(total, owner, axis=0) - within, BM)
        inside = tile < tiles
        tl.store(table + tile, owner, mask=inside)
        tl.store(table + tiles + tile, first, mask=inside)
        tl.store(table + 2 * tiles + tile, tl.where(of < EP, rows, 0), mask=inside)
        if program == blocks:
            tl.store(offsets + e, start, mask=e < E)
            tl.store(offsets + E, tl.sum(total, axis=0))


class Routing:
    """Where the pairs are, for tiles of BM rows; all int32, and views of the one tensor `memory`.

    order [pairs]: the pair at a sorted place. inverse [pairs]: the place of a pair, -1 without one. table [3, tiles]: of
    each tile its expert, first place and rows. offsets [E + 1]: where the places of an expert start.
    """

    def __init__(self, memory: torch.Tensor | None, like: torch.Tensor, E: int, BM: int):
        pairs, self.tiles = like.numel(), bound_on_tiles(like.numel(), E, BM)
        sizes = [pairs, pairs, 3 * self.tiles, E + 1]
        self.memory = like.new_empty(sum(sizes), dtype=torch.int32) if memory is None else memory
        self.order, self.inverse, self.table, self.offsets = self.memory.split(sizes)


def bound_on_tiles(pairs: int, E: int, BM: int) -> int:
    """A tile that is not full is the last one of its expert, and no tile is empty."""
    return triton.cdiv(min(triton.cdiv(pairs, BM) + E, pairs), GROUP.value) * GROUP.value


def launch_sort(indices: torch.Tensor, E: int, BM: int) -> Routing:
    """`indices` is [T, k], contiguous."""
    pairs, EP = indices.numel(), max(32, triton.next_power_of_2(E))
    blocks = triton.cdiv(pairs, BLOCK.value)
    routing = Routing(None, indices, E, BM)
    work = indices.new_empty(blocks + 1, EP, dtype=torch.int32)
    counts, totals = work[:-1], work[-1]
    experts_sort_kernel_count[(blocks,)](indices, counts, pairs, E, EP=EP, num_warps=4)
    experts_sort_kernel_sum[(triton.cdiv(EP, COLUMNS.value),)](counts, totals, blocks, EP=EP, ROWS=128, num_warps=4)
    experts_sort_kernel_place[(blocks + triton.cdiv(routing.tiles, TABLE.value),)](
        indices, counts, totals, routing.order, routing.inverse, routing.offsets, routing.table,
        pairs, blocks, routing.tiles, E, EP=EP, BM=BM, num_warps=8,
    )  # fmt: skip
    return routing
