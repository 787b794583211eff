"""`moe-lc bench` of experts, router, attn-res and mla: every case can be built, what is wrong gets no speed."""

import json
import sys
from argparse import ArgumentParser
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from modeling_moe_lc.training import (
    bench,
    bench_attn_res,
    bench_experts,
    bench_mla,
    bench_operator,
    bench_router,
)
from modeling_moe_lc.training.bench_operator import BACKWARD, EAGER, FORWARD, GRAPH, Implementation
from modeling_moe_lc.training.cli import main


CPU = torch.device("cpu")
COMMAND = "moe-lc bench and so on"
MODULES = {"experts": bench_experts, "router": bench_router, "attn-res": bench_attn_res, "mla": bench_mla}
TOY = {
    "experts": ["4,32,16,2,40", "4,32,16,2,1", "600,8,4,2,40"],
    "router": ["12,3,40"],
    "attn-res": ["40,16,2", "40,16,1"],
    "mla": ["40,2"],
}
ROWS = {"experts": 2 * (2 + 2 + 1), "router": 2, "attn-res": 2 * 2, "mla": 2}


class Machine:
    """In place of a CUDA device: every call is made, every time is 2 ms."""

    name, device, bandwidth, matmul_rate = "an H200 that is none", CPU, 1e9, 1e12

    def median_ms(self, calls):
        for call in calls:
            call()
        return 2.0

    def extra_bytes(self, call):
        call()
        return 3_000_000

    def graph(self, calls):
        return lambda: [call() for call in calls]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"LATENT": 16, "SHARED": 8, "CHECKED_TOKENS": 24}.items():
        monkeypatch.setattr(bench_mla, name, value)
    monkeypatch.setattr(bench_experts, "CHECKED_TOKENS", 24)
    monkeypatch.setattr(bench_router, "BINS", 7)


def right(name, **changes):
    """What ours is, by the reference: the module's own call, but for the choice of the implementation."""
    return Implementation("ours", partial(MODULES[name].call, "reference"), **changes)


def arguments(name, *options):
    parser = ArgumentParser()
    parser.set_defaults(command=COMMAND)
    MODULES[name].add_arguments(parser)
    return parser.parse_args(["--sizes", *TOY[name], *options])


def measured(name, tmp_path, *compared, options=(), problem=None):
    path = tmp_path / "lines.jsonl"
    args = arguments(name, "--output", str(path), *options)
    problem = problem or MODULES[name].PROBLEM
    bench_operator.check_arguments(problem, args)
    status = bench_operator.bench(args, Machine(), problem, compared)
    return status, [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", MODULES)
def test_every_case_can_be_built_and_is_right(name, tmp_path, capsys):
    status, lines = measured(name, tmp_path, replace(right(name), name="another", is_rival=True), right(name))
    assert status == 0 and len(lines) == 2 * ROWS[name]
    assert all(line["ms"] == 2.0 / (3 if line["direction"] == GRAPH else 1) for line in lines)
    assert all(line["ratio_to_rival"] == 1.0 and line["device"] == Machine.name for line in lines)
    assert {line["kind"] for line in lines} == set(MODULES[name].PROBLEM.kinds)
    assert all(max(line["errors"].values()) < 1.5e-2 for line in lines)
    printed = capsys.readouterr().out
    assert "vs rival" in printed and "1.00x" in printed and f"{COMMAND} on {Machine.name}" in printed


@pytest.mark.parametrize("name", MODULES)
def test_every_default_size_has_directions_and_limits(name):
    problem = MODULES[name].PROBLEM
    assert problem.sizes and all(problem.directions(problem.case(size)) for size in problem.sizes)
    known = {direction for directions in bench_operator.PARTS.values() for direction in directions}
    for kind, size, direction in problem.recorded:
        assert kind in problem.kinds and size in problem.sizes
        assert direction in known & set(problem.directions(problem.case(size)))


@pytest.mark.parametrize("name", MODULES)
def test_a_wrong_result_gets_no_speed(name, tmp_path, capsys):
    def louder(x):
        return {key: 1.1 * t if t.is_floating_point() else t for key, t in right(name).call(x).items()}

    status, lines = measured(name, tmp_path, Implementation("ours", louder))
    assert status == 1 and all(line["wrong"] and line["ms"] is None for line in lines)
    assert "wrong: " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["experts", "attn-res"])
