"""`moe-lc bench`: nothing wrong gets a speed, tables and JSON lines say what was measured, options are checked."""

import json
import sys
from argparse import ArgumentParser
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from modeling_moe_lc.kernels.gated_norm import gated_rms_norm
from modeling_moe_lc.kernels.kda import kda, kda_step
from modeling_moe_lc.kernels.short_conv import short_conv
from modeling_moe_lc.training import bench, bench_kda, bench_kda_layer
from modeling_moe_lc.training.bench_kda_implementations import Implementation
from modeling_moe_lc.training.cli import main


class Machine:
    """In place of a CUDA device: every call is made, every time is 2 ms."""

    name, device, bandwidth = "an H200 that is none", torch.device("cpu"), 1e12
    matmul_rate = 1e12

    def median_ms(self, calls):
        for call in calls:
            call()
        return 2.0

    def extra_bytes(self, call):
        call()
        return 3_000_000

    def graph(self, calls):
        return lambda: [call() for call in calls]


def sequence(x, state):
    return kda(**x, initial_state=state, impl="reference")


def softplus(x, state):
    return kda(**x, initial_state=state, lower_bound=None, impl="reference")


def step(x, state):
    one = {name: t[:, 0] if t.ndim > 2 else t for name, t in x.items()}
    return kda_step(**one, state=state, impl="reference"), state


RIGHT = Implementation("ours", sequence, step)
FLA = replace(RIGHT, name="FLA", is_fla=True)
KDA = ("forward", "backward", "decode")
COMMAND = "moe-lc bench kda and so on"


def layer(one, parts=bench_kda_layer.REFERENCE):
    return replace(one, sequence=parts.around(one.sequence), step=None)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"DIM": 8, "CHECKED_TOKENS": 40, "TAIL": 8, "COLD_BYTES": 2048}.items():
        monkeypatch.setattr(bench_kda, name, value)
    monkeypatch.setattr(bench_kda, "RECORDED", {(64, 1): {"another": (1.0, 4.0)}})


def arguments(*options):
    parser = ArgumentParser()
    parser.set_defaults(command=COMMAND)
    bench_kda.add_arguments(parser)
    return parser.parse_args(["--lengths", "64", "--heads", "1", "--batches", "2", *options])


def measured(tmp_path, *compared, layers=(), unbounded=(), only=KDA):
    path = tmp_path / "lines.jsonl"
    status = bench_kda.bench(arguments("--output", str(path), "--only", *only), Machine(), compared, layers, unbounded)
    return status, [json.loads(line) for line in path.read_text().splitlines()]


def test_table_and_lines_hold_every_measurement(tmp_path, capsys):
    status, lines = measured(tmp_path, FLA, RIGHT)
    assert status == 0
    directions = ["forward", "forward", "forward", "forward+backward", "forward+backward"]
    assert [line["direction"] for line in lines] == 2 * directions + ["forward"] + 2 * ["step, CUDA graph"] + 2 * [
        "step, eager"
    ]
    ours = next(line for line in lines if line["implementation"] == "ours")
    assert ours["operator"] == "kda" and ours["case"] == {"B": 1, "T": 64, "H": 1} and ours["kind"] == "fast"
    assert ours["ms"] == 2.0 and ours["ratio_to_rival"] == 1.0 and ours["extra_bytes"] == 3_000_000
    assert ours["floor_fraction"] == pytest.approx(1e3 * 64 * 82 / 1e12 / 2.0)
    assert set(ours["errors"]) == {"o", "state", "tail"} and max(ours["errors"].values()) < 5e-3
    assert ours["device"] == Machine.name and ours["torch"] and "triton" in ours
    assert all(line["command"] == COMMAND for line in lines)
    table = capsys.readouterr().out
    assert " ".join(table.splitlines()[0].split()).startswith("operator case gate direction implementation ms vs FLA")
    assert "B 1 T 64 H 1" in table and "1.00x" in table and "1.00 TB/s" in table


DIRECTIONS = {
    "forward": {("kda", "fast", "forward"), ("kda", "slow", "forward"), ("kda", "-", "forward")},
    "backward": {("kda", "fast", "forward+backward"), ("kda", "slow", "forward+backward")},
    "decode": {("kda", "slow", "step, CUDA graph"), ("kda", "slow", "step, eager")},
    "layer": {("kda layer", "slow", "forward"), ("kda layer", "slow", "forward+backward")},
}


