"""Safetensors checkpoints by plain reads: nothing that a file says is believed before it is checked, nothing is mapped.

A header is bounded by its file and by `MAX_HEADER`, and refused before it is parsed when it holds more structure than the
entries of tensors can: what is allocated for it is a small multiple of its bytes, and its check takes well under a second.
"""

import dataclasses
import json
import math
import os
import re
import reprlib
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
from tqdm import tqdm


MAX_HEADER = 1 << 23  # bytes; the released K3 shards have about 1 MB
MAX_INDEX = 1 << 27  # bytes; that of the released K3 has about 65 MB
MAX_CONFIG = 1 << 22
MAX_DIMS = 8
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
# What `Trainer` leaves beside the weights. None of it is opened.
OF_TRAINER = re.compile(r"training_args\.bin|optimizer\.(pt|bin)|(scheduler|scaler)\.pt|rng_state(_\d+)?\.pth")
LEAST_BYTES = {b"{": 32, b"[": 16, b",": 4, b":": 8}  # of a header per such character
LEAST_INDEX_BYTES = {b"{": 1 << 16, b"[": 1 << 16, b",": 12, b":": 12}
_SHORT = reprlib.Repr()
_SHORT.maxstring = 160
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies: the file, the byte in it, and what the bytes are."""

    file: Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def read_header(path: Path) -> dict[str, Stored]:
    """Name -> place of every tensor of a safetensors file, whose data the tensors must cover without gap or overlap.

    Raises `ValueError` that names the file for everything else, before anything of the claimed size is allocated.
    """
    size = _regular_file_size(path)
    _expect(size >= 8, path, "at least 8 bytes", f"{size}")
    with path.open("rb", buffering=0) as file:
        length = int.from_bytes(file.read(8), "little")
        _expect(length <= size - 8, path, f"a header within the {size} bytes of the file", f"one of {length} bytes")
        _expect(length <= MAX_HEADER, path, f"a header of at most {MAX_HEADER} bytes", f"{length}")
        text = file.read(length)
    _expect(len(text) == length, path, f"a header of {length} bytes", f"{len(text)}")
    _expect(text[:1] == b"{", path, "a header that begins with '{'", repr(text[:1]))
    _expect_sparse(text, path, LEAST_BYTES)
    header = _parse(text, path)
    _check_metadata(header.pop("__metadata__", None), path)
    begin = 8 + length
    tensors, spans = {}, []
    for name, entry in header.items():
        problem = _problem(name, entry, size - begin)
        if problem is not None:
            raise ValueError(f"{path.name}: {_short(name)}: expected {problem}")
        start, end = entry["data_offsets"]
        tensors[name] = Stored(path, begin + start, entry["dtype"], tuple(entry["shape"]))
        spans.append((start, end, name))
    reached = 0
    for start, end, name in sorted(spans):
        if start != reached:
            raise ValueError(f"{path.name}: {_short(name)}: expected it at byte {reached} of the data, got {start}")
        reached = end
    _expect(reached == size - begin, path, f"{reached} bytes of data, as the header says", f"{size - begin}")
    return tensors


def _problem(name: str, entry: Any, size: int) -> str | None:
    """What was expected of an entry and what came; None: it is right. `size` counts all bytes of data."""
    if not name.isprintable():
        return "a printable name, got another"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return f"dtype, shape and data_offsets, got {_short(entry)}"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"a dtype of {', '.join(DTYPES)}, got {_short(dtype)}"
    if not _sizes(shape) or len(shape) > MAX_DIMS:
        return f"a shape of at most {MAX_DIMS} sizes, got {_short(shape)}"
    if not _sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size:
        return f"data_offsets within {size} bytes, got {_short(offsets)}"
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if nbytes != offsets[1] - offsets[0]:
        return f"{nbytes} bytes for {dtype} {shape}, got {_short(offsets)}"
    return None


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 1 << 63 for one in value)


def _check_metadata(metadata: Any, path: Path) -> None:
    texts = metadata is None or (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values()))
    _expect(texts, path, "texts in __metadata__", _short(metadata))


def _expect_sparse(text: bytes, path: Path, least: dict[bytes, int]) -> None:
    for character, apart in least.items():
        most = len(text) // apart + 8
        _expect(text.count(character) <= most, path, f"at most {most} times {character.decode()!r} in it", "more")


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise ValueError(f"expected every key once, got {_short(twice)} twice")
        return found

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: expected JSON in UTF-8, got an error: {_short(str(error))}") from error
    _expect(isinstance(parsed, dict), path, "a JSON object", _short(parsed))
    return parsed


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file of moderate size. Raises `ValueError` that names the file."""
    size = _regular_file_size(path)
    _expect(size <= MAX_CONFIG, path, f"at most {MAX_CONFIG} bytes", f"{size}")
    return _parse(path.read_bytes(), path)


