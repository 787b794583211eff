"""What is logged is there after a kill and once after a resume; trackers and the terminal hear the same."""

import json
import math
import os
import signal
from pathlib import Path

import pytest
from accelerate import tracking

from modeling_moe_lc.training.run_log import LOG, STEP, VALIDATION, RunLog, read_log, records_of


NUMBERS = {"loss": 2.5, "tokens_per_second": 1234.0, "mfu": 0.25, "max_violation": [0.5, 0.25]}


def write_steps(log, first, last):
    for step in range(first, last + 1):
        log.write(STEP, step, 100 * step, NUMBERS | {"loss": 1.0 / step})


@pytest.fixture
def written(tmp_path):
    with RunLog(tmp_path, total_tokens=1000) as log:
        write_steps(log, 1, 6)
        log.write(VALIDATION, 6, 600, {"loss": 3.0})
    return tmp_path


def test_records_come_back_as_they_were_written(written):
    records = read_log(written)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6, 6]
    assert records[0] == {"kind": "step", "step": 1, "tokens": 100, **NUMBERS, "loss": 1.0}
    assert records_of(records, VALIDATION) == [{"kind": "validation", "step": 6, "tokens": 600, "loss": 3.0}]


def test_a_resumed_log_is_that_of_an_uninterrupted_run(written, tmp_path_factory):
    expected = (written / LOG).read_bytes()
    for cut in (b"", b'{"kind": "st', b'{"kind": "step", "step": 7}'):
        (written / LOG).write_bytes(expected + cut)
        with RunLog(written, total_tokens=1000, step=4, tokens=400) as log:
            assert [record["step"] for record in read_log(written)] == [1, 2, 3, 4]
            write_steps(log, 5, 6)
            log.write(VALIDATION, 6, 600, {"loss": 3.0})
        assert (written / LOG).read_bytes() == expected


def test_a_run_from_the_start_keeps_nothing(written):
    RunLog(written, total_tokens=1000).close()
    assert read_log(written) == []


def test_the_old_log_stands_until_the_new_one_is_whole(written, monkeypatch):
    expected = (written / LOG).read_bytes()

    def fail(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError):
        RunLog(written, total_tokens=1000, step=4)
    assert (written / LOG).read_bytes() == expected


def test_a_killed_run_has_logged_every_step(tmp_path):
    child = os.fork()
    if child == 0:
        log = RunLog(tmp_path, total_tokens=1000)
        write_steps(log, 1, 3)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert [record["step"] for record in read_log(tmp_path)] == [1, 2, 3]


def test_a_last_line_that_was_cut_off_is_left_out_and_a_broken_one_is_named(written):
    whole = (written / LOG).read_bytes()
    (written / LOG).write_bytes(whole[:-5])
    assert len(read_log(written)) == 6
    (written / LOG).write_bytes(whole.replace(b'"step": 3', b'"step": '))
    with pytest.raises(ValueError, match="line 3: expected a JSON object"):
        read_log(written)


def test_there_must_be_a_log(tmp_path):
    with pytest.raises(ValueError, match="run: expected a folder with log.jsonl"):
        read_log(tmp_path)


def test_numbers_that_are_not_finite_are_null(tmp_path):
    with RunLog(tmp_path, total_tokens=10) as log:
        log.write(
            STEP, 1, 1, {"loss": math.nan, "tokens_per_second": 1.0, "rows": [1.0, math.inf], "more": {"a": -math.inf}}
        )
    [line] = (tmp_path / LOG).read_text().splitlines()
    record = json.loads(line, parse_constant=pytest.fail)
    assert record["loss"] is None and record["rows"] == [1.0, None] and record["more"] == {"a": None}


def test_the_bar_shows_loss_speed_mfu_and_time_left(tmp_path, capsys):
    with RunLog(tmp_path, total_tokens=2000, step=5, tokens=500) as log:
        assert log.bar.n == 500
        log.write(STEP, 6, 1000, NUMBERS)
        assert log.bar.n == 1000 and log.bar.total == 2000
        assert log.bar.postfix == "loss=2.500, tok/s=1,234, MFU=25.0%"
        log.write(STEP, 7, 1500, NUMBERS | {"loss": 9.0, "spike": True})
    out, err = capsys.readouterr()
    assert "step 7: the loss jumped to 9.000" in out + err


def test_other_ranks_write_nothing(tmp_path):
    folder = tmp_path / "run"
    with RunLog(folder, total_tokens=10, trackers=["nobody"], is_main=False) as log:
        write_steps(log, 1, 2)
    assert not folder.exists()


class Listener(tracking.GeneralTracker):
    name = "listener"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: Path):
        super().__init__()
        self.run_name, self.logging_dir, self.heard, self.finished = run_name, logging_dir, {}, False

    @property
    def tracker(self):
        return self.heard

    def start(self):
        self.heard["started"] = True

    def store_init_configuration(self, values):
        self.settings = values

    def log(self, values, step=None, **kwargs):
        self.heard[step] = values

    def finish(self):
        self.finished = True


def test_a_tracker_hears_scalars_under_their_names(tmp_path, monkeypatch):
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "listener", Listener)
    settings = {"seed": 1, "stages": [{"name": "short", "length": 8}], "nothing": None}
    with RunLog(tmp_path, total_tokens=10, trackers=["listener"], project="ours", settings=settings) as log:
        [listener] = log.trackers
        log.write(STEP, 3, 1, NUMBERS | {"gradient_norm": math.nan, "stage": "short"})
    assert (listener.run_name, listener.logging_dir) == ("ours", tmp_path)
    assert listener.settings == {"seed": 1, "stages/00/name": "short", "stages/00/length": 8}
    assert listener.heard["started"] and listener.finished
    assert listener.heard[3] == {
        "step/loss": 2.5,
        "step/tokens_per_second": 1234.0,
        "step/mfu": 0.25,
        "step/max_violation/00": 0.5,
        "step/max_violation/01": 0.25,
        "step/stage": "short",
    }


@pytest.mark.parametrize("name", ["nobody", "aim"])
def test_a_tracker_that_is_not_there_is_an_error_before_anything_is_written(tmp_path, name, monkeypatch):
    monkeypatch.setattr(tracking, "_available_trackers", [])
    with pytest.raises(ValueError, match=f"trackers: expected .*tensorboard.* got {name}"):
        RunLog(tmp_path / "run", total_tokens=10, trackers=[name])
    assert not (tmp_path / "run").exists()
