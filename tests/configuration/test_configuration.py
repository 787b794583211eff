"""A released config reads without renaming; every inconsistent value is refused with the name of its field."""

import json

import pytest

from modeling_moe_lc.configuration.configuration_moe_lc import MoeLcTextConfig
from modeling_moe_lc.configuration.presets import load_multimodal_preset, load_preset, preset_names


WRONG = [
    ({"num_experts_per_token": 9}, "num_experts_per_token"),
    ({"num_experts": 0}, "num_experts"),
    ({"num_experts": "8"}, "num_experts"),
    ({"hidden_size": -64}, "hidden_size"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
    ({"num_key_value_heads": 2}, "num_key_value_heads"),
    ({"attn_res_block_size": 0}, "attn_res_block_size"),
    ({"attn_res_block_size": 6}, "attn_res_block_size"),
    ({"hidden_act": "gelu", "activation_situ_beta": None, "activation_situ_linear_beta": None}, "hidden_act"),
    ({"hidden_act": "silu"}, "activation_situ_beta"),
    ({"activation_situ_linear_beta": 0.0}, "activation_situ_linear_beta"),
    ({"routed_expert_hidden_size": None}, "latent_moe_use_norm"),
    ({"num_expert_group": 3}, "num_expert_group"),
    ({"num_expert_group": 2, "topk_group": 3}, "topk_group"),
    ({"num_expert_group": 8, "topk_group": 1}, "topk_group"),
    ({"num_expert_group": 2, "use_grouped_topk": False}, "use_grouped_topk"),
    ({"num_expert_group": 2, "router_balance": {"method": "quantile"}}, "router_balance.method"),
    ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
    ({"topk_method": "greedy"}, "topk_method"),
    ({"mla_use_nope": False}, "mla_use_nope"),
    ({"qk_rope_head_dim": 0}, "qk_rope_head_dim"),
    ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
    ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling"),
    ({"attention_bias": True}, "attention_bias"),
    ({"attention_dropout": 0.1}, "attention_dropout"),
    ({"swiglu_limit": 7.0}, "swiglu_limit"),
    ({"checkpoint_layout": "deepseek"}, "checkpoint_layout"),
    ({"loss_chunk_size": 0}, "loss_chunk_size"),
    ({"pad_token_id": 512}, "pad_token_id"),
    ({"router_balance": {"method": "aux"}}, "router_balance.method"),
    ({"router_balance": {"speed": 1}}, "router_balance"),
    ({"router_balance": {"ema": 1.0}}, "router_balance.ema"),
    ({"router_balance": {"bins": 1}}, "router_balance.bins"),
    ({"router_balance": {"low": 0.9, "high": 0.1}}, "router_balance.low"),
    ({"layer_types": ["full_attention"] * 5}, "layer_types"),
]
WRONG_LISTS = [
    ({"kda_layers": [1, 2, 3], "full_attn_layers": [3, 4, 5]}, "kda_layers"),
    ({"kda_layers": [1, 2], "full_attn_layers": [4, 5]}, "kda_layers"),
    ({"kda_layers": [0, 1, 2], "full_attn_layers": [3, 4]}, "kda_layers"),
    ({"kda_layers": [1, 2, 3, 4, 5], "full_attn_layers": []}, "full_attn_layers"),
    ({"kda_layers": [1, 2, 3]}, "full_attn_layers"),
    ({"gate_lower_bound": 5.0}, "gate_lower_bound"),
    ({"head_dim": 0}, "head_dim"),
    ({"short_conv_kernel_size": 1}, "short_conv_kernel_size"),
    ({"num_head": 4}, "linear_attn_config"),
    ({"gate_lower_bound": "x"}, "linear_attn_config.gate_lower_bound"),
    ({"use_full_rank_gate": "no"}, "linear_attn_config.use_full_rank_gate"),
    ({"kda_layers": None, "full_attn_layers": [1]}, "linear_attn_config.kda_layers"),
    ({"kda_layers": ["a"], "full_attn_layers": [1]}, "linear_attn_config.kda_layers"),
]


@pytest.mark.parametrize(("fields", "name"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_value_names_its_field(fields, name):
    with pytest.raises(ValueError, match=name):
        load_preset("tiny", **fields)


@pytest.mark.parametrize(("fields", "name"), WRONG_LISTS, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_linear_attention_names_its_field(fields, name):
    with pytest.raises(ValueError, match=name):
        MoeLcTextConfig(num_hidden_layers=5, num_attention_heads=4, linear_attn_config=fields)


def test_full_attention_layers_of_27_with_lists_without_and_reloaded(tmp_path):
    expected = [3, 7, 11, 15, 19, 23, 26]
    with_lists = load_preset("kimi-linear-48b-a3b")
    without = MoeLcTextConfig(num_hidden_layers=27)
    without.save_pretrained(tmp_path)
    reloaded = MoeLcTextConfig.from_pretrained(tmp_path)
    for config in (with_lists, without, reloaded):
        assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == expected


@pytest.mark.parametrize("name", preset_names())
def test_preset_survives_a_round_trip(name, tmp_path):
    config = load_preset(name)
    config.save_pretrained(tmp_path)
    assert MoeLcTextConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_unknown_preset_names_the_known_ones():
    with pytest.raises(ValueError, match="kimi-k3"):
        load_preset("kimi-k4")


@pytest.mark.parametrize("load", (load_preset, load_multimodal_preset))
def test_fields_that_there_are_not_are_named(load):
    with pytest.raises(ValueError, match="hidden_sizee: expected a field of the configuration, got an unknown one"):
        load("tiny", hidden_sizee=3)
    assert load("tiny", attn_implementation="eager", mlp_bias=False)._attn_implementation in ("eager", None)


def test_fields_that_a_tower_has_not_are_named():
    with pytest.raises(ValueError, match="vision_config.patch_sizee: expected a field"):
        load_multimodal_preset("tiny", vision_config={"patch_sizee": 14})


def test_released_folder_tells_its_layout(tmp_path):
    text = json.loads(load_preset("tiny").to_json_string(use_diff=False)) | {"model_type": "kimi_linear"}
    del text["checkpoint_layout"]
    for layout, whole in (("kimi_linear", text), ("kimi_k3", {"model_type": "kimi_k3", "text_config": text})):
        (tmp_path / "config.json").write_text(json.dumps(whole))
        config = MoeLcTextConfig.from_pretrained(tmp_path)
        assert (config.model_type, config.checkpoint_layout) == ("moe_lc_text", layout)


def test_aliases_of_transformers_read_and_write_the_released_names():
    config = load_preset("tiny", num_experts_per_tok=3, n_shared_experts=2)
    assert (config.num_experts_per_token, config.num_shared_experts) == (3, 2)
    assert (config.num_local_experts, config.norm_topk_prob) == (8, True)
