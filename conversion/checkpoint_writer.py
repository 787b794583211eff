"""Safetensors shards written at known places, complete or not there at all, and the journal of those that are done."""

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .checkpoint_reader import DTYPES


JOURNAL = ".convert.jsonl"
METADATA = {"format": "pt"}  # without it transformers refuses the file


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return DTYPES[self.dtype].itemsize * torch.Size(self.shape).numel()


def header_bytes(outputs: Iterable[Output]) -> bytes:
    """The length and header of a file that holds `outputs` in this order; its data begins at a multiple of 8.

    The order must not let the size of an element grow, so that every tensor begins at a multiple of its own.
    """
    entries: dict[str, Any] = {"__metadata__": METADATA}
    end = 0
    for output in outputs:
        start, end = end, end + output.nbytes
        entries[output.name] = {"dtype": output.dtype, "shape": output.shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def partial_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, and waits until it is on the disk."""
    with partial_path(path).open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    publish(path)


def publish(path: Path) -> None:
    """Gives the partial file of `path` its name."""
    os.replace(partial_path(path), path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class ShardFile:
    """A file whose parts several threads write, in any order; it takes its name by `finish`, after all have."""

    def __init__(self, path: Path, header: bytes, size: int):
        self.path, self.size = path, size
        self._descriptor = os.open(partial_path(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.truncate(self._descriptor, size)
        self._write(memoryview(header), 0)

    def write(self, tensor: torch.Tensor, offset: int) -> None:
        """Writes the bytes of `tensor` at byte `offset` of the file."""
        self._write(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy()), offset)

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            count = os.pwrite(self._descriptor, data, offset)
            data, offset = data[count:], offset + count

    def finish(self) -> None:
        os.fsync(self._descriptor)
        self.close()
        publish(self.path)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class Journal:
    """The finished files of a folder, one JSON line each, after a line with all that their bytes depend on.

    A line that a crash cut short does not count. Raises `ValueError` when the folder was begun with other settings, or a
    finished file has no longer the size that it had.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self.path = folder / JOURNAL
        whole = [line for line in self._lines() if line.endswith(b"\n")]
        begun = json.loads(whole[0]) if whole else settings
        for name, value in settings.items():
            if begun.get(name) != value:
                raise ValueError(f"{name}: expected {begun.get(name)!r}, with which {folder} was begun, got {value!r}")
        self.done: dict[str, int] = dict(json.loads(line) for line in whole[1:])
        for name, size in self.done.items():
            path = folder / name
            got = path.stat().st_size if path.exists() else "no such file"
            if got != size:
                raise ValueError(f"{path}: expected {size} bytes, as when it was finished, got {got}")
        write_atomically(self.path, b"".join(whole) or _line(settings))

    def append(self, name: str, size: int) -> None:
        with self.path.open("ab") as file:
            file.write(_line([name, size]))
            file.flush()
            os.fsync(file.fileno())
        self.done[name] = size

    def remove(self) -> None:
        self.path.unlink()

    def _lines(self) -> list[bytes]:
        return self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []


def _line(content: Any) -> bytes:
    return json.dumps(content).encode() + b"\n"
