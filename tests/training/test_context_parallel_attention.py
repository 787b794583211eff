"""Attention of the last queries = masked attention; the chunks of all ranks are the sequence."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from modeling_moe_lc.training.context_parallel_attention import chunk_bounds, lower_right_attention, own_chunks


def relative(x, reference):
    return ((x - reference).norm() / reference.norm()).item()


def compare(n, S, K, V, device, dtype):
    generator = torch.Generator().manual_seed(n + S)
    shapes = (2, 3, n, K), (2, 3, S, K), (2, 3, S, V)
    leaves = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    do = torch.randn(2, 3, n, V, generator=generator).to(device, dtype)
    o = lower_right_attention(*leaves, 0.2)
    mask = torch.ones(n, S, dtype=torch.bool, device=device).tril(S - n)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = F.scaled_dot_product_attention(*wide, mask, scale=0.2)
    found = torch.autograd.grad(o, leaves, do)
    gradients = torch.autograd.grad(expected, wide, do.double())
    return max(itertools.starmap(relative, zip((o, *found), (expected, *gradients), strict=True)))


@pytest.mark.parametrize(("n", "S"), [(1, 2), (1, 40), (17, 17), (17, 18), (40, 100)])
def test_last_queries(n, S):
    assert compare(n, S, 24, 16, "cpu", torch.float64) < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "S"), [(1, 40), (256, 256), (200, 5000), (4096, 4100)])
def test_last_queries_on_a_gpu(n, S):
    assert compare(n, S, 192, 128, "cuda", torch.bfloat16) < 1e-2


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
