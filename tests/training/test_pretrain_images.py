"""The loop with pictures: it resumes to the bit, packs as if documents were apart, and refuses what does not fit."""

import itertools
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForImageTextToText, AutoProcessor

from modeling_moe_lc import MoeLcForCausalLM, MoeLcForConditionalGeneration
from modeling_moe_lc.training.batches import Batches, model_inputs
from modeling_moe_lc.training.checkpoint_files import latest, step_folders
from modeling_moe_lc.training.cli import main
from modeling_moe_lc.training.collate_images import CollateImages, CollatePacks, MediaPack, documents_of
from modeling_moe_lc.training.packing import IGNORED, Pack
from modeling_moe_lc.training.processes import processes
from modeling_moe_lc.training.recipe import load_recipe
from modeling_moe_lc.training.run_log import read_log, records_of
from modeling_moe_lc.training.start import build_model, fill_model, model_config


made = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("image_documents.py"))))
RECIPE = """
model: {base: BASE, vision: {}, dtype: float64, activation_checkpointing: false, loss_chunk_size: 100}
data: {folders: {pictures: PICTURES, text: TEXT}, validation_tokens: 512}
tokens_per_step: 768
stages: [{name: only, sequence_length: 192, tokens: 2304, micro_batch: 1}]
optimizer: {learning_rate: 1e-2}
logging: {every_steps: 1}
checkpoints: {every_minutes: null}
"""
TIMES = {"seconds", "tokens_per_second", "mfu"}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Pictures, and text of the same tokenizer."""
    folder = tmp_path_factory.mktemp("folders")
    source = made.write_source(folder / "source", 12)
    assert made.prepare(source, folder / "pictures") == 0
    lines = "".join(f'{{"text": "line {number} of {"many " * 5}"}}\n' for number in range(40))
    (folder / "lines.jsonl").write_text(lines)
    options = ["--tokenizer", str(folder / "pictures" / "tokenizer"), "--validation-share", "0.3", "--workers", "1"]
    assert main(["prepare", str(folder / "lines.jsonl"), "--out", str(folder / "text"), *options]) == 0
    made.write_base(folder / "base")
    return folder


@pytest.fixture(scope="module")
def recipe(folders):
    text = RECIPE
    for name in ("base", "pictures", "text"):
        text = text.replace(name.upper(), str(folders / name))
    path = folders / "recipe.yaml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def call(recipe):
    return lambda out, *overrides: main(["train", str(recipe), "--output_dir", str(out), *overrides])


@pytest.fixture(scope="module")
def whole(call, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    assert call(out) == 0
    return out


def contents(run):
    dcp_to_torch_save(latest(run / "checkpoints"), run / "contents.pt")
    return torch.load(run / "contents.pt", weights_only=False)


def test_a_run_with_pictures_leaves_a_model_that_others_load(whole):
    steps = records_of(read_log(whole), "step")
    assert len(steps) == 3 and steps[-1]["loss"] < steps[0]["loss"]
    [validation] = records_of(read_log(whole), "validation")
    assert validation["losses"].keys() == {"pictures", "text"}
    folder = whole / "models" / "only"
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    assert isinstance(model, MoeLcForConditionalGeneration)
    inputs = processor(images=[made.picture(0)], text="<|media_pad|>", return_tensors="pt")
    generated = model.generate(**inputs, min_new_tokens=2, max_new_tokens=2)
    assert generated.shape[1] == inputs["input_ids"].shape[1] + 2


def test_a_run_that_stops_after_every_step_is_the_same_run(whole, call, tmp_path):
    for step in (1, 2, 3, 3):
        assert call(tmp_path, "--limits.max_minutes", "1e-9") == 0
        assert max(step_folders(tmp_path / "checkpoints")) == step
    one, two = contents(tmp_path), contents(whole)
    assert one.keys() == two.keys() and any("vision_tower" in name for name in one)
    tensors = {name for name, value in one.items() if isinstance(value, torch.Tensor)}
    for name in tensors:
        assert torch.equal(one[name], two[name]), name

    def numbers(run):
        return [{name: value for name, value in record.items() if name not in TIMES} for record in read_log(run)]

    assert numbers(tmp_path) == numbers(whole)


@pytest.fixture(scope="module")
def loaded(recipe):
    return load_recipe(recipe, ["--output_dir", "nowhere"])


def test_packed_documents_lose_what_they_lose_apart(loaded):
    config = model_config(loaded)
    collate = CollatePacks(3, 4, (2, 2))
    with processes() as ours:
        model = build_model(loaded, config, ours)
        fill_model(model, loaded, ours)
        model.eval()
        data = loaded.stage_data(0)
        [step] = Batches(ours.mesh(1), 4, ours, collate).steps(data, 0, 1)
        [batch] = step
        together = model(**batch.inputs).loss * batch.predictions
        apart = 0.0
        for document in itertools.chain.from_iterable(documents_of(pack) for pack in data[0]):
            inputs = collate([MediaPack.of([document])])
            labels = inputs["labels"][:, 1:]
            logits = model(**{name: inputs[name] for name in inputs if name != "labels"}, use_cache=False).logits
            apart += torch.nn.functional.cross_entropy(logits[0, :-1].double(), labels[0], reduction="sum")
        assert batch.predictions == sum(pack.predictions for pack in data[0])
        torch.testing.assert_close(together.double(), apart, rtol=1e-7, atol=0)  # transformers takes the loss in FP32


def test_every_forward_has_a_picture_and_every_parameter_a_gradient(loaded):
    config = model_config(loaded)
    pack = Pack([0, 20, 21, 1, 0, 30, 1], [0, 4, 7])
    inputs = CollatePacks(3, 4, (2, 2))([pack])
    plain = model_inputs([pack])
    assert inputs["grid_thws"].tolist() == [[1, 2, 2]] and inputs["cu_seq_lens_q"].tolist() == [0, 4, 7, 8]
    assert torch.equal(inputs["labels"][:, :7], plain["labels"]) and inputs["labels"][0, 7] == IGNORED
    torch.manual_seed(0)
    model = MoeLcForConditionalGeneration(config).double().train()
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    vision = [p for name, p in model.named_parameters() if "vision" in name or "projector" in name]
    assert vision and all(p.grad is not None and not p.grad.any() for p in vision)
    without = model(**{**plain, "use_cache": False}).loss
    torch.testing.assert_close(loss, without, rtol=1e-12, atol=0)


def test_a_picture_is_not_added_where_there_is_one(loaded):
    packs = next(packs for packs in map(loaded.stage_data(0).__getitem__, range(9)) if any(map(has_picture, packs)))
    documents = [document for pack in packs for document in documents_of(pack)]
    together, collated = CollatePacks(3, 4, (2, 2))(packs), CollateImages(3)(documents)
    assert all(torch.equal(together[name], collated[name]) for name in collated)


def has_picture(pack):
    return any(document.pixel_values is not None for document in documents_of(pack))


def test_a_text_model_is_refused_pictures_and_trains_on_text(call, folders, tmp_path, capsys):
    assert call(tmp_path, "--model.vision", "null") == 2
    assert "model.vision: expected a tower for the pictures in" in capsys.readouterr().err
    assert call(tmp_path, "--model.vision", "null", "--stages.0.mixture", "{text: 1}", "--stages.0.tokens", "768") == 0
    assert isinstance(MoeLcForCausalLM.from_pretrained(tmp_path / "models" / "only"), MoeLcForCausalLM)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["--model.vision.patch_size", "6"], "data.folders: expected pictures of {'patch_size': 6"),
        (["--model.vision.depth", "6", "--model.base", "tiny"], "model.vision.depth: expected a field of the tower's"),
        (["--model.base", "kimi-linear-48b-a3b"], "model.vision: expected null for the preset 'kimi-linear-48b-a3b'"),
        (["--model.base", "tiny", "--model.vision.patch_size", "0"], "model.vision: patch_size: expected a positive"),
        (["--stages.0.context_parallel", "2"], "stages.0.context_parallel: expected 1 with model.vision"),
        (["--stages.0.sequence_length", "32", "--tokens_per_step", "32"], "sequence_length: expected at least the"),
    ],
)
def test_what_does_not_fit_is_named(overrides, named, call, tmp_path, capsys):
    assert call(tmp_path, *overrides) == 2
    assert named in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_tower_may_not_change_during_a_run(whole, call, capsys):
    assert call(whole, "--model.vision.rms_norm_eps", "1e-3") == 2
    assert "model.vision: expected {}, as the run began with" in capsys.readouterr().err
