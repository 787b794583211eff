"""`moe-lc prepare`: text documents become tokenised shards that training reads.

One process reads documents in order, others tokenise them, the first writes them in the same order. A journal names the
shards that are done and how far the sources were read: killed at any moment, the same command goes on from there and
ends with the same bytes.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from .corpus import Document, is_held_out
from .shards import (
    MANIFEST,
    checked_lengths,
    read_manifest,
    token_dtype,
    write_atomically,
    write_manifest,
    write_shard,
)
from .sources import SUFFIXES, Item, LeftOut, Reading, Record, iterate_records, list_items
from .tokenizer import encode_documents, tokenizer_facts, train_tokenizer


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DIGEST = re.compile("[0-9a-f]{64}")
JOURNAL, TOKENIZER, SPLITS = "journal.jsonl", "tokenizer", ("train", "validation")
BATCH = 1 << 18  # characters that go to a worker at once
LONGEST_CONTEXT = 1 << 20  # what a tokenizer that is trained here says of its model

Numbered = tuple[int, int, Record]  # item, records taken of it, record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("sources", nargs="+", metavar="SOURCE", help="file, folder, fsspec or http URL, or hf:NAME[:CONFIG][:SPLIT]")
    add("--out", type=Path, required=True, help="folder to write; an interrupted one goes on")
    tokenizer = parser.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument("--tokenizer", metavar="NAME_OR_FOLDER", help="of an existing fast tokenizer")
    tokenizer.add_argument(
        "--train-tokenizer", type=int, metavar="VOCAB", help="train one of this size on the sources"
    )
    add("--tokenizer-characters", type=float, default=1e9, help="to train it on, at most (default: %(default).0e)")
    add(
        "--suffixes",
        nargs="+",
        default=list(SUFFIXES),
        help="of the files that are read in a folder (default: %(default)s)",
    )
    add("--text-field", default="text", help="of JSON lines and tables (default: %(default)s)")
    add("--join-depth", type=int, help="join the text files of a folder, down to this depth, into one long document")
    add("--validation-share", type=float, default=0.01, help="of the documents, by name (default: %(default)s)")
    add("--shard-tokens", type=int, default=1 << 26, help="tokens after which a shard ends (default: %(default)s)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes that tokenise (default: one per core)")


def run(args: argparse.Namespace) -> None:
    reading = Reading(tuple(args.suffixes), args.text_field, args.join_depth)
    _check(args)
    out: Path = args.out
    items = list_items(args.sources, reading)
    settings = _settings(args, items)
    if (out / MANIFEST).exists():
        check_settings(out, read_manifest(out)["settings"], settings)
        print(f"{out} is complete")
        return
    with begun(out, settings) as journal:
        tokenizer = _tokenizer(args, items, out / TOKENIZER)
        facts = tokenizer_facts(tokenizer)
        try:
            _write_shards(out, journal, items, token_dtype(facts["vocab_size"]), args)
        except KeyboardInterrupt:
            print(f"\ninterrupted after {len(journal.entries)} shards; the same command goes on from there")
            raise
        _finish(out, journal, settings, facts)


class Journal:
    """The shards that are done, one JSON line each, after a line with the settings. `position` is how far the sources
    have been read: an item, and the number of its records. A line that a crash cut short does not count.

    Raises ValueError if the folder was begun with other settings, or a finished shard is no longer what it was.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], elsewhere: str = "another --out"):
        self.path = folder / JOURNAL
        whole = [line for line in self._lines() if line.endswith(b"\n")]
        if whole:
            check_settings(folder, json.loads(whole[0]), settings, elsewhere)
        else:
            whole = [_line(settings)]
        write_atomically(self.path, b"".join(whole))
        self.entries: list[dict[str, Any]] = [json.loads(line) for line in whole[1:]]
        for entry in self.entries:
            for shard in entry["shards"].values():
                checked_lengths(folder, shard)

    @property
    def position(self) -> tuple[int, int]:
        return tuple(self.entries[-1]["position"]) if self.entries else (0, 0)

    def append(self, entry: dict[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(_line(entry))
            file.flush()
            os.fsync(file.fileno())
        self.entries.append(entry)

    def _lines(self) -> list[bytes]:
        return self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []


class Unfit(ValueError):
    """What was made is of no use to anyone: raised within `begun`, it takes the shards away, too."""


@contextlib.contextmanager
def begun(out: Path, settings: dict[str, Any], elsewhere: str = "another --out") -> Iterator[Journal]:
    """The journal of a folder and of its splits, which are made, or gone on with. Raises ValueError as `Journal`.

    Where the work in the context fails before it wrote a shard, what was made here is removed again, or else other settings
    would be refused beside it. A tokenizer stays, unless the failure is a ValueError: the same command would meet it again.
    """
    parts = [out / name for name in (*SPLITS, JOURNAL, TOKENIZER, f".{TOKENIZER}.partial")]
    made = [path for path in (out, *parts) if not path.exists()]
    for split in SPLITS:
        (out / split).mkdir(parents=True, exist_ok=True)
    journal = Journal(out, settings, elsewhere)
    try:
        yield journal
    except BaseException as error:
        reusable = not isinstance(error, ValueError) and (out / TOKENIZER).exists()
        if isinstance(error, Unfit):
            _take_back(out, journal, tokenizer=out / TOKENIZER in made)
        elif not reusable and not any(entry["shards"] for entry in journal.entries):
            for path in made:
                path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)
        raise


def _take_back(out: Path, journal: Journal, *, tokenizer: bool) -> None:
    """The files of a journal, the tokenizer that was put beside them, and the folders that are empty then; whatever else is
    there belongs to somebody."""
    for shard in (shard for entry in journal.entries for shard in entry["shards"].values()):
        for file in out.glob(f"{shard['name']}.*"):
            file.unlink()
    journal.path.unlink(missing_ok=True)
    if tokenizer:
        shutil.rmtree(out / TOKENIZER, ignore_errors=True)
    for folder in (*(out / split for split in SPLITS), out):
        with contextlib.suppress(OSError):  # it is not empty
            folder.rmdir()


@dataclass
class Group:
    """What becomes one shard of each split: tokens of documents in order, and what was counted on the way."""

    documents: dict[str, list[np.ndarray]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    sources: dict[str, collections.Counter] = field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )
    records: int = 0
    tokens: int = 0

    def add(self, item: Item, record: Record, tokens: np.ndarray, validation_share: float) -> None:
        self.records += 1
        counts = self.sources[item.source]
        if isinstance(record, LeftOut):
            counts[record.reason] += 1
            return
        self.documents[SPLITS[is_held_out(record.name, validation_share)]].append(tokens)
        counts.update(documents=1, tokens=len(tokens))
        self.tokens += len(tokens)

    def write(self, out: Path, number: int, position: tuple[int, int]) -> dict[str, Any]:
        """Writes the shards; returns the journal's entry."""
        shards = {
            split: write_shard(out, f"{split}/{number:05d}", documents)
            for split, documents in self.documents.items()
            if documents
        }
        return {"position": position, "shards": shards, "sources": self.sources}


def _write_shards(
    out: Path, journal: Journal, items: Sequence[Item], dtype: np.dtype, args: argparse.Namespace
) -> None:
    group = Group()
    position = journal.position
    done = sum(counts.get("tokens", 0) for entry in journal.entries for counts in entry["sources"].values())
    batches = _batches(iterate_records(items, *position))
    with tqdm(desc="tokenising", initial=done, unit="tok", unit_scale=True) as progress:
        for batch, documents in encoded(batches, out / TOKENIZER, dtype, args.workers):
            for (item, taken, record), tokens in zip(batch, documents, strict=True):
                position = item, taken
                group.add(items[item], record, tokens, args.validation_share)
                if group.tokens >= args.shard_tokens:
                    journal.append(group.write(out, len(journal.entries), position))
                    group = Group()
            progress.update(sum(map(len, documents)))
            progress.set_postfix(item=f"{position[0] + 1:,}/{len(items):,}", refresh=False)
    if group.records:
        journal.append(group.write(out, len(journal.entries), position))


def _batches(records: Iterable[Numbered]) -> Iterator[list[Numbered]]:
    batch: list[Numbered] = []
    characters = 0
    for numbered in records:
        batch.append(numbered)
        characters += len(_text(numbered[2]))
        if characters >= BATCH or len(batch) >= BATCH >> 6:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _text(record: Record) -> str:
    return record.text if isinstance(record, Document) else ""


def encoded(
    batches: Iterable[list[Numbered]], tokenizer: Path, dtype: np.dtype, workers: int
) -> Iterator[tuple[list[Numbered], list[np.ndarray]]]:
    """Each batch, in order, with the tokens of its records (none for what is left out), made by `workers` processes.
    A few batches per worker are read ahead, no more, however slowly the results are taken."""
    if workers == 1:
        _start_worker(str(tokenizer))
        yield from ((batch, _encode([_text(record) for *_, record in batch], dtype)) for batch in batches)
        return
    # A fork of this process could inherit a lock that one of its threads holds; a spawned one imports everything anew.
    way = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(way)
    if way == "forkserver":
        context.set_forkserver_preload([__name__, "transformers.models.auto.tokenization_auto"])
    pool = ProcessPoolExecutor(workers, context, _start_worker, (str(tokenizer), os.getpid()))
    waiting: collections.deque[tuple[list[Numbered], Future]] = collections.deque()
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(_encode, [_text(record) for *_, record in batch], dtype)))
            if len(waiting) > 3 * workers:
                batch, future = waiting.popleft()
                yield batch, future.result()
        while waiting:
            batch, future = waiting.popleft()
            yield batch, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


