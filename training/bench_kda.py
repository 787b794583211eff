"""`moe-lc bench kda`: KDA beside FLA, beside recorded figures of two CUDA libraries, beside attention and the byte floor.

BF16, B = 1, K = V = 128, bounded gate; L2 norm, gate and sigmoid inside. "Fast" gates forget most of the state at every
token, "slow" ones keep it for hundreds: some implementations are quick on the former alone. "softplus": the unbounded gate,
where "fast" ones leave a few heads too steep for the kernels of the bounded one. The layer without its GEMMs: bench_kda_layer.py.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from ..kernels.kda.reference import kda_chunk, kda_recurrent
from . import bench_kda_layer
from .bench import Cuda, Measurement, Report, finish, measure, relative_error
from .bench_kda_implementations import (
    BACKWARD,
    EAGER,
    FORWARD,
    GRAPH,
    LOWER_BOUND,
    Implementation,
    Inputs,
    Operator,
    implementations,
)


DIM = 128
SHIFT = {"fast": 0.0, "slow": -6.0}  # of the raw gates
DIRECTIONS = {"forward": FORWARD, "backward": BACKWARD}
PARTS = (*DIRECTIONS, "decode", "layer", "softplus")
CHECKED_TOKENS, TAIL = 2048, 128
INPUT_SETS, LONG = 3, 16384  # from this length on one set is larger than any cache
COLD_BYTES = 256 << 20  # states that are stepped in turn are together larger than any cache
SDPA_TOKENS = 32768
LIMITS = {"o": 1e-2, "state": 1e-2, "tail": 1e-2, "A_log": 3e-2, "dt_bias": 3e-2}
LIMITS |= dict.fromkeys(("q", "k", "v", "g", "beta"), 2e-2) | {"not finite": 0.0}
LIMITS |= dict.fromkeys(("q_taps", "k_taps", "v_taps", "output_gate", "norm_weight"), 2e-2)
# (T, H): ms of a forward pass with fast and with slow gates on one NVIDIA H200, torch 2.11.0+cu130; FlashKDA of
# 2026-07-29, cudnn-frontend 1.32.0.
RECORDED_ON = "H200"
RECORDED = {
    (8192, 32): {"FlashKDA": (1.04, 1.04), "cuDNN": (0.29, 2.31)},
    (8192, 96): {"FlashKDA": (1.46, 1.46), "cuDNN": (1.13, 2.43)},
    (65536, 32): {"FlashKDA": (8.06, 8.06), "cuDNN": (2.19, 18.5)},
    (65536, 96): {"FlashKDA": (11.4, 11.4), "cuDNN": (8.82, 19.2)},
}
NOTES = """
kda layer: three short convolutions with SiLU, KDA and the gated RMSNorm, a layer without its GEMMs; its floor is the sum of
those of the three parts.
vs FLA: time of FLA's fastest way over this one. of floor: time in which the bytes that must be read and written could be
copied ({bandwidth:.2f} TB/s measured), over the time taken. extra GB: peak memory of a call, results included.
recorded: measured before on one H200, not in this run. cuDNN splits the sequence and drops state that has decayed, which
is why it is fast on fast gates. Gluon: FLA's convolutions in Gluon, which it takes where FLA_CONV_GLUON=1."""


