"""What is the user's to mend is one line; what is ours to mend keeps its traceback."""

import errno
import re
import tomllib
from pathlib import Path

import pytest

from modeling_moe_lc.training import cli, plot
from modeling_moe_lc.training.cli import EXTRAS, main


@pytest.fixture
def file(tmp_path):
    """Where a folder would have to be."""
    (tmp_path / "file").write_text("not a folder")
    return tmp_path / "file"


@pytest.mark.parametrize(
    ("command", "name"),
    (
        ("prepare SOURCE --out FILE --train-tokenizer 300 --workers 1", "FILE"),
        ("prepare SOURCE --out FILE/below --train-tokenizer 300 --workers 1", "FILE"),
        ("card tiny --out FILE/card.md", "FILE"),
        ("count FOLDER", "config.json"),
    ),
)
def test_files_that_cannot_be_used_are_one_line(file, tmp_path, capsys, command, name):
    (tmp_path / "source.py").write_text("pass\n")
    (tmp_path / "folder").mkdir()
    places = {"FILE": file, "SOURCE": tmp_path / "source.py", "FOLDER": tmp_path / "folder"}
    words = re.sub("FILE|SOURCE|FOLDER", lambda found: str(places[found[0]]), command).split()
    assert main(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("moe-lc: error: ") and str(places.get(name, name)) in line
    assert file.read_text() == "not a folder"


def raising(monkeypatch, error):
    def run(args):
        raise error

    monkeypatch.setattr(plot, "run", run)
    return lambda: main(["plot", "folder"])


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch, capsys):
    call = raising(monkeypatch, ModuleNotFoundError("No module named 'peft.utils'", name="peft.utils"))
    assert call() == 2
    assert capsys.readouterr().err == "moe-lc: error: this needs peft: pip install 'modeling_moe_lc[peft]'\n"


@pytest.mark.parametrize("where", ("import", "run"))
def test_a_missing_package_is_named_wherever_it_is_missed(monkeypatch, capsys, where):
    error = ModuleNotFoundError("No module named 'tqdm'", name="tqdm")
    if where == "import":
        monkeypatch.setattr(cli.importlib, "import_module", lambda name: (_ for _ in ()).throw(error))
        assert main(["plot", "folder"]) == 2
    else:
        assert raising(monkeypatch, error)() == 2
    assert "pip install 'modeling_moe_lc[train]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    (
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        OSError("without a file"),
        ModuleNotFoundError("No module named 'modeling_moe_lc.nothing'", name="modeling_moe_lc.nothing"),
    ),
)
def test_what_the_user_cannot_mend_is_raised(monkeypatch, error):
    with pytest.raises(type(error)):
        raising(monkeypatch, error)()


def test_extras_are_those_of_the_package():
    file = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(file.read_text())["project"]["optional-dependencies"]
    names = {extra: {re.match("[A-Za-z-]+", one)[0] for one in needs} for extra, needs in extras.items()}
    distributions = {"yaml": "pyyaml", "sklearn": "scikit-learn", "pyarrow": "datasets"}
    for module, extra in EXTRAS.items():
        assert distributions.get(module, module) in names[extra], module
    assert names["train"] | names["peft"] | names["rl"] | names["triton"] <= {
        distributions.get(one, one) for one in EXTRAS
    }
