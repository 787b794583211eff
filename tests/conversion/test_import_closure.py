"""Flat files run as the package runs, and transformers reads them as Python does; what it would misread is refused."""

import ast
import difflib
import importlib
import shutil
import sys
import textwrap

import pytest
import transformers.dynamic_module_utils as loader

from modeling_moe_lc.conversion.import_closure import flat_name, import_closure


PACKAGE = {
    "__init__.py": "",
    "model.py": '''
        """A model: it keeps its text, from .kernels to the last é."""

        import math  # standard library

        from .kernels.op import add, twice as double  # two modules
        from .kernels.op import (
            add_slowly,  # a comment inside
        )
        from .layer import layer


        if True:
            from .kernels.op import (
                add as plus,  # renamed on the way
                scale,
            )


        class Model:
            def forward(self, x):
                from .kernels.op.half import half as é; y = é(scale(double(x)))  # noqa: E702

                return add(y) + plus(x) + add_slowly(x) + layer(x) + math.floor(1.5)
        ''',
    "layer.py": "from .kernels.op.api import add_slowly as layer\n",
    "unused.py": "raise RuntimeError\n",
    "kernels/scale.py": "def scale(x):\n    return 3 * x\n",
    "kernels/op/__init__.py": """
        from ..math import twice
        from ..scale import scale
        from .api import add_slowly, op_add as add
        """,
    "kernels/op/half.py": "def half(x):\n    return x / 2\n",
    "kernels/op/api.py": """
        from ..scale import scale


        def op_add(x, fused=False):
            if fused:
                from .fused import op_fused

                return op_fused(x)
            return x + 1


        def add_slowly(x):
            return scale(x) + 1
        """,
    "kernels/op/fused.py": """
        import triton  # on a GPU only
        import triton.language as tl


        @triton.jit
        def kernel(x, BLOCK: tl.constexpr):
            pass


        def op_fused(x):
            import triton.testing

            return -x
        """,
    "kernels/math/__init__.py": "from .arithmetic import twice\n",
    "kernels/math/arithmetic.py": "def twice(x):\n    return 2 * x\n",
}


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
    return folder


@pytest.fixture
def flat(tmp_path):
    package = write(tmp_path / "made_up", PACKAGE)
    return write(tmp_path / "flat", import_closure("made_up", [package], ["model"]))


@pytest.fixture
def no_triton(monkeypatch):
    class Blocker:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name.split(".")[0] == "triton":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Blocker, *sys.meta_path])