@dataclass(frozen=True)
class Problem:
    """What is computed for whole sequences: `reference` in FP64, `floor_bytes(direction)` per token and head."""

    name: str
    make_inputs: Callable[..., Inputs]
    reference: Operator
    floor_bytes: Callable[[str], int]
    check_at_size: Callable[[Implementation, Inputs], dict[str, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[8192, 65536], help="tokens of a sequence (default: %(default)s)")
    add("--heads", type=int, nargs="+", default=[32, 96], help="(default: %(default)s)")
    add("--batches", type=int, nargs="*", default=[1, 32, 256], help="rows of one-token steps (default: %(default)s)")
    add(
        "--only",
        nargs="+",
        default=PARTS[:-1],
        metavar="PART",
        help=f"some of {', '.join(PARTS)} (default: all but the last)",
    )
    add("--quick", action="store_true", help="the first of the lengths, of the heads and of the batches alone")
    add("--long-sdpa", action="store_true", help=f"attention beyond {SDPA_TOKENS:,} tokens too, which takes a while")
    add("--output", type=Path, help="file to which one JSON line is appended for each measurement")


def run(args: argparse.Namespace) -> int:
    for name, least in (("lengths", TAIL + 1), ("heads", 1), ("batches", 1)):
        if min(getattr(args, name), default=least) < least:
            raise ValueError(f"{name}: expected numbers of at least {least}, got {getattr(args, name)}")
    if unknown := [part for part in args.only if part not in PARTS]:
        raise ValueError(f"only: expected some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    if args.quick:
        args.lengths, args.heads, args.batches = args.lengths[:1], args.heads[:1], args.batches[:1]
    machine = Cuda()
    compared = implementations()
    return bench(args, machine, compared, bench_kda_layer.implementations(compared), implementations(lower_bound=None))


def bench(
    args: argparse.Namespace,
    machine,
    compared: Sequence[Implementation],
    layers: Sequence[Implementation],
    unbounded: Sequence[Implementation],
) -> int:
    """Measures every case with every implementation; returns the exit status, 1 where one was wrong."""
    directions = [direction for part, direction in DIRECTIONS.items() if part in args.only]
    sequences = [(KDA, compared, gate, directions) for gate in SHIFT if directions]
    if "layer" in args.only:
        sequences.append((LAYER, layers, "slow", [FORWARD, BACKWARD]))
    if "softplus" in args.only:
        sequences += [(SOFTPLUS, unbounded, gate, [FORWARD, BACKWARD]) for gate in SHIFT]
    attention = [T for T in args.lengths if "forward" in args.only and (args.long_sdpa or T <= SDPA_TOKENS)]
    batches = args.batches if "decode" in args.only else []
    rows = sum(direction in one.directions for _, of, _, which in sequences for direction in which for one in of)
    steps = 2 * len(batches) * sum(one.step is not None for one in compared)
    total = len(args.heads) * (len(args.lengths) * rows + len(attention) + steps)
    with Report(machine.name, args.command, args.output, total) as report:
        for H, case in itertools.product(args.heads, sequences):
            measure_sequences(machine, *case, H, args.lengths, report)
        for H in args.heads:
            for T in attention:
                report.add(measure_sdpa(machine, T, H))
            for B in batches:
                measure_steps(machine, compared, B, H, report)
        tqdm.write(NOTES.format(bandwidth=machine.bandwidth / 1e12))
    return int(report.wrong > 0)


def make_inputs(B: int, T: int, H: int, gate: str, device: torch.device, seed: int = 0) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    x = {name: random(B, T, H, DIM).bfloat16() for name in ("q", "k", "v")}
    x["g"] = (random(B, T, H, DIM) + SHIFT[gate]).bfloat16()
    x["beta"] = random(B, T, H).bfloat16()
    return {**x, "A_log": 0.3 * random(H), "dt_bias": random(H, DIM)}


def make_layer_inputs(B: int, T: int, H: int, gate: str, device: torch.device, seed: int = 0) -> Inputs:
    return bench_kda_layer.add_inputs(make_inputs(B, T, H, gate, device, seed), seed)


def kda_bytes(direction: str) -> int:
    """BF16 bytes per token and head: read q, k, v, g, beta, write o; backward, read them and do, write gradients, too."""
    forward = 2 * (5 * DIM + 1)
    return forward if direction == FORWARD else 2 * forward + 2 * (4 * DIM + 1)


def layer_bytes(direction: str) -> int:
    """Those of KDA and of the parts around it, each fused perfectly: what one part hands to the next is written and read."""
    forward, backward = bench_kda_layer.bytes_around(DIM)
    return kda_bytes(direction) + forward + (backward if direction == BACKWARD else 0)


def kda_reference(
    x: Inputs, state: torch.Tensor | None, lower_bound: float | None = LOWER_BOUND
) -> tuple[torch.Tensor, torch.Tensor]:
    return kda_chunk(**x, lower_bound=lower_bound, initial_state=state)


def results(sequence: Operator, x: Inputs, with_gradients: bool) -> Inputs:
    """o, final state and the gradient of every input, for cotangents that do not depend on the implementation."""
    if not with_gradients:
        with torch.no_grad():
            return dict(zip(("o", "state"), sequence(x, None), strict=True))
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    o, state = sequence(leaves, None)
    generator = torch.Generator(o.device).manual_seed(1)
    cotangent = torch.randn(o.shape, generator=generator, device=o.device).bfloat16().to(o.dtype)
    gradients = torch.autograd.grad(o, list(leaves.values()), cotangent)
    return {"o": o.detach(), "state": state.detach(), **dict(zip(leaves, gradients, strict=True))}


def check_short(problem: Problem, compared: Sequence[Implementation], H: int, gate: str, device, with_gradients: bool):
    """For each name, a function that returns errors on a sequence short enough for FP64 and computes them but once."""
    x = problem.make_inputs(1, CHECKED_TOKENS, H, gate, device)
    expected = results(problem.reference, {name: t.double() for name, t in x.items()}, with_gradients)

    def errors(one: Implementation) -> dict[str, float]:
        found = results(one.sequence, x, with_gradients)
        return {name: relative_error(found[name], t) for name, t in expected.items()}

    return {one.name: cache(partial(errors, one)) for one in compared}


@torch.no_grad()
def check_tail(implementation: Implementation, x: Inputs, lower_bound: float | None = LOWER_BOUND) -> dict[str, float]:
    """At full size: the last outputs against the recurrence in FP64 from the state that the tokens before them leave."""
    gate = {name: t for name, t in x.items() if t.ndim < 3}
    before, last = (
        {name: t[:, cut] for name, t in x.items() if t.ndim > 2} for cut in (slice(-TAIL), slice(-TAIL, None))
    )
    _, state = implementation.sequence({name: t.contiguous() for name, t in before.items()} | gate, None)
    last = {name: t.double() for name, t in last.items()} | gate
    expected, _ = kda_recurrent(**last, lower_bound=lower_bound, initial_state=state.double())
    return {"tail": relative_error(implementation.sequence(x, None)[0][:, -TAIL:], expected)}


KDA = Problem("kda", make_inputs, kda_reference, kda_bytes, check_tail)
SOFTPLUS = Problem(
    "kda softplus",
    make_inputs,
    partial(kda_reference, lower_bound=None),
    kda_bytes,
    partial(check_tail, lower_bound=None),
)
LAYER = Problem(
    "kda layer", make_layer_inputs, bench_kda_layer.REFERENCE.around(kda_reference), layer_bytes, lambda one, x: {}
)


def measure_sequences(machine, problem: Problem, compared, gate: str, directions, H: int, lengths, report) -> None:
    """Forward, and forward with backward, of one gate and head count."""
    short = check_short(problem, compared, H, gate, machine.device, BACKWARD in directions)
    for T, direction in itertools.product(lengths, directions):
        seeds = range(1 if T >= LONG else INPUT_SETS)
        sets = [problem.make_inputs(1, T, H, gate, machine.device, seed) for seed in seeds]
        floor = 1e3 * H * T * problem.floor_bytes(direction) / machine.bandwidth
        case = {"B": 1, "T": T, "H": H}
        rows: list[Measurement] = []
        for one in compared:
            if direction not in one.directions:
                continue
            row = Measurement(problem.name, case, gate, direction, one.name, is_rival=one.is_fla)
            check = partial(_errors, problem, one, short[one.name], sets[0], direction)
            rows.append(measure(row, machine, check, LIMITS, _calls(one, sets, direction)))
            finish(rows, floor, report)
        if problem is KDA and direction == FORWARD and RECORDED_ON in machine.name:
            _add_recorded(rows, floor, report)


def _errors(problem, one, short, x, direction) -> dict[str, float]:
    errors = short()
    if direction == FORWARD:
        errors = {name: errors[name] for name in ("o", "state")}
    return errors | problem.check_at_size(one, x)


def _add_recorded(rows: list[Measurement], floor: float, report: Report) -> None:
    measured = rows[-1]
    for name, times in RECORDED.get((measured.case["T"], measured.case["H"]), {}).items():
        ms = times[list(SHIFT).index(measured.kind)]
        rows.append(Measurement("kda", measured.case, measured.kind, FORWARD, name, ms=ms, recorded=True))
        finish(rows, floor, report)


def _calls(implementation: Implementation, sets: Sequence[Inputs], direction: str) -> list[Callable[[], object]]:
    def forward(x):
        with torch.no_grad():
            return implementation.sequence(x, None)

    def both(leaves, cotangent):
        return torch.autograd.grad(implementation.sequence(leaves, None)[0], list(leaves.values()), cotangent)

    if direction == FORWARD:
        return [partial(forward, x) for x in sets]
    trained = [{name: t.detach().requires_grad_() for name, t in x.items()} for x in sets]
    return [partial(both, leaves, torch.randn_like(x["v"])) for leaves, x in zip(trained, sets, strict=True)]


def check_step(implementation: Implementation, x: Inputs, state: torch.Tensor) -> dict[str, float]:
    """Errors in the first and the last row of the batch, against FP64."""
    before = state[[0, -1]].double()
    few = {name: t[[0, -1]].double() if t.ndim > 2 else t for name, t in x.items()}
    expected_o, expected = kda_recurrent(**few, lower_bound=LOWER_BOUND, initial_state=before)
    o, after = implementation.step(x, state.clone())
    o = o.view(x["v"].shape)
    return {"o": relative_error(o[[0, -1]], expected_o), "state": relative_error(after[[0, -1]], expected)}


@torch.no_grad()
def measure_steps(machine, compared, B, H, report) -> None:
    """One token for every row, replayed and launched anew. The states are too many for a cache, as those of a model are."""
    x = make_inputs(B, 1, H, "slow", machine.device)
    count = max(1, min(64, COLD_BYTES // (4 * B * H * DIM * DIM)))
    states = [torch.randn(B, H, DIM, DIM, device=machine.device) for _ in range(count)]
    floor = 1e3 * 8 * B * H * DIM * DIM / machine.bandwidth
    for direction in (GRAPH, EAGER):
        rows: list[Measurement] = []
        for one in compared:
            if one.step is None:
                continue
            calls: list[Callable[[], Any]] = [partial(one.step, x, state) for state in states]
            row = Measurement("kda", {"B": B, "T": 1, "H": H}, "slow", direction, one.name, is_rival=one.is_fla)
            check = partial(check_step, one, x, states[0])
            rows.append(measure(row, machine, check, LIMITS, calls, graph=direction == GRAPH))
            finish(rows, floor, report)


@torch.no_grad()
def measure_sdpa(machine, T: int, H: int) -> Measurement:
    """Causal attention of the same sizes, as torch chooses it; its time grows with the square of T."""
    q, k, v = (torch.randn(1, H, T, DIM, dtype=torch.bfloat16, device=machine.device) for _ in range(3))
    row = Measurement("kda", {"B": 1, "T": T, "H": H}, "-", FORWARD, "causal SDPA of torch")
    return measure(row, machine, dict, LIMITS, [lambda: [scaled_dot_product_attention(q, k, v, is_causal=True)]])
