"""How checkpoints lie in a folder or on object storage: complete, or not there at all.

    FOLDER/step-000123/__R_0.distcp    the bytes that rank R wrote
                       .metadata       which tensor lies where, by torch.distributed.checkpoint
                       state.json      the state of the loop
                       COMPLETE        written last: step, ranks, size and CRC-32 of every other file

On a local file system the folder is written as `.step-000123.partial` and then renamed. Object storage cannot rename, so
there the marker COMPLETE alone decides. FOLDER is a path or any URL that fsspec opens; all go through fsspec, so that the
code that is tested is the code that runs.
"""

import dataclasses
import io
import json
import os
import re
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecWriter
from torch.futures import Future
from tqdm import tqdm


MARKER, STATE = "COMPLETE", "state.json"
CHUNK = 2**24  # bytes read at a time


def open_folder(folder: str | os.PathLike) -> tuple[AbstractFileSystem, str]:
    """The file system of a path or URL, and its address there."""
    fs, path = url_to_fs(os.fspath(folder))
    return fs, path.rstrip("/")


def address(folder: str | os.PathLike) -> str:
    """The absolute path of a local folder, or its URL."""
    fs, path = open_folder(folder)
    return path if _is_local(fs) else os.fspath(folder).rstrip("/")


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def step_folders(folder: str | os.PathLike) -> dict[int, str]:
    """Step -> path or URL of its folder, oldest first; complete or not."""
    fs, root = open_folder(folder)
    steps = {int(found[1]): name for name in _names(fs, root) if (found := re.fullmatch(r"step-(\d+)", name))}
    return {step: f"{address(folder)}/{steps[step]}" for step in sorted(steps)}


def latest(folder: str | os.PathLike) -> str | None:
    """The newest checkpoint in `folder` whose files are all there in full length; None: there is none.

    Half-written and truncated ones are skipped with a warning. Bytes are not read: that is done before loading.
    """
    for path in reversed(step_folders(folder).values()):
        problem = damage(path)
        if problem is None:
            return path
        warnings.warn(f"skipping the checkpoint {path}: {problem}", stacklevel=2)
    return None


def read_marker(path: str | os.PathLike) -> dict | None:
    """What the marker of a checkpoint says; None: it has none that can be read."""
    fs, folder = open_folder(path)
    try:
        return json.loads(fs.cat_file(f"{folder}/{MARKER}"))
    except (FileNotFoundError, ValueError):  # also bytes that are no text
        return None


def damage(path: str | os.PathLike) -> str | None:
    """What is wrong with the marker or the lengths of the files; None: nothing."""
    marker = read_marker(path)
    if marker is None:
        return f"no readable {MARKER}: its writing was interrupted"
    fs, folder = open_folder(path)
    sizes = _names(fs, folder)
    for name, (size, _) in marker["files"].items():
        if name not in sizes:
            return f"{name}: expected {size} bytes, got no such file"
        if sizes[name] != size:
            return f"{name}: expected {size} bytes, got {sizes[name]}"
    # Read before all others are checked, and small.
    return corruption(path, {STATE: marker["files"][STATE]}) if STATE in marker["files"] else None


def corruption(path: str | os.PathLike, files: dict[str, tuple[int, int]]) -> str | None:
    """The first of `files`, name -> (bytes, CRC-32), that holds other bytes than were written; None: there is none."""
    fs, folder = open_folder(path)
    with tqdm(total=sum(size for size, _ in files.values()), unit="B", unit_scale=True, delay=2, leave=False) as bar:
        for name, (_, expected) in files.items():
            bar.set_description(f"checking {name}", refresh=False)
            got = 0
            with fs.open(f"{folder}/{name}", "rb") as stream:
                while chunk := stream.read(CHUNK):
                    got = zlib.crc32(chunk, got)
                    bar.update(len(chunk))
            if got != expected:
                return f"{name}: expected a CRC-32 of {expected:08x}, got {got:08x}"
    return None


def read_state(path: str | os.PathLike) -> dict:
    """The state of the loop in a checkpoint."""
    fs, folder = open_folder(path)
    return json.loads(fs.cat_file(f"{folder}/{STATE}"))


def prune_folder(folder: str | os.PathLike, step: int, keep: int) -> None:
    """Deletes what the new checkpoint of `step` makes superfluous.

    The newest `keep` complete ones up to `step` stay, and all permanent ones, and all later than `step`: they are of
    another history of the run, and not this one's to judge.
    """
    fs, root = open_folder(folder)
    past = [path for number, path in step_folders(folder).items() if number <= step]
    complete = [path for path in past if damage(path) is None]
    kept = {*complete[-keep:], *(path for path in complete if read_marker(path)["permanent"])}
    for path in past:
        if path not in kept:
            remove(path)
    for name in _names(fs, root):
        if re.fullmatch(r"\.step-\d+\.partial", name):
            fs.rm(f"{root}/{name}", recursive=True)


