"""Which tiles the products take, by their sizes: measured on an H200, README.md has the figures."""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Rows, columns and steps of a program, its warps, and the steps that are loaded ahead."""

    BM: int
    BN: int
    BK: int
    num_warps: int
    STAGES: int


def rows_per_tile(pairs: int, E: int, dtype: torch.dtype) -> int:
    """Half-empty tiles of 128 rows cost more than the slower ones of 64 where an expert has few rows."""
    return 128 if dtype != torch.float32 and pairs >= 160 * E else 64


def row_tile(BM: int, depth: int, columns: int, dtype: torch.dtype, longest: int = 1024) -> Tile:
    """For the products over rows, from `longest` steps on with wide tiles. BF16 ones of Triton 3.6 need 64 in each direction.

    FP32 ones, three products in a step, are not safe to load ahead for: buffers are filled while they are still read.
    """
    if dtype == torch.float32:
        return Tile(BM, 64, 32, 4, 1)
    if BM == 64:
        return Tile(64, 128, 64, 4, 3)
    # Two programs of 128 columns on a multiprocessor hide the start and the end of a short sum, but read more from L2.
    return Tile(128, 256, 64, 8, 4) if depth >= longest and columns >= 256 else Tile(128, 128, 64, 4, 3)


def tall_rows(pairs: int, E: int, D: int, dtype: torch.dtype) -> int:
    """Rows of a tile whose parts share their weights (`fused_tall.py`), 0 where tiles have one part.

    Experts of up to 192 rows have one tile, and their weights are read once, where two or three tiles would read them.
    """
    return 192 if dtype != torch.float32 and pairs >= 96 * E and D >= 1024 else 0


def tall_tile(BM: int, depth: int, columns: int) -> Tile:
    """One program on a multiprocessor, whose registers are full of sums, or two, which hide the ends of short sums."""
    return Tile(BM, 256, 64, 8, 4) if depth >= 1024 and columns >= 256 else Tile(BM, 128, 64, 4, 2)


def weight_tile(pairs: int, E: int, width: int, dtype: torch.dtype, *, gather_a: bool) -> Tile:
    """For the gradients of the projections: sums over the rows of an expert. `width`: columns of the operand in order.

    Rows are found through an index, which takes half of the stages: five of them load two steps ahead, four one step; seven
    would not fit where D or I is no multiple of 16.
    The gathered operand, columns of BM (`gather_a`) or of BN, has the narrow side: its pieces of 16 bytes cost the threads an
    address each, the other one is fetched by the copy engine.
    """
    if dtype == torch.float32:
        return Tile(64, 64, 32, 4, 1)
    if pairs < 768 * E or width % 256:
        return Tile(128, 128, 64, 4, 4)
    return Tile(128, 256, 64, 8, 5) if gather_a else Tile(256, 128, 64, 8, 5)
