"""Text documents from a folder of source files, split into training and held-out files."""

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


# Third-party packages and tests are not the library; `encodings` and `pydoc_data` are generated tables, not code.
SKIPPED_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__")
)


@dataclass(frozen=True)
class Document:
    """One file: its path relative to the corpus folder in POSIX form, and its exact text (UTF-8 gives back the bytes)."""

    name: str
    text: str


def standard_library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def iterate_documents(
    folder: Path, suffix: str = ".py", skipped: frozenset[str] = SKIPPED_FOLDERS
) -> Iterator[Document]:
    """Yields every non-empty UTF-8 file below `folder` that ends in `suffix`, in the order of its relative path.

    A file inside a folder of a name in `skipped`, or that is not UTF-8, is left out.
    Raises ValueError if `folder` is not a folder.
    """
    if not folder.is_dir():
        raise ValueError(f"corpus: expected a folder with {suffix} files, got {str(folder)!r}")
    names = {path: path.relative_to(folder) for path in folder.rglob(f"*{suffix}") if path.is_file()}
    for path, name in sorted(names.items(), key=lambda item: item[1].as_posix()):
        if skipped.isdisjoint(name.parts[:-1]):
            try:
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue
            if text:
                yield Document(name.as_posix(), text)


def is_held_out(name: str, share: float) -> bool:
    """Whether a document belongs to the held-out part: a stable function of its name alone, true for about `share` of
    all names, so that a file never changes sides when others come or go."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def split_corpus(documents: Iterator[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Splits documents by name into (training, held out), `share` in (0, 1) being the expected part held out.

    Raises ValueError if `share` is outside (0, 1) or if one side is left without a document.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"held-out share: expected a number between 0 and 1, got {share}")
    training, held_out = [], []
    for document in documents:
        (held_out if is_held_out(document.name, share) else training).append(document)
    if not training or not held_out:
        raise ValueError(
            f"corpus: expected at least one training and one held-out document, got {len(training)} and {len(held_out)}"
        )
    return training, held_out


def fingerprint(documents: Iterable[Document]) -> str:
    """A digest of the names and texts, in their order: equal for equal corpora."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.name}\0{document.text}\0".encode())
    return digest.hexdigest()
