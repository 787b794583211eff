"""Conversations, and pictures in training and generation, on a GPU: the Triton kernels learn and say what the references do."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.training.cli import main
from modeling_moe_lc.training.run_log import STEP, read_log, records_of


pytestmark = pytest.mark.gpu
chats, images = (
    SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name(f"{name}_documents.py"))))
    for name in ("chat", "image")
)
BACKENDS = ("moe_lc_triton", "moe_lc_reference")
KDA = load_preset("tiny").linear_attn_config | {"head_dim": 64}  # BF16 kernels take no narrower ones
LIMIT = 2e-2
PICTURES = """
model: {base: BASE, vision: {}, dtype: bfloat16}
data: {folders: {pictures: FOLDER}, validation_tokens: 512}
tokens_per_step: 768
stages: [{name: only, sequence_length: 192, tokens: 3072, micro_batch: 1}]
optimizer: {learning_rate: 1e-3}
logging: {every_steps: 1}
checkpoints: {every_minutes: null}
"""


def losses(command, recipe, out, *options):
    found = []
    for backend in BACKENDS:
        run = out / backend
        arguments = [command, str(recipe), "--output_dir", str(run), "--model.attn_implementation", backend, *options]
        assert main(arguments) == 0
        found.append([record["loss"] for record in records_of(read_log(run), STEP)])
    return found


@pytest.mark.parametrize("adapter", [True, False], ids=["an adapter", "all weights"])
def test_conversations(adapter, tmp_path):
    recipe = chats.make(tmp_path, linear_attn_config=KDA)
    options = (
        "--model.dtype",
        "bfloat16",
        "--optimizer.learning_rate",
        "1e-3",
        *(() if adapter else ("--adapter", "null")),
    )
    ours, expected = losses("finetune", recipe, tmp_path, *options)
    assert len(ours) == 4
    assert ours == pytest.approx(expected, rel=LIMIT)


def test_pictures_in_training_and_generation(tmp_path):
    source = images.write_source(tmp_path / "source", 12)
    assert images.prepare(source, tmp_path / "data") == 0
    config = images.write_base(tmp_path / "base") / "config.json"
    fields = json.loads(config.read_text())
    fields["text_config"]["linear_attn_config"] |= {"head_dim": 64}
    config.write_text(json.dumps(fields))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(PICTURES.replace("BASE", str(tmp_path / "base")).replace("FOLDER", str(tmp_path / "data")))
    ours, expected = losses("train", recipe, tmp_path)
    assert len(ours) == 4
    assert ours == pytest.approx(expected, rel=LIMIT)

    folder = tmp_path / BACKENDS[0] / "models" / "only"
    inputs = AutoProcessor.from_pretrained(folder)(
        images=[images.picture(0)], text="<|media_pad|> is", return_tensors="pt"
    ).to("cuda", torch.bfloat16)
    ours, expected = (
        AutoModelForImageTextToText.from_pretrained(folder, attn_implementation=backend, dtype=torch.bfloat16).to(
            "cuda"
        )
        for backend in BACKENDS
    )
    with torch.no_grad():
        logits, theirs = (model(**inputs).logits.float() for model in (ours, expected))
    assert (logits - theirs).norm() < LIMIT * theirs.norm()
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    launched, replayed = (ours.generate(**inputs, **settings, disable_compile=plain) for plain in (True, False))
    assert torch.equal(launched, replayed)
