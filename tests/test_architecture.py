"""Imports point one way and a few habits hold in every file; each rule is shown to bite on a made-up tree."""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest


ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "modeling_moe_lc"
SIDE = ("configuration", "kernels", "conversion", "training")
MAY_IMPORT = {
    "kernels": {"kernels"},
    "configuration": {"configuration"},
    PACKAGE: {PACKAGE, "configuration", "kernels"},
    "conversion": {"conversion", PACKAGE, "configuration", "kernels"},
    "training": {"training", "conversion", PACKAGE, "configuration", "kernels"},
}
FOREIGN = {"kernels": ("transformers",), "configuration": ("torch", "triton"), PACKAGE: ("torch.distributed",)}
MAX_LINES = 500


class Import(NamedTuple):
    name: str  # absolute and dotted, with the imported name: "modeling_moe_lc.kernels.kda.kda"
    line: int
    inside: frozenset  # the types of the statements around it


class Source(NamedTuple):
    path: str
    part: str
    tree: ast.Module
    text: str

    @property
    def package(self) -> list[str]:
        """Where relative imports start: the installed package that holds this file, whatever folder it stands in."""
        folders = list(Path(self.path).parent.parts)
        return folders if folders[0] == PACKAGE else [PACKAGE, *folders]

    def absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        up = node.level - 1
        above = self.package[: len(self.package) - up] if up < len(self.package) else ["<above the package>"]
        return ".".join([*above, *([node.module] if node.module else [])])

    def imports(self, node=None, inside=frozenset()):
        for child in ast.iter_child_nodes(node or self.tree):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = self.absolute(child)
                yield from (Import(f"{base}.{alias.name}", child.lineno, inside) for alias in child.names)
            else:
                yield from self.imports(child, inside | {type(child)})


