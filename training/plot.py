"""`moe-lc plot RUN`: the log of a run, finished or not, as one PNG; of several runs, what they differ in."""

import argparse
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from .run_log import STAGE, STEP, VALIDATION, read_log, records_of


COLUMNS = 400  # of the heat map, at most
LEAST = 1e-3  # MaxVio at the dark end: balance may be perfect, and its logarithm is not drawn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run; of several: a comparison")
    parser.add_argument("--out", type=Path, help="the PNG (default: curves.png in the folder of one run)")


def run(args: argparse.Namespace) -> None:
    if len(args.runs) > 1 and args.out is None:
        raise ValueError("out: expected a file for the comparison of several runs, got none")
    out = args.out or args.runs[0] / "curves.png"
    logs = {folder.resolve().name: read_log(folder) for folder in args.runs}
    if len(logs) < len(args.runs):
        raise ValueError(f"runs: expected folders of different names, got {', '.join(map(str, args.runs))}")
    if len(args.runs) == 1:
        draw(out, *logs.values())
    else:
        from .plot_comparison import draw_comparison

        draw_comparison(out, logs)
    print(f"wrote {out}")


def draw(path: Path, records: Sequence[dict]) -> None:
    """Draws loss, loss by position, balance of the experts and throughput from the records of a log.

    Raises ValueError if there is no step among them.
    """
    steps = records_of(records, STEP)
    if not steps:
        raise ValueError("run: expected a log with at least one step, got none")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, ((loss, position), (load, speed)) = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    scale, unit = unit_of(steps[-1]["tokens"])
    draw_loss(loss, steps, records_of(records, VALIDATION), scale)
    draw_positions(position, records_of(records, STAGE))
    draw_load(figure, load, steps, scale)
    draw_speed(speed, steps, scale)
    for axis in (loss, load, speed):
        axis.set_xlabel(f"{unit}tokens seen")
        axis.set_xlim(0, steps[-1]["tokens"] / scale)
        mark_stages(axis, steps, scale)
    new = path.with_name(f"{path.name}.new")
    figure.savefig(new, dpi=120, format="png")
    new.replace(path)
    plt.close(figure)


def unit_of(tokens: int) -> tuple[float, str]:
    """What to divide token numbers by, and how to call the unit."""
    for scale, name in ((1e9, "billion "), (1e6, "million "), (1e3, "thousand ")):
        if tokens >= scale:
            return scale, name
    return 1.0, ""


def series(records: Sequence[dict], name: str) -> list[float]:
    """One number of each record; what is missing or null is a gap in the curve."""
    return gaps(record.get(name) for record in records)


def gaps(values: Iterable[float | None]) -> list[float]:
    """Null as NaN, which is not drawn."""
    return [math.nan if value is None else value for value in values]


def draw_loss(axis, steps: Sequence[dict], validations: Sequence[dict], scale: float) -> None:
    axis.plot([step["tokens"] / scale for step in steps], series(steps, "loss"), color="tab:blue", label="training")
    if validations:
        tokens = [record["tokens"] / scale for record in validations]
        axis.plot(tokens, series(validations, "loss"), "o", color="tab:red", clip_on=False, label="validation")
    spikes = [step for step in steps if step.get("spike")]
    if spikes:
        tokens = [step["tokens"] / scale for step in spikes]
        axis.plot(tokens, series(spikes, "loss"), "x", color="black", label="spike")
    axis.set(title="Loss", ylabel="nats per token")
    axis.legend(loc="best")


def draw_positions(axis, stages: Sequence[dict]) -> None:
    """A curve for every stage that ended; dashed, in its colour, the same text in windows of the trained length."""
    axis.set(
        title="Held-out loss by position, at the end of a stage", xlabel="position, up to", ylabel="nats per token"
    )
    measured = [stage for stage in stages if stage.get("by_position")]
    if not measured:
        axis.text(0.5, 0.5, "no stage has ended yet", ha="center", va="center", transform=axis.transAxes, color="grey")
        return
    for number, stage in enumerate(measured):
        by_position, colour = stage["by_position"], f"C{number % 10}"
        ends = by_position["borders"][1:]
        axis.plot(ends, gaps(by_position["one_document"]), "o-", color=colour, label=stage["stage"])
        axis.plot(ends, gaps(by_position["windows"]), "--", color=colour, linewidth=0.8)
        axis.axvline(by_position["trained_length"], color=colour, linestyle=":", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}K" if tokens >= 1024 else f"{tokens:g}")
    axis.legend(title="dashed: in windows of the trained length", title_fontsize=8)


def draw_load(figure, axis, steps: Sequence[dict], scale: float) -> None:
    """MaxVio of every MoE layer over the tokens."""
    axis.set(title="Routing: MaxVio by layer", ylabel="MoE layer")
    routed = [step for step in steps if step.get("max_violation")]
    if not routed:
        axis.text(0.5, 0.5, "no MoE layers", ha="center", va="center", transform=axis.transAxes, color="grey")
        return
    routed = routed[:: math.ceil(len(routed) / COLUMNS)]
    grid = np.array([gaps(step["max_violation"]) for step in routed]).T  # [L, columns]
    edges = np.array([0, *(step["tokens"] for step in routed)]) / scale
    layers = np.arange(len(grid) + 1) + 0.5
    low = max(float(np.nanmin(grid)), LEAST)
    high = max(float(np.nanmax(grid)), 2 * low)
    mesh = axis.pcolormesh(edges, layers, grid.clip(low), norm="log", vmin=low, vmax=high)
    axis.set_yticks(range(1, len(grid) + 1, math.ceil(len(grid) / 12)))
    floor = series(routed, "floor")[-1]
    figure.colorbar(mesh, ax=axis, label=f"max load / mean load - 1 (by chance: {floor:.2g})")


def draw_speed(axis, steps: Sequence[dict], scale: float) -> None:
    tokens = [step["tokens"] / scale for step in steps]
    axis.plot(tokens, series(steps, "tokens_per_second"), color="tab:blue")
    axis.set(title="Throughput", ylabel="tokens per second")
    axis.set_ylim(0, 1.1 * np.nanmax(series(steps, "tokens_per_second")))
    if any(step.get("mfu") is not None for step in steps):
        share = axis.twinx()
        percent = 100 * np.array(series(steps, "mfu"))
        share.plot(tokens, percent, color="tab:orange", linewidth=0.8)
        share.set_ylabel("MFU, %", color="tab:orange")
        share.set_ylim(0, 1.3 * np.nanmax(percent))


def mark_stages(axis, steps: Sequence[dict], scale: float) -> None:
    """The borders of the stages, and their names between them."""
    start = 0.0
    for name, stage in itertools.groupby(steps, key=lambda step: step.get("stage", "")):
        *_, last = stage
        end = last["tokens"] / scale
        axis.axvline(end, color="grey", linewidth=0.8, linestyle=":")
        axis.annotate(
            f"{name}", ((start + end) / 2, 1.0), xycoords=("data", "axes fraction"), xytext=(0, -10),
            textcoords="offset points", ha="center", fontsize=8, color="grey",
        )  # fmt: skip
        start = end
