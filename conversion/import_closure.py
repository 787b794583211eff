"""The modules that a module needs, as flat files whose imports transformers' loader of remote code can follow.

That loader (`transformers.dynamic_module_utils`) copies a file and, from the same folder, every `name`.py for which it
reads a line `from <dot>name import`; before it runs anything it asks for every absolute import outside `try`.
`import_closure` turns part of a package into such files and refuses what they cannot say.
"""

import ast
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from transformers.dynamic_module_utils import get_imports


# Present wherever transformers loads a model.
ALLOWED = {"torch", "transformers", "huggingface_hub", "safetensors", "numpy", "packaging", "PIL"}
# Needed only once an implementation is called: put behind `try` where loading a model does not reach the import.
OPTIONAL = {"triton"}

# The reading of transformers' `get_relative_imports`, which sees docstrings too and no other spelling of an import.
_SEEN_BY_TRANSFORMERS = re.compile(r"^\s*(?:import\s+\.(\S+)\s*$|from\s+\.(\S+)\s+import)", re.MULTILINE)
_GUARD = "\nexcept ImportError:  # in `try`, or transformers would refuse to load without it\n    raise"


@dataclass(frozen=True)
class _Import:
    node: ast.Import | ast.ImportFrom
    in_function: bool
    in_try: bool

    @property
    def runs_at_load(self) -> bool:
        return not (self.in_function or self.in_try)


def flat_name(module: str) -> str:
    """The name in the flat folder of a module given by its dotted path inside the package."""
    return module.replace(".", "_")


def import_closure(package: str, search_path: Iterable[str | Path], entries: Iterable[str]) -> dict[str, str]:
    """The entry modules and all that they import from their package, as flat self-contained files.

    Args:
        package: importable name of the package, to recognise absolute imports of itself.
        search_path: the folders of the package, its `__path__`.
        entries: modules to start from, as dotted paths inside the package.

    Returns:
        File name -> source text, where only import statements are changed: a relative import names the flat file that
        defines the name (re-exports of `__init__` files are followed), an import of an optional package that loading
        does not reach stands in `try`. `__init__` files are left out, so what they do on import is lost.

    Raises:
        ValueError: naming file and line, for code that transformers' loader would not carry over or would not load.
    """
    folders = [Path(folder) for folder in search_path]
    modules: dict[str, _Module] = {}
    at_load: set[str] = set()
    waiting = [(entry, True) for entry in entries]
    while waiting:
        name, loaded = waiting.pop()
        if name in modules and (name in at_load or not loaded):
            continue
        if name not in modules:
            modules[name] = _Module(name, package, folders)
        if loaded:
            at_load.add(name)
        for item, origins in modules[name].relative_imports:
            waiting += [(origin, loaded and item.runs_at_load) for origin in origins]

    files: dict[str, str] = {}
    for name in sorted(modules):
        file = f"{flat_name(name)}.py"
        if file in files:
            twins = sorted(twin for twin in modules if flat_name(twin) == flat_name(name))
            raise ValueError(f"{package}: expected one module per exported file, got {' and '.join(twins)} for {file}")
        files[file] = modules[name].rewritten(loads=name in at_load)
    return files


