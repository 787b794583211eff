"""`moe-lc export`: a checkpoint of ours, or a released one, as a folder that serving engines read.

A file whose bytes do not change becomes a hard link; the others are streamed, one output file for one input file, by the
same code as `moe-lc convert`. Everything happens in a hidden folder beside the destination, which takes its name when it
is whole: killed at any moment, the same command goes on with the files that are finished.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from .checkpoint_reader import DTYPES, INDEX, SINGLE, Checkpoint, read_json
from .checkpoint_writer import JOURNAL
from .convert import convert
from .convert_plan import Plan, Shard, Step, make_plan
from .export_config import TARGETS, exported
from .export_files import files_beside
from .layouts import describe


THREADS = min(8, os.cpu_count() or 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="folder with config.json and safetensors, ours or released"
    )
    add("out", type=Path, metavar="OUT", help="folder to write: a new or an empty one")
    add(
        "--to",
        required=True,
        choices=TARGETS,
        help="layout to write; dtypes stay as they are (`moe-lc convert --dtype` changes them)",
    )


def run(args: argparse.Namespace) -> None:
    export(args.checkpoint, args.out, args.to)


def export(checkpoint: Path, out: Path, target: str) -> Path:
    """Writes the folder `out`, with a released `config.json` and the released names of tensors, and returns it.

    Args:
        checkpoint: folder in our layout, that of K3 or that of Kimi-Linear. It and `out` may share files (hard links):
            replace a file of either, rather than to change its bytes in place.
        target: "kimi-k3" (nested config; text, or text and vision) or "kimi-linear" (text).

    Raises:
        ValueError: `out` has files; the target cannot express a field (all are named); tensors are missing, unexpected
            or of another shape or dtype (all are named); the disk is too small. Nothing was written then.
    """
    out = out.resolve()  # beside what a link leads to, and "." has no name
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out: expected a new or an empty folder, got {out}")
    with Checkpoint(checkpoint) as opened:
        plan, links = plan_export(opened, target, out)
        staged = out.with_name(f".{out.name}.export")
        _clear(staged, plan, links)
        convert(opened, plan, staged, resume=True, workers=THREADS)
        for name, file in links.items():
            os.link(file, staged / name)
    if out.exists():
        out.rmdir()
    staged.rename(out)
    written = sum(plan.sizes().values())
    print(f"exported {out} as {target}: {len(links)} files of weights linked, {written:,} bytes written")
    return out


def _clear(staged: Path, plan: Plan, links: dict[str, Path]) -> None:
    """Leaves of an interrupted run what its journal vouches for; without one, nothing tells what the files came from."""
    begun = (staged / JOURNAL).exists()
    for name in [*links, *(() if begun else plan.sizes())]:
        (staged / name).unlink(missing_ok=True)


def plan_export(checkpoint: Checkpoint, target: str, out: Path) -> tuple[Plan, dict[str, Path]]:
    """What has to be written, and (name -> file) what can be linked. Raises `ValueError` as `export`."""
    source = describe(read_json(checkpoint.folder / "config.json"))
    wanted = exported(source, target)
    whole = make_plan(checkpoint, source, wanted, None, sys.maxsize)
    steps = [step for shard in whole.shards for step in shard.steps]
    groups = _by_file(steps, checkpoint)
    names = dict(zip(groups, _names(len(groups)), strict=True))
    unchanged = [file for file, its in groups.items() if all(_is_unchanged(step, checkpoint) for step in its)]
    links = {names[file]: file.resolve() for file in unchanged if _can_link(file.resolve(), out)}
    shards = tuple(
        Shard(names[file], tuple(sorted(its, key=lambda step: -DTYPES[step.outputs[0].dtype].itemsize)))
        for file, its in groups.items()
        if names[file] not in links
    )
    index = {INDEX: _index(groups, names)} if len(groups) > 1 else {}
    return Plan(source, wanted, shards, index | files_beside(checkpoint.folder, source, wanted)), links


def _by_file(steps: list[Step], checkpoint: Checkpoint) -> dict[Path, list[Step]]:
    """Steps by the file that they read; without another dtype each has a single source."""
    groups: dict[Path, list[Step]] = {file: [] for file in checkpoint.files}
    for step in steps:
        groups[step.sources[0].file].append(step)
    return groups


def _names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _is_unchanged(step: Step, checkpoint: Checkpoint) -> bool:
    """Whether the tensor is there already, under its name; one rewritten in its own dtype and shape keeps its bytes."""
    (stored,), (output,) = step.sources, step.outputs
    same = (output.dtype, output.shape) == (stored.dtype, stored.shape)
    return same and checkpoint.tensors.get(output.name) == stored


def _can_link(file: Path, out: Path) -> bool:
    """Tried, not guessed: devices, file systems and rights decide, and only the disk that is needed shall be checked for."""
    near = next(folder for folder in out.absolute().parents if folder.exists())
    with tempfile.TemporaryDirectory(prefix=".", dir=near) as scratch:
        try:
            os.link(file, Path(scratch, "probe"))
        except OSError:
            return False
    return True


def _index(groups: dict[Path, list[Step]], names: dict[Path, str]) -> bytes:
    outputs = [(output, names[file]) for file, steps in groups.items() for step in steps for output in step.outputs]
    total = sum(output.nbytes for output, _ in outputs)
    weight_map = {output.name: name for output, name in outputs}
    return (json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n").encode()
