"""`moe-lc bench OPERATOR`: an operator's speed on this GPU beside other implementations, each checked before it is timed."""

import argparse
import importlib
import json
import math
import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Self

import torch
from tqdm import tqdm


PACKAGE = __package__.rpartition(".")[0]

# name: (module with add_arguments(parser) and run(args), what it measures)
OPERATORS = {
    "kda": (
        f"{PACKAGE}.training.bench_kda",
        "Kimi Delta Attention: whole sequences, one-token steps, the layer without its GEMMs",
    ),
    "experts": (
        f"{PACKAGE}.training.bench_experts",
        "expert MLPs: balanced and skewed routing, training and decoding",
    ),
    "router": (f"{PACKAGE}.training.bench_router", "routing to the best experts, with and without a histogram"),
    "attn-res": (f"{PACKAGE}.training.bench_attn_res", "block attention residual mix with the norm behind it"),
    "mla": (f"{PACKAGE}.training.bench_mla", "one-token attention over a long latent cache"),
    "layer": (
        f"{PACKAGE}.training.bench_layer",
        "a decoder layer forward and backward: launched, its kernels alone, as a CUDA graph",
    ),
    "train": (
        f"{PACKAGE}.training.bench_train",
        "whole training steps: tokens a second, MFU, memory, the optimiser's share",
    ),
    "generate": (
        f"{PACKAGE}.training.bench_generate",
        "prefilling a long prompt and decoding behind it, with random weights of any preset's size",
    ),
    "lora": (
        f"{PACKAGE}.training.bench_lora",
        "steps of an adapter on a frozen model, ours beside stock PEFT's formulation",
    ),
    "vision": (
        f"{PACKAGE}.training.bench_vision",
        "images a second through the vision tower and its projector",
    ),
}

OURS = "ours"
RESULTS = ("o", "state", "tail", "o at size")  # all other errors of a backward pass are those of gradients
# A measurement takes as many calls as fit into this time, within these bounds.
MILLISECONDS, FEWEST, MOST = 300.0, 5, 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    listing = "; ".join(f"{name}: {help_text}" for name, (_, help_text) in OPERATORS.items())
    parser.add_argument("operator", choices=OPERATORS, metavar="OPERATOR", help=listing)
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="options of the operator, or --help"
    )


def run(args: argparse.Namespace) -> int:
    module_name, help_text = OPERATORS[args.operator]
    module = importlib.import_module(module_name)
    parser = argparse.ArgumentParser(prog=f"moe-lc bench {args.operator}", description=help_text)
    parser.set_defaults(command=shlex.join(("moe-lc", "bench", args.operator, *args.arguments)))
    module.add_arguments(parser)
    return module.run(parser.parse_args(args.arguments))


@dataclass(frozen=True)
class Measurement:
    """One line of the table. `wrong` or `skipped` stands in place of a speed; `errors` are relative, against FP64."""

    operator: str
    case: dict[str, int]
    kind: str  # of inputs: gates of KDA, routing of experts
    direction: str
    implementation: str
    ms: float | None = None
    ratio_to_rival: float | None = None  # the time of FLA, or of who else is named, over this one's: above 1 is faster
    extra_bytes: int | None = None
    floor_fraction: float | None = None  # of the speed at which the necessary bytes could be copied
    copy_fraction: float | None = None  # where both are known: the floor is then the larger time of the two
    matmul_fraction: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    wrong: str | None = None
    skipped: str | None = None
    recorded: bool = False  # measured earlier on such a device, not in this run
    is_rival: bool = False


