"""What a step costs and what the device could do: the two sides of MFU."""

import statistics
import time
from collections.abc import Iterable

import torch

from ..configuration.configuration_moe_lc import MoeLcVisionConfig
from ..conversion.count import Count


def training_flops(counted: Count, lengths: Iterable[int]) -> int:
    """FLOPs of a forward and a backward pass over documents of `lengths` tokens.

    KDA and the active parameters cost the same for every token, MLA half of the document's length for each. What
    activation checkpointing computes again is not counted: MFU is of useful work.
    """
    return 3 * sum(length * counted.flops_per_token(length) for length in lengths)


def adapter_flops(counted: Count, lengths: Iterable[int]) -> int:
    """As `training_flops`, where the weights are frozen and have no gradients; what an adapter adds is left out."""
    return 2 * sum(length * counted.flops_per_token(length) for length in lengths)


def vision_flops(config: MoeLcVisionConfig, grid_thws: torch.Tensor) -> float:
    """FLOPs of the matrix products of tower and projector in a forward pass over items of `grid_thws` [items, 3]: 2 per
    weight and patch, or token, and 2 each for scores and values, per channel and pair of patches of an item."""
    lengths, areas = grid_thws.double().prod(1), grid_thws[:, 1:].double().prod(1)
    patches, pairs = lengths.sum().item(), lengths.square().sum().item()
    width, merged, layers = config.vt_hidden_size, config.patches_per_token, config.vt_num_hidden_layers
    block = 4 * width * config.qkv_hidden_size + 2 * width * config.vt_intermediate_size
    projector = merged * width * (merged * width + config.text_hidden_size)
    weights = patches * (3 * config.patch_size**2 * width + layers * block) + areas.sum().item() / merged * projector
    return 2 * weights + 4 * layers * config.qkv_hidden_size * pairs


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
