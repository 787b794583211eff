"""Where documents come from: files, folders and object stores through fsspec, files over HTTP, streams of `datasets`.

A source is listed into items, in an order that depends on names alone; an item is opened at once and gives its records
in a fixed order. So a record is found again by two integers: its item and its place in there.
"""

import contextlib
import functools
import io
import itertools
import json
import shutil
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from fsspec.core import url_to_fs
from fsspec.utils import infer_compression

from .corpus import Document


SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
LINES, TABLE = (".jsonl", ".ndjson"), ".parquet"
EMPTY, NOT_UTF8 = "empty", "not UTF-8"


@dataclass(frozen=True)
class LeftOut:
    """A record that gives no document, and why: `EMPTY` or `NOT_UTF8`."""

    name: str
    reason: str


Record = Document | LeftOut


@dataclass(frozen=True)
class Item:
    """What is opened at once: a file, a folder whose files are joined, or a stream. `read(start)` yields its records
    but the first `start`. `signature` changes when the listing does: names and sizes, not contents."""

    source: str
    name: str
    signature: str
    read: Callable[[int], Iterator[Record]]


@dataclass(frozen=True)
class Reading:
    """How sources are read.

    suffixes: which files of a folder are read (a file given by name is read whatever it is called). Compression is
        known by a further suffix, as in `.jsonl.gz`.
    text_field: the field of a JSON line, or the column of a table, that holds the text; None: the text is the whole line
        or row, as JSON.
    join_depth: None, or join the text files of a folder into one document; files in deeper folders count for their
        ancestor at this depth (0: the whole source is one document). Each file's text follows a line with its path.
    """

    suffixes: tuple[str, ...] = SUFFIXES
    text_field: str | None = "text"
    join_depth: int | None = None

    def __post_init__(self):
        for suffix in self.suffixes:
            if not suffix.startswith("."):
                raise ValueError(f"suffixes: expected a dot and letters, as in '.py', got {suffix!r}")
        if self.join_depth is not None and self.join_depth < 0:
            raise ValueError(f"join_depth: expected at least 0, got {self.join_depth}")


@dataclass(frozen=True)
class _File:
    name: str
    size: int | None
    open: Callable[[], AbstractContextManager[BinaryIO]]


def list_items(sources: Sequence[str], reading: Reading) -> list[Item]:
    """Lists sources: a file or folder on this machine, an fsspec URL of one, the http(s) URL of a file, or
    `hf:NAME[:CONFIG][:SPLIT]` for `datasets.load_dataset(NAME, CONFIG, split=SPLIT)`, streamed ("train" by default).

    Documents are named by their path below the source; a line or row adds its number, from 1. Folders and files whose
    names begin with a dot, and folders behind symbolic links, are not read.
    Raises ValueError if a source is not there or has no file to read; what fsspec and `datasets` raise goes through.
    """
    return [item for source in sources for item in _items(source, reading)]


def iterate_records(items: Sequence[Item], item: int = 0, taken: int = 0) -> Iterator[tuple[int, int, Record]]:
    """Yields (item, number of records taken of it, record) for all that follow the first `taken` records of an item."""
    for number in range(item, len(items)):
        start = taken if number == item else 0
        for count, record in enumerate(items[number].read(start), start + 1):
            yield number, count, record


def _items(source: str, reading: Reading) -> list[Item]:
    if source.startswith("hf:"):
        return [Item(source, source, "", functools.partial(_read_stream, source, reading.text_field))]
    if source.startswith(("http://", "https://")):
        name = PurePosixPath(urllib.parse.urlsplit(source).path).name
        return [_item(source, _File(name, None, functools.partial(_fetched, source, name)), reading)]
    filesystem, root = url_to_fs(source)
    if filesystem.isfile(root):
        return [_item(source, _file(filesystem, root, PurePosixPath(root).name, filesystem.size(root)), reading)]
    if not filesystem.isdir(root):
        raise ValueError(f"source: expected a file, a folder, a URL or hf:NAME, got {source!r}")
    files = list(_walk(filesystem, root, reading.suffixes))
    if not files:
        raise ValueError(f"source: expected files that end in {', '.join(reading.suffixes)}, got none in {source!r}")
    files.sort(key=lambda file: file.name)
    if reading.join_depth is None:
        return [_item(source, file, reading) for file in files]
    rows = [file for file in files if _kind(file.name) in (*LINES, TABLE)]
    texts = [file for file in files if _kind(file.name) not in (*LINES, TABLE)]
    return [*_joined_items(source, texts, reading.join_depth), *(_item(source, file, reading) for file in rows)]


def _walk(filesystem: Any, root: str, suffixes: Sequence[str]) -> Iterator[_File]:
    for _, folders, files in filesystem.walk(root, detail=True):
        for hidden in [name for name in folders if name.startswith(".")]:
            del folders[hidden]  # fsspec does not walk into what is taken away here
        for name, info in files.items():
            if not name.startswith(".") and info["type"] == "file" and _kind(name) in suffixes:
                below = info["name"].removeprefix(root).lstrip("/")
                yield _file(filesystem, info["name"], below, info.get("size"))


def _file(filesystem: Any, path: str, name: str, size: int | None) -> _File:
    return _File(name, size, functools.partial(filesystem.open, path, "rb", compression="infer"))


def _kind(name: str) -> str:
    path = PurePosixPath(name)
    return path.with_suffix("").suffix if infer_compression(name) else path.suffix


