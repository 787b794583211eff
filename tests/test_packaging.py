"""The side folders install as sub-packages of modeling_moe_lc, whole, and never answer to bare names."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import modeling_moe_lc


ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "modeling_moe_lc"
SIDE = ("configuration", "kernels", "conversion", "training")
CARDS = "model_cards"  # holds no code, but the template that `moe-lc card` fills
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_folder_with_code_is_listed():
    listed = set(PYPROJECT["tool"]["setuptools"]["packages"])
    folders = {path.parent.relative_to(ROOT) for folder in SIDE for path in (ROOT / folder).rglob("*.py")}
    found = {".".join((PACKAGE, *folder.parts)) for folder in folders} | {f"{PACKAGE}.{folder}" for folder in SIDE}
    assert listed == found | {PACKAGE, f"{PACKAGE}.{CARDS}"}


@pytest.mark.parametrize("folder", (*SIDE, "tests"))
def test_side_folder_is_not_a_package_of_its_own(folder):
    assert not (ROOT / folder / "__init__.py").exists(), f"{folder}/__init__.py would shadow an installed {folder!r}"


@pytest.mark.parametrize("folder", (PACKAGE, *SIDE))
def test_no_file_hides_a_module_that_is_imported_bare(folder):
    # `python training/x.py` puts training/ first on sys.path, and `import logging` would find our file
    hiding = {f"{name}.py" for name in ("triton", "types", "logging", "profile", "data")}
    assert not [path for path in (ROOT / folder).rglob("*.py") if path.name in hiding]


def test_bare_names_are_not_ours():
    # started in the root, as `python -m pytest` is; an installed `kernels` or nothing may answer, a namespace at most
    probe = f"import importlib.util as u; print(*[s.origin for n in {SIDE} if (s := u.find_spec(n))], sep='\\n')"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    ours = [ROOT / folder for folder in SIDE]
    assert not [path for path in done.stdout.splitlines() if any(Path(path).is_relative_to(folder) for folder in ours)]


def test_one_version_everywhere():
    released = re.search(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released is not None, "CHANGELOG.md names no version"
    assert PYPROJECT["project"]["version"] == released[1] == modeling_moe_lc.__version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this tree, built from a copy: setuptools leaves build/ and *.egg-info where it works."""
    pytest.importorskip("setuptools", minversion="77")
    pytest.importorskip("pip")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in (PACKAGE, *SIDE, CARDS):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("dist")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", out, source]
    built = subprocess.run(pip, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(out.glob("*.whl"))


def test_wheel_holds_the_whole_package(wheel):
    own = {path.relative_to(ROOT) for path in (ROOT / PACKAGE).rglob("*.py")} | {Path(PACKAGE, "py.typed")}
    side = {path.relative_to(ROOT) for folder in SIDE for path in (ROOT / folder).rglob("*.py")}
    presets = {path.relative_to(ROOT) for path in (ROOT / "configuration" / "presets").glob("*.json")}
    side |= presets | {Path(CARDS, "TEMPLATE.md")}
    expected = {path.as_posix() for path in own} | {Path(PACKAGE, path).as_posix() for path in side}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert any(name.endswith("/LICENSE") for name in archive.namelist())
    assert expected - held == set(), "missing from the wheel"
    assert {name for name in held if name.endswith(".py")} - expected == set(), "in the wheel, but not in the tree"
    assert all(name.startswith(f"{PACKAGE}/") for name in held)


def test_wheel_is_found_without_the_checkout(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    names = sorted(PYPROJECT["tool"]["setuptools"]["packages"])
    probe = f"import importlib as i; print(*[p for n in {names} for p in i.import_module(n).__path__], sep='\\n')"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-c", probe]
    done = subprocess.run(command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    assert len(found) == len(names)
    assert [path for path in found if not Path(path).is_relative_to(tmp_path / "site")] == []
