"""`moe-lc bench vision`: every batch is as large as it says, towers that disagree get no speed, floors count all products."""

import json
from argparse import ArgumentParser

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from modeling_moe_lc.configuration.presets import load_multimodal_preset
from modeling_moe_lc.training import bench, bench_vision
from modeling_moe_lc.training.bench_kda_implementations import BACKWARD, FORWARD
from modeling_moe_lc.training.bench_vision import MIXED, OURS, PLAIN
from modeling_moe_lc.training.cli import main
from modeling_moe_lc.training.flops import vision_flops


CPU = torch.device("cpu")
COMMAND = "moe-lc bench vision and so on"
PARAMETERS = ["--preset", "tiny", "--sides", "16", "32", "--patches", "100"]


class Machine:
    """In place of a CUDA device: every call is made, every time is 2 ms."""

    name, device, matmul_rate = "an H200 that is none", CPU, 1e12

    def median_ms(self, calls):
        for call in calls:
            call()
        return 2.0

    def extra_bytes(self, call):
        call()
        return 3_000_000


@pytest.fixture(scope="module")
def config():
    return load_multimodal_preset("tiny").vision_config


@pytest.fixture
def compared(config):
    built = bench_vision.build(config, CPU)
    return {PLAIN: bench_vision.image_by_image(built), OURS: built}


def measured(compared, tmp_path, *options):
    parser = ArgumentParser()
    parser.set_defaults(command=COMMAND)
    bench_vision.add_arguments(parser)
    args = parser.parse_args([*PARAMETERS, "--output", str(tmp_path / "lines.jsonl"), *options])
    bench_vision.check_arguments(args)
    status = bench_vision.bench(args, Machine(), compared)
    return status, [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]


def test_every_batch_gets_images_a_second_and_a_share_of_the_floor(compared, config, tmp_path, capsys):
    status, lines = measured(compared, tmp_path)
    assert status == 0 and len(lines) == 3 * 2 * 2
    cases = {line["kind"]: line["case"] for line in lines}
    assert cases == {
        "16": {"images": 6, "patches": 96},
        "32": {"images": 1, "patches": 64},
        MIXED: {"images": 2, "patches": 80},
    }
    for line in lines:
        grids = bench_vision.batches(config, [16, 32], 100)[line["kind"]]
        products = vision_flops(config, grids) * (3 if line["direction"] == BACKWARD else 1)
        assert line["images_per_second"] == 500 * len(grids) and line["ratio_to_rival"] == 1.0
        assert line["floor_fraction"] == pytest.approx(products / 1e12 / 2e-3)
    printed = capsys.readouterr().out
    assert "vs SDPA" in printed and "3,000.0 images/s" in printed and f"{COMMAND} on {Machine.name}" in printed


def test_memory_is_beyond_the_gradients(compared, tmp_path):
    _, lines = measured(compared, tmp_path, "--quick")
    gradients = sum(p.numel() * 2 for p in compared[OURS].parameters())
    assert {line["direction"]: line["extra_bytes"] for line in lines} == {
        FORWARD: 3_000_000,
        BACKWARD: 3_000_000 - gradients,
    }


@torch.no_grad()
def test_operations_are_those_that_torch_counts(compared, config):
    grids = torch.cat((bench_vision.batches(config, [16, 32], 100)[MIXED], torch.tensor([(3, 4, 2)])))
    compared[OURS].tower.set_attn_implementation("moe_lc_reference")
    with FlopCounterMode(display=False) as counter:
        compared[OURS](bench_vision.make_pixels(config, grids), grids)
    assert counter.get_total_flops() == vision_flops(config, grids)


@pytest.mark.parametrize("name", [PLAIN, OURS])
def test_a_wrong_tower_gets_no_speed(name, compared, tmp_path, capsys):
    compared[name].register_forward_hook(lambda module, inputs, o: 1.1 * o)
    status, lines = measured(compared, tmp_path, "--sides", "16")
    assert status == 1 and {line["implementation"] for line in lines if line["wrong"]} == {PLAIN, OURS}
    assert all(line["ms"] is None and line["images_per_second"] is None for line in lines)
    printed = capsys.readouterr().out
    assert "wrong: " in printed and "images/s" not in printed


def test_towers_that_disagree_on_one_large_image_get_no_speed(compared, tmp_path):
    def stray(module, inputs, o):
        return torch.cat((o[:-4], 1.1 * o[-4:])) if len(inputs[0]) == 96 else o

    compared[OURS].register_forward_hook(stray)
    status, lines = measured(compared, tmp_path, "--only", "forward")
    assert status == 1
    assert {line["kind"] for line in lines if line["wrong"]} == {"16"}
    assert all(line["wrong"].startswith("o at size 1") for line in lines if line["wrong"])


def test_a_wrong_gradient_of_one_parameter_gets_no_speed(compared, tmp_path):
    compared[OURS].tower.encoder.blocks[1].wo.weight.register_hook(lambda gradient: 1.2 * gradient)
    status, lines = measured(compared, tmp_path, "--quick")
    [wrong] = [line for line in lines if line["wrong"]]
    assert status == 1 and wrong["implementation"] == OURS and wrong["direction"] == BACKWARD
    assert wrong["wrong"].startswith("d parameters")


def test_attention_across_images_would_be_seen(compared):
    for block in compared[PLAIN].tower.encoder.blocks:
        inner = block.item_by_item
        block.item_by_item = lambda q, k, v, media, inner=inner: inner(
            q, k, v, media._replace(shapes=[(1, 1, sum(media.lengths))])
        )
    errors = bench_vision.check_short(compared, CPU, False)[PLAIN]()
    assert "o" in bench.wrong(errors, bench_vision.LIMITS)


def test_image_by_image_differs_from_ours_in_attention_alone(compared):
    ours, plain = compared[OURS].state_dict(), compared[PLAIN].state_dict()
    assert all(torch.equal(ours[name], plain[name]) for name in ours)
    assert not any(block.is_flash(torch.empty(0)) for block in compared[PLAIN].tower.encoder.blocks)
    assert compared[PLAIN].tower.config._attn_implementation == "sdpa"


def test_the_default_is_the_released_tower():
    parser = ArgumentParser()
    bench_vision.add_arguments(parser)
    args = parser.parse_args([])
    bench_vision.check_arguments(args)
    config = load_multimodal_preset(args.preset).vision_config
    assert (config.vt_num_hidden_layers, config.vt_hidden_size, config.text_hidden_size) == (27, 1024, 7168)
    images = {kind: len(grids) for kind, grids in bench_vision.batches(config, args.sides, args.patches).items()}
    assert images == {"448": 64, "896": 16, "1344": 7, "1792": 4, MIXED: 8}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--only", "decode"], "only: expected some of forward, backward, got decode"),
        (["--sides", "20"], "sides: expected multiples of 8, at most 2048, got 20"),
        (["--sides", "0"], "sides: expected multiples of 8, at most 2048, got 0"),
        (["--patches", "63"], "patches: expected at least the 64 of the largest image, got 63"),
    ],
)
def test_bad_options_are_named(options, named, capsys):
    assert main(["bench", "vision", *PARAMETERS, *options]) == 2
    assert f"moe-lc: error: {named}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["bench", "vision", *PARAMETERS]) == 2
    assert "moe-lc: error: device: expected a CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_both_towers_agree(tmp_path):
    output = tmp_path / "lines.jsonl"
    options = ["--preset", "nano", "--sides", "56", "112", "--patches", "512", "--output", str(output)]
    assert main(["bench", "vision", *options]) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(lines) == 3 * 2 * 2 and all(line["images_per_second"] > 0 for line in lines)
