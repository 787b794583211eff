"""`moe-lc bench experts`: the routed expert MLPs beside transformers' `grouped_mm`, eager and compiled, and their floor.

With --mxfp4 on packed weights beside BF16 ones, see `bench_experts_mxfp4.py`.
BF16 with SiTU-GLU. "balanced": every expert is as likely; "skewed": popularity falls as 1 / rank (Zipf).
"""

import argparse
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn

from ..kernels.experts import expert_mlp
from ..kernels.situ_glu.reference import situ_glu_reference
from . import bench_operator
from .bench import OURS, installed_version, relative_error
from .bench_operator import BACKWARD, EAGER, FORWARD, GRAPH, Case, Implementation, Inputs, Problem, compiled


CAPS = {"beta": 4.0, "linear_beta": 25.0}
ARGUMENTS = ("x", "indices", "weights", "gate_up_proj", "down_proj")
CHECKED_TOKENS, CHECKED_EXPERTS = 256, 16
DECODED = 32  # a size with at most so many tokens is a step of decoding
WHOLE_LAYER = 512  # from so many experts of K3's width on, gradients leave no room for a comparison
SIZES = (
    (64, 512, 256, 8, 8192),
    (128, 1024, 512, 8, 1024),
    (128, 1024, 512, 8, 8192),
    (128, 512, 256, 8, 32768),
    (256, 2304, 1024, 8, 8192),
    (112, 3584, 3072, 16, 8192),
    (896, 3584, 3072, 16, 8192),
    (256, 2304, 1024, 8, 1),
    (256, 2304, 1024, 8, 32),
)
# Size: (ms forward, ms forward + backward, extra GB beyond gradients) of transformers 5.17.0 as a whole under
# torch.compile on one NVIDIA H200, torch 2.11.0+cu130, balanced.
COMPILED = {
    (64, 512, 256, 8, 8192): (0.417, 1.53, 0.387),
    (128, 1024, 512, 8, 1024): (0.427, 1.14, 0.034),
    (128, 1024, 512, 8, 8192): (0.862, 2.46, 0.471),
    (128, 512, 256, 8, 32768): (None, 3.67, None),
    (256, 2304, 1024, 8, 8192): (2.77, 8.84, 0.57),
    (112, 3584, 3072, 16, 8192): (16.3, 50.2, 2.61),
    (896, 3584, 3072, 16, 8192): (25.1, None, None),
    (256, 2304, 1024, 8, 1): (0.161, None, None),
    (256, 2304, 1024, 8, 32): (0.831, None, None),
}
NOTES = """
vs rival: time of transformers' fastest way over this one. of floor: time in which the bytes that must be read and written
could be copied ({bandwidth:.2f} TB/s measured) / in which the products could be computed ({matmul:.0f} TFLOP/s measured),
over the time taken. extra GB: peak memory of a call beyond the gradients.
recorded: measured before on one H200, not in this run."""


def make_inputs(case: Case, kind: str, device: torch.device, seed: int) -> Inputs:
    E, D, I, k, T = (case[name] for name in "EDIkT")
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    popularity = torch.zeros(E, device=device)
    if kind == "skewed":
        popularity = -torch.arange(1, E + 1, device=device).log()[
            torch.randperm(E, generator=generator, device=device)
        ]
    # The k largest of log p + Gumbel noise are k draws from p without replacement.
    noise = -torch.empty(T, E, device=device).exponential_(generator=generator).log()
    weights = 0.1 + torch.rand(T, k, generator=generator, device=device)
    return {
        "x": random(T, D),
        "indices": (popularity + noise).topk(k, dim=-1).indices,
        "weights": weights / weights.sum(-1, keepdim=True),
        "gate_up_proj": random(E, 2 * I, D).mul_(D**-0.5),
        "down_proj": random(E, D, I).mul_(I**-0.5),
    }


def cost(case: Case, x: Inputs, direction: str) -> tuple[float, float]:
    """Bytes and operations that no implementation can do without.

    Forward: the weights of the experts that are hit, 6 I D bytes each in BF16, are read once; x is read and the sum is
    written, 4 D bytes a token; 12 bytes an assignment are read, its expert in INT64 and its weight in FP32. 6 I D
    operations an assignment. Backward, too: the weights are read again and the gradients of all experts written; x and
    the cotangent are read and a gradient written, 6 D bytes a token; assignments are read again and the gradients of
    their weights written, 16 bytes; twice the operations.
    """
    E, D, I, k, T = (case[name] for name in "EDIkT")
    expert, hit = 6.0 * I * D, x["indices"].unique().numel()
    forward = expert * hit + T * (4 * D + 12 * k), expert * T * k
    if direction != BACKWARD:
        return forward
    return 2 * forward[0] + expert * E + T * (2 * D + 4 * k), 3 * forward[1]


def take(x: Inputs, rows: torch.Tensor) -> Inputs:
    """The tokens alone, and of the experts only theirs, since those of a layer do not fit in FP64."""
    used, indices = x["indices"][rows].unique(return_inverse=True)
    some = {name: x[name][rows] for name in ("x", "weights")}
    return {**some, "indices": indices, **{name: x[name][used] for name in ("gate_up_proj", "down_proj")}}