def remove(path: str | os.PathLike) -> None:
    """Deletes a checkpoint, its marker first: interrupted, it leaves one that is ignored."""
    fs, folder = open_folder(path)
    if fs.exists(f"{folder}/{MARKER}"):
        fs.rm_file(f"{folder}/{MARKER}")
    if fs.exists(folder):
        fs.rm(folder, recursive=True)


def _is_local(fs: AbstractFileSystem) -> bool:
    return isinstance(fs, LocalFileSystem)


def _names(fs: AbstractFileSystem, folder: str) -> dict[str, int]:
    """Name -> bytes of what lies in `folder`, which need not exist."""
    fs.invalidate_cache()
    try:
        return {entry["name"].rpartition("/")[2]: entry["size"] for entry in fs.ls(folder, detail=True)}
    except FileNotFoundError:
        return {}


class _Summed(io.RawIOBase):
    """A stream to write to that knows the length and the CRC-32 of what went through it."""

    def __init__(self, stream: Any):
        self.stream, self.size, self.crc = stream, 0, 0

    def write(self, data) -> int:
        self.crc = zlib.crc32(data, self.crc)
        self.size += memoryview(data).nbytes
        return self.stream.write(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self.stream.closed:
            self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()


class _SummedFiles(FileSystem):
    """The file system of torch.distributed.checkpoint over fsspec; `sums` is name -> (bytes, CRC-32) of what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, tuple[int, int]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            summed = _Summed(stream)
            yield summed
            self.sums[Path(path).name] = summed.size, summed.crc

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class CheckpointWriter(FsspecWriter):
    """Writes one checkpoint, publishes it and prunes the folder, all in the thread that torch saves in.

    Only rank 0 runs `prepare_global_plan`, before any rank writes, and `finish`, after all have written: no further
    agreement among ranks is needed.
    """

    def __init__(self, folder: str, step: int, state: str, *, ranks: int, permanent: bool, keep: int):
        fs, _ = open_folder(folder)
        self.folder, self.step, self.keep, self.state = address(folder), step, keep, state
        self.marker = {"step": step, "ranks": ranks, "permanent": permanent}
        self.target = f"{self.folder}/{name_of(step)}"
        # No copying ahead: the tensors are on the CPU already, and a thread that saves shall not touch a GPU.
        super().__init__(
            f"{self.folder}/.{name_of(step)}.partial" if _is_local(fs) else self.target,
            sync_files=_is_local(fs),
            per_thread_copy_ahead=0,
        )
        self.fs = _SummedFiles()
        self.fs.init_path(self.path)

    def prepare_local_plan(self, plan):
        return plan  # rank 0 makes the folder, once it has removed what may lie there

    def prepare_global_plan(self, plans):
        before = read_marker(self.target)
        self.marker["permanent"] |= before is not None and before["permanent"]
        remove(self.path)
        self.fs.mkdir(self.path)
        return super().prepare_global_plan(plans)

    def write_data(self, plan, planner):
        results = super().write_data(plan, planner).value()
        summed: Future = Future()
        summed.set_result([_with_sums(result, self.fs.sums) for result in results])
        return summed

    def finish(self, metadata, results) -> None:
        pairs = [[result.storage_data for result in of_rank] for of_rank in results]
        sums = {info.relative_path: summed for of_rank in pairs for info, summed in of_rank}
        plain = [[dataclasses.replace(one, storage_data=one.storage_data[0]) for one in rank] for rank in results]
        super().finish(metadata, plain)
        self._write(STATE, self.state)
        self._write(MARKER, json.dumps(self.marker | {"files": {**sums, **self.fs.sums}}))
        if self.path != self.target:
            remove(self.target)
            Path(self.path).rename(self.target)
        prune_folder(self.folder, self.step, self.keep)

    def _write(self, name: str, text: str) -> None:
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
            stream.write(text.encode())
            stream.flush()
            if self.sync_files:
                os.fsync(stream.fileno())


def _with_sums(result, sums: dict[str, tuple[int, int]]):
    """`storage_data` is the storage's own: it brings size and CRC-32 of the file to rank 0."""
    return dataclasses.replace(result, storage_data=(result.storage_data, sums[result.storage_data.relative_path]))
