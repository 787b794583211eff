"""`moe-lc bench layer`: every layer can be built, what is wrong gets no speed, tables and lines hold what was timed."""

import json
from argparse import ArgumentParser

import pytest
import torch

from modeling_moe_lc.training import bench, bench_layer
from modeling_moe_lc.training.bench_layer import GRAPH, KERNELS, LIMITS, WALL, Layer
from modeling_moe_lc.training.cli import main


CPU = torch.device("cpu")
COMMAND = "moe-lc bench layer and so on"
TOKENS = 40


class Machine:
    """In place of a CUDA device: every call is made, takes 2 ms, of which kernels take 1.5, and 1.6 as a graph."""

    name, device = "an H200 that is none", CPU

    def median_ms(self, calls):
        for call in calls:
            call()
        return getattr(calls[0], "ms", 2.0)

    def extra_bytes(self, call):
        call()
        return 3_000_000

    def kernels(self, call):
        call()
        return {"gemm": 1.0, "mix": 0.4, "cast": 0.1}

    def graph(self, calls):
        def replay():
            return [call() for call in calls]

        replay.ms = 1.6
        return replay


@pytest.fixture(autouse=True)
def small(monkeypatch):
    layers = {"tiny": Layer("tiny", recorded={"KDA": (4.0, 3.0, 0.5)}), "plain": Layer("tiny", with_reference=False)}
    monkeypatch.setattr(bench_layer, "LAYERS", layers)
    monkeypatch.setattr(bench_layer, "TOKENS", TOKENS)
    monkeypatch.setattr(bench_layer, "CHECKED_TOKENS", 24)
    # Ours is Triton, which under the interpreter cannot multiply BF16.
    monkeypatch.setattr(bench_layer, "BACKENDS", {"ours": "moe_lc_reference", "reference": "moe_lc_reference"})


def arguments(*options):
    parser = ArgumentParser()
    parser.set_defaults(command=COMMAND)
    bench_layer.add_arguments(parser)
    args = parser.parse_args(["--layers", "tiny", "--tokens", str(TOKENS), *options])
    bench_layer.check_arguments(args)
    return args


def measured(tmp_path, *options):
    path = tmp_path / "lines.jsonl"
    status = bench_layer.bench(arguments("--output", str(path), *options), Machine())
    return status, [json.loads(line) for line in path.read_text().splitlines()]


def test_every_time_is_beside_the_recorded_and_the_kernels(tmp_path, capsys):
    status, lines = measured(tmp_path, "--attentions", "KDA", "--top", "2")
    assert status == 0
    found = {(line["implementation"], line["kind"]): line for line in lines}
    expected = {
        ("public parts", WALL): 4.0,
        ("public parts", KERNELS): 3.0,
        ("ours", WALL): 2.0,
        ("ours", KERNELS): 1.5,
    }
    expected |= {("ours", GRAPH): 1.6, ("reference", WALL): 2.0, ("reference", KERNELS): 1.5}
    assert {name: line["ms"] for name, line in found.items()} == pytest.approx(expected)
    ours = {kind: line for (name, kind), line in found.items() if name == "ours"}
    assert [ours[kind]["ratio_to_rival"] for kind in (WALL, KERNELS, GRAPH)] == pytest.approx([2.0, 2.0, 2.5])
    assert [ours[kind]["floor_fraction"] for kind in (WALL, KERNELS, GRAPH)] == pytest.approx([0.75, 1.0, 1.5 / 1.6])
    assert found["public parts", WALL]["floor_fraction"] == 0.75 and found["public parts", WALL]["recorded"]
    assert (
        ours[WALL]["case"] == {"D": 64, "H": 4, "E": 8, "k": 2, "T": TOKENS} and ours[WALL]["operator"] == "layer KDA"
    )
    assert ours[KERNELS]["kernels"] == {"gemm": 1.0, "mix": 0.4, "cast": 0.1}
    assert set(ours[WALL]["errors"]) == {"o", "running sum", *(f"block {i}" for i in range(4))}
    printed = capsys.readouterr().out
    assert (
        "public parts (recorded)" in printed and "vs public" in printed and f"{COMMAND} on {Machine.name}" in printed
    )
    assert "67%  gemm" in printed and "27%  mix" in printed and "%  cast" not in printed


def test_memory_is_beyond_the_gradients(tmp_path):
    _, lines = measured(tmp_path, "--attentions", "MLA")
    config = bench_layer.LAYERS["tiny"].config("moe_lc_reference")
    layer = bench_layer.build(config, "MLA", CPU, torch.bfloat16)
    parameters = sum(p.numel() * p.element_size() for p in layer.parameters())
    assert lines[0]["extra_bytes"] == 3_000_000 - parameters - 5 * 2 * TOKENS * 64


def test_recorded_figures_are_of_one_device_and_length(tmp_path, monkeypatch):
    _, lines = measured(tmp_path, "--attentions", "KDA", "--tokens", "8")
    assert not any(line["recorded"] or line["ratio_to_rival"] for line in lines)
    monkeypatch.setattr(Machine, "name", "another device")
    assert not any(line["recorded"] for line in measured(tmp_path, "--attentions", "KDA")[1])


def test_without_a_reference_ours_is_alone(tmp_path):
    _, lines = measured(tmp_path, "--layers", "plain", "--attentions", "MLA")
    assert [(line["implementation"], line["kind"]) for line in lines] == [("ours", k) for k in (WALL, KERNELS, GRAPH)]


class Stray(torch.autograd.Function):
    """Scales values, and gradients, by a little too much."""

    @staticmethod
    def forward(ctx, x, value, gradient):
        ctx.gradient = gradient
        return value * x

    @staticmethod
    def backward(ctx, gradient):
        return ctx.gradient * gradient, None, None