def parameters(x: Inputs, found: Inputs, cotangent: torch.Tensor) -> dict[str, float]:
    """Errors in the gradients of the busiest and of the last expert, from their tokens alone in FP64."""
    names = ("gate_up_proj", "down_proj")
    loads = x["indices"].flatten().bincount(minlength=len(x["down_proj"]))
    errors: dict[str, list[float]] = {f"d {name}": [] for name in names}
    for expert in (int(loads.argmax()), len(loads) - 1):
        token, slot = (x["indices"] == expert).nonzero(as_tuple=True)
        only = {name: x[name][expert : expert + 1].double().requires_grad_() for name in names}
        tokens = {"x": x["x"][token].double(), "weights": x["weights"][token, slot, None].double()}
        o = call("reference", {**only, **tokens, "indices": torch.zeros_like(token)[:, None]})["o"]
        expected = torch.autograd.grad(o, list(only.values()), cotangent[token].double())
        for name, gradient in zip(names, expected, strict=True):
            errors[f"d {name}"].append(relative_error(found[f"d {name}"][expert], gradient[0]))
    return {name: torch.tensor(both).max().item() for name, both in errors.items()}  # keeps a NaN, unlike max()


def small(case: Case) -> Case:
    return case | {"T": min(case["T"], CHECKED_TOKENS), "E": min(case["E"], max(CHECKED_EXPERTS, case["k"]))}


def directions(case: Case) -> tuple[str, ...]:
    if case["T"] <= DECODED:
        return (GRAPH, EAGER)
    return (FORWARD,) if case["E"] > WHOLE_LAYER else (FORWARD, BACKWARD)


def call(impl: str, x: Inputs) -> Inputs:
    return {"o": expert_mlp(**{name: x[name] for name in ARGUMENTS}, **CAPS, impl=impl)}


def _recorded() -> dict:
    found: dict = {}
    for size, (forward, both, gigabytes) in COMPILED.items():
        first = FORWARD if size[-1] > DECODED else EAGER
        extra = None if gigabytes is None else 1e9 * gigabytes
        for direction, ms, memory in ((first, forward, None), (BACKWARD, both, extra)):
            if ms is not None:
                found["balanced", size, direction] = {"grouped_mm, compiled": (ms, memory)}
    return found


# Our results keep BF16's accuracy; gradients pass through one more product.
LIMITS = {"o": 1e-2, "o at size": 1e-2, "not finite": 0.0}
TRAINED = ("x", "weights", "gate_up_proj", "down_proj")
LIMITS |= {f"d {name}{where}": 2e-2 for name in TRAINED for where in ("", " at size")}
PROBLEM = Problem(
    name="experts",
    letters=tuple("EDIkT"),
    sizes=SIZES,
    kinds=("balanced", "skewed"),
    make_inputs=make_inputs,
    reference=partial(call, "reference"),
    directions=directions,
    trained=TRAINED,
    rows=("o", "x", "weights"),
    like="x",
    parameters=parameters,
    small=small,
    take=take,
    cost=cost,
    limits=LIMITS,
    recorded=_recorded(),
    notes=NOTES,
)


def implementations() -> list[Implementation]:
    """Transformers' `grouped_mm`, eager and as a whole under torch.compile, then ours."""
    name, module = f"transformers {installed_version('transformers') or ''}".strip(), transformers_experts()

    def grouped_mm(x: Inputs) -> Inputs:
        return {"o": module(x["x"], x["indices"], x["weights"])}

    def prepared(inner):
        def with_weights(x: Inputs) -> Inputs:  # outside of what is compiled
            module.num_experts = len(x["down_proj"])
            module.gate_up_proj, module.down_proj = x["gate_up_proj"], x["down_proj"]
            try:
                return inner(x)
            finally:  # or the weights of one size would still be there beside those of the next
                module.gate_up_proj = module.down_proj = None

        return with_weights

    return [
        Implementation(f"{name}, eager", prepared(grouped_mm), is_rival=True),
        Implementation(f"{name}, compiled", prepared(compiled(grouped_mm)), is_rival=True),
        Implementation(OURS, partial(call, "triton")),
    ]


def transformers_experts() -> nn.Module:
    """Experts as a model of transformers has them, with SiTU-GLU, that run by `grouped_mm`."""
    from transformers.integrations.moe import use_experts_implementation

    @use_experts_implementation
    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()

        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            return situ_glu_reference(gate_up, **CAPS)

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise NotImplementedError("grouped_mm stands in its place")

    return Experts(SimpleNamespace(_experts_implementation="grouped_mm"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bench_operator.add_arguments(PROBLEM, parser)
    parser.add_argument("--mxfp4", action="store_true", help="weights in MXFP4 beside BF16, with sizes of its own")


def run(args: argparse.Namespace) -> int:
    if args.mxfp4:
        from . import bench_experts_mxfp4 as packed

        return bench_operator.run(packed.PROBLEM, packed.implementations, args)
    return bench_operator.run(PROBLEM, implementations, args)
