"""Runs of one recipe beside each other: how their losses fall and how evenly their experts are used."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .plot import gaps, series, unit_of
from .run_log import STEP, VALIDATION, records_of


SMOOTHED = 16  # steps of which a point of a curve is the mean


def draw_comparison(path: Path, runs: Mapping[str, Sequence[dict]]) -> None:
    """Draws the logs of `runs`, by name, as one PNG: training loss and MaxVio by tokens, validation loss by run.

    Runs that differ in a number at the end of their name alone, say in their seed (`sign-0`, `sign-1`), are a group of one
    colour. MaxVio is the mean over the layers.

    Raises ValueError, naming the run, if there is no step in a log.
    """
    for name, records in runs.items():
        if not records_of(records, STEP):
            raise ValueError(f"run {name}: expected a log with at least one step, got none")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    groups = list(dict.fromkeys(map(group_of, runs)))
    longest = max(records_of(records, STEP)[-1]["tokens"] for records in runs.values())
    scale, unit = unit_of(longest)
    named: set[str] = set()
    for name, records in runs.items():
        group, steps = group_of(name), records_of(records, STEP)
        style = {"color": f"C{groups.index(group) % 10}", "linewidth": 1.0}
        style |= {} if group in named else {"label": group}
        named.add(group)
        tokens = [step["tokens"] / scale for step in steps]
        axes[0].plot(tokens, smoothed(series(steps, "loss")), **style)
        routed = [step for step in steps if step.get("max_violation")]
        if routed:
            means = [float(np.nanmean(gaps(step["max_violation"]))) for step in routed]
            axes[1].plot([step["tokens"] / scale for step in routed], smoothed(means), **style)
        for record in records_of(records, VALIDATION)[-1:]:
            axes[2].plot(groups.index(group), record["loss"], "o", color=style["color"])
    _draw_floor(axes[1], runs)
    axes[0].set(title="Training loss", ylabel="nats per token", xlabel=f"{unit}tokens seen")
    axes[0].legend()
    axes[1].set(title="MaxVio, mean over layers", xlabel=f"{unit}tokens seen", yscale="log")
    axes[2].set(title="Validation loss at the end", ylabel="nats per token", xlim=(-0.5, len(groups) - 0.5))
    axes[2].set_xticks(range(len(groups)), groups, rotation=20, ha="right")
    new = path.with_name(f"{path.name}.new")
    figure.savefig(new, dpi=110, format="png")
    new.replace(path)
    plt.close(figure)


def group_of(name: str) -> str:
    return re.sub(r"[-_]\d+$", "", name) or name


def smoothed(values: Sequence[float]) -> np.ndarray:
    """The mean of the last `SMOOTHED` values at each place, of fewer at the start; NaN counts in none."""
    return np.array([np.nanmean(values[max(0, end - SMOOTHED) : end]) for end in range(1, len(values) + 1)])


def _draw_floor(axis, runs: Mapping[str, Sequence[dict]]) -> None:
    records = [record for log in runs.values() for record in records_of(log, STEP)]
    floors = [record["floor"] for record in records if record.get("floor") is not None]
    if floors:
        axis.axhline(floors[-1], color="grey", linestyle="--", linewidth=0.8)
        axis.annotate(
            "by chance", (0.99, floors[-1]), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="grey"
        )
