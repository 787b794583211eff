"""`moe-lc bench attn-res`: the residual mix with the norm behind it, beside FLA's fused kernel and the byte floor.

N finished blocks and the running sum are the sources, N + 1 of them, all in BF16.
"""

import argparse
from functools import partial

import torch

from ..kernels.attn_res import attn_res_norm
from . import bench_operator
from .bench import OURS, installed_version
from .bench_operator import BACKWARD, FORWARD, Case, Implementation, Inputs, Problem


EPS = 1e-5
CHECKED_TOKENS = 512
MOST = 16  # blocks
VECTORS = ("query", "norm_weight", "out_norm_weight")
# (T, D, N): ms forward and forward + backward of FLA 0.6.0 on one NVIDIA H200, torch 2.11.0+cu130.
RECORDED = {
    (8192, 2304, 4): (0.36, 1.49),
    (8192, 7168, 8): (0.355, 1.40),
    (32768, 1024, 4): (0.26, 1.02),
    (65536, 2304, 4): (0.67, 2.24),
}
NOTES = """
vs rival: time of FLA over this one. of floor: time in which the bytes that must be read and written could be copied
({bandwidth:.2f} TB/s measured) over the time taken; there are no products. extra GB: peak memory of a call beyond the
gradients. recorded: measured before on one H200, not in this run."""


def make_inputs(case: Case, kind: str, device: torch.device, seed: int) -> Inputs:
    T, D, N = (case[name] for name in "TDN")
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    sources = {f"block {j}": random(T, D) for j in range(N)} | {"partial": random(T, D)}
    query = random(D).mul_(D**-0.5)  # scores of about one
    return sources | {"query": query, "norm_weight": 1 + 0.1 * random(D), "out_norm_weight": 1 + 0.1 * random(D)}


def cost(case: Case, x: Inputs, direction: str) -> tuple[float, float]:
    """Bytes: N + 1 sources are read and the mix is written, 2 D each a token.

    Backward, too: sources and cotangent are read and N + 1 gradients written. Vectors are too small to count.
    """
    T, D, N = (case[name] for name in "TDN")
    tensors = N + 2 if direction != BACKWARD else (N + 2) + 2 * (N + 1) + 1
    return 2.0 * T * D * tensors, 0.0


def sources(x: Inputs) -> list[torch.Tensor]:
    return [t for name, t in x.items() if name not in VECTORS]


def call(impl: str, x: Inputs) -> Inputs:
    *blocks, running = sources(x)
    o = attn_res_norm(blocks, running, x["query"], x["norm_weight"], EPS, x["out_norm_weight"], EPS, impl=impl)
    return {"o": o}


def take(x: Inputs, rows: torch.Tensor) -> Inputs:
    return {name: t if name in VECTORS else t[rows] for name, t in x.items()}


SOURCES = (*(f"block {j}" for j in range(MOST)), "partial")
TRAINED = (*SOURCES, *VECTORS)
PROBLEM = Problem(
    name="attn-res",
    letters=tuple("TDN"),
    sizes=tuple(RECORDED),
    kinds=("-",),
    make_inputs=make_inputs,
    reference=partial(call, "reference"),
    directions=lambda case: (FORWARD, BACKWARD),
    trained=TRAINED,
    rows=("o", *SOURCES),
    like="partial",
    small=lambda case: case | {"T": min(case["T"], CHECKED_TOKENS)},
    take=take,
    cost=cost,
    limits={"o": 1e-2, "o at size": 1e-2, "not finite": 0.0}
    | {f"d {name}{where}": 2e-2 for name in TRAINED for where in ("", " at size")},
    bounds={"N": (1, MOST)},
    recorded={
        ("-", size, direction): {"FLA 0.6.0": (ms, None)}
        for size, times in RECORDED.items()
        for direction, ms in zip((FORWARD, BACKWARD), times, strict=True)
    },
    notes=NOTES,
)


def implementations() -> list[Implementation]:
    """FLA where it can be imported, then ours."""
    ours = Implementation(OURS, partial(call, "triton"))
    try:
        from fla.ops.attnres import fused_attnres
    except ImportError as error:
        print(f"FLA: cannot be imported, so it is left out ({error})")
        return [ours]

    def fla(x: Inputs) -> Inputs:
        return {"o": fused_attnres(x["query"], sources(x), x["norm_weight"], x["out_norm_weight"], EPS)}

    name = f"FLA {installed_version('fla-core') or ''}".strip()
    return [Implementation(name, fla, is_rival=True), ours]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bench_operator.add_arguments(PROBLEM, parser)


def run(args: argparse.Namespace) -> int:
    return bench_operator.run(PROBLEM, implementations, args)
