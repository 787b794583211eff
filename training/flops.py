"""What a step costs and what the device could do: the two sides of MFU."""

import statistics
import time
from collections.abc import Iterable

import torch

from ..conversion.count import Count


def training_flops(counted: Count, lengths: Iterable[int]) -> int:
    """FLOPs of a forward and a backward pass over documents of `lengths` tokens.

    KDA and the active parameters cost the same for every token, MLA half of the document's length for each. What
    activation checkpointing computes again is not counted: MFU is of useful work.
    """
    return 3 * sum(length * counted.flops_per_token(length) for length in lengths)


def measure_peak(device: torch.device | str) -> float:
    """FLOP/s of a large matrix product: BF16 on CUDA, FP32 with torch's current threads elsewhere. Takes about a second."""
    if torch.device(device).type == "cuda":
        from .bench import Cuda

        with torch.cuda.device(device):
            return Cuda().matmul_rate
    n = 768
    a, b = torch.randn(2, n, n, device=device)
    a @ b  # the first product also allocates
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - begun)
    return 2 * n**3 / statistics.median(times)
