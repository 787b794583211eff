"""What others got wrong when they converted, saved or loaded such models, by its number in the list of known problems.

The table says which tests would notice each; those that stand nowhere else are here.
"""

import ast
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.configuration.presets import load_preset


TESTS = Path(__file__).parents[1]
FIXTURES = TESTS / "fixtures"
WHERE = {
    "40 trained router bias lost": [
        "conversion/test_convert.py::test_40_47_full_precision_values_survive_every_dtype",
        "modeling/test_disk.py::test_model_made_from_scratch_goes_round",
    ],
    "42 repeated or wrong prefixes": [
        "modeling/test_multimodal_disk.py::test_released_folder_goes_round_twice",
        "modeling/test_multimodal_disk.py::test_auto_classes_open_a_released_folder_with_our_code",
        "conversion/test_traps.py::test_42_the_text_of_a_multimodal_folder_has_its_own_names",
    ],
    "43 fused and separate experts": [
        "conversion/test_convert_safety.py::test_fused_experts_are_not_taken_for_missing_ones",
        "modeling/test_disk.py::test_a_missing_expert_is_refused",
        "conversion/test_traps.py::test_43_fused_and_separate_experts_load_the_same",
    ],
    "44 transposed experts": [
        "conversion/test_convert.py::test_44_asymmetric_experts_are_not_transposed",
        "conversion/test_traps.py::test_44_experts_on_disk_compute_what_their_names_say",
    ],
    "45 a name that begins like another": [
        "conversion/test_convert_safety.py::test_names_that_begin_like_another_are_other_names",
        "modeling/test_mxfp4_loading.py::test_released_folder_goes_round_twice",
    ],
    "46 rates of minus infinity": [
        "modeling/test_training_forward.py::test_starting_values_are_as_published_and_finite",
        "conversion/test_traps.py::test_46_rates_start_the_same_in_every_dtype",
    ],
    "47 rates rounded to BF16": [
        "conversion/test_convert.py::test_40_47_full_precision_values_survive_every_dtype",
        "modeling/test_precision.py::test_casts_keep_fp32_tensors_bit_equal",
        "modeling/test_precision.py::test_rounding_the_rates_would_show",
    ],
    "48 gates computed in half precision": ["conversion/test_traps.py::test_48_strong_gates_survive_half_precision"],
    "49 packed experts taken for plain ones, others packed": [
        "modeling/test_mxfp4_loading.py::test_everything_is_found_and_nothing_is_left_packed",
        "modeling/test_mxfp4_loading.py::test_the_ignore_list_decides_nothing",
        "conversion/test_convert.py::test_dequantised_to_the_bit_and_nothing_else_changes",
        "kernels/test_mxfp4.py::test_quantiser_against_a_scalar_implementation",
    ],
    "50 codes lost when quantised again": [
        "kernels/test_mxfp4.py::test_requantised_bytes_are_the_released_ones",
        "modeling/test_mxfp4_loading.py::test_released_folder_goes_round_twice",
        "conversion/test_converted_fixtures.py::test_mxfp4_there_and_back_twice_has_the_same_values_and_logits",
    ],
    "51 shapes of convolutions": [
        "conversion/test_convert.py::test_51_both_shapes_of_convolutions_and_every_form_of_a_log_are_read",
        "modeling/test_disk.py::test_every_released_shape_of_conv_and_a_log_reads_the_same",
        "modeling/test_disk.py::test_a_shape_that_nobody_released_is_refused",
    ],
    "52 layer lists": [
        "conversion/test_convert.py::test_52_layer_lists_stay_one_based_on_disk",
        "configuration/test_configuration.py::test_full_attention_layers_of_27_with_lists_without_and_reloaded",
        "configuration/test_configuration.py::test_wrong_linear_attention_names_its_field",
    ],
    "padding of A_log": [
        "conversion/test_convert_safety.py::test_the_complete_list_of_what_is_wrong_comes_before_anything_is_written",
        "modeling/test_disk.py::test_a_shape_that_nobody_released_is_refused",
        "modeling/test_disk.py::test_layout_decides_shapes_and_loses_nothing",
    ],
}


