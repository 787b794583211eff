"""What the benchmarks of `experts`, `router`, `attn-res` and `mla` have in common: sizes, checks, sets of inputs, rows.

Every implementation is compared with the reference in FP64: in all results and gradients on a few tokens, then at full
size in the rows of a few tokens. Only what passes, and has finite results at full size, is timed.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import torch
from tqdm import tqdm

from .bench import Cuda, Measurement, Report, finish, measure, relative_error
from .bench_kda_implementations import BACKWARD, EAGER, FORWARD, GRAPH


Inputs = dict[str, torch.Tensor]
Case = dict[str, int]
PARTS = {"forward": (FORWARD,), "backward": (BACKWARD,), "decode": (GRAPH, EAGER)}
INPUT_SETS, COLD_BYTES = 3, 256 << 20  # from this size on one set of inputs is larger than any cache
COMPILED_SHAPES = 6
RECORDED_ON = "H200"


@dataclass(frozen=True)
class Implementation:
    """`call(inputs)` gives results by name; the first is the one that has a gradient."""

    name: str
    call: Callable[[Inputs], Inputs]
    is_rival: bool = False


@dataclass(frozen=True)
class Problem:
    """What is computed, on which sizes, and what it must cost at least.

    letters, sizes: names of the numbers of a size; the sizes that are measured without --sizes.
    kinds: of inputs. `make_inputs(case, kind, device, seed)`.
    directions: `directions(case)`, those in which a size is measured.
    trained: inputs that have a gradient, where there are such inputs. rows: results and inputs with one row per token, checked at full size.
    small: `small(case)`, few enough tokens for every result in FP64. `take(inputs, rows)`: the inputs of some tokens.
    parameters: `parameters(inputs, results, cotangent)`, errors at full size of gradients that have no rows.
    cost: `cost(case, inputs, direction)`, bytes that must be read or written and floating point operations.
    recorded: (kind, size, direction) to {name: (ms, extra bytes or None)}, measured before on one H200.
    """

    name: str
    letters: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...]
    make_inputs: Callable[[Case, str, torch.device, int], Inputs]
    reference: Callable[[Inputs], Inputs]
    directions: Callable[[Case], Sequence[str]]
    trained: tuple[str, ...]
    rows: tuple[str, ...]
    small: Callable[[Case], Case]
    take: Callable[[Inputs, torch.Tensor], Inputs]
    cost: Callable[[Case, Inputs, str], tuple[float, float]]
    limits: dict[str, float]
    bounds: dict[str, tuple[int, int]] = field(default_factory=dict)  # of the numbers of a size, where other than >= 1
    parameters: Callable[[Inputs, Inputs, torch.Tensor], dict[str, float]] = lambda x, found, cotangent: {}
    like: str | None = None  # the input that the result with a gradient has the shape and dtype of
    spare_experts: int = 0  # that must be left beside the k chosen ones
    recorded: dict[tuple[str, tuple[int, ...], str], dict[str, tuple[float, float | None]]] = field(
        default_factory=dict
    )
    notes: str = ""

    @property
    def parts(self) -> list[str]:
        """Those of `PARTS` that some size has."""
        possible = {direction for size in self.sizes for direction in self.directions(self.case(size))}
        return [part for part, directions in PARTS.items() if possible & set(directions)]

    def case(self, size: Sequence[int]) -> Case:
        return dict(zip(self.letters, size, strict=True))


def add_arguments(problem: Problem, parser: argparse.ArgumentParser) -> None:
    form, parts = ",".join(problem.letters), problem.parts
    default = " ".join(",".join(map(str, size)) for size in problem.sizes)
    add = parser.add_argument
    add("--sizes", nargs="+", metavar=form, help=f"(default: {default})")
    add("--only", nargs="+", default=parts, metavar="PART", help=f"some of {', '.join(parts)} (default: all)")
    add("--kinds", nargs="+", default=problem.kinds, metavar="KIND", help="of inputs (default: %(default)s)")
    add("--quick", action="store_true", help="the first of the sizes and of the kinds alone")
    add("--output", type=Path, help="file to which one JSON line is appended for each measurement")


def check_arguments(problem: Problem, args: argparse.Namespace) -> None:
    for name, known in (("only", problem.parts), ("kinds", problem.kinds)):
        if unknown := [value for value in getattr(args, name) if value not in known]:
            raise ValueError(f"{name}: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    args.sizes = list(problem.sizes) if args.sizes is None else [_size(problem, text) for text in args.sizes]
    if args.quick:
        args.sizes, args.kinds = args.sizes[:1], args.kinds[:1]


def _size(problem: Problem, text: str) -> tuple[int, ...]:
    try:
        size = tuple(map(int, text.split(",")))
        fits = len(size) == len(problem.letters)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"sizes: expected {','.join(problem.letters)} as whole numbers, got {text}")
    case = problem.case(size)
    for name, number in case.items():
        least, most = problem.bounds.get(name, (1, 1 << 62))
        if not least <= number <= most:
            expected = f"{name} >= {least}" if most == 1 << 62 else f"{name} from {least} to {most}"
            raise ValueError(f"sizes: expected {expected}, got {text}")
    if "k" in case and case["k"] > case["E"] - problem.spare_experts:
        raise ValueError(f"sizes: expected k {'<' if problem.spare_experts else '<='} E, got {text}")
    return size


def run(problem: Problem, implementations: Callable[[], list[Implementation]], args: argparse.Namespace) -> int:
    check_arguments(problem, args)
    return bench(args, Cuda(), problem, implementations())


def bench(args: argparse.Namespace, machine, problem: Problem, compared: Sequence[Implementation]) -> int:
    """Measures every size with every implementation; returns the exit status, 1 where one was wrong."""
    wanted = {direction for part in args.only for direction in PARTS[part]}
    plan = [
        (size, kind, [direction for direction in problem.directions(problem.case(size)) if direction in wanted])
        for size in args.sizes
        for kind in args.kinds
    ]
    total = len(compared) * sum(len(directions) for _, _, directions in plan)
    with Report(machine.name, args.command, args.output, total, rival="rival") as report:
        for size, kind, directions in plan:
            if directions:
                measure_case(machine, problem, compared, size, kind, directions, report)
        tqdm.write(problem.notes.format(bandwidth=machine.bandwidth / 1e12, matmul=machine.matmul_rate / 1e12))
    return int(report.wrong > 0)


def measure_case(machine, problem: Problem, compared, size, kind: str, directions, report: Report) -> None:
    case, device = problem.case(size), machine.device
    x = problem.make_inputs(case, kind, device, 0)
    cold = sum(t.numel() * t.element_size() for t in x.values()) >= COLD_BYTES and GRAPH not in directions
    sets = [x, *(problem.make_inputs(case, kind, device, seed) for seed in range(1, 1 if cold else INPUT_SETS))]
    short = check_short(problem, compared, case, kind, device, BACKWARD in directions)
    for direction in directions:
        moved, operations = problem.cost(case, x, direction)
        floors = 1e3 * moved / machine.bandwidth, 1e3 * operations / machine.matmul_rate
        gradients = [x[name] for name in trained(problem, x)] if direction == BACKWARD else []
        rows: list[Measurement] = []
        for one in compared:
            row = Measurement(problem.name, case, kind, direction, one.name, is_rival=one.is_rival)
            check = partial(_errors, problem, one, short[one.name], x, direction)
            row = measure(
                row, machine, check, problem.limits, _calls(problem, one, sets, direction), direction == GRAPH
            )
            if row.ms is not None:
                kept = sum(t.numel() * t.element_size() for t in gradients)
                row = replace(
                    row,
                    extra_bytes=max(0, row.extra_bytes - kept),
                    copy_fraction=floors[0] / row.ms,
                    matmul_fraction=floors[1] / row.ms,
                )
            rows.append(row)
            finish(rows, max(floors), report)
        if RECORDED_ON in machine.name:
            for name, (ms, extra) in problem.recorded.get((kind, tuple(size), direction), {}).items():
                extra_bytes = None if extra is None else int(extra)
                row = Measurement(
                    problem.name, case, kind, direction, name, ms=ms, extra_bytes=extra_bytes, recorded=True
                )
                rows.append(row)
                finish(rows, max(floors), report)


def results(problem: Problem, call, x: Inputs, cotangent: torch.Tensor | None) -> Inputs:
    """All results and, with a cotangent of the first of them, the gradients of what is trained."""
    if cotangent is None:
        with torch.no_grad():
            return call(x)
    leaves = _leaves(problem, x)
    found = call(leaves)
    first = next(iter(found.values()))
    names = trained(problem, x)
    gradients = torch.autograd.grad(first, [leaves[name] for name in names], cotangent.to(first.dtype))
    return {name: t.detach() for name, t in found.items()} | {
        f"d {name}": t for name, t in zip(names, gradients, strict=True)
    }


def trained(problem: Problem, x: Inputs) -> list[str]:
    return [name for name in problem.trained if name in x]


def _leaves(problem: Problem, x: Inputs) -> Inputs:
    return {name: t.detach().requires_grad_(name in problem.trained) for name, t in x.items()}


def _double(x: Inputs) -> Inputs:
    return {name: t.double() if t.is_floating_point() else t.clone() for name, t in x.items()}


def _cotangent(problem: Problem, x: Inputs) -> torch.Tensor:
    like = x[problem.like]
    generator = torch.Generator(like.device).manual_seed(1)
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)


def check_short(problem: Problem, compared, case: Case, kind: str, device, with_gradients: bool):
    """For each name, a function that returns all errors on a few tokens and computes them but once."""
    x = problem.make_inputs(problem.small(case), kind, device, 0)
    cotangent = _cotangent(problem, x) if with_gradients else None
    expected = results(problem, problem.reference, _double(x), cotangent)

    def errors(one: Implementation) -> dict[str, float]:
        fresh = {name: t.clone() for name, t in x.items()}  # one of them may be written to
        return compare(results(problem, one.call, fresh, cotangent), expected)

    return {one.name: cache(partial(errors, one)) for one in compared}


def compare(found: Inputs, expected: Inputs) -> dict[str, float]:
    """Relative errors; of whole numbers that name something, the fraction that differs."""
    return {
        name: (found[name] != t).double().mean().item() if name == "indices" else relative_error(found[name], t)
        for name, t in expected.items()
    }


def _errors(problem: Problem, one: Implementation, short, x: Inputs, direction: str) -> dict[str, float]:
    errors = short()
    if direction != BACKWARD:
        errors = {name: error for name, error in errors.items() if not name.startswith("d ")}
    return errors | check_rows(problem, one, x, direction == BACKWARD)


def check_rows(problem: Problem, one: Implementation, x: Inputs, with_gradients: bool) -> dict[str, float]:
    """At full size: the results, and gradients, in the rows of the first, the middle and the last token."""
    cotangent = _cotangent(problem, x) if with_gradients else None
    found = results(problem, one.call, x, cotangent)
    first = next(iter(found.values()))
    T = len(first)
    rows = torch.tensor(sorted({0, T // 2, T - 1}), device=first.device)
    some = None if cotangent is None else cotangent[rows]
    expected = results(problem, problem.reference, _double(problem.take(x, rows)), some)
    names = [name for name in expected if name.removeprefix("d ") in problem.rows]
    errors = compare({name: found[name][rows] for name in names}, {name: expected[name] for name in names})
    if cotangent is not None:
        errors |= problem.parameters(x, found, cotangent)
    return {f"{name} at size": error for name, error in errors.items()}


def _calls(problem: Problem, one: Implementation, sets: Sequence[Inputs], direction: str):
    def forward(x):
        with torch.no_grad():
            return list(one.call(x).values())

    def both(leaves, cotangent):
        first = next(iter(one.call(leaves).values()))
        return torch.autograd.grad(first, [leaves[name] for name in trained(problem, leaves)], cotangent)

    if direction != BACKWARD:
        return [partial(forward, x) for x in sets]
    return [partial(both, _leaves(problem, x), _cotangent(problem, x)) for x in sets]


def compiled(function: Callable[[Inputs], Inputs]) -> Callable[[Inputs], Inputs]:
    """`function` under torch.compile, for each set of shapes; anew after a few of them, before dynamo refuses more."""
    known: dict[tuple, Callable[[Inputs], Inputs]] = {}

    def call(x: Inputs) -> Inputs:
        key = (torch.is_grad_enabled(), *((name, t.shape, t.dtype, t.requires_grad) for name, t in x.items()))
        if key not in known:
            if len(known) == COMPILED_SHAPES:
                known.clear()
                torch.compiler.reset()
            known[key] = torch.compile(function, dynamic=False, fullgraph=True)
        return known[key](x)

    return call