def _item(source: str, file: _File, reading: Reading) -> Item:
    kind = _kind(file.name)
    if kind in LINES:
        read = functools.partial(_read_lines, file, reading.text_field)
    elif kind == TABLE:
        read = functools.partial(_read_table, file, reading.text_field)
    else:
        read = functools.partial(_read_text, file)
    return Item(source, file.name, str(file.size), read)


def _joined_items(source: str, files: list[_File], depth: int) -> Iterator[Item]:
    groups: dict[str, list[_File]] = {}
    for file in files:
        groups.setdefault("/".join(PurePosixPath(file.name).parts[:-1][:depth]), []).append(file)
    for folder, group in groups.items():
        signature = ";".join(f"{file.name}:{file.size}" for file in group)
        yield Item(source, folder or ".", signature, functools.partial(_read_joined, folder or ".", group))


def _record(name: str, content: str | bytes | None) -> Record:
    try:
        text = content.decode() if isinstance(content, bytes) else content
        if not text:
            return LeftOut(name, EMPTY)
        text.encode()  # JSON can spell half a surrogate pair
    except UnicodeError:
        return LeftOut(name, NOT_UTF8)
    return Document(name, text)


def _read_text(file: _File, start: int) -> Iterator[Record]:
    if start == 0:
        with file.open() as stream:
            yield _record(file.name, stream.read())


def _read_joined(name: str, files: list[_File], start: int) -> Iterator[Record]:
    parts: list[str] = []
    left_out: list[Record] = []
    for file in files:
        for record in _read_text(file, 0):
            if isinstance(record, LeftOut):
                left_out.append(record)
            else:
                parts.append(f"{record.name}\n{record.text}\n")
    joined = [Document(name, "".join(parts))] if parts else []
    yield from itertools.islice([*left_out, *joined], start, None)


def _read_lines(file: _File, field: str | None, start: int) -> Iterator[Record]:
    with file.open() as stream, io.BufferedReader(stream) as lines:  # type: ignore[type-var]
        for number, line in enumerate(itertools.islice(lines, start, None), start + 1):
            name = f"{file.name}:{number}"
            if not line.strip():
                yield LeftOut(name, EMPTY)
                continue
            try:
                row = json.loads(line.decode())
            except UnicodeError:
                yield LeftOut(name, NOT_UTF8)
                continue
            except json.JSONDecodeError as error:
                raise ValueError(f"{name}: expected a JSON object, got {line[:60]!r}") from error
            yield _record(name, _text_of(row, field, name))


def _read_table(file: _File, field: str | None, start: int) -> Iterator[Record]:
    import pyarrow as pa
    from pyarrow import parquet

    with file.open() as stream:
        table = parquet.ParquetFile(stream)
        names = table.schema_arrow.names
        kind = table.schema_arrow.field(field).type if field in names else None
        if field is not None and kind not in (pa.string(), pa.large_string()):
            raise ValueError(f"{file.name}: expected a column {field!r} of strings, got {kind or names}")
        ends = list(
            itertools.accumulate(table.metadata.row_group(one).num_rows for one in range(table.num_row_groups))
        )
        groups = [number for number, end in enumerate(ends) if end > start]
        if not groups:
            return
        first = ends[groups[0] - 1] if groups[0] else 0
        batches = table.iter_batches(row_groups=groups, columns=None if field is None else [field])
        if field is None:
            rows = (json.dumps(row, ensure_ascii=False) for batch in batches for row in batch.to_pylist())
        else:  # as bytes, since whether they are UTF-8 is only known by looking
            rows = (row for batch in batches for row in batch.column(0).cast(pa.large_binary()).to_pylist())
        for number, row in enumerate(itertools.islice(rows, start - first, None), start + 1):
            yield _record(f"{file.name}:{number}", row)


def _read_stream(source: str, field: str | None, start: int) -> Iterator[Record]:
    from datasets import load_dataset

    name, config, split = (source.removeprefix("hf:").split(":") + ["", ""])[:3]
    rows = load_dataset(name, config or None, split=split or "train", streaming=True).skip(start)
    for number, row in enumerate(rows, start + 1):
        place = f"{source}:{number}"
        yield _record(place, _text_of(row, field, place))


def _text_of(row: Any, field: str | None, name: str) -> str | None:
    if field is None:
        return json.dumps(row, ensure_ascii=False)
    if not isinstance(row, dict) or field not in row:
        raise ValueError(f"{name}: expected an object with the field {field!r}, got {_shape(row)}")
    if row[field] is not None and not isinstance(row[field], str):
        raise ValueError(f"{name}: expected text in the field {field!r}, got {_shape(row[field])}")
    return row[field]


def _shape(value: Any) -> str:
    return f"the fields {sorted(value)}" if isinstance(value, dict) else type(value).__name__


@contextlib.contextmanager
def _fetched(url: str, name: str) -> Iterator[BinaryIO]:
    """A file over HTTP, copied to a temporary one first: tables are read in any order, and a cut connection shows."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/{name or 'document'}"
        with urllib.request.urlopen(url) as response, open(path, "wb") as copy:
            shutil.copyfileobj(response, copy)
            expected, got = response.headers["Content-Length"], copy.tell()
        if expected is not None and int(expected) != got:
            raise OSError(f"{url}: expected {expected} bytes, got {got}")
        filesystem, path = url_to_fs(path)
        with filesystem.open(path, "rb", compression="infer") as stream:
            yield stream