@pytest.mark.parametrize("attention", bench_layer.ATTENTIONS)
@pytest.mark.parametrize(("value", "gradient", "named"), [(1.1, 1.0, "o 1."), (1.0, 1.1, "block 0 ")])
def test_a_wrong_result_gets_no_speed(value, gradient, named, attention, tmp_path, monkeypatch, capsys):
    def build(config, attention, device, dtype):
        layer = real(config, attention, device, dtype)
        if dtype == torch.bfloat16:
            layer.register_forward_hook(lambda layer, x, found: (Stray.apply(found[0], value, gradient), *found[1:]))
        return layer

    real = bench_layer.build
    monkeypatch.setattr(bench_layer, "build", build)
    status, lines = measured(tmp_path, "--attentions", attention)
    ours = [line for line in lines if line["implementation"] == "ours"]
    assert status == 1 and len(ours) == 3 and all(named in line["wrong"] and line["ms"] is None for line in ours)
    assert "wrong: " in capsys.readouterr().out


def test_what_is_not_finite_at_full_size_gets_no_speed(tmp_path, monkeypatch):
    def undefined(layer, sources, cotangent):
        found = real(layer, sources, cotangent)
        found[0][0, -1] = float("nan")
        return found

    real = bench_layer.gradients
    monkeypatch.setattr(bench_layer, "gradients", undefined)
    status, lines = measured(tmp_path, "--attentions", "KDA")
    wrong = {line["wrong"] for line in lines if not line["recorded"]}
    assert status == 1 and wrong == {"not finite nan"}


def built(**changes):
    config = Layer("tiny", changes).config("moe_lc_reference")
    return bench_layer.build(config, "KDA", CPU, torch.bfloat16)


def test_near_ties_of_the_router_are_no_errors():
    layer = built(num_experts=64, num_experts_per_token=8)
    gate = layer.block_sparse_moe.gate
    with torch.no_grad():
        gate.weight.mul_(1e-3)  # so that roundings choose
    errors = bench_layer.check_short(layer, "KDA", CPU)
    assert bench.wrong(errors, LIMITS) is None


def test_another_choice_of_experts_is_wrong():
    layer = built()
    layer.block_sparse_moe.gate.register_forward_hook(
        lambda gate, x, found: (found[0], found[1], (found[2] + 1) % gate.config.num_experts)
    )
    assert "choice" in bench.wrong(bench_layer.check_short(layer, "KDA", CPU), LIMITS)


def test_out_of_memory_says_so(tmp_path, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(bench_layer, "build", full)
    status, lines = measured(tmp_path, "--attentions", "KDA")
    assert status == 0 and {line["skipped"] for line in lines if not line["recorded"]} == {"out of memory"}


def test_parameters_are_those_of_a_model_that_has_trained():
    layer = built()
    assert layer.self_attention_res.query.std() > 0.01 and layer.mlp_res.query.std() > 0.01
    assert layer.self_attn.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert layer.self_attn.decay.dt_bias.dtype == torch.float32 and layer.self_attn.decay.dt_bias.std() > 0.5
    assert layer.training and layer.block_sparse_moe.experts.down_proj.dtype == torch.bfloat16


def test_the_real_layers_are_those_of_the_docstrings(monkeypatch):
    monkeypatch.undo()
    widths = {"1b-a200m": (1024, 8, 128, 8, 512), "kimi-linear": (2304, 32, 256, 8, None)}
    widths["k3-112-experts"] = (7168, 96, 112, 16, 3584)
    assert bench_layer.BACKENDS["ours"] == "moe_lc_triton"
    for name, layer in bench_layer.LAYERS.items():
        config = layer.config("moe_lc_triton")
        size = config.hidden_size, config.num_attention_heads, config.num_experts, config.num_experts_per_token
        assert (*size, config.routed_expert_hidden_size) == widths[
            name
        ] and config._attn_implementation == "moe_lc_triton"
        assert config.hidden_act == "situ" and config.linear_attn_config["gate_lower_bound"] == -5.0
        kinds = [config.layer_types[index] for index in bench_layer.ATTENTIONS.values()]
        assert kinds == ["linear_attention", "full_attention"] and set(layer.recorded) == {"KDA", "MLA"}
        indices = bench_layer.ATTENTIONS.values()
        assert all(config.is_sparse_layer(i) and i % config.attn_res_block_size for i in indices)


def test_quick_takes_the_first_layer():
    assert arguments("--layers", "plain", "tiny", "--quick").layers == ["plain"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--layers", "huge"], "layers: expected some of tiny, plain, got huge"),
        (["--attentions", "full"], "attentions: expected some of KDA, MLA, got full"),
        (["--tokens", "0"], "tokens: expected a number of at least 1, got 0"),
        (["--top", "-1"], "top: expected a number of at least 0, got -1"),
    ],
)
def test_bad_options_are_named(options, named, capsys):
    assert main(["bench", "layer", "--layers", "tiny", *options]) == 2
    assert f"moe-lc: error: {named}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["bench", "layer", "--layers", "tiny"]) == 2
    assert "moe-lc: error: device: expected a CUDA device" in capsys.readouterr().err


def test_help_lists_the_options(capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench", "layer", "--help"])
    assert left.value.code == 0 and "--attentions" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_device_times_kernels_and_replays():
    machine = bench_layer.Device()
    x = torch.randn(1024, 1024, device="cuda")
    kernels = machine.kernels(lambda: (x @ x).relu())
    assert len(kernels) >= 2 and all(ms > 0 for ms in kernels.values())
    assert list(kernels.values()) == sorted(kernels.values(), reverse=True)
    assert machine.median_ms([machine.graph([lambda: (x @ x).relu()])]) > 0