def test_a_wrong_gradient_gets_no_speed(name, tmp_path):
    def stray(x):
        found = right(name).call(x)
        if found["o"].requires_grad:
            found["o"].register_hook(lambda gradient: 1.1 * gradient)
        return found

    status, lines = measured(name, tmp_path, Implementation("ours", stray))
    assert status == 1
    assert all((line["wrong"] is None) == (line["direction"] != BACKWARD) for line in lines)


@pytest.mark.parametrize("name", MODULES)
def test_what_is_wrong_at_full_size_alone_gets_no_speed(name, tmp_path):
    problem = MODULES[name].PROBLEM

    def lost(x):
        found = right(name).call(x)
        first = next(iter(found))
        long = len(x["latent"][0]) == 40 if name == "mla" else len(found[first]) == 40
        return found | ({first: 0 * found[first]} if long else {})

    fewer = replace(problem, small=lambda case: case | {"S" if name == "mla" else "T": 24})
    options = ["--sizes", TOY[name][0]]
    status, lines = measured(name, tmp_path, Implementation("ours", lost), options=options, problem=fewer)
    assert status == 1 and all("at size" in line["wrong"] for line in lines)


def test_a_wrong_gradient_of_one_expert_at_full_size_gets_no_speed(tmp_path):
    class Lost(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weights):
            return weights.view_as(weights)

        @staticmethod
        def backward(ctx, gradient):
            return torch.cat((gradient[:-1], 0.9 * gradient[-1:]))

    def stray(x):
        long = len(x["x"]) == 40
        return right("experts").call(x | {"down_proj": Lost.apply(x["down_proj"])} if long else x)

    options = ["--only", "backward", "--sizes", "4,32,16,2,40"]
    status, lines = measured("experts", tmp_path, Implementation("ours", stray), options=options)
    assert status == 1 and all(line["wrong"].startswith("d down_proj at size 1") for line in lines)


def test_what_is_not_finite_gets_no_speed(tmp_path):
    def undefined(x):
        o = right("experts").call(x)["o"]
        o.data[1] = float("nan")  # a row that is not among those that are compared at full size
        return {"o": o} if len(o) == 40 else right("experts").call(x)

    options = ["--only", "forward", "--sizes", "4,32,16,2,40"]
    status, lines = measured("experts", tmp_path, Implementation("ours", undefined), options=options)
    assert status == 1 and {line["wrong"] for line in lines} == {"not finite nan"}


@pytest.mark.parametrize(
    ("part", "directions"), [("forward", {FORWARD}), ("backward", {BACKWARD}), ("decode", {GRAPH, EAGER})]
)
def test_only_measures_the_part(part, directions, tmp_path):
    _, lines = measured("experts", tmp_path, right("experts"), options=["--only", part])
    assert {line["direction"] for line in lines} == directions


def test_quick_takes_the_first_size_and_kind(tmp_path):
    _, lines = measured("router", tmp_path, right("router"), options=["--quick"])
    assert [(line["kind"], line["case"]) for line in lines] == [("plain", {"E": 12, "k": 3, "T": 40})]


def test_recorded_figures_say_so(tmp_path, capsys):
    recorded = {("-", (40, 16, 2), FORWARD): {"FLA 0.6.0": (1.0, 2e9)}}
    problem = replace(bench_attn_res.PROBLEM, recorded=recorded)
    _, lines = measured("attn-res", tmp_path, right("attn-res"), problem=problem)
    [line] = [line for line in lines if line["recorded"]]
    assert line["ms"] == 1.0 and line["extra_bytes"] == 2e9 and "FLA 0.6.0 (recorded)" in capsys.readouterr().out


