"""The exported processor is the same one where the package is missing, and again when it is saved from there."""

import subprocess
import sys
import textwrap

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from modeling_moe_lc import MoeLcForConditionalGeneration, MoeLcImageProcessor, MoeLcProcessor
from modeling_moe_lc.configuration.presets import load_multimodal_preset
from modeling_moe_lc.conversion.export_remote_code import export_remote_code


PROGRAM = """
    import sys

    sys.modules |= {"modeling_moe_lc": None, "triton": None}
    import torch
    from PIL import Image
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    folder, again = sys.argv[1:]
    expected = load_file(f"{folder}/../expected.safetensors")
    picture = Image.open(f"{folder}/../picture.png")
    content = [{"type": "image", "image": picture}, {"type": "video", "video": [picture] * 3, "fps": 1.0}]
    for name in (folder, again):
        processor = AutoProcessor.from_pretrained(name, trust_remote_code=True)
        assert type(processor).__module__.startswith("transformers_modules.")
        features = processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=True, return_dict=True, return_tensors="pt"
        )
        assert set(features) == {*expected} - {"logits"}
        for key, value in features.items():
            assert torch.equal(value, expected[key]), key
        images = AutoImageProcessor.from_pretrained(name, trust_remote_code=True)
        assert images.to_dict() == processor.image_processor.to_dict()
        if name == folder:
            processor.save_pretrained(again)
    model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        assert torch.equal(model(**features).logits, expected["logits"])
    """


@pytest.fixture
def checkpoint(tokenizer, tmp_path):
    processor = MoeLcProcessor(MoeLcImageProcessor(patch_size=4, in_patch_limit=60), tokenizer)
    config = load_multimodal_preset("tiny", media_placeholder_token_id=processor.image_token_id)
    model = MoeLcForConditionalGeneration(config).eval()
    folder = tmp_path / "checkpoint"
    for part in (model, processor):
        part.save_pretrained(folder)
    picture = Image.linear_gradient("L").resize((50, 30))
    picture.save(tmp_path / "picture.png")
    content = [{"type": "image", "image": picture}, {"type": "video", "video": [picture] * 3, "fps": 1.0}]
    features = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        features["logits"] = model(**features).logits
    save_file({name: value.contiguous() for name, value in features.items()}, tmp_path / "expected.safetensors")
    return folder


def test_exported_processor_works_without_the_package(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    out = export_remote_code(checkpoint, tmp_path / "exported")
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), out, tmp_path / "again"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_without_a_processor_exports_none(checkpoint, tmp_path):
    (checkpoint / "processor_config.json").unlink()
    out = export_remote_code(checkpoint, tmp_path / "exported")
    assert not (out / "processing_moe_lc.py").exists() and (out / "modeling_moe_lc_vl.py").exists()
