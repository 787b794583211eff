"""`moe-lc convert`: a released checkpoint, or one of ours, in another layout or dtype, whatever its size.

Everything is planned before anything is written (`convert_plan`). Then threads read pieces of tensors, convert them and
write them at their places in one shard after the other: memory holds a few pieces per thread, never a tensor of the
size of the model's. A journal names the finished shards: killed at any moment, the same command with `--resume` goes on
and ends with the same bytes.
"""

import argparse
import dataclasses
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from .bound_gate import (
    REPORT,
    bounded_config,
    fit_model,
    read_calibration,
    remove_fitted,
    report_lines,
    use_fitted,
)
from .checkpoint_reader import DTYPES, Checkpoint, Stored, read_json
from .checkpoint_writer import JOURNAL, Journal, Output, ShardFile, partial_path, write_atomically
from .convert_plan import FLOATS, Plan, Shard, Step, make_plan, source_files, tensor_lines
from .layouts import LAYOUTS, Description, change, describe, rewritten


PIECE = 1 << 21  # bytes of the larger side of a conversion that a thread holds at once: small enough for caches
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

Sink = Callable[[torch.Tensor, Output, int], None]  # bytes of a tensor, from byte n of it on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="SRC", help="folder with config.json and safetensors: K3, Kimi-Linear or ours")
    add("destination", type=Path, metavar="DST", help="folder to write")
    add(
        "--dtype",
        choices=FLOATS,
        help="of the weights; mxfp4: routed experts, the others bfloat16 (default: as they are)",
    )
    add("--layout", choices=LAYOUTS, help="names, shapes, dtypes and config to write (default: those of SRC)")
    add("--text-only", action="store_true", help="leave the vision tensors out")
    add("--shard-size", default="5GB", help="of a file, at most (default: %(default)s)")
    add("--workers", type=int, default=min(8, os.cpu_count() or 1), help="threads (default: %(default)s)")
    add("--dry-run", action="store_true", help="print what would be written and stop")
    add("--resume", action="store_true", help="go on with an interrupted conversion")
    add("--verify", action="store_true", help="read everything back and compare it with SRC converted once more")
    add(
        "--bound-gate",
        type=float,
        metavar="BOUND",
        help="approximate the softplus decay gate by one whose log decay stays above BOUND, for example -5",
    )
    add(
        "--calibration", type=Path, metavar="TEXT", help="for --bound-gate: a text file, or a folder of moe-lc prepare"
    )
    add("--calibration-tokens", type=int, default=8192, help="so many of it (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    if args.workers < 1:
        raise ValueError(f"workers: expected at least 1, got {args.workers}")
    if args.destination.resolve() == args.source.resolve():
        raise ValueError(f"destination: expected another folder than the source, got {args.destination}")
    with Checkpoint(args.source) as checkpoint:
        plan = make_bounded(checkpoint, args) if args.bound_gate is not None else _plan(checkpoint, args)
        if args.dry_run:
            _print(plan, args.destination)
            return
        if convert(checkpoint, plan, args.destination, resume=args.resume, workers=args.workers):
            print(f"wrote {args.destination}: {len(plan.shards)} shards, {sum(plan.sizes().values()):,} bytes")
        else:
            print(f"{args.destination} is complete")
        if args.verify:
            verify(checkpoint, plan, args.destination, workers=args.workers)
    if args.bound_gate is not None:
        remove_fitted(args.destination)


def _plan(checkpoint: Checkpoint, args: argparse.Namespace, source: Description | None = None) -> Plan:
    options = args.layout, args.dtype, args.text_only, parse_size(args.shard_size), source
    return plan_conversion(checkpoint, *options)


def make_bounded(checkpoint: Checkpoint, args: argparse.Namespace) -> Plan:
    """The plan for `checkpoint` with a bounded gate, which is fitted now; of a dry run without the gate and its report."""
    raw = read_json(checkpoint.folder / "config.json")
    source = describe(bounded_config(raw, args.bound_gate, args.calibration_tokens))
    if args.layout is None and source.layout == "kimi-linear":
        args.layout = "own"  # the released one has no bound
    plan = _plan(checkpoint, args, source)
    calibration = read_calibration(
        args.calibration, checkpoint.folder, args.calibration_tokens, source.config.vocab_size
    )
    if args.dry_run:
        print(f"beside it: {REPORT}, the report of the fit on {calibration.ids.numel():,} tokens")
        return plan
    if not args.resume:
        _is_complete(plan, args.destination, resume=False)
        _check_disk(args.destination, sum(plan.sizes().values()))
    report = fit_model(checkpoint.folder, args.bound_gate, calibration, args.destination, resume=args.resume)
    print("\n".join(report_lines(report)))
    use_fitted(checkpoint, source.prefix, args.destination)
    plan = _plan(checkpoint, args, source)
    return dataclasses.replace(plan, small_files={REPORT: report, **plan.small_files})


def plan_conversion(
    checkpoint: Checkpoint,
    layout: str | None = None,
    dtype: str | None = None,
    text_only: bool = False,
    shard_size: int = 5 * 10**9,
    source: Description | None = None,
) -> Plan:
    """Plans what `moe-lc convert` with these options would write. Raises `ValueError` for a checkpoint that is not whole.

    `source`: what the checkpoint is taken for, by default what its `config.json` says.
    """
    source = source or describe(read_json(checkpoint.folder / "config.json"))
    target = change(source, layout or source.layout, dtype, text_only)
    return make_plan(checkpoint, source, target, dtype, shard_size)


def convert(checkpoint: Checkpoint, plan: Plan, folder: Path, *, resume: bool = False, workers: int = 1) -> bool:
    """Writes what `plan` says into `folder`, which must be new, empty, or with `resume` begun by the same conversion.

    Returns False where that was done before.

    Raises `ValueError` when it is none of these, when the disk is too small, or when the source has changed.
    """
    if _is_complete(plan, folder, resume):
        return False
    todo, settings = plan.sizes(), {"files of the source": source_files(checkpoint), "plan": plan.digest()}
    if (folder / JOURNAL).exists():
        journal = Journal(folder, settings)
        todo = {name: size for name, size in todo.items() if name not in journal.done}
    for name in todo:
        partial_path(folder / name).unlink(missing_ok=True)
    _check_disk(folder, sum(todo.values()))
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder, settings)
    shards = [shard for shard in plan.shards if shard.name in todo]
    total, left = (sum(shard.data_bytes for shard in some) for some in (plan.shards, shards))
    with tqdm(desc="converting", total=total, initial=total - left, unit="B", unit_scale=True) as bar:
        _write_shards(checkpoint, plan, shards, folder, journal, bar, workers)
    for name, content in plan.small_files.items():
        write_atomically(folder / name, content)
    journal.remove()
    return True