class Cuda:
    """Time, memory and bandwidth of the current CUDA device."""

    def __init__(self):
        if not torch.cuda.is_available():
            raise ValueError("device: expected a CUDA device, because GPU kernels are measured; found none")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name()

    def median_ms(self, calls: Sequence[Callable[[], object]]) -> float:
        """Median time of a call; `calls` are taken in turn, so that their inputs do not stay in the cache."""
        for call in calls:
            call()
        [once] = self._times(calls[:1])
        count = min(max(int(MILLISECONDS / max(once, 1e-3)), FEWEST), MOST)
        return statistics.median(self._times([calls[turn % len(calls)] for turn in range(count)]))

    def _times(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls]
        torch.cuda.synchronize()
        for (start, end), call in zip(events, calls, strict=True):
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def extra_bytes(self, call: Callable[[], object]) -> int:
        """Peak memory that a call allocates beyond what was allocated before; its results are counted."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def graph(self, calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
        """All calls, one after the other, as one CUDA graph."""
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph.replay

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second, read and written, of a large copy."""
        source = torch.zeros(1 << 30, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / (1e-3 * self.median_ms([lambda: target.copy_(source)]))

    @cached_property
    def matmul_rate(self) -> float:
        """Floating point operations per second of a large BF16 matrix product."""
        n = 8192
        a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        return 2 * n**3 / (1e-3 * self.median_ms([lambda: a @ b]))


class Report:
    """Prints measurements as a table, one line as soon as it is known, and appends them to a file of JSON lines.

    A summary comes last, after an interruption too: the end of a log says what the log holds.
    """

    COLUMNS = (
        ("operator", 9), ("case", 20), ("gate", 4), ("direction", 16), ("implementation", 26), ("ms", 7), ("vs FLA", 6),
        ("of floor", 8), ("extra GB", 8), ("worst error", 12),
    )  # fmt: skip
    SUMMARY = (
        *COLUMNS[:4], ("ours ms", 7), ("FLA ms", 7), *COLUMNS[6:9], ("o", 7), ("state", 7), ("worst gradient", 14),
    )  # fmt: skip

    def __init__(self, device: str, command: str, output: Path | None, measurements: int, rival: str = "FLA"):
        if output is not None and not output.resolve().parent.is_dir():
            raise ValueError(f"output: expected a file in a folder that exists, got {output}")
        versions = {name: installed_version(name) for name in ("torch", "triton")}
        self.origin = {"device": device, **versions, "command": command}
        self.file: IO[str] | None = None if output is None else output.open("a")
        self.progress = tqdm(total=measurements, unit="measurement")
        self.rows: list[Measurement] = []
        self.rival = rival
        tqdm.write(self._heading(self.COLUMNS))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.close()
        if self.file is not None:
            self.file.close()
        print("\n".join(self.summary()))

    def add(self, measurement: Measurement) -> None:
        self.rows.append(measurement)
        tqdm.write(_line(_cells(measurement), self._columns(self.COLUMNS)))
        if self.file is not None:
            errors = {name: error if math.isfinite(error) else None for name, error in measurement.errors.items()}
            self.file.write(json.dumps({**asdict(measurement), "errors": errors, **self.origin}) + "\n")
            self.file.flush()
        self.progress.update(not measurement.recorded)

    def _columns(self, columns: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Beside FLA as they are; beside others under their name, and wider for sizes of five numbers."""
        if self.rival == "FLA":
            return list(columns)
        others = {"case": ("case", 36), "gate": ("kind", 9), "implementation": ("implementation", 32)}
        return [others.get(name, (name.replace("FLA", self.rival), max(width, len(name)))) for name, width in columns]

    def _heading(self, columns: Sequence[tuple[str, int]]) -> str:
        columns = self._columns(columns)
        return _line([name for name, _ in columns], columns)

    @property
    def wrong(self) -> int:
        return sum(row.wrong is not None for row in self.rows)

    def summary(self) -> list[str]:
        """A line for each of our measurements, the fastest of FLA's or the rival's of its case, the parts of our error."""
        command, device = self.origin["command"], self.origin["device"]
        lines = [f"\n{command} on {device}", self._heading(self.SUMMARY)]
        for ours in self.rows:
            if ours.implementation == OURS:
                times = [
                    row.ms for row in self.rows if row.is_rival and row.ms is not None and _case(row) == _case(ours)
                ]
                lines.append(_line(_summary_cells(ours, min(times, default=None)), self._columns(self.SUMMARY)))
        return lines


def measure(
    row: Measurement, machine, check: Callable[[], dict], limits: dict, calls: Sequence[Callable], graph=False
) -> Measurement:
    """`row` with its errors and, where they are small and results finite, time and memory of one of the `calls`."""
    try:
        errors = check()
        if not all(result.isfinite().all() for result in calls[0]()):
            errors |= {"not finite": math.nan}
        failure = wrong(errors, limits)
        if failure is not None:
            return replace(row, errors=errors, wrong=failure)
        extra = machine.extra_bytes(calls[0])
        ms = machine.median_ms([machine.graph(calls)]) / len(calls) if graph else machine.median_ms(calls)
        return replace(row, errors=errors, ms=ms, extra_bytes=extra)
    except torch.OutOfMemoryError:
        return replace(row, skipped="out of memory")
    except Exception as error:
        # Another library may not run on this machine, in ways of its own. The rest can still be measured.
        if not row.is_rival:
            raise
        return replace(row, skipped=f"failed: {type(error).__name__}: {error}".partition("\n")[0])


def finish(rows: list[Measurement], floor_ms: float, report: Report) -> None:
    """Reports the last of the rows of a case, compared with those of FLA, or of the rival, before it."""
    base = min((row.ms for row in rows if row.is_rival and row.ms is not None), default=None)
    row = rows[-1]
    if row.ms is not None:
        row = replace(row, floor_fraction=floor_ms / row.ms, ratio_to_rival=None if base is None else base / row.ms)
    report.add(row)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the norm of `expected`; NaN where `result` is not finite."""
    return ((result.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300)).item()


def wrong(errors: dict[str, float], limits: dict[str, float]) -> str | None:
    """The errors above their limits in words, or None; NaN is above every limit."""
    above = [f"{name} {error:.1e}" for name, error in errors.items() if not error <= limits[name]]
    return ", ".join(above) or None


def _case(m: Measurement) -> tuple:
    return m.operator, m.case, m.kind, m.direction


def _names(m: Measurement) -> list[str]:
    return [m.operator, " ".join(f"{name} {size:,}" for name, size in m.case.items()), m.kind, m.direction]


def _cells(m: Measurement) -> list[str]:
    names = [*_names(m), m.implementation + (" (recorded)" if m.recorded else "")]
    worst = max(m.errors.values(), default=None)
    return names + (_instead(m) or [_format(m.ms, "{:.4g}"), *_comparison(m), _format(worst, "{:.1e}")])


def _summary_cells(m: Measurement, rival_ms: float | None) -> list[str]:
    gradients = [error for name, error in m.errors.items() if m.direction.endswith("backward") and name not in RESULTS]
    errors = [m.errors.get("o"), m.errors.get("state"), max(gradients, default=None)]
    times = [_format(m.ms, "{:.4g}"), _format(rival_ms, "{:.4g}")]
    return _names(m) + (_instead(m) or [*times, *_comparison(m), *(_format(error, "{:.1e}") for error in errors)])


def _instead(m: Measurement) -> list[str]:
    """What stands in place of a speed, if anything does."""
    said = f"wrong: {m.wrong}" if m.wrong is not None else m.skipped
    return [] if said is None else [said]


def _comparison(m: Measurement) -> list[str]:
    gigabytes = None if m.extra_bytes is None else m.extra_bytes / 1e9
    return [
        _format(m.ratio_to_rival, "{:.2f}x"),
        f"{m.copy_fraction:.0%}/{m.matmul_fraction:.0%}" if m.matmul_fraction else _format(m.floor_fraction, "{:.0%}"),
        _format(gigabytes, "{:.3f}"),
    ]


def _line(cells: Sequence[str], columns: Sequence[tuple[str, int]]) -> str:
    return "  ".join(f"{cell:<{width}}" for cell, (_, width) in zip(cells, columns)).rstrip()


def _format(number: float | None, form: str) -> str:
    return "-" if number is None else form.format(number)


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