class _Module:
    def __init__(self, name: str, package: str, search_path: Sequence[Path]):
        file = _locate(name, search_path)
        if file is None or file.name == "__init__.py":
            raise ValueError(f"{package}.{name}: expected a module, got {'no such file' if file is None else file}")
        self.name, self.package, self.search_path, self.file = name, package, search_path, file
        self.bytes = file.read_bytes()
        tree = ast.parse(self.bytes, filename=str(file))
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == "__file__":
                self.refuse(node.lineno, "expected no use of __file__: only Python files travel with remote code")
        self.imports = list(_walk_imports(tree))
        # [(import, {module: [(name there, name here)]})]
        self.relative_imports = [
            (item, self._origins(item.node))
            for item in self.imports
            if isinstance(item.node, ast.ImportFrom) and item.node.level
        ]
        self._refuse_what_transformers_misreads()

    def refuse(self, line: int, reason: str) -> NoReturn:
        raise ValueError(f"{self.file}, line {line}: {reason}")

    def _origins(self, node: ast.ImportFrom) -> dict[str, list[tuple[str, str]]]:
        if node.module is None:
            self.refuse(node.lineno, f"expected `from .module import name`, got `{ast.unparse(node)}`")
        target = _absolute(node, self.name.split(".")[:-1])
        origins: dict[str, list[tuple[str, str]]] = {}
        for alias in node.names:
            if alias.name == "*":
                self.refuse(node.lineno, f"expected names, got `{ast.unparse(node)}`")
            try:
                module, name = _definition(target, alias.name, self.search_path)
            except LookupError as error:
                self.refuse(node.lineno, f"`{ast.unparse(node)}`: {error.args[0]}")
            origins.setdefault(module, []).append((name, alias.asname or alias.name))
        return origins

    def _refuse_what_transformers_misreads(self):
        source = self.bytes.decode()
        matches = _SEEN_BY_TRANSFORMERS.finditer(source)
        seen = {source.count("\n", 0, match.start(match.lastindex)) + 1 for match in matches}
        written = {item.node.lineno for item, _ in self.relative_imports}
        for line in sorted(seen - written):
            self.refuse(line, "transformers takes this text for an import and would look for its file: reword it")
        for line in sorted(written - seen):
            self.refuse(
                line, "expected `from .module import` at the start of a line: transformers sees no other import"
            )

    def rewritten(self, *, loads: bool) -> str:
        """The text for the flat folder. `loads`: whether loading a model runs the body of this module."""
        edits = [self._flattened(item.node, origins) for item, origins in self.relative_imports]
        for item in self._needed_by_transformers():
            edits += self._guarded(item, loads=loads)
        text = self.bytes
        for start, end, new in sorted(edits, reverse=True):
            text = text[:start] + new.encode() + text[end:]
        return text.decode().replace(f"{_GUARD}\ntry:\n", "\n")

    def _span(self, node: ast.stmt) -> tuple[int, int]:
        starts = list(itertools.accumulate((len(line) + 1 for line in self.bytes.split(b"\n")), initial=0))
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def _flattened(
        self, node: ast.Import | ast.ImportFrom, origins: dict[str, list[tuple[str, str]]]
    ) -> tuple[int, int, str]:
        start, end = self._span(node)
        statement = self.bytes[start:end].decode()
        names = [(alias.name, alias.asname or alias.name) for alias in node.names]
        if list(origins.values()) == [names]:
            target = _SEEN_BY_TRANSFORMERS.match(statement)
            return start + target.start(2), start + target.end(2), flat_name(next(iter(origins)))
        tokens = tokenize.generate_tokens(io.StringIO(statement).readline)
        lines = [token.string for token in tokens if token.type == tokenize.COMMENT]
        for module, pairs in origins.items():
            listed = ", ".join(name if name == here else f"{name} as {here}" for name, here in pairs)
            lines.append(f"from .{flat_name(module)} import {listed}")
        return start, end, f"\n{' ' * node.col_offset}".join(lines)

    def _needed_by_transformers(self) -> Iterator[_Import]:
        needed = set(get_imports(self.file)) - sys.stdlib_module_names - ALLOWED
        for item in self.imports:
            packages = _packages(item.node)
            if self.package in packages:
                self.refuse(item.node.lineno, f"expected a relative import, got `{ast.unparse(item.node)}`")
            if needed & packages and not item.in_try:
                yield item

    def _guarded(self, item: _Import, *, loads: bool) -> list[tuple[int, int, str]]:
        node = item.node
        if _packages(node) - OPTIONAL or (loads and not item.in_function):
            self.refuse(
                node.lineno,
                f"expected no `{ast.unparse(node)}` outside try/except: transformers would load nothing without it"
                f" (only {', '.join(OPTIONAL)} may also stand in a function, or in a module that one imports)",
            )
        start, end = self._span(node)
        end_of_line = (self.bytes + b"\n").index(b"\n", end)
        indent = self.bytes[start - node.col_offset : start].decode()
        if indent.strip():
            self.refuse(node.lineno, f"expected `{ast.unparse(node)}` on a line of its own")
        after = _GUARD.replace("\n", f"\n{indent}")
        return [(start, start, f"try:\n{indent}    "), (end_of_line, end_of_line, after)]


def _walk_imports(parent: ast.AST, in_function: bool = False, in_try: bool = False) -> Iterator[_Import]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield _Import(node, in_function, in_try)
        else:
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _walk_imports(node, in_function or function, in_try or isinstance(node, ast.Try))


def _packages(node: ast.Import | ast.ImportFrom) -> set[str]:
    """The top-level packages of an absolute import."""
    if isinstance(node, ast.ImportFrom):
        return {node.module.split(".")[0]} if node.module and not node.level else set()
    return {alias.name.split(".")[0] for alias in node.names}


def _absolute(node: ast.ImportFrom, folder: list[str]) -> str:
    """The dotted path inside the package that a relative import in `folder` names; "" outside the package."""
    up = node.level - 1
    return ".".join([*folder[: len(folder) - up], node.module]) if up <= len(folder) else ""


def _locate(module: str, search_path: Sequence[Path]) -> Path | None:
    """The file of a module or package, in Python's order of search; its folder if a namespace; None if nothing."""
    found, folders = None, list(search_path)
    for part in module.split("."):
        files = [folder / name for folder in folders for name in (f"{part}/__init__.py", f"{part}.py")]
        found = next((file for file in files if file.is_file()), None)
        folders = [folder / part for folder in folders if (folder / part).is_dir()]
        if found is not None:
            folders = [found.parent] if found.name == "__init__.py" else []
        elif folders:
            found = folders[0]
        else:
            return None
    return found


def _definition(module: str, name: str, search_path: Sequence[Path]) -> tuple[str, str]:
    """For `name` as imported from `module`: the module it comes from, no `__init__`, and its name there.

    Raises LookupError, saying why, where a flat file could not import it.
    """
    file = _locate(module, search_path) if module else None
    if file is None:
        raise LookupError(f"there is no module {module}" if module else "this leaves the package")
    if file.suffix == ".py" and file.name != "__init__.py":
        return module, name
    for item in _walk_imports(ast.parse(file.read_bytes())) if file.is_file() else ():
        node = item.node
        if isinstance(node, ast.ImportFrom) and node.level and node.module and not item.in_function:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _definition(_absolute(node, module.split(".")), alias.name, search_path)
    if _locate(f"{module}.{name}", search_path) is not None:
        raise LookupError(f"{name} is a module, expected a name from one: write `from .{name} import ...`")
    raise LookupError(f"{module}/__init__.py does not import {name} from a module of the package, expected it to")
