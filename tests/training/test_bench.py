"""`moe-lc bench`: nothing wrong gets a speed, tables and JSON lines say what was measured, options are checked."""

import json
import sys
from argparse import ArgumentParser
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from modeling_moe_lc.kernels.kda import kda, kda_step
from modeling_moe_lc.training import bench, bench_kda
from modeling_moe_lc.training.bench_kda import Implementation
from modeling_moe_lc.training.cli import main


class Machine:
    """In place of a CUDA device: every call is made, every time is 2 ms."""

    name, device = "an H200 that is none", torch.device("cpu")

    def median_ms(self, calls):
        for call in calls:
            call()
        return 2.0

    def extra_bytes(self, call):
        call()
        return 3_000_000

    def graph(self, calls):
        return lambda: [call() for call in calls]

    def copy_bandwidth(self):
        return 1e12


def sequence(x, state):
    return kda(**x, initial_state=state, impl="reference")


def step(x, state):
    one = {name: t[:, 0] if t.ndim > 2 else t for name, t in x.items()}
    return kda_step(**one, state=state, impl="reference"), state


RIGHT = Implementation("right", sequence, step)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"DIM": 8, "CHECKED_TOKENS": 40, "TAIL": 8, "COLD_BYTES": 2048}.items():
        monkeypatch.setattr(bench_kda, name, value)
    monkeypatch.setattr(bench_kda, "RECORDED", {(64, 1): {"another": (1.0, 4.0)}})


def arguments(*options):
    parser = ArgumentParser()
    bench_kda.add_arguments(parser)
    return parser.parse_args(["--lengths", "64", "--heads", "1", "--batches", "2", *options])


def measured(tmp_path, *compared):
    path = tmp_path / "lines.jsonl"
    status = bench_kda.bench(arguments("--output", str(path)), Machine(), compared)
    return status, [json.loads(line) for line in path.read_text().splitlines()]


def test_table_and_lines_hold_every_measurement(tmp_path, capsys):
    fla = replace(RIGHT, name="FLA", is_fla=True)
    status, lines = measured(tmp_path, fla, RIGHT)
    assert status == 0
    directions = ["forward", "forward", "forward", "forward+backward", "forward+backward"]
    assert [line["direction"] for line in lines] == 2 * directions + ["forward"] + 2 * ["step, CUDA graph"] + 2 * [
        "step, eager"
    ]
    ours = next(line for line in lines if line["implementation"] == "right")
    assert ours["operator"] == "kda" and ours["case"] == {"B": 1, "T": 64, "H": 1} and ours["gate"] == "fast"
    assert ours["ms"] == 2.0 and ours["ratio_to_fla"] == 1.0 and ours["extra_bytes"] == 3_000_000
    assert ours["floor_fraction"] == pytest.approx(1e3 * 64 * 82 / 1e12 / 2.0)
    assert set(ours["errors"]) == {"o", "state", "tail"} and max(ours["errors"].values()) < 5e-3
    assert ours["device"] == Machine.name and ours["torch"] and "triton" in ours
    table = capsys.readouterr().out
    assert " ".join(table.splitlines()[0].split()).startswith("case gate direction implementation ms vs FLA of floor")
    assert "B 1 T 64 H 1" in table and "1.00x" in table and "1.00 TB/s" in table


def test_recorded_figures_say_so(tmp_path, capsys):
    _, lines = measured(tmp_path, RIGHT)
    recorded = [line for line in lines if line["recorded"]]
    assert [(line["implementation"], line["gate"], line["ms"]) for line in recorded] == [
        ("another", "fast", 1.0),
        ("another", "slow", 4.0),
    ]
    assert "another (recorded)" in capsys.readouterr().out


def louder(x, state):
    o, final = sequence(x, state)
    return 1.1 * o, final


def lost(x, state):
    """Wrong on long sequences alone, as an offset of 32 bits is."""
    o, final = sequence(x, state)
    return (o * (torch.arange(o.shape[1]) < 50)[:, None, None], final)


def nan_gradients(x, state):
    o, final = sequence(x, state)
    if o.requires_grad and o.shape[1] == 64:
        o.register_hook(lambda gradient: gradient * float("nan"))
    return o, final


