"""After the last step a run still validates and saves: it says so, and a signal that comes then is not lost."""

import os
import runpy
import signal
from pathlib import Path

import pytest

from modeling_moe_lc.training import pretrain
from modeling_moe_lc.training.processes import processes
from modeling_moe_lc.training.recipe import load_recipe
from modeling_moe_lc.training.run_log import read_log


made = runpy.run_path(str(Path(__file__).with_name("test_pretrain.py")))
WHOLE = ["step", "validation", "stage"]  # records of a stage

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return made["make_data"](tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def recipe(data, tmp_path):
    """Of one step in each of two stages."""
    few = ["--stages.0.tokens=512", "--stages.1.tokens=512", "--output_dir", str(tmp_path / "run")]
    return load_recipe(made["make_recipe"](tmp_path, data), few)


@pytest.mark.parametrize(
    ("place", "number", "last", "logged"),
    (
        ("_validate_if_due", signal.SIGINT, 1, WHOLE[:2]),
        ("_end_stage", signal.SIGTERM, 2, WHOLE * 2),
    ),
)
def test_a_signal_after_the_last_step_of_a_stage_stops_the_run(recipe, monkeypatch, place, number, last, logged):
    real = getattr(pretrain.Run, place)

    def interrupted(run, *args):
        if run.step == last:
            os.kill(os.getpid(), number)
        real(run, *args)

    with processes() as ours:
        with monkeypatch.context() as patch:
            patch.setattr(pretrain.Run, place, interrupted)
            assert not pretrain.pretrain(recipe, ours)
        assert [one["kind"] for one in read_log(recipe.output_dir)] == logged
        assert pretrain.pretrain(recipe, ours)
    assert [one["kind"] for one in read_log(recipe.output_dir)] == WHOLE * 2
    assert all((Path(recipe.output_dir) / "models" / name / "config.json").exists() for name in ("short", "long"))


def test_the_progress_bar_says_why_it_stands_still(recipe, monkeypatch):
    seen, real = [], pretrain.validation_losses

    def validation_losses(*args):
        seen.append(run.log.bar.desc)
        return real(*args)

    monkeypatch.setattr(pretrain, "validation_losses", validation_losses)
    with processes() as ours:
        run = pretrain.Run(recipe, ours)
        run.train()
    assert seen == ["validating: "] * 2 and "validating" not in run.log.bar.desc
