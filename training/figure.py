"""Results as tables and as one figure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Table:
    """A titled table of strings with a note under it; the first column is text, the others are numbers."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def plain(self) -> str:
        """Aligned columns for a terminal."""
        widths = [max(map(len, column)) for column in zip(self.headers, *self.rows, strict=True)]
        lines = [self.title]
        for row in (self.headers, *self.rows):
            cells = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
            lines.append("  " + "  ".join(cells).rstrip())
        return "\n".join([*lines, f"  {self.note}"] if self.note else lines)

    def markdown(self) -> str:
        """A section with a pipe table."""
        lines = [f"## {self.title}", "", _pipes(self.headers), _pipes(["---", *["---:"] * (len(self.headers) - 1)])]
        lines += [_pipes(row) for row in self.rows]
        return "\n".join([*lines, "", self.note, ""] if self.note else [*lines, ""])


def _pipes(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def plot_run(path: Path, results: dict) -> None:
    """Draws the four curves of a demo run (the content of its results.json) into one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, ((loss, violation), (position, bars)) = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    history, stages, by_position = results["history"], results["stages"], results["by_position"]
    tokens = [record["tokens"] / 1e3 for record in history]
    ends = [stage["tokens"] / 1e3 for stage in stages]

    loss.plot(tokens, [record["loss"] for record in history], color="tab:blue", label="training step")
    loss.plot(
        ends, [stage["held_out_loss"] for stage in stages], "o", color="tab:red", label="held out, at a stage's end"
    )
    loss.set(title="Loss", xlabel="thousand tokens seen", ylabel="nats per token")

    violation.plot(
        tokens, [record["max_violation"] for record in history], color="tab:green", label="mean of the layers"
    )
    violation.plot(
        tokens, [record["floor"] for record in history], color="black", linestyle="--", label="sampling floor"
    )
    violation.set(
        title="Routing: MaxVio of each step", xlabel="thousand tokens seen", ylabel="max load / mean load - 1"
    )
    violation.set_yscale("log")

    for axis in (loss, violation):
        for stage, start, end in zip(stages, [0.0, *ends], ends):
            axis.axvline(end, color="grey", linewidth=0.8, linestyle=":")
            axis.annotate(
                f"{stage['length']:,}", ((start + end) / 2, 1.0), xycoords=("data", "axes fraction"), xytext=(0, -10),
                textcoords="offset points", ha="center", fontsize=8, color="grey",
            )  # fmt: skip
        axis.legend(loc="best")

    borders = by_position["borders"]
    for name, label, style in (
        ("windows", f"in windows of {by_position['trained_length']:,}", "s--"),
        ("one_document", "one document", "o-"),
    ):
        position.plot(borders[1:], by_position[name], style, label=label)
    position.axvline(by_position["trained_length"], color="grey", linestyle=":")
    position.annotate(
        "longest trained", (by_position["trained_length"], 0.0), xycoords=("data", "axes fraction"), xytext=(4, 6),
        textcoords="offset points", fontsize=8, color="grey",
    )  # fmt: skip
    position.set_xscale("log", base=2)
    position.set_xticks(borders[1:], [f"{border:,}" for border in borders[1:]])
    position.set(title="Held-out loss by position", xlabel="position in the text, up to", ylabel="nats per token")
    position.legend()

    names, bits = zip(*results["bits_per_byte"].items())
    drawn = bars.bar(names, bits, color=["tab:blue", *["lightgrey"] * (len(names) - 1)])
    bars.bar_label(drawn, fmt="%.3f")
    bars.margins(y=0.12)
    bars.set(title="Held-out files", ylabel="bits per byte (lower is better)")

    figure.savefig(path, dpi=120)
    plt.close(figure)