def test_the_loader_of_transformers_runs_the_files_as_python_runs_the_package(tmp_path, flat, no_triton, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(loader, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    expected = importlib.import_module("made_up.model").Model().forward(7.0)
    try:
        remote = loader.get_class_from_dynamic_module("model.Model", flat)
        assert remote.__module__.startswith("transformers_modules.")
        assert remote().forward(7.0) == expected == 22 + 8 + 22 + 22 + 1
        api = importlib.import_module(remote.__module__.replace(".model", ".kernels_op_api"))
        with pytest.raises(ModuleNotFoundError, match="triton"):
            api.op_add(1.0, fused=True)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in ("transformers_modules", "made_up")]:
            del sys.modules[name]


def test_transformers_sees_the_imports_that_python_sees(flat, no_triton):
    files = sorted(flat.iterdir())
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        relative = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
        assert all(node.level == 1 for node in relative)
        assert set(loader.check_imports(file)) == {node.module for node in relative}
    copied = map(flat.joinpath, {*loader.get_relative_import_files(flat / "model.py"), "model.py"})
    assert sorted(copied) == files
    kernels = ["kernels_math_arithmetic", "kernels_op_api", "kernels_op_fused", "kernels_op_half", "kernels_scale"]
    assert [file.stem for file in files] == [*kernels, "layer", "model"]


def test_only_imports_change(tmp_path, flat):
    def written(module):
        old = (tmp_path / "made_up" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        new = (flat / f"{flat_name(module)}.py").read_text(encoding="utf-8")
        changed = [line for line in difflib.ndiff(old.splitlines(), new.splitlines()) if line[0] in "+-"]
        return [line[2:].strip() for line in changed if line[0] == "+"]

    assert written("model") == [
        "from .kernels_op_api import op_add as add",
        "from .kernels_math_arithmetic import twice as double  # two modules",
        "from .kernels_op_api import (",
        "# renamed on the way",
        "from .kernels_op_api import op_add as plus",
        "from .kernels_scale import scale",
        "from .kernels_op_half import half as é; y = é(scale(double(x)))  # noqa: E702",
    ]
    assert written("kernels.op.api") == ["from .kernels_scale import scale", "from .kernels_op_fused import op_fused"]
    assert written("kernels.scale") == []


def test_triton_imports_that_loading_does_not_reach_stand_in_try(flat):
    text = (flat / "kernels_op_fused.py").read_text()
    guard = "except ImportError:  # in `try`, or transformers would refuse to load without it\n"
    top = "try:\n    import triton  # on a GPU only\n    import triton.language as tl\n"
    assert text.startswith(f"{top}{guard}    raise\n\n\n@triton.jit\n")
    assert f"    try:\n        import triton.testing\n    {guard}        raise\n\n    return -x\n" in text


def test_a_checkout_gives_the_files_of_an_installed_package(tmp_path, flat):
    checkout = tmp_path / "checkout"
    shutil.copytree(tmp_path / "made_up", checkout / "made_up")
    (checkout / "made_up" / "kernels").rename(checkout / "kernels")
    sources = import_closure("made_up", [checkout / "made_up", checkout], ["model"])
    assert sources == {file.name: file.read_text(encoding="utf-8") for file in flat.iterdir()}


REFUSED = {
    "a module as a name": ("x = 1\nfrom . import a", 2, "expected `from .module import name`"),
    "a module through its folder": ("from .folder import module", 1, "module is a module"),
    "an absolute import of itself": ("import made_up.module", 1, "expected a relative import"),
    "the same, of names": ("def f():\n    from made_up.module import b", 2, "expected a relative import"),
    "a star": ("from .module import *", 1, "expected names"),
    "a name that no module defines": ("from .package import b", 1, "does not import b"),
    "a module that is not there": ("x = 1\nfrom .a import b", 2, "no module a"),
    "a module above the package": ("from ..a import b", 1, "leaves the package"),
    "a docstring": ('"""Use it so:\n\n    from .module import b\n"""', 3, "reword it"),
    "a spelling": ("x = 1; from .module import b", 1, "at the start of a line"),
    "a data file": ("from pathlib import Path\n\nHERE = Path(__file__)", 3, "__file__"),
    "triton on loading": ("import os\nimport triton", 2, "`import triton`"),
    "another package": ("def f():\n    from fla.ops import kda", 2, "`from fla.ops import kda`"),
}


@pytest.mark.parametrize("text, line, message", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("file", ["model.py", "imported.py"])
def test_what_the_loader_cannot_follow_is_refused_by_file_and_line(tmp_path, file, text, line, message):
    files = {"module.py": "b = 1\n", "folder/module.py": "", "package/__init__.py": "b = 1\n"}
    package = write(
        tmp_path / "made_up", {"model.py": "from .imported import a\n", "imported.py": "", **files, file: text}
    )
    with pytest.raises(ValueError, match=f"{file}, line {line}: ") as error:
        import_closure("made_up", [package], ["model"])
    assert message in str(error.value)


def test_two_modules_of_one_flat_name_are_refused(tmp_path):
    files = {"model.py": "from .a.b import c\nfrom .a_b import c as d\n", "a/b.py": "c = 1\n", "a_b.py": "c = 1\n"}
    with pytest.raises(ValueError, match=r"got a\.b and a_b for a_b\.py"):
        import_closure("made_up", [write(tmp_path / "made_up", files)], ["model"])


def test_guarded_imports_pass(tmp_path):
    text = """
        from transformers.utils import is_torchvision_available

        try:
            import fla
        except ImportError:
            fla = None
        if is_torchvision_available():
            import torchvision
        """
    package = write(tmp_path / "made_up", {"model.py": text})
    assert import_closure("made_up", [package], ["model"]) == {"model.py": (package / "model.py").read_text()}