@pytest.mark.parametrize("part", DIRECTIONS)
def test_only_measures_the_part(part, tmp_path):
    status, lines = measured(tmp_path, FLA, RIGHT, layers=[layer(FLA), layer(RIGHT)], only=[part])
    assert status == 0
    assert {(line["operator"], line["kind"], line["direction"]) for line in lines} == DIRECTIONS[part]


def test_only_forward_runs_no_backward(tmp_path):
    def forward_only(x, state):
        assert not torch.is_grad_enabled()
        return sequence(x, state)

    assert measured(tmp_path, replace(RIGHT, sequence=forward_only), only=["forward"])[0] == 0


def test_the_layer_is_checked_in_every_input(tmp_path):
    status, lines = measured(tmp_path, layers=[layer(FLA), layer(RIGHT)], only=["layer"])
    assert status == 0 and all(line["ms"] == 2.0 for line in lines)
    names = {"o", "state", "q", "k", "v", "g", "beta", "A_log", "dt_bias", "output_gate", "norm_weight"}
    assert set(lines[-1]["errors"]) == names | {"q_taps", "k_taps", "v_taps"}
    assert lines[-1]["floor_fraction"] == pytest.approx(1e3 * 64 * (82 + 148 + 16 * 23) / 1e12 / 2.0)