def sources(root, parts=(PACKAGE, *SIDE)):
    for part in parts:
        for path in sorted((root / part).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            yield Source(path.relative_to(root).as_posix(), part, ast.parse(text), text)


def under(name, *packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def part_of(name):
    """The part of the project that an absolute name belongs to, or None for other people's packages."""
    first, *rest = name.split(".")
    if first == PACKAGE:
        return rest[0] if rest and rest[0] in (*SIDE, "tests", "model_cards") else PACKAGE
    return first if first in ("tests", "<above the package>") else None


def is_fused(path):
    return Path(path).match("kernels/*/fused*.py")


def imports_point_one_way(root):
    for source in sources(root):
        for name, line, _ in source.imports():
            part = part_of(name)
            if part is not None and part not in MAY_IMPORT[source.part]:
                yield f"{source.path}:{line}: {source.part} imports {name}"


def foreign_packages_stay_out(root):
    for source in sources(root):
        banned = FOREIGN.get(source.part, ())
        for name, line, _ in source.imports():
            if under(name, *banned):
                yield f"{source.path}:{line}: {source.part} imports {name}"
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in banned:
                yield f"{source.path}:{node.lineno}: {source.part} uses {ast.unparse(node)}"


def triton_is_optional(root):
    guards = {ast.If, ast.Try}
    for source in sources(root):
        for name, line, inside in source.imports():
            if under(name, "triton") and not is_fused(source.path) and not guards & inside:
                yield f"{source.path}:{line}: {name} outside kernels/*/fused.py needs a try or an if"
            module = "/".join(name.split(".")[1:4]) + ".py"
            needs_triton = is_fused(module) and (root / module).exists()
            if needs_triton and not is_fused(source.path) and ast.FunctionDef not in inside:
                yield f"{source.path}:{line}: {name} imports triton, so import it inside the function that needs it"


def heavy_packages_are_imported_where_used(root):
    for source in sources(root, ("training",)):
        for name, line, inside in source.imports():
            if under(name, "datasets", "trl", "matplotlib") and ast.FunctionDef not in inside:
                yield f"{source.path}:{line}: {name} at module level; import it in the function that uses it"


def versions_are_compared_in_one_place(root):
    read = ("transformers.__version__", "torch.__version__")
    for source in sources(root):
        if source.path == f"{PACKAGE}/compat.py":
            continue
        lines = [line for name, line, _ in source.imports() if name in read]
        lines += [n.lineno for n in ast.walk(source.tree) if isinstance(n, ast.Attribute) and ast.unparse(n) in read]
        yield from (
            f"{source.path}:{line}: compare in compat.py, print importlib.metadata.version()" for line in lines
        )


def files_are_short(root):
    for source in sources(root, (PACKAGE, *SIDE, "tests")):
        lines = len(source.text.splitlines())
        if lines > MAX_LINES:
            yield f"{source.path}: {lines} lines, at most {MAX_LINES}"


def nothing_is_left_undone(root):
    marks = ("TO" + "DO", "FIX" + "ME")
    for source in sources(root, (PACKAGE, *SIDE, "tests")):
        for number, line in enumerate(source.text.splitlines(), 1):
            if any(mark in line for mark in marks):
                yield f"{source.path}:{number}: {line.strip()}"


RULES = (
    imports_point_one_way,
    foreign_packages_stay_out,
    triton_is_optional,
    heavy_packages_are_imported_where_used,
    versions_are_compared_in_one_place,
    files_are_short,
    nothing_is_left_undone,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule):
    assert list(rule(ROOT)) == []


VIOLATIONS = (
    (imports_point_one_way, "kernels/kda/api.py", "from ...configuration import configuration_moe_lc"),
    (imports_point_one_way, "kernels/dispatch.py", "from ..router import Router"),
    (imports_point_one_way, "kernels/dispatch.py", "from .. import kda"),
    (imports_point_one_way, "kernels/kda/api.py", "import modeling_moe_lc"),
    (imports_point_one_way, "configuration/count.py", "def f():\n    from modeling_moe_lc.modeling_moe_lc import X"),
    (imports_point_one_way, "configuration/count.py", "from ..kernels.kda import kda"),
    (imports_point_one_way, "modeling_moe_lc/kda.py", "from .training.optim import Muon"),
    (imports_point_one_way, "modeling_moe_lc/kda.py", "from modeling_moe_lc import conversion"),
    (imports_point_one_way, "modeling_moe_lc/kda.py", "from ..kernels import kda"),
    (imports_point_one_way, "conversion/names.py", "from ..training.recipe import Recipe"),
    (imports_point_one_way, "training/demo.py", "from tests.conftest import seeded"),
    (imports_point_one_way, "training/demo.py", "from ..tests import conftest"),
    (foreign_packages_stay_out, "kernels/kda/api.py", "def f():\n    import transformers.utils"),
    (foreign_packages_stay_out, "configuration/count.py", "from torch import nn"),
    (foreign_packages_stay_out, "modeling_moe_lc/router.py", "from torch import distributed as dist"),
    (foreign_packages_stay_out, "modeling_moe_lc/router.py", "import torch\ntorch.distributed.all_reduce(x)"),
    (triton_is_optional, "kernels/kda/api.py", "import triton.language as tl"),
    (triton_is_optional, "kernels/kda/api.py", "def f():\n    from triton import jit"),
    (triton_is_optional, "kernels/kda/api.py", "from .fused import kda_fused"),
    (triton_is_optional, "kernels/kda/api.py", "from . import fused"),
    (triton_is_optional, "modeling_moe_lc/kda.py", "from .kernels.kda.fused_backward import f"),
    (heavy_packages_are_imported_where_used, "training/plot.py", "import matplotlib.pyplot as plt"),
    (
        heavy_packages_are_imported_where_used,
        "training/plot.py",
        "try:\n    import trl\nexcept ImportError:\n    pass",
    ),
    (versions_are_compared_in_one_place, "modeling_moe_lc/cache.py", "from transformers import __version__"),
    (versions_are_compared_in_one_place, "training/demo.py", "import torch\nif torch.__version__ > '2':\n    pass"),
    (files_are_short, "tests/test_long.py", "x = 1\n" * (MAX_LINES + 1)),
    (nothing_is_left_undone, "tests/test_late.py", "x = 1  # TO" + "DO"),
)
ALLOWED = {
    "kernels/dispatch.py": "import torch\ntry:\n    import triton\nexcept ImportError:\n    triton = None",
    "kernels/kda/__init__.py": "from .api import kda",
    "kernels/kda/api.py": "from ..dispatch import choose\ndef kda():\n    from .fused import kda_fused",
    "kernels/kda/fused.py": "import triton.language as tl\nfrom .fused_backward import f\nfrom ..checks import check_shape",
    "kernels/kda/fused_backward.py": "import triton",
    "configuration/count.py": "import transformers\nfrom .configuration_moe_lc import MoeLcConfig",
    "modeling_moe_lc/__init__.py": "from .configuration.configuration_moe_lc import MoeLcConfig",
    "modeling_moe_lc/compat.py": "import torch, transformers\nprint(transformers.__version__, torch.__version__)",
    "modeling_moe_lc/kda.py": "from torch import nn\nfrom .kernels.kda import fused_kda\nfrom . import norm",
    "conversion/names.py": "from ..kda import KimiDeltaAttention\nfrom ..configuration import count",
    "training/demo.py": "from ..modeling_moe_lc import X\nfrom ..conversion.names import y\nimport torch.distributed",
    "training/plot.py": "def plot():\n    import matplotlib.pyplot as plt",
}


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("rule", "path", "code"), VIOLATIONS, ids=[f"{v[0].__name__}-{i}" for i, v in enumerate(VIOLATIONS)]
)
def test_rule_bites(rule, path, code, tmp_path):
    found = list(rule(write(tmp_path, ALLOWED | {path: code})))
    assert found and all(line.startswith(path) for line in found)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_lets_right_code_pass(rule, tmp_path):
    assert list(rule(write(tmp_path, ALLOWED))) == []


def test_every_rule_is_shown_to_bite():
    assert {violation[0] for violation in VIOLATIONS} == set(RULES)