def _write_shards(checkpoint, plan: Plan, shards, folder: Path, journal: Journal, bar: tqdm, workers: int) -> None:
    def finish(file: ShardFile) -> None:
        file.finish()
        journal.append(file.path.name, file.size)

    with _threads(workers) as pool, ThreadPoolExecutor(1) as finisher:
        last: Future | None = None
        for shard in shards:
            bar.set_postfix_str(shard.name, refresh=False)
            file = ShardFile(folder / shard.name, shard.header(), shard.size)
            try:
                _run(pool, checkpoint, plan, shard, _writer(file, shard), bar, 2 * workers)
            except BaseException:
                file.close()
                raise
            if last is not None:
                last.result()  # the disk had the time of a whole shard for the one before
            last = finisher.submit(finish, file)
        if last is not None:
            last.result()


def _writer(file: ShardFile, shard: Shard) -> Sink:
    places, end = {}, len(shard.header())
    for output in shard.outputs:
        places[output.name], end = end, end + output.nbytes
    return lambda tensor, output, first: file.write(tensor, places[output.name] + first)


def verify(checkpoint: Checkpoint, plan: Plan, folder: Path, *, workers: int = 1) -> None:
    """Converts the source once more and compares it with the bytes in `folder`; raises `ValueError` with all differences."""
    with Checkpoint(folder) as written:
        wanted = {output.name: output for shard in plan.shards for output in shard.outputs}
        wrong = {name for name in wanted.keys() | written.tensors.keys() if not _same(written, wanted, name)}
        files = {name: folder / name for name in plan.small_files}
        wrong |= {n for n, path in files.items() if not path.is_file() or path.read_bytes() != plan.small_files[n]}

        def compare(tensor: torch.Tensor, output: Output, first: int) -> None:
            data = tensor.contiguous().flatten().view(torch.uint8)
            if output.name in wrong:
                return
            if not torch.equal(data, written.read(written.tensors[output.name], first, len(data))):
                wrong.add(output.name)

        total = sum(shard.data_bytes for shard in plan.shards)
        with tqdm(desc="verifying", total=total, unit="B", unit_scale=True) as bar, _threads(workers) as pool:
            for shard in plan.shards:
                _run(pool, checkpoint, plan, shard, compare, bar, 2 * workers)
    if wrong:
        raise ValueError(f"{folder}: expected what the source becomes, got other bytes in {', '.join(sorted(wrong))}")
    print(f"verified {folder}: {len(wanted):,} tensors")


def _same(written: Checkpoint, wanted: dict[str, Output], name: str) -> bool:
    if name not in written.tensors or name not in wanted:
        return False
    return (written.tensors[name].dtype, written.tensors[name].shape) == (wanted[name].dtype, wanted[name].shape)


