"""`moe-lc bench kda`: KDA beside FLA, beside recorded figures of two CUDA libraries, beside attention and the byte floor.

BF16, B = 1, K = V = 128, bounded gate; L2 norm, gate and sigmoid inside. "Fast" gates forget most of the state at every
token, "slow" ones keep it for hundreds: some implementations are quick on the former alone.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..kernels.kda import kda, kda_step
from ..kernels.kda.reference import kda_chunk, kda_recurrent
from .bench import Cuda, Measurement, Report, installed_version, relative_error, wrong


DIM = 128
LOWER_BOUND = -5.0
SHIFT = {"fast": 0.0, "slow": -6.0}  # of the raw gates
FORWARD, BACKWARD, GRAPH, EAGER = "forward", "forward+backward", "step, CUDA graph", "step, eager"
CHECKED_TOKENS, TAIL = 2048, 128
INPUT_SETS, LONG = 3, 16384  # from this length on one set is larger than any cache
COLD_BYTES = 256 << 20  # states that are stepped in turn are together larger than any cache
SDPA_TOKENS = 32768
LIMITS = {"o": 1e-2, "state": 1e-2, "tail": 1e-2, "A_log": 3e-2, "dt_bias": 3e-2}
LIMITS |= dict.fromkeys(("q", "k", "v", "g", "beta"), 2e-2) | {"not finite": 0.0}
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
vs FLA: time of FLA's fastest way over this one. of floor: time in which the bytes that must be read and written could be
copied ({bandwidth:.2f} TB/s measured), over the time taken. extra GB: peak memory of a call, results included.
recorded: measured before on one H200, not in this run. cuDNN splits the sequence and drops state that has decayed, which
is why it is fast on fast gates."""

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Implementation:
    """`sequence(inputs, initial_state)` and `step(inputs, state)` return o and the new state; a step may work in place."""

    name: str
    sequence: Callable[[Inputs, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
    step: Callable[[Inputs, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    directions: tuple[str, ...] = (FORWARD, BACKWARD)
    is_fla: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[8192, 65536], help="tokens of a sequence (default: %(default)s)")
    add("--heads", type=int, nargs="+", default=[32, 96], help="(default: %(default)s)")
    add("--batches", type=int, nargs="*", default=[1, 32, 256], help="rows of one-token steps (default: %(default)s)")
    add("--quick", action="store_true", help="the first of the lengths, of the heads and of the batches alone")
    add("--long-sdpa", action="store_true", help=f"attention beyond {SDPA_TOKENS:,} tokens too, which takes a while")
    add("--output", type=Path, help="file to which one JSON line is appended for each measurement")


def run(args: argparse.Namespace) -> int:
    for name, least in (("lengths", TAIL + 1), ("heads", 1), ("batches", 1)):
        if min(getattr(args, name), default=least) < least:
            raise ValueError(f"{name}: expected numbers of at least {least}, got {getattr(args, name)}")
    if args.quick:
        args.lengths, args.heads, args.batches = args.lengths[:1], args.heads[:1], args.batches[:1]
    machine = Cuda()
    return bench(args, machine, implementations())


def bench(args: argparse.Namespace, machine: Cuda, compared: Sequence[Implementation]) -> int:
    """Measures every case with every implementation; returns the exit status, 1 where one was wrong."""
    bandwidth = machine.copy_bandwidth()
    directions = sum(len(one.directions) for one in compared)
    steps = 2 * len(args.batches) * sum(one.step is not None for one in compared)
    attention = [T for T in args.lengths if args.long_sdpa or T <= SDPA_TOKENS]
    total = len(args.heads) * (len(SHIFT) * len(args.lengths) * directions + len(attention) + steps)
    with Report(machine.name, args.output, total) as report:
        for H, gate in itertools.product(args.heads, SHIFT):
            short = make_inputs(1, CHECKED_TOKENS, H, gate, machine.device)
            checks = {one.name: check_short(one, short) for one in compared}
            for T in args.lengths:
                measure_sequences(machine, compared, checks, T, H, gate, bandwidth, report)
        for H in args.heads:
            for T in attention:
                report.add(measure_sdpa(machine, T, H))
            for B in args.batches:
                measure_steps(machine, compared, B, H, bandwidth, report)
    print(NOTES.format(bandwidth=bandwidth / 1e12))
    return int(report.wrong > 0)


def implementations() -> list[Implementation]:
    """Ours, and FLA before it when it can be imported, so that ratios are known at once."""
    ours = Implementation("ours", _ours, _our_step)
    try:
        from fla.ops.kda import chunk_kda, fused_recurrent_kda
    except ImportError as error:
        print(f"FLA: cannot be imported, so it is left out ({error})")
        return [ours]
    name = f"FLA {installed_version('fla-core') or ''}".strip()
    options: dict[str, Any] = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "lower_bound": LOWER_BOUND,
        "output_final_state": True,
    }

    def call(function, more, x, state):
        flat = {**x, "dt_bias": x["dt_bias"].flatten()}
        return function(**flat, initial_state=state, **options, **more)

    safe, kept = {"safe_gate": True}, {"safe_gate": True, "disable_recompute": True}
    return [
        Implementation(f"{name}, all kept", partial(call, chunk_kda, kept), directions=(BACKWARD,), is_fla=True),
        Implementation(name, partial(call, chunk_kda, safe), partial(call, fused_recurrent_kda, {}), is_fla=True),
        ours,
    ]


def _ours(x: Inputs, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return kda(**x, lower_bound=LOWER_BOUND, initial_state=state, impl="triton")


def _our_step(x: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    one = {name: t[:, 0] if t.ndim > 2 else t for name, t in x.items()}  # [B, H, ...], as the layer does
    return kda_step(**one, lower_bound=LOWER_BOUND, state=state, impl="triton"), state


def make_inputs(B: int, T: int, H: int, gate: str, device: torch.device, seed: int = 0) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    x = {name: random(B, T, H, DIM).bfloat16() for name in ("q", "k", "v")}
    x["g"] = (random(B, T, H, DIM) + SHIFT[gate]).bfloat16()
    x["beta"] = random(B, T, H).bfloat16()
    return {**x, "A_log": 0.3 * random(H), "dt_bias": random(H, DIM)}


def floor_ms(H: int, T: int, direction: str, bandwidth: float) -> float:
    """Time to read q, k, v, g, beta and write o; backward, to read them and do and write their gradients, too."""
    forward = 2 * (5 * DIM + 1)  # BF16 bytes per token and head
    backward = forward + 2 * (4 * DIM + 1)
    return 1e3 * H * T * (forward if direction == FORWARD else forward + backward) / bandwidth


def results(sequence: Callable, x: Inputs) -> Inputs:
    """o, final state and the gradient of every input, for cotangents that do not depend on the implementation."""
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    o, state = sequence(leaves, None)
    generator = torch.Generator(o.device).manual_seed(1)
    cotangent = torch.randn(o.shape, generator=generator, device=o.device).bfloat16().to(o.dtype)
    gradients = torch.autograd.grad(o, list(leaves.values()), cotangent)
    return {"o": o.detach(), "state": state.detach(), **dict(zip(leaves, gradients, strict=True))}


def check_short(implementation: Implementation, x: Inputs) -> dict[str, float]:
    """Errors of results and gradients on a sequence short enough for FP64."""
    exact = {name: t.double() for name, t in x.items()}
    expected = results(lambda leaves, state: kda_chunk(**leaves, lower_bound=LOWER_BOUND, initial_state=state), exact)
    ours = results(implementation.sequence, x)
    return {name: relative_error(ours[name], t) for name, t in expected.items()}


@torch.no_grad()
def check_tail(implementation: Implementation, x: Inputs) -> dict[str, float]:
    """At full size: the last outputs against the recurrence in FP64 from the state that the tokens before them leave."""
    gate = {name: t for name, t in x.items() if t.ndim < 3}
    before, last = (
        {name: t[:, cut] for name, t in x.items() if t.ndim > 2} for cut in (slice(-TAIL), slice(-TAIL, None))
    )
    _, state = implementation.sequence({name: t.contiguous() for name, t in before.items()} | gate, None)
    last = {name: t.double() for name, t in last.items()} | gate
    expected, _ = kda_recurrent(**last, lower_bound=LOWER_BOUND, initial_state=state.double())
    return {"tail": relative_error(implementation.sequence(x, None)[0][:, -TAIL:], expected)}


def measure_sequences(machine, compared, checks, T, H, gate, bandwidth, report) -> None:
    """Forward, and forward with backward, of one shape."""
    sets = [make_inputs(1, T, H, gate, machine.device, seed) for seed in range(1 if T >= LONG else INPUT_SETS)]
    case = {"B": 1, "T": T, "H": H}
    for direction in (FORWARD, BACKWARD):
        rows = []
        for one in compared:
            if direction not in one.directions:
                continue
            errors = checks[one.name] if direction == BACKWARD else {n: checks[one.name][n] for n in ("o", "state")}
            row = Measurement("kda", case, gate, direction, one.name, errors=errors)
            rows.append(measure(row, machine, partial(check_tail, one, sets[0]), _calls(one, sets, direction)))
            finish(rows, compared, floor_ms(H, T, direction, bandwidth), report)
        if direction == FORWARD and RECORDED_ON in machine.name:
            for name, (fast, slow) in RECORDED.get((T, H), {}).items():
                ms = fast if gate == "fast" else slow
                rows.append(Measurement("kda", case, gate, direction, name, ms=ms, recorded=True))
                finish(rows, compared, floor_ms(H, T, direction, bandwidth), report)


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


def measure(
    row: Measurement, machine, check: Callable[[], dict], calls: Sequence[Callable], graph=False
) -> Measurement:
    """`row` with its errors and, where they are small and results finite, time and memory of one of the `calls`."""
    try:
        errors = row.errors | check()
        if not all(result.isfinite().all() for result in calls[0]()):
            errors["not finite"] = math.nan
        failure = wrong(errors, LIMITS)
        if failure is not None:
            return replace(row, errors=errors, wrong=failure)
        extra = machine.extra_bytes(calls[0])
        ms = machine.median_ms([machine.graph(calls)]) / len(calls) if graph else machine.median_ms(calls)
        return replace(row, errors=errors, ms=ms, extra_bytes=extra)
    except torch.OutOfMemoryError:
        return replace(row, skipped="out of memory")


def finish(rows: list[Measurement], compared: Sequence[Implementation], floor: float, report: Report) -> None:
    """Reports the last of the rows of a case, compared with those of FLA before it."""
    fla = {one.name for one in compared if one.is_fla}
    base = min((row.ms for row in rows if row.implementation in fla and row.ms is not None), default=None)
    row = rows[-1]
    if row.ms is not None:
        row = replace(row, floor_fraction=floor / row.ms, ratio_to_fla=None if base is None else base / row.ms)
    report.add(row)


def check_step(implementation: Implementation, x: Inputs, state: torch.Tensor) -> dict[str, float]:
    """Errors in the first and the last row of the batch, against FP64."""
    before = state[[0, -1]].double()
    few = {name: t[[0, -1]].double() if t.ndim > 2 else t for name, t in x.items()}
    expected_o, expected = kda_recurrent(**few, lower_bound=LOWER_BOUND, initial_state=before)
    o, after = implementation.step(x, state.clone())
    o = o.view(x["v"].shape)
    return {"o": relative_error(o[[0, -1]], expected_o), "state": relative_error(after[[0, -1]], expected)}


@torch.no_grad()
def measure_steps(machine, compared, B, H, bandwidth, report) -> None:
    """One token for every row, replayed and launched anew. The states are too many for a cache, as those of a model are."""
    x = make_inputs(B, 1, H, "slow", machine.device)
    count = max(1, min(64, COLD_BYTES // (4 * B * H * DIM * DIM)))
    states = [torch.randn(B, H, DIM, DIM, device=machine.device) for _ in range(count)]
    floor = 1e3 * 8 * B * H * DIM * DIM / bandwidth
    for direction in (GRAPH, EAGER):
        rows: list[Measurement] = []
        for one in compared:
            if one.step is None:
                continue
            calls: list[Callable[[], Any]] = [partial(one.step, x, state) for state in states]
            row = Measurement("kda", {"B": B, "T": 1, "H": H}, "slow", direction, one.name)
            check = partial(check_step, one, x, states[0])
            rows.append(measure(row, machine, check, calls, graph=direction == GRAPH))
            finish(rows, compared, floor, report)


@torch.no_grad()
def measure_sdpa(machine, T: int, H: int) -> Measurement:
    """Causal attention of the same sizes, as torch chooses it; its time grows with the square of T."""
    q, k, v = (torch.randn(1, H, T, DIM, dtype=torch.bfloat16, device=machine.device) for _ in range(3))
    row = Measurement("kda", {"B": 1, "T": T, "H": H}, "-", FORWARD, "causal SDPA of torch")
    return measure(row, machine, dict, [lambda: [scaled_dot_product_attention(q, k, v, is_causal=True)]])
