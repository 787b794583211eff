"""The tests that transformers runs over each of its own models, run over ours."""

import re
import runpy
import unittest
from fnmatch import fnmatch
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.conversion_mapping import get_model_conversion_mapping

from modeling_moe_lc import MoeLcForCausalLM, MoeLcTextConfig, MoeLcTextModel
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.released_experts import Mxfp4Converter
from modeling_moe_lc.released_names import ReadAs


source = runpy.run_path(str(Path(__file__).parents[1] / "transformers_source.py"))
common, config_common = source["common_tests"]("test_modeling_common", "test_configuration_common")

DEVICE = "needs a CUDA device, or more than one"
PACKAGE = "needs a package that is no dependency: flash-attn, deepspeed or kernels"
ROPE = "no rotary positions"
COMPOSITE = "one model without sub-models"
SKIPPED = {  # test or pattern of tests -> reason; what needs a device or a package skips itself where that is missing
    "test_can_load_with_*": DEVICE,
    "test_cpu_offload": DEVICE,
    "test_disk_offload_*": DEVICE,
    "test_flex_attention_with_grads": DEVICE,
    "test_model_parallelism": DEVICE,
    "test_sdpa_can_compile_dynamic": DEVICE,
    "test_sdpa_can_dispatch_on_flash": DEVICE,
    "test_torch_compile_for_training": DEVICE,
    "test_flash_attn_*": PACKAGE,
    "test_kernels_can_load_without_crashing": PACKAGE,
    "test_resize_*_with_deepspeed*": PACKAGE,
    "test_model_rope_*": ROPE,
    "test_vision_axial_rope": ROPE,
    "test_attn_implementation_composite_models": COMPOSITE,
    "test_can_set_attention_dynamically_composite_model": COMPOSITE,
    "test_internal_model_config_and_subconfig_are_same": COMPOSITE,
    "test_sdpa_can_dispatch_composite_models": COMPOSITE,
    "test_encoder_decoder_loss_no_double_shift": "no encoder",
    "test_resize_position_vector_embeddings": "no position embeddings",
    "test_sliding_window_mask": "no sliding window",
    "test_generation_tester_mixin_inheritance": "the distribution leaves GenerationTesterMixin out; see test_generation.py",
    "test_moe_models_record_router_logits": (
        "looks for the experts in the file of the model classes, ours are in latent_moe.py; that router logits are "
        "recorded and returned, test_output_router_logits_from_config shows"
    ),
}

# Older tests have fewer names, and skip more by themselves.
LIST_IS_COMPLETE = Version(transformers.__version__) >= Version("5.23")
TESTS = [name for name, value in vars(common.ModelTesterMixin).items() if name.startswith("test_") and callable(value)]


def reason_to_skip(name: str) -> str | None:
    return next((reason for pattern, reason in SKIPPED.items() if fnmatch(name, pattern)), None)