def test_extra_memory_is_beyond_the_gradients(tmp_path):
    options = ["--sizes", "4,32,16,2,40", "--only", "forward", "backward", "--kinds", "balanced"]
    _, (forward, both) = measured("experts", tmp_path, right("experts"), options=options)
    gradients = 2 * (40 * 32 + 4 * 3 * 16 * 32) + 4 * 40 * 2
    assert forward["extra_bytes"] == 3_000_000 and both["extra_bytes"] == 3_000_000 - gradients


def test_floors_are_those_of_the_docstrings():
    case = {"E": 4, "D": 32, "I": 16, "k": 2, "T": 40}
    x = bench_experts.make_inputs(case, "balanced", CPU, 0)
    weights, assignments = 6 * 16 * 32, 80
    forward = 4 * weights + 40 * 4 * 32 + 12 * assignments
    assert bench_experts.cost(case, x, FORWARD) == (forward, weights * assignments)
    assert bench_experts.cost(case, x, BACKWARD) == (
        2 * forward + 4 * weights + 40 * 2 * 32 + 4 * assignments,
        3 * weights * assignments,
    )
    one = bench_experts.make_inputs(case | {"T": 1}, "balanced", CPU, 0)
    assert bench_experts.cost(case | {"T": 1}, one, GRAPH)[0] == 2 * weights + 4 * 32 + 24
    case = {"T": 8192, "D": 2304, "N": 4}
    assert bench_attn_res.cost(case, {}, FORWARD)[0] == 2 * 8192 * 2304 * 6
    assert bench_attn_res.cost(case, {}, BACKWARD)[0] == 2 * 8192 * 2304 * 17
    assert bench_mla.cost({"S": 100, "H": 3}, {}, GRAPH) == (2 * 100 * 24, 2 * 100 * 3 * 40)
    assert bench_router.cost({"E": 896, "k": 16, "T": 2}, {}, FORWARD) == (2 * (3584 + 192 + 4), 0)


def test_skewed_routing_is_skewed_and_without_repetition():
    case = {"E": 16, "D": 2, "I": 2, "k": 4, "T": 400}
    loads = {}
    for kind in ("balanced", "skewed"):
        indices = bench_experts.make_inputs(case, kind, CPU, 0)["indices"]
        assert all(len(row.unique()) == 4 for row in indices)
        loads[kind] = indices.flatten().bincount(minlength=16)
    assert loads["balanced"].max() < 130 and loads["skewed"].max() > 200 and loads["skewed"].min() < 60


def test_transformers_is_called_as_it_wants_it():
    *theirs, ours = bench_experts.implementations()
    assert [one.name.rpartition(", ")[2] for one in theirs] == ["eager", "compiled"]
    assert all(one.is_rival for one in theirs) and ours.name == "ours" and not ours.is_rival
    case = {"E": 4, "D": 32, "I": 16, "k": 2, "T": 40}
    short = bench_operator.check_short(bench_experts.PROBLEM, theirs[:1], case, "skewed", CPU, True)
    assert bench.wrong(short[theirs[0].name](), bench_experts.LIMITS) is None


def test_compiled_starts_anew_after_a_few_shapes(monkeypatch):
    seen = []
    monkeypatch.setattr(bench_operator, "COMPILED_SHAPES", 2)
    monkeypatch.setattr(torch, "compile", lambda function, **options: seen.append(options) or function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: seen.append("reset"))
    double = bench_operator.compiled(lambda x: {"o": 2 * x["x"]})
    for size in (3, 4, 3, 5, 5):
        assert double({"x": torch.ones(size)})["o"].sum() == 2 * size
    options = {"dynamic": False, "fullgraph": True}
    assert seen == [options, options, "reset", options]


