"""A text model in the layout of K3 has no tower: whoever reads the folder gets the text model, and never K3's defaults."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from modeling_moe_lc import (
    MoeLcConfig,
    MoeLcForCausalLM,
    MoeLcForConditionalGeneration,
    MoeLcTextConfig,
    MoeLcTextModel,
)
from modeling_moe_lc.configuration.presets import load_multimodal_preset, load_preset, preset_names
from modeling_moe_lc.conversion.count import config_from_path, count
from modeling_moe_lc.training.cli import main


IDS = torch.arange(12)[None] * 7 % 50
SMALL = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 32, "vocab_size": 4096,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "expert_quantization": None,
}  # fmt: skip


def small(name):
    """The preset with everything that it chooses, and with sizes that a test has time for."""
    linear = load_preset(name).linear_attn_config | {"num_heads": 4, "head_dim": 16}
    linear = {key: value for key, value in linear.items() if key not in ("kda_layers", "full_attn_layers")}
    chosen = load_preset(name)
    latent, block = chosen.routed_expert_hidden_size and 32, chosen.attn_res_block_size and 2
    return load_preset(
        name,
        **SMALL,
        layer_types=None,
        linear_attn_config=linear,
        routed_expert_hidden_size=latent,
        attn_res_block_size=block,
    )


def saved(config, folder):
    torch.manual_seed(0)
    model = MoeLcForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def assert_text_model(folder, model):
    config = AutoConfig.from_pretrained(folder)
    assert type(config) is MoeLcTextConfig and config.checkpoint_layout == "kimi_k3"
    assert type(AutoModel.from_config(config)) is MoeLcTextModel
    again, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(again) is MoeLcForCausalLM
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(again.eval()(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("command", [("export", "--to"), ("convert", "--layout")], ids=lambda one: one[0])
@pytest.mark.parametrize("name", preset_names())
def test_text_presets_stay_text(name, command, tmp_path, capsys):
    config = load_preset(name) if name == "tiny" else small(name)
    model = saved(config, tmp_path / "own")
    assert main([command[0], str(tmp_path / "own"), str(tmp_path / "out"), command[1], "kimi-k3"]) == 0
    assert "vision_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert_text_model(tmp_path / "out", model)
    capsys.readouterr()
    assert main(["count", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"] == count(config).total


def test_nano_in_its_own_sizes(tmp_path):
    model = saved(load_preset("nano"), tmp_path / "own")
    assert main(["export", str(tmp_path / "own"), str(tmp_path / "out"), "--to", "kimi-k3"]) == 0
    assert_text_model(tmp_path / "out", model)
    assert count(config_from_path(tmp_path / "out")) == count(model.config)


def test_a_folder_with_a_tower_stays_multimodal(tmp_path):
    model = MoeLcForConditionalGeneration(load_multimodal_preset("tiny"))
    model.save_pretrained(tmp_path / "own")
    assert main(["export", str(tmp_path / "own"), str(tmp_path / "out"), "--to", "kimi-k3"]) == 0
    for folder in ("own", "out"):
        assert type(AutoConfig.from_pretrained(tmp_path / folder)) is MoeLcConfig
        assert count(config_from_path(tmp_path / folder)) == count(model.config)


def test_the_multimodal_classes_refuse_a_folder_without_a_tower(tmp_path):
    saved(load_preset("tiny"), tmp_path / "own")
    assert main(["export", str(tmp_path / "own"), str(tmp_path / "out"), "--to", "kimi-k3"]) == 0
    with pytest.raises(ValueError, match=r"vision_config: expected .* got None"):
        MoeLcForConditionalGeneration.from_pretrained(tmp_path / "out")
