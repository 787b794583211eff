"""The tests that transformers runs over each of its own models, run over ours."""

import runpy
import unittest
from pathlib import Path

import torch

from modeling_moe_lc import MoeLcForCausalLM, MoeLcTextConfig, MoeLcTextModel
from modeling_moe_lc.configuration.presets import load_preset


source = runpy.run_path(str(Path(__file__).parents[1] / "transformers_source.py"))
common, config_common = source["common_tests"]("test_modeling_common", "test_configuration_common")


class ModelTester:
    batch_size, seq_length, is_training = 3, 7, True

    def __init__(self):
        config = self.get_config()
        self.num_hidden_layers, self.hidden_size = config.num_hidden_layers, config.hidden_size
        self.num_attention_heads, self.vocab_size = config.num_attention_heads, config.vocab_size

    def get_config(self):
        linear = {"num_heads": 4, "head_dim": 16, "use_full_rank_gate": True, "gate_lower_bound": -5.0}
        return load_preset("tiny", num_hidden_layers=2, attn_res_block_size=2, linear_attn_config=linear)

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        shape = (self.batch_size, self.seq_length)
        ids = torch.randint(3, config.vocab_size, shape)
        return config, {"input_ids": ids, "attention_mask": torch.ones(shape, dtype=torch.int64)}


class TestCommon(common.ModelTesterMixin, unittest.TestCase):
    all_model_classes = (MoeLcTextModel, MoeLcForCausalLM)
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = ModelTester()
        self.config_tester = config_common.ConfigTester(self, config_class=MoeLcTextConfig, hidden_size=64)

    def test_config(self):
        self.config_tester.run_common_tests()
