"""`moe-lc bench router`: the choice of experts beside the same in torch, eager and compiled, and beside the byte floor.

FP32 logits, sigmoid scores, a bias that takes part in the choice only; forward, as the choice costs nothing backward.
"""

import argparse
from functools import partial

import torch

from ..kernels.router import route
from . import bench_operator
from .bench import OURS
from .bench_operator import FORWARD, Case, Implementation, Inputs, Problem, compiled


CHECKED_TOKENS = 2048
BINS = 1000
RECORDED = {8192: (0.49, 0.32), 65536: (2.82, 2.47)}  # T: ms in torch, and compiled, on one NVIDIA H200, torch 2.11.0
NOTES = """
vs rival: time of the faster of torch's over this one. of floor: time in which the bytes that must be read and written could
be copied ({bandwidth:.2f} TB/s measured) over the time taken; there are no products. extra GB: peak memory of a call.
recorded: measured before on one H200, not in this run."""


def make_inputs(case: Case, kind: str, device: torch.device, seed: int) -> Inputs:
    E, k, T = (case[name] for name in "EkT")
    generator = torch.Generator(device).manual_seed(seed)
    x = {
        "logits": torch.randn(T, E, generator=generator, device=device),
        "bias": 0.1 * torch.randn(E, generator=generator, device=device),
        "top_k": torch.empty(
            k, 0, device=device
        ),  # a number that travels as a shape, so that a change of it compiles anew
    }
    return x | ({"histogram": torch.zeros(E, BINS, dtype=torch.int64, device=device)} if kind == "histogram" else {})


def cost(case: Case, x: Inputs, direction: str) -> tuple[float, float]:
    """Bytes: FP32 logits are read, 4 E a token; per choice an INT64 and an FP32 are written, and a cutoff per token.

    A histogram of INT64 is read and written once, 16 E bins bytes. The bias and the counts are too small to count.
    """
    E, k, T = (case[name] for name in "EkT")
    return T * (4.0 * E + 12 * k + 4) + (16 * x["histogram"].numel() if "histogram" in x else 0), 0.0


def take(x: Inputs, rows: torch.Tensor) -> Inputs:
    return {name: x[name] for name in ("bias", "top_k")} | {"logits": x["logits"][rows]}


def call(impl: str, x: Inputs) -> Inputs:
    histogram = x.get("histogram")
    found = route(x["logits"], x["bias"], len(x["top_k"]), histogram=histogram, impl=impl)
    named = dict(zip(("weights", "indices", "counts", "cutoff"), (found[1], found[0], *found[2:]), strict=True))
    return named if histogram is None else named | {"histogram": histogram}


# FP32 against FP64: near ties fall otherwise, which moves a few choices, counts and entries of bins.
LIMITS = {"weights": 1e-2, "indices": 1e-3, "counts": 1e-2, "cutoff": 1e-5, "histogram": 1e-2, "not finite": 0.0}
# Three rows: one swapped near tie is two choices of 48.
LIMITS |= {"weights at size": 1e-1, "indices at size": 5e-2, "cutoff at size": 1e-5}
PROBLEM = Problem(
    name="router",
    letters=tuple("EkT"),
    sizes=tuple((896, 16, T) for T in RECORDED),
    kinds=("plain", "histogram"),
    make_inputs=make_inputs,
    reference=partial(call, "reference"),
    directions=lambda case: (FORWARD,),
    trained=(),
    rows=("weights", "indices", "cutoff"),
    small=lambda case: case | {"T": min(case["T"], CHECKED_TOKENS)},
    take=take,
    cost=cost,
    limits=LIMITS,
    spare_experts=1,  # sets the cutoff
    recorded={
        ("plain", (896, 16, T), FORWARD): {"torch": (eager, None), "torch, compiled": (fast, None)}
        for T, (eager, fast) in RECORDED.items()
    },
    notes=NOTES,
)


def implementations() -> list[Implementation]:
    in_torch = partial(call, "reference")
    return [
        Implementation("torch, eager", in_torch, is_rival=True),
        Implementation("torch, compiled", compiled(in_torch), is_rival=True),
        Implementation(OURS, partial(call, "triton")),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bench_operator.add_arguments(PROBLEM, parser)


def run(args: argparse.Namespace) -> int:
    return bench_operator.run(PROBLEM, implementations, args)
