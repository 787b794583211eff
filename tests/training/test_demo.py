"""The demo leaves what it promises, and an interrupted run ends exactly where an uninterrupted one does."""

import json
import textwrap
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_moe_lc.training import demo, step
from modeling_moe_lc.training.checkpoint_files import CheckpointWriter, latest, step_folders
from modeling_moe_lc.training.cli import main
from modeling_moe_lc.training.corpus import is_held_out
from modeling_moe_lc.training.evaluate import evaluate
from modeling_moe_lc.training.packing import pack


STEPS = (3, 2, 2)
ARGUMENTS = [
    *("--preset", "tiny", "--held-out-share", "0.3", "--learning-rate", "0.01", "--warmup", "2", "--threads", "1"),
    *("--tokens-per-step", "128", "--lengths", "32", "64", "128", "--steps", *map(str, STEPS)),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A library of ten small files: parts of a module of this Python."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = Path(textwrap.__file__).read_text().splitlines(keepends=True)
    for part in range(10):
        (folder / f"part_{part}.py").write_text("".join(lines[part * 24 : part * 24 + 24]))
    assert 2 <= sum(is_held_out(path.name, 0.3) for path in folder.iterdir()) <= 5
    return folder


@pytest.fixture(scope="module")
def call(corpus):
    return lambda out, *more: main(["demo", "--out", str(out), "--corpus", str(corpus), *ARGUMENTS, *more])


@pytest.fixture(scope="module")
def whole(call, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    assert call(out) == 0
    return out


def checkpoints(out):
    return list(step_folders(out / "checkpoints"))


def results_of(out):
    return json.loads((out / "results.json").read_text())


def without_times(out):
    results = results_of(out)
    for row in (*results["history"], *results["stages"]):
        row.pop("seconds", None)
        row.pop("tokens_per_second", None)
        row.pop("step_tokens", None)
    results.pop("facts")
    return results


def interrupt_in_step(monkeypatch, number):
    """A second Ctrl-C in the middle of the `number`-th step of the next run, between the optimiser and the routers."""
    calls = iter(range(1, number + 1))

    def update(*args, real=step.update_router_bias):
        if next(calls) == number:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(step, "update_router_bias", update)


def test_demo_leaves_a_model_a_figure_and_a_report_of_its_own_numbers(whole):
    results, report = results_of(whole), (whole / "report.md").read_text()
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert checkpoints(whole) == [3, 5, 7]
    assert len(results["history"]) == sum(STEPS)
    assert [row["steps"] for row in results["stages"]] == list(STEPS)
    assert results["by_position"]["borders"][-1] == 4 * 128
    for number in (*results["bits_per_byte"].values(), results["stages"][-1]["held_out_loss"]):
        assert f"{number:.3f}" in report
    assert results["sample"] in report and results["command"] in report
    assert all(f"`{path}`" in report for path in whole.iterdir())


def test_the_saved_model_is_the_one_that_was_evaluated(whole):
    results = results_of(whole)
    unseen, folder = demo.documents_of(whole, "validation"), whole / "models" / "128"
    last_stage, balanced = results["stages"][-1], results["routing"][-1]
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert balanced["loss"] == pytest.approx(evaluate(model, pack(unseen, 128, unseen[0][:1]), 128).loss, rel=1e-6)
    assert balanced["loss"] == pytest.approx(
        last_stage["held_out_loss"], rel=0.02
    )  # in whole steps, packs may come twice
    assert model.config.vocab_size >= len(tokenizer)
    assert tokenizer.decode(tokenizer("def f(x):\n    pass\n")["input_ids"]) == "def f(x):\n    pass\n"
    assert results["sample"].startswith(demo.PROMPT)


@pytest.mark.parametrize("step", (4, 6))
def test_an_interrupted_run_goes_on_to_the_same_result(whole, call, tmp_path, monkeypatch, step):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt_in_step(patch, step)
        patch.setattr(demo, "MINUTES_BETWEEN_CHECKPOINTS", 1e-9 if step == 6 else 1e9)
        assert call(out) == 130
    assert checkpoints(out)[-1] == {4: 3, 6: 5}[step]
    assert call(out) == 0
    assert without_times(out) == without_times(whole) | {"command": results_of(out)["command"]}
    torch.testing.assert_close(contents(out), contents(whole), rtol=0, atol=0)
    one, other = (
        AutoModelForCausalLM.from_pretrained(folder / "models" / "128").state_dict() for folder in (whole, out)
    )
    torch.testing.assert_close(other, one, rtol=0, atol=0)


def contents(out):
    """Weights, biases and the state of the optimiser."""
    dcp_to_torch_save(latest(out / "checkpoints"), out.with_name("contents.pt"))
    saved = torch.load(out.with_name("contents.pt"), weights_only=False)
    return {name: value for name, value in saved.items() if isinstance(value, torch.Tensor)}


def test_checkpoints_inside_a_stage_replace_one_another(call, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "MINUTES_BETWEEN_CHECKPOINTS", 1e-9)
    interrupt_in_step(monkeypatch, 5)
    assert call(tmp_path) == 130
    assert checkpoints(tmp_path) == [3, 4]


def test_a_crash_while_saving_leaves_the_checkpoint_before_it(call, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "MINUTES_BETWEEN_CHECKPOINTS", 1e-9)
    saves = iter(range(3))

    def finish(*args, real=CheckpointWriter.finish, **kwargs):
        if next(saves) == 2:
            raise OSError("no space left on device")
        real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "finish", finish)
        with pytest.raises(CheckpointException, match="no space left on device"):
            call(tmp_path)
    assert checkpoints(tmp_path) == [2]
    assert latest(tmp_path / "checkpoints") is not None


def test_a_run_goes_on_under_its_own_settings_only(whole, call, corpus, capsys):
    assert call(whole, "--seed", "5") == 2
    assert "expected seed = 0, got 5" in capsys.readouterr().err
    changed = corpus / "part_0.py"
    text = changed.read_text()
    try:
        changed.write_text(text + "# one more line\n")
        assert call(whole) == 2
    finally:
        changed.write_text(text)
    assert "moe-lc: error: corpus: expected the files" in capsys.readouterr().err


def test_restart_deletes_runs_only(call, tmp_path, capsys):
    (tmp_path / "precious.txt").write_text("")
    assert call(tmp_path, "--restart") == 2
    assert "without settings.json" in capsys.readouterr().err
    assert (tmp_path / "precious.txt").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ("--lengths 64 32", "lengths: expected ascending lengths"),
        ("--lengths 48 96", "the last of which divides tokens-per-step = 128"),
        ("--steps 1 2", "steps: expected a positive number for each length"),
        ("--threads 0", "threads: expected at least 1, got 0"),
        ("--preset nothing", "preset: expected one of"),
        ("--held-out-share 0", "held-out share: expected a number between 0 and 1"),
    ),
)
def test_bad_arguments_are_errors_without_a_traceback(call, tmp_path, capsys, arguments, message):
    assert call(tmp_path / "run", *arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("moe-lc: error: ") and message in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_slow_machine_trains_fewer_steps_of_every_stage(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "STEPS", [4000, 2000, 1000])
    seconds, fitting = [], demo.fitting_steps
    monkeypatch.setattr(demo, "fitting_steps", lambda *args: seconds.append(args[-1]) or fitting(*args))
    arguments = ["demo", "--out", str(tmp_path), "--corpus", str(corpus), *ARGUMENTS[: ARGUMENTS.index("--steps")]]
    assert main([*arguments, "--minutes", "0.002"]) == 0
    assert seconds == pytest.approx([0.12])  # the minutes are those of the steps
    first, second, third = json.loads((tmp_path / "settings.json").read_text())["steps"]
    assert 1 <= third <= second <= first < 100
    assert main(arguments) == 0  # finished: evaluates again, with the steps it was trained for
    assert len(results_of(tmp_path)["history"]) == first + second + third
