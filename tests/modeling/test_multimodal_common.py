"""The tests that transformers runs over each of its own vision-language models, run over ours."""

import runpy
import unittest
from fnmatch import fnmatch
from pathlib import Path
from unittest.mock import patch

import torch

from modeling_moe_lc import MoeLcConfig, MoeLcForConditionalGeneration, MoeLcModel
from modeling_moe_lc.configuration.presets import load_multimodal_preset


text = runpy.run_path(str(Path(__file__).with_name("test_transformers_common.py")))
common, config_common = text["common"], text["config_common"]

SKIPPED = {name: reason for name, reason in text["SKIPPED"].items() if reason != text["COMPOSITE"]} | {
    "test_sdpa_can_dispatch_non_composite_models": "a model with sub-models",
    "test_tp_plan_matches_params": "one plan serves every text config: test_transformers_common.py",
}


class ModelTester:
    """A tower of two blocks before a dense KDA layer and a sparse MLA layer; one picture in every row."""

    batch_size, seq_length, is_training = 3, 7, True
    vision_config = {"num_hidden_layers": 2}
    pictures = True

    def __init__(self):
        config = self.get_config().text_config
        self.num_hidden_layers, self.hidden_size = config.num_hidden_layers, config.hidden_size
        self.num_attention_heads, self.vocab_size = config.num_attention_heads, config.vocab_size

    def get_config(self) -> MoeLcConfig:
        linear = {"num_heads": 4, "head_dim": 16, "use_full_rank_gate": True, "gate_lower_bound": -5.0}
        # Tests that shrink the vocabulary go down to 10 words.
        return load_multimodal_preset(
            "tiny", num_hidden_layers=2, attn_res_block_size=2, linear_attn_config=linear, media_placeholder_token_id=9
        )

    def prepare_config_and_inputs_for_common(self):
        config, device = self.get_config(), common.torch_device
        ids = torch.randint(10, config.text_config.vocab_size, (self.batch_size, self.seq_length), device=device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if not self.pictures:
            return config, inputs
        ids[:, 1:3] = config.media_placeholder_token_id
        grids = torch.tensor([[1, 2, 4]] * self.batch_size, device=device)
        pixels = torch.randn(int(grids.prod(-1).sum()), 3, 4, 4, device=device)
        return config, {**inputs, "pixel_values": pixels, "grid_thws": grids}


class TestMultimodal(common.ModelTesterMixin, unittest.TestCase):
    all_model_classes = (MoeLcModel, MoeLcForConditionalGeneration)
    _is_composite = True
    test_can_init_all_missing_weights_before_2023 = True  # our files name no year
    skipTest = text["TestKimiK3"].skipTest

    def setUp(self):
        self.model_tester = ModelTester()
        # This test cuts every input to the size of the batch, patches too; test_vision.py compares backends of the tower.
        self.model_tester.pictures = "eager_matches_sdpa" not in self._testMethodName
        self.config_tester = config_common.ConfigTester(
            self, config_class=MoeLcConfig, has_text_modality=False, media_placeholder_token_id=163000
        )
        mappings = {
            "MODEL_MAPPING_NAMES": "MoeLcModel",
            "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "MoeLcForConditionalGeneration",
        }
        for mapping, name in mappings.items():
            self.enterContext(patch.dict(getattr(common, mapping), {MoeLcConfig.model_type: name}))

    def _image_features_prepare_config_and_inputs(self):
        """The original would leave out `grid_thws`."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        return config, {key: inputs[key] for key in ("pixel_values", "grid_thws")}

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_attention_outputs(self):
        """One map for every full-attention layer; the original expects one for every layer."""
        for model_class in self.all_model_classes:
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            model = model_class._from_config(config, attn_implementation="eager").to(common.torch_device).eval()
            assert model(**inputs).attentions is None
            (weights,) = model(**inputs, output_attentions=True).attentions
            assert weights.shape == (3, config.text_config.num_attention_heads, 7, 7)
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


for name in text["TESTS"]:
    reason = next((SKIPPED[pattern] for pattern in SKIPPED if fnmatch(name, pattern)), None)
    if reason not in (None, text["DEVICE"], text["PACKAGE"]):
        setattr(TestMultimodal, name, unittest.skip(reason)(getattr(TestMultimodal, name)))
