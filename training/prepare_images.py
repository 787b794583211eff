"""`moe-lc prepare-images`: documents with pictures become shards that training reads, beside those of `moe-lc prepare`.

A document is a line of JSON: `{"messages": [...]}`, a conversation as `apply_chat_template` takes it, of which the
assistant's turns are learned; or `{"content": [...]}`, the items of one message, text and media in turn, of which all text
is learned. Media are paths relative to the file, or what else a processor reads. Killed at any moment, the same command
goes on from its last shard and ends with the same bytes.
"""

import argparse
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from .corpus import is_held_out
from .media_shards import PICTURES, Pictures, StoredDocument, as_json, write_media_shard
from .prepare import LONGEST_CONTEXT, SPLITS, TOKENIZER, Journal, begun, check_settings, warn_without_validation
from .shards import MANIFEST, read_manifest, token_dtype, write_manifest
from .tokenizer import tokenizer_facts, train_tokenizer


if TYPE_CHECKING:
    from ..processing_moe_lc import MoeLcProcessor

AS_BYTES = {"do_rescale": False, "do_normalize": False}
PATHS, LONGEST_PATH = ("image", "video", "path"), 1024  # fields of an item that can hold a path, and its characters
SHARD_PATCHES, SHARD_TOKENS = 1 << 18, 1 << 26  # after which a shard ends; patches of 3 x 14 x 14 bytes are 150 MB
# A document without turns: what stands in it is text and media, and nothing else.
DOCUMENT = """{{ bos_token }}{% for item in messages[0].content %}{% if item.type == 'text' %}{{ item.text }}{% else %}\
<|media_begin|>{{ item.type }}<|media_content|><|media_pad|><|media_end|>{% endif %}{% endfor %}{{ eos_token }}"""


