"""The documents name only files, headings and commands that exist, and no file names the machine it was written on."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md")
DOCUMENTS += tuple(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "kernels").rglob("README.md")))
DOCUMENTS += tuple(f"model_cards/{path.name}" for path in sorted((ROOT / "model_cards").glob("[a-z0-9]*.md")))
FOLDERS = ("modeling_moe_lc", "configuration", "kernels", "conversion", "training", "tests", "model_cards", ".ci")
MACHINE_PATHS = ("/wo" + "rk/", "/ro" + "ot/")


def fenced(text):
    return re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def prose(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def code(text):
    """What stands in code blocks and between backticks, one piece each."""
    return fenced(text) + re.findall(r"`([^`\n]+)`", prose(text))


def anchors(text):
    """The names that a host of Markdown gives to the headings."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document, root=ROOT):
    text = (root / document).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (root / document).parent / name if name else root / document
        if not path.exists():
            yield f"{document}: {target} does not exist"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text()):
            yield f"{document}: {target}: no such heading"


def missing_paths(document, root=ROOT):
    """Paths in code that start in one of our folders; what follows a `<placeholder>` or a `*` is not looked for."""
    for piece in code((root / document).read_text()):
        for word in re.findall(r"(?<![\w./-])\.?[a-z_]+/[\w./<>*-]*", piece):
            fixed = re.split(r"[^/]*[<*]", word)[0].rstrip(".")
            if word.split("/")[0] in FOLDERS and not (root / fixed).exists():
                yield f"{document}: {word} does not exist"


def commands(text):
    return set(re.findall(r"\bmoe-lc +([a-z][a-z-]*)", "\n".join(code(text))))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_paths_exist(document):
    assert [*broken_links(document), *missing_paths(document)] == []


def test_broken_links_and_paths_are_found(tmp_path):
    (tmp_path / "kernels" / "kda").mkdir(parents=True)
    (tmp_path / "kernels" / "kda" / "api.py").touch()
    right = "# A heading, here\n[a](kernels/kda) [b](#a-heading-here) [c](https://x.org/y) `kernels/<op>/api.py` `kernels/`\n"
    (tmp_path / "right.md").write_text(right)
    assert [*broken_links("right.md", tmp_path), *missing_paths("right.md", tmp_path)] == []
    (tmp_path / "wrong.md").write_text("[a](gone.md) [b](#gone) `training/gone.py`\n```bash\nls kernels/gone\n```\n")
    assert len([*broken_links("wrong.md", tmp_path), *missing_paths("wrong.md", tmp_path)]) == 4


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_exist(document):
    named = commands((ROOT / document).read_text())
    if importlib.util.find_spec("modeling_moe_lc.training.cli") is None:
        pytest.skip("modeling_moe_lc.training.cli is not there")
    from modeling_moe_lc.training.cli import build_parser

    choices = [action.choices for action in build_parser()._actions if action.choices]
    assert named <= set().union(*choices)


def test_commands_are_read_from_code_only():
    assert commands("The moe-lc command. `moe-lc train x`\n```bash\nmoe-lc export-remote-code y\n```") == {
        "train",
        "export-remote-code",
    }


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for text in DOCUMENTS for name in re.findall(r"`make ([a-z]+)`", (ROOT / text).read_text())}
    assert named and named <= targets


def test_no_file_names_the_machine():
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in names if name and (ROOT / name).is_file()]
    assert files
    found = [str(path) for path in files if any(mark.encode() in path.read_bytes() for mark in MACHINE_PATHS)]
    assert found == []