def test_what_fails_in_a_rival_costs_nothing_else(tmp_path):
    def broken(x):
        raise RuntimeError("no such instruction\nand more")

    status, lines = measured("experts", tmp_path, Implementation("another", broken, is_rival=True), right("experts"))
    failed = [line for line in lines if line["implementation"] == "another"]
    assert status == 0 and {line["skipped"] for line in failed} == {"failed: RuntimeError: no such instruction"}
    assert len(failed) == ROWS["experts"] and len(lines) == 2 * len(failed)


def test_fla_is_called_with_the_norm_inside(monkeypatch):
    def stand_in(query, residuals, rms_weight, output_rms_weight, rms_eps):
        *blocks, running = residuals
        weights = {"query": query, "norm_weight": rms_weight, "out_norm_weight": output_rms_weight}
        x = {f"block {j}": t for j, t in enumerate(blocks)} | {"partial": running} | weights
        assert rms_eps == bench_attn_res.EPS
        return bench_attn_res.call("reference", x)["o"]

    monkeypatch.setitem(sys.modules, "fla.ops.attnres", SimpleNamespace(fused_attnres=stand_in))
    fla, ours = bench_attn_res.implementations()
    assert fla.is_rival and not ours.is_rival
    case = {"T": 40, "D": 16, "N": 2}
    errors = bench_operator.check_short(bench_attn_res.PROBLEM, [fla], case, "-", CPU, True)[fla.name]()
    assert bench.wrong(errors, bench_attn_res.PROBLEM.limits) is None


def test_without_fla_ours_is_alone(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fla.ops.attnres", None)
    assert [one.name for one in bench_attn_res.implementations()] == ["ours"]
    assert "FLA: cannot be imported" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "function"),
    [("experts", "expert_mlp"), ("router", "route"), ("attn-res", "attn_res_norm"), ("mla", "mla_decode")],
)
def test_ours_has_no_fallback(name, function, monkeypatch):
    real = getattr(MODULES[name], function)
    seen = []
    monkeypatch.setattr(
        MODULES[name],
        function,
        lambda *args, impl, **options: seen.append(impl) or real(*args, impl="reference", **options),
    )
    problem = MODULES[name].PROBLEM
    case = problem.case(list(map(int, TOY[name][0].split(","))))
    MODULES[name].implementations()[-1].call(problem.make_inputs(case, problem.kinds[-1], CPU, 0))
    assert seen == ["triton"]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["experts", "--sizes", "4,32,16,2"], "sizes: expected E,D,I,k,T as whole numbers, got 4,32,16,2"),
        (["experts", "--sizes", "4,32,16,5,8"], "sizes: expected k <= E, got 4,32,16,5,8"),
        (["experts", "--only", "steps"], "only: expected some of forward, backward, decode, got steps"),
        (["router", "--sizes", "8,8,4"], "sizes: expected k < E, got 8,8,4"),
        (["router", "--kinds", "zipf"], "kinds: expected some of plain, histogram, got zipf"),
        (["router", "--only", "backward"], "only: expected some of forward, got backward"),
        (["attn-res", "--sizes", "8,8,17"], "sizes: expected N from 1 to 16, got 8,8,17"),
        (["mla", "--sizes", "0,32"], "sizes: expected S >= 1, got 0,32"),
        (["mla", "--sizes", "many,32"], "sizes: expected S,H as whole numbers, got many,32"),
    ],
)
def test_bad_options_are_named(argv, named, capsys):
    assert main(["bench", *argv]) == 2
    assert f"moe-lc: error: {named}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", MODULES)
def test_without_a_gpu_it_says_so(name, capsys):
    assert main(["bench", name]) == 2
    assert "moe-lc: error: device: expected a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("name", MODULES)
def test_help_lists_the_options(name, capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench", name, "--help"])
    assert left.value.code == 0 and "--sizes" in capsys.readouterr().out
