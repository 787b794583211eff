"""`moe-lc bench experts --mxfp4`: the experts on packed weights beside ours on the BF16 weights that these stand for.

All weights are values of MXFP4, so that both compute the same and are checked alike. Gradients are those of x and of the
router's weights: packed projections are frozen.
"""

from dataclasses import replace

import torch

from ..kernels.mxfp4 import dequantize_mxfp4, expert_mlp_mxfp4, quantize_mxfp4
from . import bench_experts as plain
from .bench import OURS
from .bench_operator import BACKWARD, Case, Implementation, Inputs, Problem


SIZES = (
    (256, 2304, 1024, 8, 1),
    (256, 2304, 1024, 8, 32),
    (256, 2304, 1024, 8, 8192),
    (112, 3584, 3072, 16, 1),
    (112, 3584, 3072, 16, 32),
    (112, 3584, 3072, 16, 8192),
    (896, 3584, 3072, 16, 8192),
)
PROJECTIONS = (("gate_up", "gate_up_proj"), ("down", "down_proj"))
NOTES = """
vs rival: time on BF16 weights over this one. of floor: as without --mxfp4, of the bytes of packed weights, also for the rival."""


def make_inputs(case: Case, kind: str, device: torch.device, seed: int) -> Inputs:
    """The inputs of `bench_experts`, the projections rounded to values of MXFP4, and packed."""
    x = plain.make_inputs(case, kind, device, seed)
    for short, name in PROJECTIONS:
        E, rows, inputs = x[name].shape
        codes = torch.empty(E, rows, inputs // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(E, inputs // 32, rows, dtype=torch.uint8, device=device)
        for e, weight in enumerate(x[name]):  # one by one, or a layer of K3 would be in memory twice
            codes[e], of_rows = quantize_mxfp4(weight)
            scales[e] = of_rows.mT
            weight.copy_(dequantize_mxfp4(codes[e], of_rows, weight.dtype))
        x |= {f"{short}_packed": codes, f"{short}_scales": scales}
    return x


def cost(case: Case, x: Inputs, direction: str) -> tuple[float, float]:
    """As `bench_experts.cost`, of experts of 3 I D values of 17 / 32 bytes that have no gradients."""
    D, I, k, T = (case[name] for name in "DIkT")
    hit, products = x["indices"].unique().numel(), 6.0 * I * D * T * k
    forward = 3.0 * I * D * 17 / 32 * hit + T * (4 * D + 12 * k)
    if direction != BACKWARD:
        return forward, products
    return 2 * forward + T * (2 * D + 4 * k), 2 * products


def call(x: Inputs) -> Inputs:
    packed = [x[f"{short}_{part}"] for short, _ in PROJECTIONS for part in ("packed", "scales")]
    return {"o": expert_mlp_mxfp4(x["x"], x["indices"], x["weights"], *packed, **plain.CAPS, impl="triton")}


TRAINED = ("x", "weights")
PROBLEM: Problem = replace(
    plain.PROBLEM,
    name="experts-mxfp4",
    sizes=SIZES,
    make_inputs=make_inputs,
    trained=TRAINED,
    parameters=lambda x, found, cotangent: {},
    cost=cost,
    recorded={},
    notes=NOTES,
)


def implementations() -> list[Implementation]:
    return [
        Implementation("BF16 weights", lambda x: plain.call("triton", x), is_rival=True),
        Implementation(OURS, call),
    ]
