"""Conversations before a template reads them: their media taken out, and no control token left in what people wrote."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any


def without_media(conversations: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Copies that a template can read: media without their data, and no values that are None."""
    return [[_plain(message) for message in messages] for messages in conversations]


def media_of(messages: list[dict[str, Any]], kind: str) -> Iterator[tuple[Any, Any]]:
    """The media of one kind ("image", "video") in a conversation, in order, each with its metadata or None.

    Raises:
        ValueError: for an item without data.
    """
    names = (kind, "url", "path", "base64", f"{kind}_url")
    for item in _items(messages):
        if item.get("type") not in (kind, f"{kind}_url"):
            continue
        found = [item[name] for name in names if item.get(name) is not None]
        if not found:
            raise ValueError(f"content: expected one of {names} in an item of type {kind}, got {sorted(item)}")
        source = found[0].get("url") if isinstance(found[0], dict) else found[0]
        metadata = {name: item[name] for name in ("fps", "timestamps") if name in item}
        yield source, metadata or item.get("video_metadata")


def breaker(tokens: Iterable[str], border: str) -> Callable[[Any], Any]:
    """A function that puts `border` behind the first character of each of `tokens` that a value spells, and behind a value
    that ends as one of them begins (the next one could end it), so that none is left whole. It copies strings and
    containers; values of other types stay what they are."""
    longest_first = sorted(tokens, key=len, reverse=True)
    beginnings = sorted(
        {token[:end] for token in longest_first for end in range(1, len(token))}, key=len, reverse=True
    )
    whole, begun = ("|".join(map(re.escape, spelled)) or "(?!)" for spelled in (longest_first, beginnings))
    pattern = re.compile(f"(?=(?:{whole}))(.)|(?:{begun})\\Z", re.DOTALL)

    def broken(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda found: found[0] + border, value)
        if isinstance(value, dict):
            return {broken(key): broken(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [broken(item) for item in value]
        return value

    return broken


def unused_character(values: Any) -> str:
    """A private-use character that occurs in no text among the values."""
    used = set().union(*(set(text) for text in _texts(values)))
    return next(character for character in map(chr, range(0xE000, 0xF900)) if character not in used)


def cut(prompt: str, spans: Sequence[tuple[int, int]]) -> list[tuple[str, bool]]:
    """The prompt in parts, each with whether it is inside the spans (those that an assistant wrote)."""
    parts, last = [], 0
    for begin, end in spans:
        parts += [(prompt[last:begin], False), (prompt[begin:end], True)]
        last = end
    return [*parts, (prompt[last:], False)]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _items(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content")
        yield from (item for item in (content if isinstance(content, list | tuple) else ()) if isinstance(item, dict))


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    message = {name: value for name, value in message.items() if value is not None}
    if isinstance(message.get("content"), list | tuple):
        message["content"] = [
            item if not isinstance(item, dict) or item.get("type") == "text" else {"type": item.get("type")}
            for item in message["content"]
        ]
    return message
