"""The files beside the weights of an export are those that engines read, and nothing of them is ours alone."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from modeling_moe_lc import (
    MoeLcForCausalLM,
    MoeLcForConditionalGeneration,
    MoeLcImageProcessor,
    MoeLcProcessor,
)
from modeling_moe_lc.configuration.presets import load_multimodal_preset, load_preset
from modeling_moe_lc.training.cli import main
from modeling_moe_lc.training.tokenizer import train_tokenizer


FIXTURES = Path(__file__).parents[1] / "fixtures"


def export(source, out, target="kimi-k3"):
    assert main(["export", str(source), str(out), "--to", target]) == 0
    return out


def save(model, folder):
    model.save_pretrained(folder)
    return folder


def read(folder, name="config.json"):
    return json.loads((folder / name).read_text())


@pytest.fixture
def tokenizer():
    return train_tokenizer(["def f(x):\n    return x + 1\n"] * 20, 300, 4096)


def test_tokenizer_and_generation_settings(tokenizer, tmp_path):
    config = load_preset("tiny", bos_token_id=0, eos_token_id=1, pad_token_id=2)
    source = save(MoeLcForCausalLM(config), tmp_path / "own")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|more|>"]})
    MoeLcProcessor(MoeLcImageProcessor(), tokenizer).save_pretrained(source)
    (source / "modeling_moe_lc.py").write_text("raise RuntimeError\n")
    out = export(source, tmp_path / "out")
    settings = read(out, "tokenizer_config.json")
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<|more|>"]
    assert not {"backend", "processor_class", "extra_special_tokens", "auto_map"} & settings.keys()
    again = AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    text = "def f(x):<|more|>\n  <|end_of_msg|>"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.chat_template == tokenizer.chat_template and again.eos_token == tokenizer.eos_token
    assert (out / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    assert not list(out.glob("*.py")), "code that no released config names"
    assert not list(out.glob("*processor_config.json")), "settings for pictures of a model without a tower"


def test_generation_settings_are_made_where_there_are_none(tmp_path):
    source = save(MoeLcForCausalLM(load_preset("tiny")), tmp_path / "own")
    (source / "generation_config.json").unlink()
    out = export(source, tmp_path / "out")
    settings = read(out, "generation_config.json")
    assert settings == {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "max_length": 4096}


def test_picture_settings_get_the_released_form(tokenizer, tmp_path):
    source = save(MoeLcForConditionalGeneration(load_multimodal_preset("tiny")), tmp_path / "own")
    MoeLcProcessor(MoeLcImageProcessor(patch_size=4, in_patch_limit=99), tokenizer).save_pretrained(source)
    out = export(source, tmp_path / "out")
    settings = read(out, "preprocessor_config.json")
    assert settings["media_proc_cfg"]["in_patch_limit"] == 99
    assert settings["media_proc_cfg"]["image_mean"] == [0.5, 0.5, 0.5]
    assert not (out / "processor_config.json").exists()
    again = MoeLcImageProcessor.from_pretrained(out)
    assert (again.patch_size, again.in_patch_limit) == (4, 99)


def test_code_of_a_tokenizer_comes_along_and_a_name_without_code_does_not(tokenizer, tmp_path):
    source = save(MoeLcForCausalLM(load_preset("tiny")), tmp_path / "own")
    tokenizer.save_pretrained(source)
    settings = read(source, "tokenizer_config.json")
    settings["auto_map"] = {"AutoTokenizer": [None, "tokenization_mine.Mine"]}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    without = export(source, tmp_path / "without")
    assert "auto_map" not in read(without, "tokenizer_config.json")
    (source / "tokenization_mine.py").write_text("from .helper import name\n")
    (source / "helper.py").write_text("name = 1\n")
    (source / "unused.py").touch()
    out = export(source, tmp_path / "out")
    assert read(out, "tokenizer_config.json")["auto_map"] == settings["auto_map"]
    assert {path.name for path in out.glob("*.py")} == {"tokenization_mine.py", "helper.py"}


def test_code_of_a_release_comes_along(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (source / name).write_bytes((FIXTURES / "kimi-linear-tiny" / name).read_bytes())
    for name in ("configuration_kimi.py", "modeling_kimi.py"):
        (source / name).touch()
    out = export(source, tmp_path / "out", "kimi-linear")
    assert read(out) == read(source)
    assert {path.name for path in out.glob("*.py")} == {"configuration_kimi.py", "modeling_kimi.py"}
