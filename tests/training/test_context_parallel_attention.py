"""The chunks that ranks compute are the sequence, and equal work."""

import itertools

import pytest

from modeling_moe_lc.training.context_parallel_attention import chunk_bounds, own_chunks


@pytest.mark.parametrize("lengths", [[7], [4, 4], [1, 1, 1], [37, 5], [3, 9, 1, 20, 2]])
def test_chunks_are_the_sequence_and_each_has_one_rank(lengths):
    bounds = chunk_bounds(lengths)
    assert bounds[0] == 0 and bounds[::2] == [0, *itertools.accumulate(lengths)] and bounds == sorted(bounds)
    turns = [chunk for rank in range(len(lengths)) for chunk in own_chunks(rank, len(lengths))]
    assert sorted(turns) == list(range(2 * len(lengths)))


def test_even_lengths_are_even_work():
    bounds = chunk_bounds([64] * 4)
    work = [(bounds[chunk] + bounds[chunk + 1]) / 2 for chunk in range(8)]
    assert len({sum(work[chunk] for chunk in own_chunks(rank, 4)) for rank in range(4)}) == 1