def read_index(path: Path) -> dict[str, str]:
    """Name -> file of `model.safetensors.index.json`. Raises `ValueError` for a file that is not right beside it."""
    size = _regular_file_size(path)
    _expect(size <= MAX_INDEX, path, f"at most {MAX_INDEX} bytes", f"{size}")
    text = path.read_bytes()
    _expect_sparse(text, path, LEAST_INDEX_BYTES)
    weight_map = _parse(text, path).get("weight_map")
    _expect(isinstance(weight_map, dict), path, "a weight_map", _short(weight_map))
    for name, file in weight_map.items():
        plain = isinstance(file, str) and file.isprintable() and re.fullmatch(r"[^/\\]+\.safetensors", file)
        _expect(plain, path, "names of .safetensors files in the same folder", _short(file))
        _expect(name.isprintable(), path, "printable names", _short(name))
    return weight_map


class Checkpoint:
    """All tensors of a folder, from headers alone, and their bytes on demand; safe to read from several threads.

    Raises `ValueError` for a pickle in the folder (by name; not for those of `Trainer`), for a missing shard, and where index
    and headers disagree.
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise ValueError(f"checkpoint: expected a folder, got {folder}")
        pickles = sorted(entry.name for entry in folder.iterdir() if entry.suffix.lower() in PICKLES)
        pickles = [name for name in pickles if not OF_TRAINER.fullmatch(name)]
        if pickles:
            raise ValueError(
                f"{folder}: expected safetensors only, got {', '.join(pickles)}: a pickle runs code when it is read"
            )
        self.folder = folder
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()
        self.files, self.tensors = _tensors(folder)

    def read(self, stored: Stored, first: int = 0, nbytes: int | None = None) -> torch.Tensor:
        """`nbytes` bytes of a tensor from byte `first` on (default: all), as `uint8` `[nbytes]`."""
        nbytes = stored.nbytes - first if nbytes is None else nbytes
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        view = memoryview(buffer.numpy())
        descriptor, offset = self._descriptor(stored.file), stored.start + first
        while view:
            count = os.preadv(descriptor, [view], offset)
            if count == 0:
                raise ValueError(f"{stored.file}: expected bytes at {offset}, got the end of the file")
            view, offset = view[count:], offset + count
        return buffer

    def load(self, stored: Stored) -> torch.Tensor:
        """A whole tensor in its dtype and shape."""
        return self.read(stored).view(DTYPES[stored.dtype]).view(stored.shape)

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            return self._open[path]

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        self.close()


def _tensors(folder: Path) -> tuple[list[Path], dict[str, Stored]]:
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise ValueError(f"{folder}: expected {SINGLE} or {INDEX}, got neither")
        return [folder / SINGLE], read_header(folder / SINGLE)
    weight_map = read_index(index)
    files = sorted(set(weight_map.values()))
    absent = [name for name in files if not (folder / name).exists()]
    if absent:
        raise ValueError(f"{INDEX}: expected the files that it names, got no {', '.join(absent)}")
    tensors: dict[str, Stored] = {}
    problems: list[str] = []
    for file in tqdm(files, desc="reading headers", unit="file", delay=2, leave=False):
        for name, stored in read_header(folder / file).items():
            if weight_map.get(name) != file:
                problems.append(f"{name} in {file}, by the index in {weight_map.get(name, 'no file')}")
            tensors[name] = stored
    problems += [f"no {name} in {file}" for name, file in weight_map.items() if name not in tensors]
    if problems:
        raise ValueError(f"{INDEX}: expected what the files hold, got\n" + "\n".join(f"  {line}" for line in problems))
    return [folder / file for file in files], tensors


def side_files(folder: Path) -> Iterator[Path]:
    """Files to hand on beside the weights: tokenizer, generation settings, licence; not the model card of other weights.

    Raises `ValueError` for a link that leads out of the folder, other than into the blobs of a Hub cache.
    """
    root = folder.resolve()
    for path in sorted(folder.iterdir()):
        wanted = path.suffix in (".json", ".jinja", ".model", ".py", ".txt") or path.stem in ("LICENSE", "NOTICE")
        if path.name.startswith(".") or path.name in ("config.json", INDEX) or not wanted:
            continue
        real = path.resolve()
        if not any(real.is_relative_to(place) for place in (root, root.parent.parent / "blobs")):
            raise ValueError(f"{path.name}: expected a file in {folder}, got a link to {real}")
        size = _regular_file_size(path)
        _expect(size <= MAX_INDEX, path, f"at most {MAX_INDEX} bytes", f"{size}")
        yield path


def _regular_file_size(path: Path) -> int:
    try:
        status = path.stat()
    except OSError as error:
        raise ValueError(f"{path}: expected a file, got {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path}: expected a regular file, got another kind")
    return status.st_size


def _expect(condition: Any, path: Path, expected: str, got: str) -> None:
    if not condition:
        raise ValueError(f"{path.name}: expected {expected}, got {got}")


def _short(value: Any) -> str:
    return _SHORT.repr(value)
