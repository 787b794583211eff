"""A multimodal folder has the released names, and every class finds its part in it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
)

from modeling_moe_lc import (
    MoeLcConfig,
    MoeLcForCausalLM,
    MoeLcForConditionalGeneration,
    MoeLcModel,
    MoeLcTextConfig,
    MoeLcVisionConfig,
)
from modeling_moe_lc.configuration.presets import load_multimodal_preset, load_preset, multimodal_preset_names


FIXTURE = Path(__file__).parents[1] / "fixtures" / "k3-vision-tiny"


def saved(folder):
    return load_file(Path(folder) / "model.safetensors")


def fields(config):
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def assert_same_tensors(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].shape, ours[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(ours[name], tensor), name


def test_released_folder_goes_round_twice(tmp_path):
    source = FIXTURE
    for trip in ("one", "two"):
        model, info = MoeLcForConditionalGeneration.from_pretrained(source, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        source = tmp_path / trip
        model.save_pretrained(source)
        assert_same_tensors(saved(source), saved(FIXTURE))


def test_model_made_from_scratch_goes_round(tiny_multimodal, tmp_path):
    model = tiny_multimodal()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(again) is MoeLcForConditionalGeneration
    assert_same_tensors(again.state_dict(), model.state_dict())


def test_model_without_a_head_writes_the_same_names(tmp_path):
    base = MoeLcModel.from_pretrained(FIXTURE)
    base.save_pretrained(tmp_path)
    expected = saved(FIXTURE)
    head = expected.pop("language_model.lm_head.weight")
    assert_same_tensors(saved(tmp_path), expected)
    whole, info = MoeLcForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {"lm_head.weight"} and whole.lm_head.weight.shape == head.shape
    assert_same_tensors(MoeLcModel.from_pretrained(tmp_path).state_dict(), base.state_dict())


def test_names_of_memory_are_read_too(tiny_multimodal, tmp_path):
    model = tiny_multimodal()
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.language_model.layers.1.block_sparse_moe.experts.gate_up_proj" in saved(tmp_path)
    assert_same_tensors(MoeLcForConditionalGeneration.from_pretrained(tmp_path).state_dict(), model.state_dict())


def test_text_classes_read_the_text_of_a_multimodal_folder(tiny_multimodal, tmp_path):
    model = tiny_multimodal()
    model.save_pretrained(tmp_path)
    text, info = MoeLcForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_same_tensors(text.model.state_dict(), model.model.language_model.state_dict())


@pytest.mark.parametrize(
    ("auto", "expected"),
    [
        (AutoConfig, MoeLcConfig),
        (AutoModel, MoeLcModel),
        (AutoModelForCausalLM, MoeLcForConditionalGeneration),
        (AutoModelForImageTextToText, MoeLcForConditionalGeneration),
        (AutoModelForMultimodalLM, MoeLcForConditionalGeneration),
    ],
    ids=lambda thing: thing.__name__,
)
def test_auto_classes_open_a_released_folder_with_our_code(auto, expected):
    assert type(auto.from_pretrained(FIXTURE)) is expected


def test_released_config_becomes_ours(tmp_path):
    config = MoeLcConfig.from_pretrained(FIXTURE)
    assert (config.text_config.hidden_size, config.vision_config.vt_hidden_size) == (96, 64)
    assert config.image_token_id == config.media_placeholder_token_id == 505
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert fields(again) == fields(config) and again.model_type == "moe_lc"
    assert MoeLcTextConfig.from_pretrained(tmp_path).hidden_size == 96
    assert MoeLcVisionConfig.from_pretrained(tmp_path).vt_hidden_size == 64
    assert MoeLcVisionConfig.from_pretrained(FIXTURE).vt_hidden_size == 64


@pytest.mark.parametrize("name", multimodal_preset_names())
def test_preset_survives_a_round_trip(name, tmp_path):
    config = load_multimodal_preset(name)
    config.save_pretrained(tmp_path)
    assert fields(MoeLcConfig.from_pretrained(tmp_path)) == fields(config)
    assert config.text_config.to_dict() == load_preset(name).to_dict()


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("media_placeholder_token_id", {"media_placeholder_token_id": 512}),
        ("text_hidden_size", {"vision_config": {"text_hidden_size": 65}}),
    ],
)
def test_parts_that_disagree_are_refused(field, fields):
    with pytest.raises(ValueError, match=field):
        load_multimodal_preset("tiny", **fields)
    with pytest.raises(ValueError, match="pad_token_id"):
        MoeLcConfig(text_config=load_preset("tiny"), pad_token_id=7, media_placeholder_token_id=5)


def test_preset_without_a_tower_names_those_that_have_one():
    with pytest.raises(ValueError, match=r"kimi-k3.*got '200m-a90m'"):
        load_multimodal_preset("200m-a90m")
