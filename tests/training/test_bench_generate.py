"""`moe-lc bench generate`: the model is made in place, every phase gets a line, and none a speed where decoding is wrong."""

import contextlib
import json
from argparse import ArgumentParser

import pytest
import torch

from modeling_moe_lc import MoeLcForCausalLM, decoding
from modeling_moe_lc.packed_experts import PackedExperts
from modeling_moe_lc.training import bench_generate
from modeling_moe_lc.training.bench_generate import GRAPH, LAUNCHED, build, check_short, first_layers
from modeling_moe_lc.training.cli import main


CPU = torch.device("cpu")
PRESET = "nano-kimi-linear"  # the tiny one has experts of 16 inputs, which are no block of MXFP4


class Machine:
    """In place of a GPU. A graph is the calls themselves, after the one that a capture makes before."""

    has_graphs = True
    name, device = "an H200 that is none", CPU

    def synchronize(self):
        pass

    def start_memory(self):
        pass

    def peak_memory(self):
        return 3_000_000_000

    def graph(self, calls):
        [call] = calls
        call()
        return call


def arguments(*options):
    parser = ArgumentParser()
    parser.set_defaults(command="moe-lc bench generate")
    bench_generate.add_arguments(parser)
    small = (
        "--preset",
        PRESET,
        "--layers",
        "4",
        "--prompt",
        "70",
        "--chunk",
        "32",
        "--batches",
        "1",
        "3",
        "--new",
        "2",
    )
    args = parser.parse_args([*small, *options])
    bench_generate.check_arguments(args)
    return args


def made(experts="bfloat16", dtype=torch.bfloat16, preset=PRESET, layers=4):
    config = first_layers(preset, layers)
    config._attn_implementation = "moe_lc_reference"
    return build(config, experts, CPU, dtype)


@pytest.mark.parametrize("experts", ["bfloat16", "mxfp4"])
def test_every_phase_has_a_line(experts, tmp_path, capsys):
    output = tmp_path / "lines.jsonl"
    assert (
        bench_generate.bench(arguments("--experts", experts, "--output", str(output)), Machine(), made(experts)) == 0
    )
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    decoded = [(f"decode, {how}", batch, 70, 2 * batch) for batch in (1, 3) for how in (LAUNCHED, GRAPH)]
    assert [tuple(line[key] for key in ("what", "batch", "context", "tokens")) for line in lines] == [
        ("prefill", 1, 70, 70), *decoded,
    ]  # fmt: skip
    assert all(line["seconds"] > 0 and line["peak_bytes"] == 3_000_000_000 for line in lines)
    prefilled, one, _, three, _ = (line["cache_bytes"] for line in lines)
    per_token = 2 * (made().config.kv_lora_rank + made().config.qk_rope_head_dim)  # in the only MLA layer
    assert one == prefilled + 4 * per_token and three == 3 * one
    assert f"experts in {experts}" in capsys.readouterr().out


def test_without_graphs(capsys):
    assert bench_generate.bench(arguments("--eager"), Machine(), made()) == 0
    assert GRAPH not in capsys.readouterr().out.partition("prefill:")[0]


def test_packed_experts_are_never_plain():
    model = made("mxfp4")
    packed = [module for module in model.modules() if isinstance(module, PackedExperts)]
    assert len(packed) == 3 and not any(".experts.down_proj" in name for name, _ in model.named_parameters())
    plain = packed[0].unpack(torch.float32)
    assert 0.015 < plain.down_proj.std() < 0.025 and plain.down_proj.isfinite().all()


def test_full_precision_stays_and_nothing_is_left_unfilled():
    model = made()
    assert model.model.layers[0].self_attn.decay.A_log.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert all(tensor.isfinite().all() and tensor.abs().max() < 10 for tensor in model.state_dict().values())


@pytest.mark.parametrize(("preset", "layers"), [("tiny", None), (PRESET, None)])
@pytest.mark.parametrize("as_graph", [False, True], ids=[LAUNCHED, GRAPH])
def test_decoding_is_a_longer_prefill(preset, layers, as_graph):
    assert check_short(Machine(), made(preset=preset, layers=layers, dtype=torch.float32), 3, as_graph) < 1e-4


@pytest.mark.parametrize("lost", ["conv", "state"])
def test_what_is_wrong_gets_no_speed(lost, monkeypatch, capsys):
    write = decoding.write_linear_state

    def forgetting(cache, layer, conv, state):
        write(cache, layer, conv.new_zeros(conv.shape) if lost == "conv" else conv, state * (lost != "state"))

    monkeypatch.setattr(decoding, "write_linear_state", forgetting)
    assert bench_generate.bench(arguments(), Machine(), made()) == 1
    printed = capsys.readouterr().out
    assert "no speed is measured" in printed and "tokens/s" not in printed


def test_what_is_not_finite_gets_no_speed(monkeypatch, capsys):
    monkeypatch.setattr(bench_generate, "check_short", lambda *_: 0.0)
    model = made()
    model.model.norm.weight.data.fill_(torch.inf)
    assert bench_generate.bench(arguments(), Machine(), model) == 1
    assert "wrong: not finite" in capsys.readouterr().out


def test_a_batch_that_does_not_fit_leaves_the_others(monkeypatch, capsys):
    measure = bench_generate.Decoder.__init__

    def crowded(self, model, cache, token, batch, room):
        if batch == 3 and cache.get_seq_length() == 70:
            raise torch.OutOfMemoryError
        measure(self, model, cache, token, batch, room)

    monkeypatch.setattr(bench_generate.Decoder, "__init__", crowded)
    assert bench_generate.bench(arguments(), Machine(), made()) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("decode, ")]
    assert ["out of memory" in line for line in lines] == [False, False, True, True]


def test_the_hooks_of_the_check_are_gone_afterwards():
    model = made()
    with contextlib.suppress(RuntimeError), bench_generate.fixed_choice(model):
        raise RuntimeError
    assert isinstance(model, MoeLcForCausalLM) and not any(module._forward_hooks for module in model.modules())


def test_the_first_layers_of_a_preset():
    config = first_layers("kimi-k3", 4)
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"] and config.num_experts == 896
    # one of full attention must be there
    assert first_layers("kimi-k3", 2).layer_types == ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match="layers: expected 1 to 93 for kimi-k3, got 94"):
        first_layers("kimi-k3", 94)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chunk", "0"], "chunk: expected a number of at least 1, got 0"),
        (["--batches", "1", "0"], "batches: expected numbers of at least 1"),
        (["--output", "/nowhere/lines"], "output: expected a file in a folder that exists"),
    ],
)
def test_options_are_checked_first(capsys, options, message):
    assert main(["bench", "generate", *options]) == 2
    assert message in capsys.readouterr().err