WRONG = {
    "outputs": (louder, "o 1.0e-01", 4),
    "long": (lost, "tail 1.0e+00", 4),
    "gradients": (nan_gradients, "not finite nan", 2),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_sequence_gets_no_speed(kind, tmp_path, capsys):
    function, said, rows = WRONG[kind]
    status, lines = measured(tmp_path, replace(RIGHT, sequence=function, step=None))
    assert status == 1
    refused = [line for line in lines if line["wrong"]]
    assert len(refused) == rows and all(line["ms"] is None for line in refused)
    assert f"wrong: {said}" in capsys.readouterr().out


def test_a_wrong_step_gets_no_speed(tmp_path):
    def stale(x, state):
        return step(x, state.clone())[0], state

    status, lines = measured(tmp_path, replace(RIGHT, step=stale))
    assert status == 1
    assert [line["direction"] for line in lines if line["wrong"]] == ["step, CUDA graph", "step, eager"]


def test_what_does_not_fit_is_skipped(tmp_path, capsys):
    def large(x, state):
        if x["q"].shape[1] == 64:
            raise torch.OutOfMemoryError
        return sequence(x, state)

    status, lines = measured(tmp_path, replace(RIGHT, sequence=large, step=None))
    assert status == 0 and "out of memory" in capsys.readouterr().out
    assert [line["skipped"] for line in lines if line["implementation"] == "right"] == 4 * ["out of memory"]


def test_the_ratio_is_to_the_fastest_of_fla():
    rows = [
        bench.Measurement("kda", {}, "fast", "forward", name, ms=ms)
        for name, ms in (("a", 4.0), ("b", 3.0), ("c", 2.0))
    ]
    compared = [replace(RIGHT, name=name, is_fla=name != "c") for name in "abc"]
    found = []

    class Collect:
        add = staticmethod(found.append)

    for count in (1, 2, 3):
        bench_kda.finish(rows[:count], compared, 1.0, Collect)
    assert [row.ratio_to_fla for row in found] == [1.0, 1.0, 1.5]
    assert [row.floor_fraction for row in found] == [0.25, 1 / 3, 0.5]


def test_fla_is_called_with_everything_inside_and_its_parameters_flat(monkeypatch):
    def stand_in(q, k, v, g, beta, A_log, dt_bias, initial_state, output_final_state, lower_bound, **flags):
        assert all(flags.pop(f"use_{name}_in_kernel") for name in ("qk_l2norm", "gate", "beta_sigmoid"))
        assert dt_bias.shape == (8,) and output_final_state
        seen.append(flags)
        x = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias.view(1, 8)}
        return kda(**x, lower_bound=lower_bound, initial_state=initial_state, impl="reference")

    seen = []
    library = SimpleNamespace(chunk_kda=stand_in, fused_recurrent_kda=stand_in)
    monkeypatch.setitem(sys.modules, "fla.ops.kda", library)
    kept, fla, ours = bench_kda.implementations()
    assert kept.directions == ("forward+backward",) and kept.is_fla and fla.is_fla and not ours.is_fla
    x = bench_kda.make_inputs(1, 40, 1, "slow", torch.device("cpu"))
    for one in (kept, fla):
        assert bench.wrong(bench_kda.check_short(one, x), bench_kda.LIMITS) is None
    token, state = bench_kda.make_inputs(2, 1, 1, "slow", torch.device("cpu")), torch.randn(2, 1, 8, 8)
    assert bench.wrong(bench_kda.check_step(fla, token, state), bench_kda.LIMITS) is None
    assert seen == [{"safe_gate": True, "disable_recompute": True}, {"safe_gate": True}, {}]


def test_without_fla_ours_is_alone(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fla.ops.kda", None)
    [ours] = bench_kda.implementations()
    assert ours.name == "ours" and "FLA: cannot be imported" in capsys.readouterr().out


def test_the_floor_is_that_of_the_notes(monkeypatch):
    monkeypatch.setattr(bench_kda, "DIM", 128)
    assert bench_kda.floor_ms(1, 1, "forward", 1e3) == 1282
    assert bench_kda.floor_ms(1, 1, "forward+backward", 1e3) == 1282 + 2308


def test_quick_takes_the_first_of_everything(monkeypatch):
    seen = []
    monkeypatch.setattr(bench_kda, "Cuda", Machine)
    monkeypatch.setattr(bench_kda, "bench", lambda args, machine, compared: seen.append(args) or 0)
    args = arguments("--lengths", "64", "128", "--heads", "3", "4", "--batches", "5", "6", "--quick")
    assert bench_kda.run(args) == 0
    assert (seen[0].lengths, seen[0].heads, seen[0].batches) == ([64], [3], [5])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--lengths", "8"], "lengths: expected numbers of at least 9, got [8]"),
        (["--heads", "0"], "heads: expected"),
        (["--batches", "4", "-1"], "batches: expected"),
    ],
)
def test_bad_options_are_named(options, named, capsys):
    assert main(["bench", "kda", *options]) == 2
    assert f"moe-lc: error: {named}" in capsys.readouterr().err


def test_an_output_without_a_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="^output: expected a file in a folder that exists"):
        bench.Report("a device", tmp_path / "none" / "lines.jsonl", 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["bench", "kda"]) == 2
    assert "moe-lc: error: device: expected a CUDA device" in capsys.readouterr().err


def test_help_lists_the_command_and_its_operators(capsys):
    for argv, said in ((["--help"], "bench"), (["bench", "--help"], "kda"), (["bench", "kda", "--help"], "--lengths")):
        with pytest.raises(SystemExit) as left:
            main(argv)
        assert left.value.code == 0 and said in capsys.readouterr().out


def test_an_unknown_operator_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "attention"])
    assert "attention" in capsys.readouterr().err
