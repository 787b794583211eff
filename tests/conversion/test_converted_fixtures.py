"""Every fixture, converted in any way, computes the logits of the independent implementation: with pictures and without."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling_moe_lc import MoeLcForCausalLM, MoeLcForConditionalGeneration
from modeling_moe_lc.kernels.mxfp4 import dequantize_mxfp4
from modeling_moe_lc.training.cli import main


FIXTURES = Path(__file__).parents[1] / "fixtures"
VISION, MXFP4 = FIXTURES / "k3-vision-tiny", FIXTURES / "k3-text-tiny-mxfp4"
LIMIT = 1e-4  # norm of the difference over norm, FP32


def convert(source, destination, *options):
    assert main(["convert", str(source), str(destination), "--workers", "2", *options]) == 0
    return destination


def relative(x, reference):
    return ((x - reference).norm() / reference.norm()).item()


def tensors(folder):
    files = sorted(folder.glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def prompts():
    """Name, inputs and expected logits of each prompt with pictures."""
    given, expected = (load_file(VISION / f"{name}.safetensors") for name in ("inputs", "expected"))
    pixels = given["pixel_values"].split(given["grid_thws"].prod(-1).tolist())
    for tag in ("all", "one", "two"):
        items = given[f"media_items.{tag}"].tolist()
        yield (
            {
                "input_ids": given[f"input_ids.{tag}"],
                "pixel_values": torch.cat([pixels[item] for item in items]),
                "grid_thws": given["grid_thws"][items],
            },
            expected[f"logits.{tag}"],
        )


@torch.no_grad()
def assert_logits_with_pictures(folder):
    model = MoeLcForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    for inputs, expected in prompts():
        assert relative(model(**inputs).logits, expected) < LIMIT


@pytest.mark.parametrize(
    "options",
    [[], ["--layout", "own"], ["--layout", "own", "--dtype", "bfloat16"], ["--dtype", "float32"]],
    ids=" ".join,
)
def test_pictures_are_seen_alike(options, tmp_path):
    assert_logits_with_pictures(convert(VISION, tmp_path / "out", *options))


def test_pictures_are_seen_alike_after_every_trip_there_and_back(tmp_path):
    source = VISION
    for trip in ("1", "2"):
        source = convert(source, tmp_path / f"own{trip}", "--layout", "own", "--shard-size", "300KB")
        assert_logits_with_pictures(source)
        source = convert(source, tmp_path / f"k3{trip}", "--layout", "kimi-k3")
        assert_logits_with_pictures(source)


@torch.no_grad()
def test_the_text_of_a_multimodal_folder_is_what_the_whole_model_computes(tmp_path):
    ids = torch.arange(3, 60)[None]
    whole = MoeLcForConditionalGeneration.from_pretrained(VISION, dtype=torch.float32).eval()
    expected, source = whole(input_ids=ids).logits, VISION
    for trip, layout in enumerate(("own", "kimi-k3", "own", "kimi-k3")):
        source = convert(source, tmp_path / str(trip), "--text-only", "--layout", layout)
        model, info = MoeLcForCausalLM.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert relative(model.eval()(ids).logits, expected) < 1e-6
    released = {name: t for name, t in tensors(VISION).items() if name.startswith("language_model.")}
    found = tensors(source)
    assert found.keys() == released.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in released.items())


@torch.no_grad()
def test_mxfp4_there_and_back_twice_has_the_same_values_and_logits(tmp_path):
    def values(folder):
        found = tensors(folder)
        return {
            name: dequantize_mxfp4(tensor, found[name.replace("packed", "scale")], torch.float32)
            for name, tensor in found.items()
            if name.endswith("weight_packed")
        }

    given, expected = (load_file(MXFP4 / f"{name}.safetensors") for name in ("inputs", "expected"))
    released, source, packed = values(MXFP4), MXFP4, []
    for trip in ("1", "2"):
        plain = convert(source, tmp_path / f"plain{trip}", "--dtype", "bfloat16", "--layout", "own")
        source = convert(plain, tmp_path / f"packed{trip}", "--dtype", "mxfp4", "--layout", "kimi-k3")
        found = values(source)
        assert found.keys() == released.keys() and len(found) == 192
        assert all(torch.equal(found[name], value) for name, value in released.items())
        for folder in (plain, source):
            model = MoeLcForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            assert relative(model(given["input_ids.t70"]).logits, expected["logits.t70"]) < LIMIT
        packed.append(tensors(source))
    assert all(torch.equal(packed[0][name], tensor) for name, tensor in packed[1].items())
    original, now = (json.loads((folder / "config.json").read_text()) for folder in (MXFP4, source))
    assert now["text_config"]["quantization_config"] == original["text_config"]["quantization_config"]