@contextmanager
def _threads(workers: int) -> Iterator[ThreadPoolExecutor]:
    """A pool whose threads are the parallelism: torch's own would only stand in their way."""
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _run(pool, checkpoint: Checkpoint, plan: Plan, shard: Shard, sink: Sink, bar: tqdm, ahead: int) -> None:
    """Makes every tensor of `shard`, piece by piece, and hands the pieces to `sink`; `ahead` pieces wait, at most.

    No thread is at work any more when this returns or raises.
    """
    waiting: set[Future] = set()
    try:
        for step in shard.steps:
            for first, rows in _pieces(step):
                if len(waiting) >= ahead:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    bar.update(sum(future.result() for future in done))
                waiting.add(pool.submit(_make, checkpoint, plan, step, first, rows, sink))
        bar.update(sum(future.result() for future in waiting))
    finally:
        for future in waiting:
            future.cancel()
        wait(waiting)


def _pieces(step: Step) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each part that is made at once; a copied or cast tensor counts single values."""
    if step.action == "rewrite":
        yield 0, 1
        return
    count = _rows(step)
    widest = max(max(one.nbytes for one in step.sources), max(one.nbytes for one in step.outputs))
    rows = max(1, PIECE * count // max(1, widest))
    for first in range(0, count, rows):
        yield first, min(rows, count - first)


def _rows(step: Step) -> int:
    shape = step.outputs[0].shape
    return torch.Size(shape).numel() if step.action in ("copy", "cast") else shape[0]


def _make(checkpoint: Checkpoint, plan: Plan, step: Step, first: int, rows: int, sink: Sink) -> int:
    count = 1 if step.action == "rewrite" else _rows(step)

    def read(stored: Stored) -> torch.Tensor:
        row = stored.nbytes // count
        return checkpoint.read(stored, first * row, rows * row)

    made = _converted(plan, step, [read(stored) for stored in step.sources], rows)
    for tensor, output in zip(made, step.outputs, strict=True):
        sink(tensor, output, first * (output.nbytes // count))
    return sum(tensor.nbytes for tensor in made)


def _converted(plan: Plan, step: Step, parts: list[torch.Tensor], rows: int) -> tuple[torch.Tensor, ...]:
    """Bytes of `rows` rows of the sources -> the same rows of the outputs."""
    if step.action == "copy":
        return (parts[0],)
    (stored, *_), (output, *_) = step.sources, step.outputs
    data = parts[0].view(DTYPES[stored.dtype])
    if step.action == "cast":
        return (data.to(DTYPES[output.dtype]),)
    if step.action == "rewrite":
        made = rewritten(data.view(stored.shape), step.kind, output.name, plan.source.config, plan.target.config)
        return (made,)
    from ..kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4

    if step.action == "quantize":
        return tuple(quantize_mxfp4(data.view(rows, -1)))
    packed, scales = (part.view(rows, -1) for part in parts)
    return (dequantize_mxfp4(packed, scales, DTYPES[output.dtype]),)


def _is_complete(plan: Plan, folder: Path, resume: bool) -> bool:
    """Whether there is nothing to do. Raises `ValueError` for a folder that is not new, empty or begun by us."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"destination: expected a folder, got {folder}")
    begun = (folder / JOURNAL).exists()
    if begun and not resume:
        raise ValueError(f"destination: expected --resume to go on with the conversion begun in {folder}")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    others = names - {partial_path(folder / JOURNAL).name}
    if begun or not others:
        return False
    sizes = {name: (folder / name).stat().st_size for name in others}
    if resume and sizes == plan.sizes():
        return True
    raise ValueError(f"destination: expected a new or an empty folder, got {sorted(others)[:5]} in {folder}")


def _check_disk(folder: Path, needed: int) -> None:
    free = _free_bytes(folder)
    if needed > free:
        raise ValueError(f"destination: expected {needed:,} free bytes on its disk, got {free:,}")


def _free_bytes(folder: Path) -> int:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def parse_size(text: str) -> int:
    """Bytes of a text like `5GB`, `512MiB` or `1000`. Raises `ValueError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?I?)B?", text.strip().upper())
    if found is None or found[2] not in UNITS or float(found[1]) * UNITS[found[2]] < 1:
        raise ValueError(f"shard_size: expected a size like 5GB or 512MiB, got {text!r}")
    return int(float(found[1]) * UNITS[found[2]])


def _print(plan: Plan, folder: Path) -> None:
    sizes = plan.sizes()
    print(f"{folder}: layout {plan.target.layout}, {len(sizes)} files, {sum(sizes.values()):,} bytes")
    tensors = {shard.name: sum(1 for _ in shard.outputs) for shard in plan.shards}
    for name, size in sizes.items():
        print(f"  {name:<40} {size:>20,} bytes" + (f" {tensors[name]:>9,} tensors" if name in tensors else ""))
    print(f"{sum(tensors.values()):,} tensors:")
    for line in tensor_lines(plan):
        print(f"  {line}")
    print(f"free on the disk: {_free_bytes(folder):,} bytes; nothing was written")
