"""Conversations become shards that training reads, in which only what the assistant says is learned.

Sources are those of `moe-lc prepare`, a row of JSON each: `{"messages": [{"role": ..., "content": ...}, ...]}`, with `tools`
and `thinking` if need be. Killed at any moment, the same call goes on from the last shard and ends with the same bytes.
"""

import collections
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from .chat_encoding import ChatEncoder
from .chat_shards import LEARNED, Conversation, write_chat_shard
from .corpus import Document, is_held_out
from .prepare import SPLITS, TOKENIZER, Journal, Unfit, begun, check_settings
from .recipe import Recipe
from .shards import MANIFEST, read_manifest, token_dtype, write_manifest
from .sources import Item, Reading, Record, iterate_records, list_items
from .tokenizer import tokenizer_facts


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

READING = Reading(suffixes=(".jsonl", ".ndjson", ".parquet"), text_field=None)
SHARD_TOKENS = 1 << 24  # after which a shard ends


def prepare_conversations(recipe: Recipe) -> None:
    """Writes the folders of a recipe's `chat.sources`, or the rest of one that was begun in the same way.

    Raises:
        ValueError: a source or conversation that cannot be read, named; one that is too long, if that is refused; a folder
            that was begun in another way, or holds something else; nothing to train on, or nothing to hold out.
    """
    for name, source in recipe.chat.sources.items():
        stages = [stage for stage in recipe.stages if stage.mixture is None or name in stage.mixture]
        longest = min((stage.sequence_length for stage in stages), default=None)
        if longest is not None:
            _prepare(name, source, longest, recipe)


def _prepare(name: str, source: str, longest: int, recipe: Recipe) -> None:
    out, elsewhere = Path(recipe.data.folders[name]), f"another --data.folders.{name} FOLDER"
    items = list_items([source], READING)
    tokenizer = _tokenizer(recipe)
    settings = _settings(recipe, items, tokenizer, longest)
    if (out / MANIFEST).exists():
        return check_settings(out, read_manifest(out)["settings"], settings, elsewhere)
    encoder = ChatEncoder(tokenizer, recipe.chat.variables)
    facts = tokenizer_facts(tokenizer)
    with begun(out, settings, elsewhere) as journal:
        if not (out / TOKENIZER).exists():
            tokenizer.save_pretrained(out / f".{TOKENIZER}.partial")
            (out / f".{TOKENIZER}.partial").rename(out / TOKENIZER)
        _write_shards(out, journal, items, encoder, token_dtype(facts["vocab_size"]), recipe, longest)
        splits = {split: _split(journal, split) for split in SPLITS}
        for split, share, other in zip(SPLITS, ("less", "more"), ("smaller", "larger"), strict=True):
            if not splits[split]["documents"]:
                found = sum(one["documents"] for one in splits.values())
                raise Unfit(
                    f"chat.validation_share: expected {share}, with conversations in the {split} split of {source}, got "
                    f"{recipe.chat.validation_share} of {found} conversations (give --chat.validation_share a {other} number)"
                )
    counts = sum((collections.Counter(entry["counts"]) for entry in journal.entries), collections.Counter())
    write_manifest(out, {"settings": settings, "tokenizer": facts, "sources": {source: counts}, "splits": splits})
    journal.path.unlink()
    said = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    print(f"{source}: {said or 'nothing left out'}", flush=True)
    for split, content in splits.items():
        print(
            f"{split}: {content['documents']:,} conversations, {content['tokens']:,} tokens, {content[LEARNED]:,} learned"
        )
    print(f"wrote {out}", flush=True)


def _tokenizer(recipe: Recipe) -> "PreTrainedTokenizerFast":
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(recipe.chat.tokenizer or recipe.model.base)
    if recipe.chat.template is not None:
        file = Path(recipe.chat.template)
        if not file.is_file():
            raise ValueError(f"chat.template: expected a file with a Jinja template, got {recipe.chat.template!r}")
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    return tokenizer


def _settings(
    recipe: Recipe, items: Sequence[Item], tokenizer: "PreTrainedTokenizerFast", longest: int
) -> dict[str, Any]:
    """All that the bytes depend on, as JSON."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(f"{item.name}\0{item.signature}\0".encode())
        source = Path(item.source)
        file = source / item.name if source.is_dir() else source
        if file.is_file():
            with file.open("rb") as content:
                while part := content.read(1 << 20):
                    digest.update(part)
    chat = asdict(recipe.chat)
    kept = {name: chat[name] for name in ("variables", "too_long", "validation_share")}
    template = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()
    known = {"tokenizer": tokenizer_facts(tokenizer)["fingerprint"], "template": template}
    return {**kept, **known, "longest": longest, "files": digest.hexdigest()}


def _write_shards(
    out: Path,
    journal: Journal,
    items: Sequence[Item],
    encoder: ChatEncoder,
    dtype: np.dtype,
    recipe: Recipe,
    longest: int,
) -> None:
    group: dict[str, list[Conversation]] = {split: [] for split in SPLITS}
    counts: collections.Counter[str] = collections.Counter()
    position, tokens = journal.position, 0
    with tqdm(desc="encoding conversations", unit="row") as progress:
        for item, taken, record in iterate_records(items, *position):
            position = item, taken
            conversation = _encoded(record, encoder, dtype, recipe.chat.too_long, longest, counts)
            if conversation is not None:
                group[SPLITS[is_held_out(record.name, recipe.chat.validation_share)]].append(conversation)
                tokens += len(conversation.input_ids)
            progress.update()
            if tokens >= SHARD_TOKENS:
                _append(out, journal, group, counts, position)
                group, counts, tokens = {split: [] for split in SPLITS}, collections.Counter(), 0
    if any(group.values()) or counts:
        _append(out, journal, group, counts, position)


def _encoded(
    record: Record,
    encoder: ChatEncoder,
    dtype: np.dtype,
    too_long: str,
    longest: int,
    counts: collections.Counter[str],
) -> Conversation | None:
    """None, and counted, if it is left out."""
    if not isinstance(record, Document):
        counts[record.reason] += 1
        return None
    try:
        ids, learned = encoder(json.loads(record.text))
        if len(ids) > longest and too_long == "refuse":
            raise ValueError(
                f"expected at most the {longest} tokens of the shortest stage, or chat.too_long 'drop' or 'truncate', got {len(ids)}"
            )
    except ValueError as error:
        raise ValueError(f"{record.name}: {error}") from error
    if len(ids) > longest:
        kept = too_long == "truncate" and any(learned[1:longest])
        counts["truncated" if kept else "too long"] += 1
        if not kept:
            return None
    return Conversation(np.array(ids[:longest], dtype), np.array(learned[:longest], bool))


def _append(
    out: Path, journal: Journal, group: dict[str, list[Conversation]], counts, position: tuple[int, int]
) -> None:
    shards, learned = {}, {}
    for split, conversations in group.items():
        if conversations:
            shards[split] = write_chat_shard(out, f"{split}/{len(journal.entries):05d}", conversations)
            learned[split] = int(sum(one.learned.sum() for one in conversations))
    journal.append({"position": position, "shards": shards, LEARNED: learned, "counts": counts})


def _split(journal: Journal, split: str) -> dict[str, Any]:
    shards = [entry["shards"][split] for entry in journal.entries if split in entry["shards"]]
    sums = {name: sum(shard[name] for shard in shards) for name in ("documents", "tokens")}
    return {**sums, LEARNED: sum(entry[LEARNED].get(split, 0) for entry in journal.entries), "shards": shards}