class ModelTester:
    """A dense KDA layer and a sparse MLA layer: every kind of sublayer once."""

    batch_size, seq_length, is_training = 3, 7, True

    def __init__(self):
        config = self.get_config()
        self.num_hidden_layers, self.hidden_size = config.num_hidden_layers, config.hidden_size
        self.num_attention_heads, self.vocab_size = config.num_attention_heads, config.vocab_size

    def get_config(self) -> MoeLcTextConfig:
        linear = {"num_heads": 4, "head_dim": 16, "use_full_rank_gate": True, "gate_lower_bound": -5.0}
        return load_preset("tiny", num_hidden_layers=2, attn_res_block_size=2, linear_attn_config=linear)

    def prepare_config_and_inputs_for_common(self):
        config, shape, device = self.get_config(), (self.batch_size, self.seq_length), common.torch_device
        ids = torch.randint(3, config.vocab_size, shape, device=device)
        return config, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class TestKimiK3(common.ModelTesterMixin, unittest.TestCase):
    all_model_classes = (MoeLcTextModel, MoeLcForCausalLM)
    test_can_init_all_missing_weights_before_2023 = True  # our files name no year
    model_tester_class = ModelTester

    def setUp(self):
        self.model_tester = self.model_tester_class()
        fields = self.model_tester.get_config().to_diff_dict()
        self.config_tester = config_common.ConfigTester(self, config_class=MoeLcTextConfig, **fields)
        model_type = MoeLcTextConfig.model_type
        self.enterContext(patch.dict(common.MODEL_MAPPING_NAMES, {model_type: "MoeLcTextModel"}))
        self.enterContext(patch.dict(common.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, {model_type: "MoeLcForCausalLM"}))

    def skipTest(self, reason):
        if LIST_IS_COMPLETE:
            self.fail(f"skips itself, but is not in SKIPPED: {reason}")
        super().skipTest(reason)

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_attention_outputs(self):
        """One map for every full-attention layer; the original expects one for every layer."""
        tokens = self.model_tester.seq_length
        for model_class in self.all_model_classes:
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            shape = (self.model_tester.batch_size, config.num_attention_heads, tokens, tokens)
            model = model_class._from_config(config, attn_implementation="eager").to(common.torch_device).eval()
            plain, asked = model(**inputs), model(**inputs, output_attentions=True)
            config.output_attentions = True
            both = model(**inputs, output_hidden_states=True)
            assert plain.attentions is None
            assert len(plain) + 1 == len(asked) == len(model(**inputs)) == len(both) - 1
            for outputs in (asked, both):
                assert len(outputs.attentions) == config.layer_types.count("full_attention")
                for weights in outputs.attentions:
                    assert weights.shape == shape
                    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))

    def test_reverse_loading_mapping(self):
        """Exempt are what is read and never written, a prefix and packed experts, and the names of a term that the config lacks."""

        def mapping(model, **kwargs):
            residuals = model.config.attn_res_block_size is not None
            return [
                conversion
                for conversion in get_model_conversion_mapping(model, **kwargs)
                if not isinstance(conversion, (ReadAs, Mxfp4Converter))
                and (residuals or "_res_" not in conversion.source_patterns[0])
            ]

        with patch.object(common, "get_model_conversion_mapping", mapping):
            super().test_reverse_loading_mapping()

    def test_tp_plan_matches_params(self):
        """One plan serves every config: each entry names something in one of the two; the original looks in one."""
        plan = set(MoeLcTextConfig.base_model_tp_plan)
        for tester in (ModelTester(), KimiLinearTester()):
            model = MoeLcTextModel(tester.get_config())
            plan -= {re.sub(r"\.\d+", ".*", name) for name, _ in [*model.named_modules(), *model.named_parameters()]}
        assert plan == set()


for name in TESTS:
    if reason_to_skip(name) not in (None, DEVICE, PACKAGE):
        setattr(TestKimiK3, name, unittest.skip(reason_to_skip(name))(getattr(TestKimiK3, name)))


class KimiLinearTester(ModelTester):
    def get_config(self) -> MoeLcTextConfig:
        return load_preset(
            "nano-kimi-linear",
            num_hidden_layers=2,
            vocab_size=512,
            hidden_size=64,
            num_attention_heads=4,
            linear_attn_config={"num_heads": 2, "head_dim": 16},
            num_experts=8,
        )


class TestKimiLinear(TestKimiK3):
    model_tester_class = KimiLinearTester


@pytest.mark.skipif(not LIST_IS_COMPLETE, reason="the list follows the newest supported transformers")
def test_what_is_skipped_is_listed_and_what_is_listed_exists():
    assert [pattern for pattern in SKIPPED if not any(fnmatch(name, pattern) for name in TESTS)] == []
    unable = [name for name in TESTS if getattr(getattr(common.ModelTesterMixin, name), "__unittest_skip__", False)]
    assert [name for name in unable if reason_to_skip(name) is None] == []