_worker: dict[str, Any] = {}


def _start_worker(tokenizer: str, parent: int | None = None) -> None:
    from transformers import AutoTokenizer

    if parent is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        threading.Thread(target=_leave_with_parent, daemon=True).start()
    _worker["tokenizer"] = AutoTokenizer.from_pretrained(tokenizer)


def _leave_with_parent() -> None:
    """A killed parent cannot shut its pool down, and a worker that waits for work would wait for ever."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _encode(texts: list[str], dtype: np.dtype) -> list[np.ndarray]:
    documents = iter(encode_documents(_worker["tokenizer"], [text for text in texts if text]))
    return [np.array(next(documents) if text else [], dtype) for text in texts]


def _tokenizer(args: argparse.Namespace, items: Sequence[Item], folder: Path) -> "PreTrainedTokenizerFast":
    """The tokenizer in `folder`; the first time it is trained, or fetched, and saved there."""
    from transformers import AutoTokenizer

    if not folder.exists():
        if args.tokenizer is not None:
            tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
            tokenizer_facts(tokenizer)
        else:
            texts = _training_texts(items, args.validation_share, int(args.tokenizer_characters))
            tokenizer = train_tokenizer(texts, args.train_tokenizer, LONGEST_CONTEXT)
        temporary = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(temporary, ignore_errors=True)
        tokenizer.save_pretrained(temporary)
        temporary.rename(folder)
    return AutoTokenizer.from_pretrained(folder)


def _training_texts(items: Sequence[Item], validation_share: float, characters: int) -> Iterator[str]:
    """Texts of the training split for the tokenizer: from the start of each source, its part of `characters`."""
    sources = list(dict.fromkeys(item.source for item in items))
    with tqdm(desc="reading for the tokenizer", unit="char", unit_scale=True) as progress:
        for source in sources:
            left = characters // len(sources)
            for *_, record in iterate_records([item for item in items if item.source == source]):
                if isinstance(record, Document) and not is_held_out(record.name, validation_share):
                    yield record.text[:left]
                    progress.update(len(record.text[:left]))
                    left -= len(record.text)
                    if left <= 0:
                        break


def _finish(out: Path, journal: Journal, settings: dict[str, Any], facts: dict[str, Any]) -> None:
    sources: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for entry in journal.entries:
        for source, counts in entry["sources"].items():
            sources[source].update(counts)
    if not any("train" in entry["shards"] for entry in journal.entries):
        raise ValueError(f"sources: expected documents to train on, got {json.dumps(sources)}")
    splits = {split: _split(out, journal, split) for split in SPLITS}
    write_manifest(out, {"settings": settings, "tokenizer": facts, "sources": sources, "splits": splits})
    journal.path.unlink()
    for source, counts in sources.items():
        print(f"{source}: {', '.join(f'{count:,} {what}' for what, count in counts.items())}")
    for split in SPLITS:
        print(f"{split}: {splits[split]['documents']:,} documents, {splits[split]['tokens']:,} tokens")
        for row in splits[split]["lengths"]:
            print(
                f"  up to {row['up_to']:>10,} tokens: {row['documents']:>11,} documents, {row['tokens']:>15,} tokens"
            )
    print(f"wrote {out}")
    warn_without_validation(splits, settings["validation_share"])


def warn_without_validation(splits: Mapping[str, Mapping[str, Any]], share: float) -> None:
    """Says on stderr if a share above 0 was asked for and no name fell into it."""
    training, validation = (splits[split]["documents"] for split in SPLITS)
    if share > 0 and not validation:
        print(
            f"warning: none of the {training:,} documents is held out, and `moe-lc train` needs some: "
            f"prepare again with a larger --validation-share than {share} and another --out",
            file=sys.stderr,
        )


def _split(out: Path, journal: Journal, split: str) -> dict[str, Any]:
    """A split's part of the manifest; `lengths` counts documents and their tokens up to each power of two."""
    shards = [entry["shards"][split] for entry in journal.entries if split in entry["shards"]]
    lengths = np.concatenate([np.zeros(0, np.int64), *(checked_lengths(out, shard) for shard in shards)])
    powers = np.ceil(np.log2(lengths)).astype(np.int64)
    rows = [
        {"up_to": 1 << power, "documents": int((powers == power).sum()), "tokens": int(lengths[powers == power].sum())}
        for power in np.unique(powers).tolist()
    ]
    return {"documents": len(lengths), "tokens": int(lengths.sum()), "lengths": rows, "shards": shards}