@pytest.mark.parametrize("trap", WHERE)
def test_every_trap_has_a_test(trap):
    for file, _, name in (test.partition("::") for test in WHERE[trap]):
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def test_42_the_text_of_a_multimodal_folder_has_its_own_names(tmp_path):
    released = load_file(FIXTURES / "k3-vision-tiny" / "model.safetensors")
    text = {n.removeprefix("language_model."): t for n, t in released.items() if n.startswith("language_model.")}
    source = FIXTURES / "k3-vision-tiny"
    for trip in ("1", "2"):
        model, info = MoeLcForCausalLM.from_pretrained(source, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        source = tmp_path / trip
        model.save_pretrained(source)
        saved = load_file(source / "model.safetensors")
        assert saved.keys() == text.keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in text.items())


def test_43_fused_and_separate_experts_load_the_same(tmp_path):
    model = MoeLcForCausalLM.from_pretrained(FIXTURES / "kimi-linear-tiny")
    model.save_pretrained(tmp_path / "separate")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    fused = load_file(tmp_path / "fused" / "model.safetensors")
    assert "model.layers.1.block_sparse_moe.experts.gate_up_proj" in fused
    loaded = [MoeLcForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("separate", "fused")]
    for name, tensor in model.state_dict().items():
        assert all(torch.equal(other[name], tensor) for other in loaded), name


@torch.no_grad()
def test_44_experts_on_disk_compute_what_their_names_say(tmp_path):
    widths = {"routed_expert_hidden_size": 48, "moe_intermediate_size": 20, "num_experts": 4}
    widths |= {"hidden_act": "silu", "activation_situ_beta": None, "activation_situ_linear_beta": None}
    model = MoeLcForCausalLM(load_preset("tiny", **widths, num_experts_per_token=1)).eval()
    model.save_pretrained(tmp_path)
    saved, x = load_file(tmp_path / "model.safetensors"), torch.randn(9, 48)
    experts = model.model.layers[1].block_sparse_moe.experts
    for expert in range(4):
        w1, w2, w3 = (saved[f"model.layers.1.block_sparse_moe.experts.{expert}.w{n}.weight"] for n in (1, 2, 3))
        assert w1.shape == (20, 48) and w2.shape == (48, 20)
        expected = F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
        found = experts(x, torch.full((9, 1), expert), torch.ones(9, 1))
        assert (found - expected).norm() / expected.norm() < 1e-6


def test_46_rates_start_the_same_in_every_dtype():
    linear = {"num_heads": 32, "head_dim": 2, "kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    config = load_preset(
        "nano-kimi-linear", num_hidden_layers=4, linear_attn_config=linear, num_experts=8, vocab_size=64
    )
    rates = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = MoeLcForCausalLM._from_config(config, dtype=dtype)
        decays = [layer.self_attn.decay for layer in model.model.layers[:3]]
        found = []
        for seed in range(50):
            torch.manual_seed(seed)
            for decay in decays:
                model._init_weights(decay)
            found.append(torch.stack([decay.A_log for decay in decays]).detach())
        rates[dtype] = torch.stack(found)
        assert rates[dtype].dtype == torch.float32 and rates[dtype].isfinite().all()
        assert rates[dtype].exp().min() >= 1 and rates[dtype].exp().max() <= 16
    assert torch.equal(rates[torch.bfloat16], rates[torch.float32])
    with torch.device("meta"):
        empty = MoeLcForCausalLM(config).bfloat16()
    decay = empty.to_empty(device="cpu").model.layers[0].self_attn.decay
    empty._init_weights(decay)
    assert decay.A_log.dtype == torch.float32 and decay.A_log.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_48_strong_gates_survive_half_precision(lower_bound):
    linear = {
        "num_heads": 2,
        "head_dim": 16,
        "kda_layers": [1],
        "full_attn_layers": [2],
        "gate_lower_bound": lower_bound,
    }
    torch.manual_seed(0)
    config = load_preset(
        "nano-kimi-linear", num_hidden_layers=2, linear_attn_config=linear, num_experts=8, vocab_size=64
    )
    layer = MoeLcForCausalLM(config).model.layers[0].self_attn
    x = torch.randn(1, 200, config.hidden_size).half()
    layer.decay.A_log.fill_(torch.log(torch.tensor(16.0)))
    gates = layer.f_b_proj(layer.f_a_proj(x.float()))
    layer.f_b_proj.weight.mul_(30 / gates.abs().max())
    wide = layer(x.float())[0]
    narrow = layer.half()(x)[0].float()
    assert narrow.isfinite().all()
    assert torch.corrcoef(torch.stack([wide.flatten(), narrow.flatten()]))[0, 1] > 0.999
