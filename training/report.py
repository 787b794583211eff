"""The report of a demo run: its tables, the machine, the sample."""

import itertools
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from .figure import Table


def machine() -> dict[str, str]:
    """The processor, the threads and the versions that a run used."""
    return {
        "processor": _processor(),
        "logical cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        **{name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def build_tables(results: dict) -> list[Table]:
    """The tables of the report, in reading order, from the results of a run (the content of its results.json)."""
    position, held_out = results["by_position"], results["held_out"]
    trained = f"{position['trained_length']:,}"
    stages = [
        (
            f"{row['length']:,}",
            f"{row['steps']}",
            f"{row['tokens']:,}",
            f"{row['train_loss']:.3f}",
            f"{row['held_out_loss']:.3f}",
            f"{row['tokens_per_second']:,.0f}",
        )
        for row in results["stages"]
    ]
    routing = [
        (row["model"], *(f"{row[name]:.3f}" for name in ("mean", "worst", "floor", "loss")))
        for row in results["routing"]
    ]
    positions = [
        (f"{start:,} to {end:,}", f"{one:.3f}", f"{cut:.3f}", f"{one - cut:+.3f}")
        for (start, end), one, cut in zip(
            itertools.pairwise(position["borders"]), position["one_document"], position["windows"], strict=True
        )
    ]
    return [
        Table(
            "Loss of each stage",
            ("sequence length", "steps", "tokens seen", "train loss", "held-out loss", "tokens/s"),
            stages,
            "Nats per token. Train: mean over the last quarter of the stage's steps. Held-out: the held-out files, cut "
            "where they are longer than the stage's sequences.",
        ),
        Table(
            f"Compression of {held_out['files']} held-out files, {held_out['bytes']:,} bytes",
            ("coder", "bits per byte"),
            [(name, f"{bits:.3f}") for name, bits in results["bits_per_byte"].items()],
            f"The model reads each file as a document of its own, in pieces of {trained} tokens where it is longer, and "
            "pays for the end of each file. xz sees no training corpus.",
        ),
        Table(
            "Routing of the held-out files",
            ("model", "MaxVio, mean of layers", "worst layer", "sampling floor", "held-out loss"),
            routing,
            "MaxVio: largest load of an expert over the mean load, minus 1. Floor: sqrt(2 ln n (1 - k/n) / (m k/n)), what "
            "chance leaves for m independent tokens; tokens of one file are not independent.",
        ),
        Table(
            f"Held-out loss by position; the longest trained length is {trained}",
            ("positions", "one document", f"windows of {trained}", "difference"),
            positions,
            "Nats per token of the held-out files behind one another, read as one document, and each with "
            f"what stood before it in a window of {trained}, half as much at least. Which text stands where moves both columns, not "
            "their difference.",
        ),
    ]


def write_report(path: Path, results: dict, files: Sequence[Path]) -> None:
    """Writes the Markdown report: how the numbers were made, the tables, the figure, the sample, the paths of `files`."""
    facts = {**results["facts"], **results["machine"]}
    lines = [
        "# Demo run",
        "",
        "A model trained from scratch; every number below comes from this run. The same command gives the same run again:",
        "",
        f"    {results['command']}",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        "",
        *(table.markdown() for table in build_tables(results)),
        "![Loss, routing, loss by position, bits per byte](curves.png)",
        "",
        "## Sample",
        "",
        "Written by the saved model, loaded with `AutoModelForCausalLM`.",
        "",
        "~~~python",
        results["sample"],
        "~~~",
        "",
        "## Files",
        "",
        *(f"- `{file}`" for file in files),
        "",
    ]
    path.write_text("\n".join(lines))