def _check(args: argparse.Namespace) -> None:
    if not 0.0 <= args.validation_share < 1.0:
        raise ValueError(f"validation_share: expected a number from 0 to below 1, got {args.validation_share}")
    for name in ("shard_tokens", "workers", "tokenizer_characters"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name}: expected at least 1, got {getattr(args, name)}")


def _settings(args: argparse.Namespace, items: Sequence[Item]) -> dict[str, Any]:
    """All that the bytes depend on, as JSON; so not the number of workers."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(f"{item.source}\0{item.name}\0{item.signature}\0".encode())
    kept = {name: value for name, value in vars(args).items() if name not in ("out", "workers")}
    return {**kept, "files": digest.hexdigest()}


def check_settings(
    folder: Path, begun: dict[str, Any], settings: dict[str, Any], elsewhere: str = "another --out"
) -> None:
    """Raises ValueError, naming the first, if `settings` are not those that `folder` was `begun` with; `elsewhere` is what
    would have to be given to write other data beside it."""
    for name, value in settings.items():
        known = begun.get(name)
        if known != value:
            differ = f"expected {known!r}, with which {folder} was begun, got {value!r}"
            if DIGEST.fullmatch(str(known)) or DIGEST.fullmatch(str(value)):
                differ = f"expected what {folder} was begun with, got something else"
            raise ValueError(f"{name}: {differ} (give {elsewhere}, or delete {folder})")


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"
