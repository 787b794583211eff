"""`moe-lc bench train`: steps as the loop makes them, every case a line, speed only where the loss is a number."""

import json
import math
from argparse import ArgumentParser

import pytest
import torch

from modeling_moe_lc.training import bench_train
from modeling_moe_lc.training.bench_train import Case, RandomText
from modeling_moe_lc.training.cli import main
from modeling_moe_lc.training.processes import processes
from modeling_moe_lc.training.step import Step


class Machine:
    """In place of a GPU: a mark is a number of calls."""

    has_graphs = False
    name, matmul_rate, marks, started = "an H200 that is none", 789e12, 0, 0

    def mark(self):
        self.marks += 1
        return self.marks

    def seconds(self, begin, end):
        assert end == begin + 1  # the optimiser's, not what lies between two steps
        return 1e-3

    def synchronize(self):
        pass

    def start_memory(self):
        self.started += 1

    def peak_memory(self):
        return 3_000_000_000

    def kernels(self, call):
        call()
        return {"gemm": 1.0, "cast": 0.1}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    cases = {"plain": Case("tiny", 64, 2, public=(1e3, 1.0)), "checkpointed": Case("tiny", 96, 1, checkpointing=True)}
    monkeypatch.setattr(bench_train, "CASES", cases)


def arguments(*options):
    parser = ArgumentParser()
    parser.set_defaults(command="moe-lc bench train")
    bench_train.add_arguments(parser)
    args = parser.parse_args(["--cases", "plain", "checkpointed", "--warm-up", "1", "--steps", "2", *options])
    bench_train.check_arguments(args)
    return args


def test_every_case_has_a_line(capsys, tmp_path):
    output, machine = tmp_path / "lines.jsonl", Machine()
    with processes() as ours:
        plain, checkpointed = bench_train.bench(arguments("--output", str(output)), machine, ours)
    assert (plain.tokens, checkpointed.tokens, machine.started) == (128, 96, 2)
    assert plain.kernels == {"gemm": 1e-3, "cast": 1e-4} and plain.kernel_seconds == pytest.approx(1.1e-3)
    assert 0 < plain.mfu < 1 and plain.rate == plain.tokens / plain.seconds
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["case"] for line in lines] == ["plain", "checkpointed"] and lines[0]["loss"] == plain.loss
    printed = capsys.readouterr().out
    assert f"{plain.rate / 1e3:.2f}x" in printed and "gemm" in printed


def test_what_is_no_number_has_no_speed(monkeypatch):
    class Exploding(Step):
        def update(self, rate):
            return super().update(math.inf)

    monkeypatch.setattr(bench_train, "Step", Exploding)
    with processes() as ours, pytest.raises(ValueError, match="plain: expected a finite loss"):
        bench_train.bench(arguments(), Machine(), ours)


def test_accumulated_steps_hold_more_tokens():
    with processes() as ours:
        [plain, _] = bench_train.bench(arguments("--micro-steps", "3", "--top", "0"), Machine(), ours)
    assert plain.tokens == 3 * 128 and not plain.kernels


def test_ranks_read_parts_of_a_step_and_common_tokens_come_often():
    text = RandomText(4096, 4, 1000)
    [first, second], [third, _] = text.slice(0, 0, 2), text.slice(0, 1, 2)
    assert first.input_ids not in (second.input_ids, third.input_ids) and first.cu_seqlens == [0, 4096]
    assert text.slice(0, 0, 2)[0] == first
    counts = torch.bincount(torch.tensor(first.input_ids), minlength=1000)
    assert len(counts) == 1000 and counts[0] > 3 * counts[9] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cases", "nothing"], "cases: expected some of"),
        (["--steps", "0"], "steps: expected a number of at least 1, got 0"),
        (["--output", "/nowhere/lines"], "output: expected a file in a folder that exists"),
    ],
)
def test_options_are_checked_first(capsys, options, message):
    assert main(["bench", "train", "--cases", "plain", *options]) == 2
    assert message in capsys.readouterr().err
