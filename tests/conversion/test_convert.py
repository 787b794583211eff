"""A converted checkpoint is the same model; there and back it is the same files, wherever nothing was quantised anew."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from modeling_moe_lc import MoeLcForCausalLM, MoeLcTextConfig
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.kernels.mxfp4 import dequantize_mxfp4
from modeling_moe_lc.training.cli import main


FIXTURES = Path(__file__).parents[1] / "fixtures"
LIMIT = 1e-4  # norm of the difference over norm, of FP32 logits
NAMES = ("k3-text-tiny", "k3-text-tiny-mxfp4", "k3-vision-tiny", "kimi-linear-tiny")
K3 = "language_model.model.layers"


def convert(source, destination, *options):
    assert main(["convert", str(source), str(destination), "--workers", "2", *options]) == 0
    return destination


def tensors(folder):
    return {
        name: tensor for file in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(file).items()
    }


def assert_same_tensors(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(ours[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


def assert_logits_of(fixture, folder, limit=LIMIT):
    model = MoeLcForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs, expected = (load_file(FIXTURES / fixture / f"{name}.safetensors") for name in ("inputs", "expected"))
    for name, ids in inputs.items():
        if name.startswith("input_ids.t"):
            with torch.no_grad():
                logits, reference = model(ids).logits, expected[name.replace("input_ids", "logits")]
            assert (logits - reference).norm() / reference.norm() < limit


OPTIONS = (["--layout", "own"], ["--layout", "own", "--dtype", "bfloat16"], ["--dtype", "float32"])


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
@pytest.mark.parametrize("fixture", [name for name in NAMES if name != "k3-vision-tiny"])
def test_logits_stay(fixture, options, tmp_path):
    assert_logits_of(fixture, convert(FIXTURES / fixture, tmp_path / "out", "--verify", *options))


@pytest.mark.parametrize("fixture", NAMES)
def test_there_and_back_twice_is_the_same_to_the_byte(fixture, tmp_path):
    source = FIXTURES / fixture
    released = "kimi-linear" if "linear" in fixture else "kimi-k3"
    for trip in ("1", "2"):
        ours = convert(source, tmp_path / f"own{trip}", "--layout", "own", "--shard-size", "500KB")
        source = convert(ours, tmp_path / f"back{trip}", "--layout", released)
        assert_same_tensors(tensors(source), load_file(FIXTURES / fixture / "model.safetensors"))
        before, after = (MoeLcTextConfig.from_pretrained(folder).to_dict() for folder in (FIXTURES / fixture, source))
        names = ("_name_or_path", "transformers_version")
        assert {k: v for k, v in before.items() if k not in names} == {
            k: v for k, v in after.items() if k not in names
        }


@pytest.mark.parametrize("fixture", NAMES)
def test_same_layout_keeps_config_and_bytes(fixture, tmp_path):
    out = convert(FIXTURES / fixture, tmp_path / "out")
    assert_same_tensors(tensors(out), load_file(FIXTURES / fixture / "model.safetensors"))
    assert json.loads((out / "config.json").read_text()) == json.loads(
        (FIXTURES / fixture / "config.json").read_text()
    )


def test_every_tensor_begins_at_a_multiple_of_its_element(tmp_path):
    out = convert(FIXTURES / "k3-text-tiny-mxfp4", tmp_path / "out")
    data = (out / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    sizes = {"F32": 4, "BF16": 2, "U8": 1}
    for name, entry in json.loads(data[8:begin]).items():
        if name != "__metadata__":
            assert (begin + entry["data_offsets"][0]) % sizes[entry["dtype"]] == 0


class TestVision:
    def test_passes_as_it_is_and_is_left_out_on_request(self, tmp_path):
        released = load_file(FIXTURES / "k3-vision-tiny" / "model.safetensors")
        whole = convert(FIXTURES / "k3-vision-tiny", tmp_path / "whole", "--dtype", "float32")
        for name, tensor in tensors(whole).items():
            if not name.startswith("language_model."):
                assert torch.equal(tensor, released[name]) and tensor.dtype == torch.bfloat16
        for layout in ("kimi-k3", "own"):
            text = convert(FIXTURES / "k3-vision-tiny", tmp_path / layout, "--text-only", "--layout", layout)
            assert "vision_config" not in json.loads((text / "config.json").read_text())
            names = {name.removeprefix("language_model.") for name in released if name.startswith("language_model.")}
            assert {name.removeprefix("language_model.") for name in tensors(text)} == names

    def test_the_text_model_is_the_same_with_and_without(self, tmp_path):
        ids = torch.arange(3, 40)[None]
        text = convert(FIXTURES / "k3-vision-tiny", tmp_path / "text", "--text-only", "--layout", "own")
        models = [MoeLcForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
                  for folder in (FIXTURES / "k3-vision-tiny", text)]  # fmt: skip
        models.append(AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32).eval())
        with torch.no_grad():
            first, *others = (model(ids).logits for model in models)
        assert all(torch.equal(first, other) for other in others)

    def test_our_own_layout_loads_as_a_multimodal_model(self, tmp_path):
        out = convert(FIXTURES / "k3-vision-tiny", tmp_path / "out", "--layout", "own")
        model, info = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        given, expected = (load_file(FIXTURES / "k3-vision-tiny" / f"{n}.safetensors") for n in ("inputs", "expected"))
        with torch.no_grad():
            features = model.eval().model.get_image_features(given["pixel_values"], given["grid_thws"]).pooler_output
        features = torch.cat(list(features))
        assert (features - expected["features"]).norm() / expected["features"].norm() < LIMIT

    def test_kimi_linear_has_none(self, tmp_path, capsys):
        command = ["convert", str(FIXTURES / "k3-vision-tiny"), str(tmp_path / "out"), "--layout", "kimi-linear"]
        assert main(command) == 2
        message = capsys.readouterr().err
        for field in ("attn_res_block_size", "hidden_act", "mla_use_output_gate", "gate_lower_bound", "--text-only"):
            assert field in message


class TestMxfp4:
    SOURCE = FIXTURES / "k3-text-tiny-mxfp4"

    def dequantized(self, found):
        values = {}
        for name, tensor in found.items():
            if name.endswith("weight_packed"):
                scales = found[name.replace("packed", "scale")]
                values[name.removesuffix("_packed")] = dequantize_mxfp4(tensor, scales, torch.float32)
        return values

    def test_dequantised_to_the_bit_and_nothing_else_changes(self, tmp_path):
        released = load_file(self.SOURCE / "model.safetensors")
        out = convert(self.SOURCE, tmp_path / "out", "--dtype", "bfloat16")
        found = tensors(out)
        values = self.dequantized(released)
        assert len(values) == 192 and not [name for name in found if "packed" in name or "scale" in name]
        for name, tensor in values.items():
            assert found[name].dtype == torch.bfloat16 and torch.equal(found[name].float(), tensor)
        others = {
            name: tensor for name, tensor in released.items() if "experts.weight" not in name and ".w" not in name
        }
        assert_same_tensors({name: found[name] for name in others}, others)
        assert "quantization_config" not in json.loads((out / "config.json").read_text())["text_config"]

    def test_quantised_again_it_has_the_same_values_names_and_config(self, tmp_path):
        plain = convert(self.SOURCE, tmp_path / "plain", "--dtype", "float32")
        again = tensors(convert(plain, tmp_path / "again", "--dtype", "mxfp4"))
        released = load_file(self.SOURCE / "model.safetensors")
        assert {n: (t.dtype, t.shape) for n, t in again.items()} == {
            n: (t.dtype, t.shape) for n, t in released.items()
        }
        assert_same_tensors(self.dequantized(again), self.dequantized(released))
        config = json.loads((tmp_path / "again" / "config.json").read_text())
        original = json.loads((self.SOURCE / "config.json").read_text())
        assert config["text_config"]["quantization_config"] == original["text_config"]["quantization_config"]

    def test_a_model_trained_here_becomes_a_k3_checkpoint(self, tmp_path):
        model = MoeLcForCausalLM(load_preset("tiny", routed_expert_hidden_size=64))
        model.save_pretrained(tmp_path / "own")
        out = convert(tmp_path / "own", tmp_path / "k3", "--layout", "kimi-k3", "--dtype", "mxfp4", "--verify")
        found = tensors(out)
        assert found[f"{K3}.1.block_sparse_moe.experts.7.w2.weight_packed"].shape == (64, 16)
        assert found[f"{K3}.0.self_attn.A_log"].shape == (128,)
        assert json.loads((out / "config.json").read_text())["model_type"] == "kimi_k3"
        MoeLcForCausalLM.from_pretrained(out)

    def test_sizes_that_have_no_blocks_are_refused(self, tmp_path, capsys):
        MoeLcForCausalLM(load_preset("tiny", moe_intermediate_size=40)).save_pretrained(tmp_path / "own")
        assert main(["convert", str(tmp_path / "own"), str(tmp_path / "out"), "--dtype", "mxfp4"]) == 2
        assert "moe_intermediate_size: expected a multiple of 32" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def rewritten(folder, fixture, change):
    """A copy of a fixture whose tensors went through `change`."""
    folder.mkdir()
    found = load_file(FIXTURES / fixture / "model.safetensors")
    change(found)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((FIXTURES / fixture / "config.json").read_bytes())
    return folder


def test_a_tied_head_is_not_missed(tmp_path):
    model = MoeLcForCausalLM(load_preset("tiny", tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "own")
    out = convert(tmp_path / "own", tmp_path / "k3", "--layout", "kimi-k3")
    assert "language_model.lm_head.weight" not in tensors(out)
    assert torch.equal(MoeLcForCausalLM.from_pretrained(out).lm_head.weight, model.lm_head.weight)


class TestTraps:
    """Numbers of docs on known problems of such models: what conversion must not lose."""

    def test_40_47_full_precision_values_survive_every_dtype(self, tmp_path):
        def change(found):
            for name in found:
                if name.endswith(("A_log", "dt_bias", "e_score_correction_bias", "o_norm.weight")):
                    size = 5 if name.endswith("A_log") else found[name].numel()
                    found[name].view(-1)[:size] += torch.rand(size) * 1e-3

        source = rewritten(tmp_path / "source", "k3-text-tiny", change)
        before = load_file(source / "model.safetensors")
        for dtype in ("bfloat16", "float32", "mxfp4"):
            found = tensors(convert(source, tmp_path / dtype, "--dtype", dtype))
            for name, tensor in before.items():
                if tensor.dtype == torch.float32:
                    assert found[name].dtype == torch.float32 and torch.equal(found[name], tensor), name
        model = MoeLcForCausalLM.from_pretrained(tmp_path / "bfloat16", dtype=torch.bfloat16)
        bias = model.model.layers[1].block_sparse_moe.gate.e_score_correction_bias
        assert torch.equal(bias, before[f"{K3}.1.block_sparse_moe.gate.e_score_correction_bias"])

    def test_44_asymmetric_experts_are_not_transposed(self, tmp_path):
        model = MoeLcForCausalLM(load_preset("tiny", num_experts=4, moe_intermediate_size=20)).eval()
        model.save_pretrained(tmp_path / "own")
        out = convert(tmp_path / "own", tmp_path / "k3", "--layout", "kimi-k3")
        back = MoeLcForCausalLM.from_pretrained(convert(out, tmp_path / "back", "--layout", "own"))
        for (name, tensor), other in zip(model.state_dict().items(), back.state_dict().values(), strict=True):
            assert torch.equal(tensor, other), name

    def test_51_both_shapes_of_convolutions_and_every_form_of_a_log_are_read(self, tmp_path):
        def change(found):
            for name in list(found):
                if "conv1d" in name:
                    found[name] = found[name][:, 0].contiguous()
                elif name.endswith("A_log"):
                    found[name] = found[name][:5].view(1, 1, 5, 1).contiguous()

        out = convert(rewritten(tmp_path / "source", "k3-text-tiny", change), tmp_path / "out")
        assert_same_tensors(tensors(out), load_file(FIXTURES / "k3-text-tiny" / "model.safetensors"))

    @pytest.mark.parametrize(
        ("layout", "fixture", "full"),
        [
            ("kimi-linear", "kimi-linear-tiny", [3, 6]),
            ("own", "kimi-linear-tiny", [3, 6]),
            ("own", "k3-text-tiny", [3, 7, 8]),
        ],
    )
    def test_52_layer_lists_stay_one_based_on_disk(self, layout, fixture, full, tmp_path):
        out = convert(FIXTURES / fixture, tmp_path / "out", "--layout", layout)
        config = json.loads((out / "config.json").read_text())
        lists = config.get("text_config", config)["linear_attn_config"]
        assert [layer - 1 for layer in lists["full_attn_layers"]] == full
        types = MoeLcTextConfig.from_pretrained(out).layer_types
        assert [i for i, kind in enumerate(types) if kind == "full_attention"] == full

    def test_kimi_linear_gets_bf16_where_no_bit_is_lost(self, tmp_path):
        model = MoeLcForCausalLM(load_preset("nano-kimi-linear", vocab_size=512, num_experts=8))
        with torch.no_grad():
            for layer in model.model.layers[:2]:
                layer.self_attn.q_conv1d.weight.copy_(layer.self_attn.q_conv1d.weight.bfloat16())
        model.save_pretrained(tmp_path / "own")
        for source, target in (("own", "kimi-k3"), ("kimi-k3", "kimi-linear"), ("own", "kimi-linear2")):
            layout = target.removesuffix("2")
            convert(tmp_path / source, tmp_path / target, "--layout", layout, "--text-only")
        found = tensors(tmp_path / "kimi-linear")
        assert_same_tensors(tensors(tmp_path / "kimi-linear2"), found)
        assert found["model.layers.0.self_attn.q_conv1d.weight"].dtype == torch.bfloat16
        assert found["model.layers.0.self_attn.k_conv1d.weight"].dtype == torch.float32
        assert found["model.layers.0.self_attn.A_log"].dim() == 4
        again = MoeLcForCausalLM.from_pretrained(tmp_path / "kimi-linear")
        for (name, tensor), other in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
            assert torch.equal(tensor, other), name
