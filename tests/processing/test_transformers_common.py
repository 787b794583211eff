"""The tests that transformers runs over each of its own processors, run over ours."""

import runpy
import sys
import tempfile
import unittest
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import transformers
from packaging.version import Version
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from modeling_moe_lc import MoeLcImageProcessor, MoeLcProcessor
from modeling_moe_lc.training.tokenizer import train_tokenizer


def offline(url: str) -> str:
    """Stands for a module that the distribution leaves out: a picture of ours for each picture of the Hub."""
    path = Path(PICTURES.name, Path(url).name)
    if path.suffix == ".png" and not path.exists():
        odd["card"]((120, 80)).save(path)
    return str(path)


PICTURES = tempfile.TemporaryDirectory()
odd = runpy.run_path(str(Path(__file__).with_name("odd_pictures.py")))
sys.modules.setdefault("fetch_hub_objects_for_ci", ModuleType("fetch_hub_objects_for_ci")).url_to_local_path = offline
source = runpy.run_path(str(Path(__file__).parents[1] / "transformers_source.py"))
images, processing = source["common_tests"]("test_image_processing_common", "test_processing_common")

ONE_BACKEND = "Pillow is the only backend"
AUDIO = "no audio"
VIDEO = "frames are read by the image processor, there is no video processor: see test_processing.py"
SKIPPED = {  # test or pattern of tests -> reason
    "test_backends_equivalence*": ONE_BACKEND,
    "test_can_compile_torchvision_backend": ONE_BACKEND,
    "test_fast_image_processor_explicit_none_preserved": ONE_BACKEND,
    "test_new_models_require_torchvision_backend": ONE_BACKEND,
    "test_save_load_backends*": ONE_BACKEND,
    "test_pil_can_run_without_torchvision": "slow, and there is no torchvision beside these tests",
    "test_call_numpy_4_channels": "patches have three channels; four are RGB with transparency, see test_pictures.py",
    "test_image_processor_preprocess_arguments": "options are checked against their types, not against a list of names",
    "test_override_instance_attributes_does_not_affect_other_instances": "no size",
    "test_apply_chat_template_audio_*": AUDIO,
    "test_chat_template_audio_*": AUDIO,
    "test_get_num_multimodal_tokens_matches_processor_call_audio": AUDIO,
    "test_*_audio": AUDIO,
    "test_apply_chat_template_decoded_video_*": VIDEO,
    "test_apply_chat_template_video_*": VIDEO,
    "test_get_num_multimodal_tokens_matches_processor_call_video": VIDEO,
    "test_*_videos": VIDEO,
    "test_processor_with_multiple_inputs": "gives no videos for its placeholder of a video",
    "test_replacement_offsets": "pictures and videos are replaced together, in the order of the prompt",
}

# Older tests have other names, and skip more by themselves.
LIST_IS_COMPLETE = Version(transformers.__version__) >= Version("5.23")


def names_of(mixin: type) -> list[str]:
    return [name for name, value in vars(mixin).items() if name.startswith("test_") and callable(value)]


def reason_to_skip(name: str) -> str | None:
    return next((reason for pattern, reason in SKIPPED.items() if fnmatch(name, pattern)), None)


def listed(test_class: type) -> type:
    """The class, with the tests of its mixin left out that are in the list."""
    for name in names_of(test_class.__mro__[1]):
        if reason_to_skip(name) is not None:
            setattr(test_class, name, unittest.skip(reason_to_skip(name))(getattr(test_class, name)))
    return test_class


class Strict(unittest.TestCase):
    def skipTest(self, reason):
        if LIST_IS_COMPLETE:
            self.fail(f"skips itself, but is not in SKIPPED: {reason}")
        super().skipTest(reason)


class Pictures(images.ImageProcessingTester):
    def __init__(self):
        self.batch_size, self.num_channels, self.min_resolution, self.max_resolution = 3, 3, 30, 100

    def prepare_image_processor_dict(self):
        return {"in_patch_limit": 20, "merge_kernel_size": 1}


@listed
class TestImageProcessor(images.ImageProcessingTestMixin, Strict):
    image_processing_classes = {"pil": MoeLcImageProcessor}
    image_processor_dict = Pictures().prepare_image_processor_dict()
    test_cast_dtype = True

    def setUp(self):
        self.image_processor_tester = Pictures()
        # Versions before 5.23 hide it in `transformers` itself where there is no torchvision.
        self.enterContext(patch.object(images, "AutoImageProcessor", AutoImageProcessor))

    def check_calls(self, **kind):
        """As the originals, for patches behind one another."""
        processor = MoeLcImageProcessor(**self.image_processor_dict)
        pictures = self.image_processor_tester.prepare_image_inputs(**kind)
        for given in (pictures[0], pictures):
            features = processor(given, return_tensors="pt")
            assert len(features.grid_thws) == (len(given) if isinstance(given, list) else 1)
            assert features.pixel_values.shape == (features.grid_thws.prod(1).sum(), 3, 14, 14)

    def test_call_pil(self):
        self.check_calls()

    def test_call_numpy(self):
        self.check_calls(numpify=True)

    def test_call_pytorch(self):
        self.check_calls(torchify=True)


@listed
class TestProcessor(processing.ProcessorTesterMixin, Strict):
    processor_class = MoeLcProcessor
    images_input_name = "grid_thws"  # as long as there are pictures

    @classmethod
    def _setup_image_processor(cls):
        return MoeLcImageProcessor()

    @classmethod
    def _setup_tokenizer(cls):
        return train_tokenizer(["lower newer upper older longer string"] * 9, 300, 4096)

    def _check_modality_outputs(self, inputs, modality):
        assert inputs["pixel_values"][0][0].mean() <= 0


@pytest.mark.skipif(not LIST_IS_COMPLETE, reason="the list follows the newest supported transformers")
def test_what_is_listed_exists():
    names = [*names_of(images.ImageProcessingTestMixin), *names_of(processing.ProcessorTesterMixin)]
    assert [pattern for pattern in SKIPPED if not any(fnmatch(name, pattern) for name in names)] == []
