"""A released MXFP4 folder loads as it is, plain or packed, computes the same, and is saved as the bytes that it was."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, core_model_loading

from modeling_moe_lc import (
    MoeLcForCausalLM,
    MoeLcMxfp4Config,
    MoeLcTextConfig,
    MoeLcTextModel,
    pack_experts,
    released_experts,
)
from modeling_moe_lc.configuration.expert_quantization import mxfp4_quantization
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4


FOLDER = Path(__file__).parents[1] / "fixtures" / "k3-text-tiny-mxfp4"
LIMIT = 1e-4  # as in test_parity.py; measured: 1.7e-5
EXPERTS = "model.layers.1.block_sparse_moe.experts"
RELEASED = json.loads((FOLDER / "config.json").read_text())["text_config"]["quantization_config"]
PACKED = MoeLcMxfp4Config(dequantize=False)


def load(folder=FOLDER, **kwargs):
    return MoeLcForCausalLM.from_pretrained(folder, **kwargs).eval()


@pytest.fixture(scope="module")
def plain():
    return load(dtype=torch.float32)


@pytest.fixture(scope="module")
def packed():
    return load(dtype=torch.float32, quantization_config=PACKED)


@pytest.fixture(scope="module")
def ids():
    return load_file(FOLDER / "inputs.safetensors")


def relative(x, reference):
    return ((x - reference).norm() / reference.norm()).item()


def text_tensors(folder):
    tensors = {}
    for file in Path(folder).glob("model*.safetensors"):
        tensors |= load_file(file)
    tensors = {name.removeprefix("language_model."): tensor for name, tensor in tensors.items()}
    return {n: t for n, t in tensors.items() if not n.startswith(("vision_tower.", "mm_projector."))}


def assert_same_files(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def saved_config(folder):
    return json.loads((Path(folder) / "config.json").read_text())


def rewritten(tmp_path, change_tensors=None, change_config=None):
    """A copy of the fixture whose tensors and config went through the two functions."""
    tensors, config = load_file(FOLDER / "model.safetensors"), saved_config(FOLDER)
    for change, content in ((change_tensors, tensors), (change_config, config)):
        if change is not None:
            change(content)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@torch.no_grad()
@pytest.mark.parametrize("tag", ["t5", "t70"])
def test_logits_are_those_of_the_release(plain, packed, ids, tag):
    expected = load_file(FOLDER / "expected.safetensors")
    for model in (plain, packed):
        logits = model(ids[f"input_ids.{tag}"]).logits
        assert relative(logits, expected[f"logits.{tag}"]) < LIMIT
        out = model.generate(ids[f"input_ids.{tag}"], max_new_tokens=8, do_sample=False, eos_token_id=None)
        assert torch.equal(out[:, -8:], expected[f"greedy_tokens.{tag}"])


@torch.no_grad()
def test_packed_experts_compute_what_plain_ones_do(plain, packed, ids):
    logits = [model(ids["input_ids.t70"]).logits for model in (packed, plain)]
    assert relative(*logits) < 1e-6


def test_packed_experts_take_a_quarter_of_the_memory(packed):
    state = packed.state_dict()
    held = sum(t.numel() for name, t in state.items() if ".experts." in name and t.dtype == torch.uint8)
    values = sum(2 * t.numel() for name, t in state.items() if name.endswith("_packed"))
    assert held / (2 * values) == pytest.approx(17 / 64)  # 4.25 bits of 16
    assert not [name for name, _ in packed.named_parameters() if ".experts." in name]


def test_gradients_pass_through_packed_experts(plain, packed, ids):
    found = []
    for model in (packed, plain):
        model.zero_grad()
        embeds = model.get_input_embeddings()(ids["input_ids.t70"]).detach().requires_grad_()
        model(inputs_embeds=embeds, labels=ids["input_ids.t70"]).loss.backward()
        found.append([embeds.grad, *(layer.block_sparse_moe.gate.weight.grad for layer in model.model.layers[1:])])
    for ours, theirs in zip(*found, strict=True):
        assert theirs.any() and relative(ours, theirs) < 1e-6


def test_an_adapter_trains_on_packed_experts(ids):
    base = load(dtype=torch.float32, quantization_config=PACKED)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "routed_expert_up_proj"]))
    model(ids["input_ids.t5"], labels=ids["input_ids.t5"]).loss.backward()
    assert all(p.grad.any() for name, p in model.named_parameters() if "lora_B" in name)


def test_everything_is_found_and_nothing_is_left_packed():
    model, info = MoeLcForCausalLM.from_pretrained(FOLDER, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    layer = model.model.layers[1]
    assert layer.block_sparse_moe.experts.down_proj.dtype == torch.bfloat16
    assert layer.block_sparse_moe.gate.e_score_correction_bias.dtype == torch.float32
    assert layer.self_attn.decay.A_log.dtype == torch.float32 and layer.mlp_res.query.dtype == torch.bfloat16
    assert not [name for name, tensor in model.state_dict().items() if tensor.dtype == torch.uint8]
    assert getattr(model, "hf_quantizer", None) is None and not getattr(model, "is_quantized", False)
    model.float()  # refused where a model counts as quantised


@pytest.mark.parametrize("choice", [None, PACKED], ids=["plain", "packed"])
def test_released_folder_goes_round_twice(choice, tmp_path):
    released, source = text_tensors(FOLDER), FOLDER
    for trip in ("one", "two"):
        model = load(source, quantization_config=choice)
        source = tmp_path / trip
        model.save_pretrained(source, max_shard_size="1MB")
        assert_same_files(text_tensors(source), released)
        config = saved_config(source)
        assert config["quantization_config"] == RELEASED and "expert_quantization" not in config


def test_released_scales_are_not_the_smallest_so_that_the_bytes_are_hard_to_keep():
    w = load_file(FOLDER / "model.safetensors")
    name = f"language_model.{EXPERTS}.0.w1.weight"
    again = quantize_mxfp4(dequantize_mxfp4(w[f"{name}_packed"], w[f"{name}_scale"], torch.bfloat16))
    assert not torch.equal(again[1], w[f"{name}_scale"])


def test_only_what_changed_gets_new_bytes(tmp_path):
    model = load()
    w1 = model.get_submodule(EXPERTS).gate_up_proj[2, :64]  # of expert 2
    with torch.no_grad():
        w1[5, 40] = 1.3 * w1[5].abs().max()
    model.save_pretrained(tmp_path)
    ours, theirs = text_tensors(tmp_path), text_tensors(FOLDER)
    changed = {name for name in theirs if not torch.equal(ours[name], theirs[name])}
    assert changed <= {f"{EXPERTS}.2.w1.weight_packed", f"{EXPERTS}.2.w1.weight_scale"} and changed
    rows = (ours[f"{EXPERTS}.2.w1.weight_packed"] != theirs[f"{EXPERTS}.2.w1.weight_packed"]).nonzero()
    assert (rows[:, 0] == 5).all() and (rows[:, 1] // 16 == 1).all()


@torch.no_grad()
def test_plain_weights_when_asked_for(ids, tmp_path):
    model = load()
    model.config.expert_quantization = None
    model.save_pretrained(tmp_path)
    saved, config = text_tensors(tmp_path), saved_config(tmp_path)
    assert saved[f"{EXPERTS}.7.w2.weight"].dtype == torch.bfloat16
    assert not [name for name in saved if name.endswith(("_packed", "_scale"))]
    assert "quantization_config" not in config and "expert_quantization" not in config
    again = load(tmp_path)
    assert torch.equal(again(ids["input_ids.t5"]).logits, model(ids["input_ids.t5"]).logits)


def test_a_packed_model_becomes_plain_and_back(plain, tmp_path):
    model = load(quantization_config=PACKED)
    experts = model.get_submodule(EXPERTS).state_dict()
    model.dequantize()
    assert torch.equal(model.get_submodule(EXPERTS).down_proj.float(), plain.get_submodule(EXPERTS).down_proj)
    model.save_pretrained(tmp_path / "plain")
    assert_same_files(text_tensors(tmp_path / "plain"), text_tensors(FOLDER))
    for name, tensor in pack_experts(pack_experts(model)).get_submodule(EXPERTS).state_dict().items():
        assert torch.equal(tensor, experts[name]), name
    model.save_pretrained(tmp_path / "packed")
    assert_same_files(text_tensors(tmp_path / "packed"), text_tensors(FOLDER))


@torch.no_grad()
def test_a_model_of_our_own_is_packed_and_stored(tmp_path):
    model = MoeLcForCausalLM(load_preset("tiny", routed_expert_hidden_size=64, moe_intermediate_size=32)).eval()
    tokens = torch.arange(3, 40)[None]
    before = model(tokens).logits
    model.config.expert_quantization = mxfp4_quantization()
    model.save_pretrained(tmp_path / "stored")
    pack_experts(model).save_pretrained(tmp_path / "packed")
    assert_same_files(text_tensors(tmp_path / "stored"), text_tensors(tmp_path / "packed"))
    logits = model(tokens).logits
    assert 0 < relative(logits, before) < 0.2
    for choice in (None, PACKED):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "stored", quantization_config=choice)
        assert relative(again(tokens).logits, logits) < 1e-6


def test_the_ignore_list_decides_nothing(plain, tmp_path):
    for number, ignore in enumerate(([], ["re:.*experts.*"], None)):
        folder = tmp_path / str(number)
        folder.mkdir()
        change = lambda config, ignore=ignore: config["text_config"]["quantization_config"].update(ignore=ignore)
        model = load(rewritten(folder, change_config=change), dtype=torch.float32)
        for (name, tensor), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(tensor, other), name
        assert model.config.expert_quantization["ignore"] == ignore


def test_one_tensor_is_read_at_a_time(monkeypatch):
    def no_threads(*args, **kwargs):
        raise AssertionError("the loader reads ahead")

    alive, most, read = [], [], released_experts.as_bytes

    def watched(source, name):
        tensor = read(source, name)
        if name.endswith("_packed"):
            alive[:] = [reference for reference in alive if reference() is not None]
            most.append(len(alive))
            alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(core_model_loading, "ThreadPoolExecutor", no_threads)
    monkeypatch.setattr(released_experts, "as_bytes", watched)
    load()
    assert len(most) == 8 * 8 * 3 and max(most) <= 1


def test_the_conversion_alone_reads_the_bytes(plain):
    config = MoeLcTextConfig.from_pretrained(FOLDER)
    del config.quantization_config
    model = load(config=config, dtype=torch.float32)
    assert torch.equal(model.get_submodule(EXPERTS).gate_up_proj, plain.get_submodule(EXPERTS).gate_up_proj)


def test_a_base_model_reads_and_writes(plain, tmp_path):
    for choice in (None, PACKED):
        base = MoeLcTextModel.from_pretrained(FOLDER, quantization_config=choice)
        base.save_pretrained(tmp_path)
        saved, released = text_tensors(tmp_path), text_tensors(FOLDER)
        assert_same_files(saved, {n.removeprefix("model."): t for n, t in released.items() if n != "lm_head.weight"})


@torch.no_grad()
def test_a_multimodal_model_goes_round(ids, tmp_path):
    for choice in (None, PACKED):
        model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16, quantization_config=choice)
        model.save_pretrained(tmp_path)
        assert_same_files(load_file(tmp_path / "model.safetensors"), load_file(FOLDER / "model.safetensors"))
        config = saved_config(tmp_path)
        assert config["text_config"]["quantization_config"] == RELEASED and "quantization_config" not in config
        text = load(dtype=torch.bfloat16)(ids["input_ids.t5"]).logits
        assert relative(model(ids["input_ids.t5"]).logits.float(), text.float()) < 1e-3


SCALE = f"language_model.{EXPERTS}.3.w2.weight_scale"


def misshapen(tensors, names):
    tensors.update({name: torch.zeros(96, 3, dtype=torch.uint8) for name in names})


@pytest.mark.parametrize("choice", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(SCALE), r"missing \['model\.layers\.1\.\S*\.experts\.3\.w2\.weight_scale'\]"),
        (lambda tensors: misshapen(tensors, [SCALE]), None),
        (lambda tensors: misshapen(tensors, [SCALE.replace(".3.", f".{e}.") for e in range(8)]), None),
        (
            lambda tensors: tensors.update({SCALE.replace(".3.", ".8."): tensors[SCALE].clone()}),
            "in addition .*experts.8",
        ),
    ],
    ids=["missing", "misshapen", "all misshapen", "one too many"],
)
def test_incomplete_and_misshapen_experts_are_refused(change, message, choice, tmp_path):
    with pytest.raises((ValueError, RuntimeError), match=message):
        load(rewritten(tmp_path, change), quantization_config=choice)


def test_a_layer_without_experts_is_not_filled_with_arbitrary_bytes(tmp_path):
    def without_layer_2(tensors):
        for name in [name for name in tensors if ".layers.2.block_sparse_moe.experts." in name]:
            del tensors[name]

    with pytest.raises(ValueError, match=r"missing \['model\.layers\.2\."):
        load(rewritten(tmp_path, without_layer_2), quantization_config=PACKED)


def test_what_packed_experts_cannot_do_is_refused_by_name(packed, ids, tmp_path):
    with pytest.raises(ValueError, match="^quantization_config: expected a checkpoint whose experts are in MXFP4"):
        load(FOLDER.parent / "k3-text-tiny", quantization_config=PACKED)
    config = MoeLcTextConfig.from_pretrained(FOLDER)
    config.distributed_config = {"tp_size": 2}
    with pytest.raises(ValueError, match="^distributed_config: expected none"):
        load(config=config)
    model = load(quantization_config=PACKED, experts_implementation="grouped_mm")
    with pytest.raises(ValueError, match="^experts_implementation: expected 'eager'"):
        model(ids["input_ids.t5"])
    model.config.expert_quantization = None
    with pytest.raises(ValueError, match="^expert_quantization: expected"):
        model.save_pretrained(tmp_path)


def released_with(**changes):
    found = mxfp4_quantization()
    found["config_groups"]["group_0"]["weights"] |= changes
    return found


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("expert_quantization.config_groups.group_0.weights.num_bits", {"quantization_config": released_with(num_bits=8)}),
        ("expert_quantization.config_groups.group_0.weights.group_size", {"expert_quantization": released_with(group_size=16)}),
        ("moe_intermediate_size", {"expert_quantization": mxfp4_quantization(), "moe_intermediate_size": 48}),
        ("expert_hidden_size", {"expert_quantization": mxfp4_quantization(), "routed_expert_hidden_size": 48}),
        ("expert_quantization", {"expert_quantization": {"quant_method": "mxfp4"}}),
        ("expert_quantization", {"expert_quantization": mxfp4_quantization(), "quantization_config": released_with(x=1)}),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_refused_by_name(field, fields):
    with pytest.raises(ValueError, match=f"^{field}: expected"):
        MoeLcTextConfig(**{"routed_expert_hidden_size": 64, "moe_intermediate_size": 64} | fields)


def test_the_released_field_comes_from_either_level_and_other_formats_are_left_alone(tmp_path):
    def one_level_up(config):
        config["quantization_config"] = config["text_config"].pop("quantization_config")

    folder = rewritten(tmp_path, change_config=one_level_up)
    assert MoeLcTextConfig.from_pretrained(folder).expert_quantization == RELEASED
    assert mxfp4_quantization() == RELEASED
    other = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    config = MoeLcTextConfig(quantization_config=other)
    assert config.expert_quantization is None and config.to_dict()["quantization_config"] == other
    ours = MoeLcTextConfig(expert_quantization=mxfp4_quantization())
    assert MoeLcTextConfig(**ours.to_dict()).expert_quantization == ours.to_diff_dict()["quantization_config"]
