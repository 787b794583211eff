"""`moe-lc bench mla`: one token of absorbed MLA over the latent cache of one long sequence, beside its two floors.

BF16, B = T = 1. S is the length of the cache, H the number of heads, which all read the same latents.
"""

import argparse
from functools import partial

import torch

from ..kernels.mla import mla_decode
from . import bench_operator
from .bench import OURS
from .bench_operator import EAGER, GRAPH, Case, Implementation, Inputs, Problem


LATENT, SHARED = 512, 64
SCALE = 192**-0.5
CHECKED_TOKENS = 2048
NOTES = """
of floor: share of the measured copy bandwidth ({bandwidth:.2f} TB/s) on the bytes of the latent cache / share of the
measured rate of a large matrix product ({matmul:.0f} TFLOP/s). extra GB: peak memory of a call."""


def make_inputs(case: Case, kind: str, device: torch.device, seed: int) -> Inputs:
    S, H = case["S"], case["H"]
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    queries = {"q_latent": random(1, 1, H, LATENT), "q_rope": random(1, 1, H, SHARED)}
    return queries | {"latent": random(1, S, LATENT), "k_rope": random(1, S, SHARED)}


def cost(case: Case, x: Inputs, direction: str) -> tuple[float, float]:
    """Bytes: the latents and the shared keys, 2 (R + P) a cached token, are read once for all heads.

    Operations: 2 (R + P) for a score and 2 R for a value, per head and cached token.
    """
    S, H = case["S"], case["H"]
    return 2.0 * S * (LATENT + SHARED), 2.0 * S * H * (2 * LATENT + SHARED)


def call(impl: str, x: Inputs) -> Inputs:
    return {"o": mla_decode(**x, scale=SCALE, impl=impl)}


PROBLEM = Problem(
    name="mla",
    letters=("S", "H"),
    sizes=((131072, 32), (131072, 96), (1048576, 32), (1048576, 96)),
    kinds=("-",),
    make_inputs=make_inputs,
    reference=partial(call, "reference"),
    directions=lambda case: (GRAPH, EAGER),
    trained=(),
    rows=("o",),
    small=lambda case: case | {"S": min(case["S"], CHECKED_TOKENS)},
    take=lambda x, rows: x,  # the one token needs the whole cache, which fits in FP64
    cost=cost,
    limits={"o": 1e-2, "o at size": 1e-2, "not finite": 0.0},
    notes=NOTES,
)


def implementations() -> list[Implementation]:
    return [Implementation(OURS, partial(call, "triton"))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bench_operator.add_arguments(PROBLEM, parser)


def run(args: argparse.Namespace) -> int:
    return bench_operator.run(PROBLEM, implementations, args)