class Row(NamedTuple):
    """A document: its name, the name of its split, and what a line of JSON says."""

    name: str
    split: str
    content: Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("sources", nargs="+", type=Path, metavar="FILE", help="of JSON lines with `messages` or `content`")
    add("--out", type=Path, required=True, help="folder to write; an interrupted one goes on")
    reader = parser.add_mutually_exclusive_group(required=True)
    reader.add_argument("--processor", metavar="NAME_OR_FOLDER", help="of an existing model")
    reader.add_argument(
        "--tokenizer", metavar="NAME_OR_FOLDER", help="with the media tokens, as `prepare` trains them"
    )
    reader.add_argument("--train-tokenizer", type=int, metavar="VOCAB", help="train one of this size on the texts")
    add("--patch-size", type=int, default=14, help="in pixels, with a tokenizer (default: %(default)s)")
    add("--max-patches", type=int, help="scale larger pictures down to so many (default: the processor's limit)")
    add("--validation-share", type=float, default=0.01, help="of the documents, by name (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    if not 0.0 <= args.validation_share < 1.0:
        raise ValueError(f"validation_share: expected a number from 0 to below 1, got {args.validation_share}")
    for name in ("patch_size", "max_patches"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"{name}: expected at least 1, got {getattr(args, name)}")
    for source in args.sources:
        if not source.is_file():
            raise ValueError(f"sources: expected files of JSON lines, got {str(source)!r}")
    kept = {name: value for name, value in vars(args).items() if name not in ("out", "sources")}
    files = [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in args.sources]
    prepare(
        args.out,
        partial(read_rows, args.sources, args.validation_share),
        {**kept, "files": files},
        partial(make_processor, args),
    )


def make_processor(args: argparse.Namespace, rows: Iterable[Row]) -> "MoeLcProcessor":
    """That of the arguments; a tokenizer is trained on the texts of `rows` that are not held out."""
    from transformers import AutoProcessor, AutoTokenizer

    from ..image_processing_moe_lc import MoeLcImageProcessor
    from ..processing_moe_lc import MoeLcProcessor

    if args.processor is not None:
        processor = AutoProcessor.from_pretrained(args.processor)
    else:
        if args.tokenizer is not None:
            tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
        else:
            texts = (text for row in rows if row.split == SPLITS[0] for text in texts_of(row.content))
            tokenizer = train_tokenizer(texts, args.train_tokenizer, LONGEST_CONTEXT)
        processor = MoeLcProcessor(MoeLcImageProcessor(patch_size=args.patch_size), tokenizer)
    if args.max_patches is not None:
        processor.image_processor.in_patch_limit = args.max_patches
    return processor


def prepare(
    out: Path,
    rows: Callable[[], Iterator[Row]],
    settings: dict[str, Any],
    new_processor: Callable[[Iterable[Row]], "MoeLcProcessor"],
) -> None:
    """Writes a folder, or the rest of one that was begun with the same `settings`: JSON, on which all bytes depend.

    `rows()` gives the same documents each time; `new_processor(rows)` is called if the folder has none yet.
    Raises ValueError, naming the document, for what cannot be read; for other settings; if there is nothing to train on.
    """
    if (out / MANIFEST).exists():
        check_settings(out, read_manifest(out)["settings"], settings)
        print(f"{out} is complete")
        return
    with begun(out, settings) as journal:
        processor = _kept_processor(out / TOKENIZER, lambda: new_processor(rows()))
        facts = tokenizer_facts(processor.tokenizer)
        try:
            _write_shards(out, journal, rows(), processor, token_dtype(facts["vocab_size"]))
        except KeyboardInterrupt:
            print(f"\ninterrupted after {len(journal.entries)} shards; the same command goes on from there")
            raise
        splits = {split: _split(journal, split, Pictures.of(processor)) for split in SPLITS}
        if not splits[SPLITS[0]]["documents"]:
            raise ValueError("sources: expected documents to train on, got none")
    write_manifest(out, {"settings": settings, "tokenizer": facts, "splits": splits})
    journal.path.unlink()
    for split, content in splits.items():
        print(f"{split}: {content['documents']:,} documents, {content['tokens']:,} tokens")
    print(f"wrote {out}")
    warn_without_validation(splits, settings.get("validation_share", 0.0))


def _kept_processor(folder: Path, make: Callable[[], "MoeLcProcessor"]) -> "MoeLcProcessor":
    from transformers import AutoProcessor

    if not folder.exists():
        temporary = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(temporary, ignore_errors=True)
        make().save_pretrained(temporary)
        temporary.rename(folder)
    return AutoProcessor.from_pretrained(folder)


def _write_shards(out: Path, journal: Journal, rows: Iterator[Row], processor: "MoeLcProcessor", dtype) -> None:
    _, done = journal.position
    group: list[tuple[str, StoredDocument]] = []
    patches = tokens = 0
    with tqdm(desc="reading", initial=done, unit="document") as progress:
        for number, row in enumerate(itertools.islice(rows, done, None), done + 1):
            group.append((row.split, stored_document(processor, row, dtype)))
            patches += len(group[-1][1].patches)
            tokens += len(group[-1][1].input_ids)
            progress.update()
            if patches >= SHARD_PATCHES or tokens >= SHARD_TOKENS:
                _append(out, journal, group, number)
                group, patches, tokens = [], 0, 0
        if group:
            _append(out, journal, group, number)


def _append(out: Path, journal: Journal, group: Sequence[tuple[str, StoredDocument]], taken: int) -> None:
    shards = {}
    for split in SPLITS:
        if documents := [document for own, document in group if own == split]:
            shards[split] = write_media_shard(out, f"{split}/{len(journal.entries):05d}", documents)
    journal.append({"position": (0, taken), "shards": shards})


def _split(journal: Journal, split: str, pictures: Pictures) -> dict[str, Any]:
    shards = [entry["shards"][split] for entry in journal.entries if split in entry["shards"]]
    sums = {name: sum(shard[name] for shard in shards) for name in ("documents", "tokens")}
    return {**sums, PICTURES: as_json(pictures), "shards": shards}


def stored_document(processor: "MoeLcProcessor", row: Row, dtype: np.dtype) -> StoredDocument:
    """A document as it lies in a shard. Raises ValueError, naming it, if it is none."""
    content = row.content
    try:
        if "messages" in content:
            features = _conversation(processor, content)
            learned = np.array(features["assistant_masks"][0], bool)
            if not learned.any():
                raise ValueError("messages: expected something that the assistant said, got nothing to learn")
        elif "content" in content:
            features = _rendered(processor, [{"role": "user", "content": content["content"]}], chat_template=DOCUMENT)
            learned = np.ones(len(features["input_ids"][0]), bool)
        else:
            raise ValueError(f"expected an object with messages or content, got the fields {sorted(content)}")
    except ValueError as error:
        raise ValueError(f"{row.name}: {error}") from error
    input_ids = np.array(features["input_ids"][0])
    side = processor.image_processor.patch_size
    grids = np.reshape(features.get("grid_thws", ()), (-1, 3)).astype(np.int64)
    patches = np.reshape(features.get("pixel_values", ()), (-1, 3, side, side)).astype(np.uint8)
    return StoredDocument(input_ids.astype(dtype), learned & (input_ids != processor.image_token_id), grids, patches)


def _conversation(processor: "MoeLcProcessor", content: Mapping[str, Any]) -> Mapping[str, Any]:
    variables = {name: content[name] for name in ("tools", "thinking") if name in content}
    return _rendered(processor, content["messages"], return_assistant_tokens_mask=True, **variables)


def _rendered(processor: "MoeLcProcessor", messages: list[dict[str, Any]], **options) -> Mapping[str, Any]:
    return processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, images_kwargs=AS_BYTES, videos_kwargs=AS_BYTES, **options
    )


def read_rows(files: Iterable[Path], validation_share: float) -> Iterator[Row]:
    """The lines of files, in order, empty ones left out; named FILE:LINE, and held out by that name.

    Raises ValueError, naming the line, if it is no JSON object.
    """
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                name = f"{file.name}:{number}"
                if not line.strip():
                    continue
                content = _json_object(name, line)
                yield Row(name, SPLITS[is_held_out(name, validation_share)], with_paths(content, file.parent))


def _json_object(name: str, line: str) -> dict[str, Any]:
    try:
        match json.loads(line):
            case dict(content):
                return content
    except json.JSONDecodeError:
        pass
    raise ValueError(f"{name}: expected a JSON object, got {line[:60]!r}")


def with_paths(value: Any, folder: Path, field: str = "") -> Any:
    """A copy, with the paths of media relative to `folder`, where there are such files."""
    if isinstance(value, dict):
        return {name: with_paths(item, folder, name) for name, item in value.items()}
    if isinstance(value, list):
        return [with_paths(item, folder, field) for item in value]
    is_path = field in PATHS and isinstance(value, str) and len(value) < LONGEST_PATH
    return str(folder / value) if is_path and (folder / value).is_file() else value


def texts_of(content: Mapping[str, Any]) -> Iterator[str]:
    """What a document says, piece by piece."""
    for message in content.get("messages", [content]):
        said = message.get("content") or ()
        yield from [said] if isinstance(said, str) else (item["text"] for item in said if item.get("type") == "text")
