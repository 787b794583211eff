"""`moe-lc bench OPERATOR`: an operator's speed on this GPU beside other implementations, each checked before it is timed."""

import argparse
import importlib
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Self

import torch
from tqdm import tqdm


PACKAGE = __package__.rpartition(".")[0]

# name: (module with add_arguments(parser) and run(args), what it measures)
OPERATORS = {"kda": (f"{PACKAGE}.training.bench_kda", "Kimi Delta Attention: whole sequences and one-token steps")}

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
    module.add_arguments(parser)
    return module.run(parser.parse_args(args.arguments))


@dataclass(frozen=True)
class Measurement:
    """One line of the table. `wrong` or `skipped` stands in place of a speed; `errors` are relative, against FP64."""

    operator: str
    case: dict[str, int]
    gate: str
    direction: str
    implementation: str
    ms: float | None = None
    ratio_to_fla: float | None = None  # FLA's time over this one's: above 1 is faster than FLA
    extra_bytes: int | None = None
    floor_fraction: float | None = None  # of the speed at which the necessary bytes could be copied
    errors: dict[str, float] = field(default_factory=dict)
    wrong: str | None = None
    skipped: str | None = None
    recorded: bool = False  # measured earlier on such a device, not in this run


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

    def copy_bandwidth(self) -> float:
        """Bytes per second, read and written, of a large copy."""
        source = torch.zeros(1 << 30, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / (1e-3 * self.median_ms([lambda: target.copy_(source)]))


class Report:
    """Prints measurements as a table, one line as soon as it is known, and appends them to a file of JSON lines."""

    COLUMNS = (
        ("case", 26), ("gate", 5), ("direction", 17), ("implementation", 26), ("ms", 10), ("vs FLA", 7),
        ("of floor", 9), ("extra GB", 9), ("worst error", 12),
    )  # fmt: skip

    def __init__(self, device: str, output: Path | None, measurements: int):
        if output is not None and not output.resolve().parent.is_dir():
            raise ValueError(f"output: expected a file in a folder that exists, got {output}")
        self.machine = {"device": device, "torch": installed_version("torch"), "triton": installed_version("triton")}
        self.file: IO[str] | None = None if output is None else output.open("a")
        self.progress = tqdm(total=measurements, unit="measurement")
        self.wrong = 0
        tqdm.write("  ".join(f"{name:<{width}}" for name, width in self.COLUMNS).rstrip())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.close()
        if self.file is not None:
            self.file.close()

    def add(self, measurement: Measurement) -> None:
        self.wrong += measurement.wrong is not None
        tqdm.write(self.line(measurement))
        if self.file is not None:
            errors = {name: error if math.isfinite(error) else None for name, error in measurement.errors.items()}
            self.file.write(json.dumps({**asdict(measurement), "errors": errors, **self.machine}) + "\n")
            self.file.flush()
        self.progress.update(not measurement.recorded)

    def line(self, m: Measurement) -> str:
        names = [
            " ".join(f"{name} {size:,}" for name, size in m.case.items()),
            m.gate,
            m.direction,
            m.implementation + (" (recorded)" if m.recorded else ""),
        ]
        worst = max(m.errors.values(), default=None)
        numbers = [
            _format(m.ms, "{:.4g}"),
            _format(m.ratio_to_fla, "{:.2f}x"),
            _format(m.floor_fraction, "{:.0%}"),
            _format(None if m.extra_bytes is None else m.extra_bytes / 1e9, "{:.3f}"),
            _format(worst, "{:.1e}"),
        ]
        instead = f"wrong: {m.wrong}" if m.wrong is not None else m.skipped
        cells = names + (numbers if instead is None else [instead])
        return "  ".join(f"{cell:<{width}}" for cell, (_, width) in zip(cells, self.COLUMNS)).rstrip()


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the norm of `expected`; NaN where `result` is not finite."""
    return ((result.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300)).item()


def wrong(errors: dict[str, float], limits: dict[str, float]) -> str | None:
    """The errors above their limits in words, or None; NaN is above every limit."""
    above = [f"{name} {error:.1e}" for name, error in errors.items() if not error <= limits[name]]
    return ", ".join(above) or None


def _format(number: float | None, form: str) -> str:
    return "-" if number is None else form.format(number)


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
