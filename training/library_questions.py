"""Questions about real text: lines of Python's standard library, and what each of them does."""

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .corpus import is_held_out, iterate_documents


PACKAGES = ("asyncio", "email", "importlib", "multiprocessing", "xml")  # what is read
KINDS: dict[str, tuple[type[ast.stmt], ...]] = {
    "import": (ast.Import, ast.ImportFrom),
    "return": (ast.Return,),
    "raise": (ast.Raise,),
    "assignment": (ast.Assign, ast.AugAssign, ast.AnnAssign),
    "call": (ast.Expr,),
    "condition": (ast.If,),
    "loop": (ast.For, ast.While),
}
HELD_OUT = 0.25  # of the files
MOST, LONGEST = 400, 60  # lines of a kind, and characters of a line


def questions(corpus: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Conversations to learn from and held-out ones, as many about each kind, from different files and without a line in
    common.

    Raises:
        ValueError: a kind without lines on one of the sides.
    """
    found: dict[bool, dict[str, str]] = {False: {}, True: {}}  # line -> its kind
    for package in PACKAGES:
        for document in iterate_documents(corpus / package):
            found[is_held_out(f"{package}/{document.name}", HELD_OUT)].update(lines(document.text))
    found[True] = {line: kind for line, kind in found[True].items() if line not in found[False]}
    learned, held_out = (balanced(found[side]) for side in (False, True))
    if not (learned and held_out):
        raise ValueError(f"corpus: expected {', '.join(KINDS)} in files of {corpus}, got too few of one")
    return learned, held_out


def lines(source: str) -> Iterator[tuple[str, str]]:
    """The short lines of a file that begin a statement, each with its kind."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # of templates
        return
    text = source.splitlines()
    for node in ast.walk(tree):
        kind = next((kind for kind, types in KINDS.items() if isinstance(node, types)), None)
        if kind == "call" and not isinstance(node.value, ast.Call):  # type: ignore[attr-defined]
            continue
        if kind is not None:
            line = text[node.lineno - 1].strip()  # type: ignore[attr-defined]
            if len(line) <= LONGEST and ";" not in line:
                yield line, kind


def balanced(of: dict[str, str]) -> list[dict[str, Any]]:
    """As many of each kind, in turn, chosen by the lines themselves."""
    by_kind = {kind: [line for line in sorted(of, key=digest) if of[line] == kind] for kind in KINDS}
    count = min(MOST, *map(len, by_kind.values()))
    return [conversation(by_kind[kind][number], kind) for number in range(count) for kind in KINDS]


def digest(line: str) -> bytes:
    return hashlib.sha256(line.encode()).digest()


def conversation(line: str, kind: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": line}, {"role": "assistant", "content": kind}]}