class Stray(torch.autograd.Function):
    """The identity, with a gradient too large by a tenth."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return 1.1 * gradient


RIGHT_PARTS = bench_kda_layer.REFERENCE


def reversed_taps(xs, taps):
    return RIGHT_PARTS.convolve(xs, [tap.flip(-1) for tap in taps])


def stray_taps(xs, taps):
    return RIGHT_PARTS.convolve(xs, list(map(Stray.apply, taps)))


def inverted_gate(o, gate, weight):
    return RIGHT_PARTS.normalize(o, -gate, weight)


def stray_gate(o, gate, weight):
    return RIGHT_PARTS.normalize(o, Stray.apply(gate), weight)


WRONG_PARTS = {
    "reversed taps": (replace(RIGHT_PARTS, convolve=reversed_taps), "wrong: o "),
    "inverted gate": (replace(RIGHT_PARTS, normalize=inverted_gate), "wrong: o "),
    "gradients of taps": (replace(RIGHT_PARTS, convolve=stray_taps), "q_taps 1.0e-01"),
    "gradient of the gate": (replace(RIGHT_PARTS, normalize=stray_gate), "output_gate 1.0e-01"),
}


@pytest.mark.parametrize("kind", WRONG_PARTS)
def test_a_layer_with_a_wrong_part_gets_no_speed(kind, tmp_path, capsys):
    parts, said = WRONG_PARTS[kind]
    status, lines = measured(tmp_path, layers=[layer(RIGHT, parts)], only=["layer"])
    assert status == 1 and lines[-1]["wrong"] and lines[-1]["ms"] is None
    assert said in capsys.readouterr().out


def summary(printed):
    lines = printed.splitlines()
    return lines[lines.index(f"{COMMAND} on {Machine.name}") + 1 :]


def test_the_last_lines_are_a_summary_of_ours(tmp_path, capsys):
    measured(tmp_path, FLA, RIGHT, layers=[layer(FLA), layer(RIGHT)], only=bench_kda.PARTS)
    title, *rows = (" ".join(line.split()) for line in summary(capsys.readouterr().out))
    assert title == ("operator case gate direction ours ms FLA ms vs FLA of floor extra GB o state worst gradient")
    assert len(rows) == 2 * 2 + 2 + 2
    assert rows[0].startswith("kda B 1 T 64 H 1 fast forward 2 2 1.00x 0% 0.003 ") and rows[0].endswith(" -")
    assert rows[1].startswith("kda B 1 T 64 H 1 fast forward+backward 2 2 1.00x 0% 0.003 ")
    assert rows[4].startswith("kda layer B 1 T 64 H 1 slow forward 2 ")
    assert max(map(float, rows[1].split()[-3:])) < 2e-2


def test_the_summary_has_no_speed_of_what_is_wrong(tmp_path, capsys):
    measured(tmp_path, FLA, replace(RIGHT, sequence=louder, step=None), only=["forward"])
    assert all("wrong: o 1.0e-01" in line for line in summary(capsys.readouterr().out)[1:])


def test_an_interruption_leaves_a_summary(tmp_path, capsys):
    def interrupted(x, state):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, RIGHT, layers=[layer(replace(RIGHT, sequence=interrupted))], only=["forward", "layer"])
    assert [line.split()[0] for line in summary(capsys.readouterr().out)] == ["operator", "kda", "kda"]


def broken(x, state):
    raise RuntimeError("no such instruction\nand more")


def test_what_fails_in_fla_costs_nothing_else(tmp_path):
    status, lines = measured(tmp_path, replace(FLA, sequence=broken), RIGHT, only=["forward"])
    failed = [line for line in lines if line["implementation"] == "FLA"]
    assert status == 0 and {line["skipped"] for line in failed} == {"failed: RuntimeError: no such instruction"}
    assert all(line["ms"] == 2.0 for line in lines if line["implementation"] == "ours")


def test_what_fails_in_ours_is_raised(tmp_path):
    with pytest.raises(RuntimeError, match="no such instruction"):
        measured(tmp_path, replace(RIGHT, sequence=broken), only=["forward"])


def test_recorded_figures_say_so(tmp_path, capsys):
    _, lines = measured(tmp_path, RIGHT)
    recorded = [line for line in lines if line["recorded"]]
    assert [(line["implementation"], line["kind"], line["ms"]) for line in recorded] == [
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
    assert [line["skipped"] for line in lines if line["implementation"] == "ours"] == 4 * ["out of memory"]


def test_the_ratio_is_to_the_fastest_of_fla():
    rows = [
        bench.Measurement("kda", {}, "fast", "forward", name, ms=ms, is_rival=name != "c")
        for name, ms in (("a", 4.0), ("b", 3.0), ("c", 2.0))
    ]
    found = []

    class Collect:
        add = staticmethod(found.append)

    for count in (1, 2, 3):
        bench.finish(rows[:count], 1.0, Collect)
    assert [row.ratio_to_rival for row in found] == [1.0, 1.0, 1.5]
    assert [row.floor_fraction for row in found] == [0.25, 1 / 3, 0.5]


def short_errors(problem, one):
    [errors] = bench_kda.check_short(problem, [one], 1, "slow", torch.device("cpu"), True).values()
    return errors()


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
    kept, fla, ours_kept, ours = bench_kda.implementations()
    assert kept.directions == ("forward+backward",) and kept.is_fla and fla.is_fla and not ours.is_fla
    assert ours_kept.directions == kept.directions and not ours_kept.is_fla
    for one in (kept, fla):
        assert bench.wrong(short_errors(bench_kda.KDA, one), bench_kda.LIMITS) is None
    token, state = bench_kda.make_inputs(2, 1, 1, "slow", torch.device("cpu")), torch.randn(2, 1, 8, 8)
    assert bench.wrong(bench_kda.check_step(fla, token, state), bench_kda.LIMITS) is None
    assert seen == [{"safe_gate": True, "disable_recompute": True}, {"safe_gate": True}, {}]


def test_fla_without_a_bound(monkeypatch):
    def stand_in(safe_gate, **inputs):
        flags = {name: inputs.pop(name) for name in list(inputs) if name.startswith(("use_", "output_", "disable_"))}
        assert inputs["lower_bound"] is None and not safe_gate and flags
        return kda(**inputs | {"dt_bias": inputs["dt_bias"].view(1, 8)}, impl="reference")

    library = SimpleNamespace(chunk_kda=stand_in, fused_recurrent_kda=stand_in)
    monkeypatch.setitem(sys.modules, "fla.ops.kda", library)
    compared = bench_kda.implementations(lower_bound=None)
    assert not any(one.step for one in compared)
    for one in compared[:2]:
        assert bench.wrong(short_errors(bench_kda.SOFTPLUS, one), bench_kda.LIMITS) is None
        assert bench.wrong(short_errors(bench_kda.KDA, one), bench_kda.LIMITS)


def test_softplus_is_a_part_of_its_own(tmp_path):
    status, lines = measured(tmp_path, unbounded=[Implementation("ours", softplus)], only=["softplus"])
    assert status == 0
    cases = [(line["operator"], line["kind"], line["direction"]) for line in lines]
    directions = ("forward", "forward+backward")
    assert cases == [("kda softplus", gate, direction) for gate in ("fast", "slow") for direction in directions]


def test_fla_parts_are_called_as_it_wants_them(monkeypatch):
    def convolution(x, weight, activation):
        assert x.shape == (1, 40, 8) and weight.shape == (8, 4) and activation == "silu"
        return short_conv(x, weight[:, None], impl="reference")[0], None

    def backward(x, dy, dht, weight, activation):
        with torch.enable_grad():
            leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
            return *torch.autograd.grad(convolution(*leaves, activation)[0], leaves, dy), None, None, None

    def norm(x, g, weight, bias, activation, eps):
        assert bias is None and activation == "sigmoid"
        return gated_rms_norm(x, g, weight, eps, impl="reference")

    gluon = SimpleNamespace(causal_conv1d_fwd_gluon=convolution, causal_conv1d_bwd_gluon=backward)
    monkeypatch.setitem(sys.modules, "fla.modules.causal_conv1d", SimpleNamespace(causal_conv1d=convolution))
    monkeypatch.setitem(sys.modules, "fla.modules.norm.fused_norm_gate", SimpleNamespace(rms_norm_gated=norm))
    monkeypatch.setitem(sys.modules, "fla.modules.causal_conv1d.backends.gluon", gluon)
    kept = replace(FLA, name="FLA, all kept", directions=("forward+backward",))
    layers = bench_kda_layer.implementations([kept, FLA, RIGHT])
    assert [one.name for one in layers] == ["FLA, all kept", "FLA, all kept, Gluon", "FLA", "FLA, Gluon", "ours"]
    assert layers[1].directions == kept.directions and not any(one.step for one in layers)
    for one in layers[:4]:
        assert bench.wrong(short_errors(bench_kda.LAYER, one), bench_kda.LIMITS) is None


def test_parts_that_fla_lacks_are_left_out(monkeypatch, capsys):
    for module in ("causal_conv1d", "norm.fused_norm_gate", "causal_conv1d.backends.gluon"):
        monkeypatch.setitem(sys.modules, f"fla.modules.{module}", None)
    assert [one.name for one in bench_kda_layer.implementations([FLA, RIGHT])] == ["ours"]
    assert "FLA's convolution and norm: cannot be imported" in capsys.readouterr().out


def test_our_layer_has_one_launch_of_convolutions_and_no_fallback(monkeypatch):
    def convolutions(xs, weights, impl):
        seen.append((len(xs), impl))
        return RIGHT_PARTS.convolve(xs, weights), None

    def norm(o, gate, weight, eps, impl):
        seen.append(impl)
        return RIGHT_PARTS.normalize(o, gate, weight)

    seen = []
    monkeypatch.setattr(bench_kda_layer, "short_convs", convolutions)
    monkeypatch.setattr(bench_kda_layer, "gated_rms_norm", norm)
    [ours] = bench_kda_layer.implementations([RIGHT])
    assert bench.wrong(short_errors(bench_kda.LAYER, ours), bench_kda.LIMITS) is None
    assert seen == [(3, "triton"), "triton"]


def test_without_fla_ours_is_alone(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fla.ops.kda", None)
    assert [one.name for one in bench_kda.implementations()] == ["ours, all kept", "ours"]
    assert "FLA: cannot be imported" in capsys.readouterr().out


def test_the_floor_is_that_of_the_notes(monkeypatch):
    monkeypatch.setattr(bench_kda, "DIM", 128)
    assert bench_kda.kda_bytes("forward") == 1282
    assert bench_kda.kda_bytes("forward+backward") == 1282 + 2308
    assert bench_kda.layer_bytes("forward") == 1282 + 256 * (6 + 3)
    assert bench_kda.layer_bytes("forward+backward") == 1282 + 2308 + 256 * (6 + 3) + 256 * (9 + 5)


def test_quick_takes_the_first_of_everything(monkeypatch):
    seen = []
    monkeypatch.setattr(bench_kda, "Cuda", Machine)
    monkeypatch.setattr(bench_kda, "bench", lambda args, *rest: seen.append(args) or 0)
    args = arguments("--lengths", "64", "128", "--heads", "3", "4", "--batches", "5", "6", "--quick")
    assert bench_kda.run(args) == 0
    assert (seen[0].lengths, seen[0].heads, seen[0].batches) == ([64], [3], [5])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--lengths", "8"], "lengths: expected numbers of at least 9, got [8]"),
        (["--heads", "0"], "heads: expected"),
        (["--batches", "4", "-1"], "batches: expected"),
        (["--only", "layer", "steps"], "only: expected some of forward, backward, decode, layer, softplus, got steps"),
    ],
)
def test_bad_options_are_named(options, named, capsys):
    assert main(["bench", "kda", *options]) == 2
    assert f"moe-lc: error: {named}" in capsys.readouterr().err


def test_an_output_without_a_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="^output: expected a file in a folder that exists"):
        bench.Report("a device", COMMAND, tmp_path / "none" / "lines.jsonl", 1)


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
