"""A card says what its data say and nothing else: those that ship are what the command makes, and numbers have a source."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.configuration.presets import load_preset, multimodal_preset_names, preset_names
from modeling_moe_lc.conversion.card import REPORTS, About, checkpoint_card, preset_card
from modeling_moe_lc.conversion.count import config_from_preset, count
from modeling_moe_lc.conversion.released import RELEASED
from modeling_moe_lc.training.cli import main
from modeling_moe_lc.training.recipe import load_recipe
from modeling_moe_lc.training.recipe_file import to_yaml
from modeling_moe_lc.training.run_log import STAGE, STEP, VALIDATION, RunLog


CARDS = Path(__file__).parents[2] / "model_cards"
WHEN_CHANGED = "for name in PRESETS; do moe-lc card $name --out model_cards/$name.md --overwrite; done"


@pytest.mark.parametrize("name", preset_names())
def test_the_cards_that_ship_are_what_the_command_makes(name):
    assert (CARDS / f"{name}.md").read_text(encoding="utf-8") == preset_card(name), WHEN_CHANGED


def test_every_card_that_ships_is_of_a_preset():
    assert {path.stem for path in CARDS.glob("*.md")} - {"balancing", *REPORTS.values()} == {
        *preset_names(),
        "TEMPLATE",
    }


@pytest.mark.parametrize("name", preset_names())
def test_metadata_are_those_of_the_hub(name):
    data, released = ModelCard.load(CARDS / f"{name}.md").data, RELEASED.get(name)
    assert data.library_name == "transformers"
    assert data.pipeline_tag in ("text-generation", "image-text-to-text")
    assert "moe_lc" in data.tags
    assert data.license == (released.license if released else "apache-2.0")
    assert data.base_model == (released.name if released else None)
    assert (data.license == "other") == (data.license_name is not None) == (data.license_link is not None)
    assert data.eval_results is None, "nothing was measured"


@pytest.mark.parametrize("name", preset_names())
def test_parameters_are_those_of_the_count(name):
    text, counted = (CARDS / f"{name}.md").read_text(encoding="utf-8"), count(config_from_preset(name))
    for term, number in counted.terms.items():
        assert f"| {term} | {number:,} |" in text
    assert f"| **{counted.total:,}** |" in text and f"| **{counted.active:,}** |" in text


@pytest.mark.parametrize("name", RELEASED)
def test_the_examples_of_the_released_models_are_pinned(name):
    text, released = (CARDS / f"{name}.md").read_text(encoding="utf-8"), RELEASED[name]
    assert re.fullmatch("[0-9a-f]{40}", released.revision)
    assert f'"{released.name}",\n    revision="{released.revision}",\n    allow_patterns=' in text
    assert "never loaded" in text


@pytest.mark.parametrize("name", ["tiny", "nano", "nano-kimi-linear"])
def test_the_examples_of_the_presets_run(name):
    example = re.search(r"```python\n(.*?)```", preset_card(name), re.DOTALL)[1]
    made = {}
    exec(example, made)  # noqa: S102
    assert sum(one.numel() for one in made["model"].parameters()) > 0
    assert ("load_multimodal_preset" in example) == (name in multimodal_preset_names())


@pytest.mark.parametrize("name", preset_names())
def test_a_card_names_the_class_that_its_configuration_is_of(name):
    text = (CARDS / f"{name}.md").read_text(encoding="utf-8").partition("## Architecture")[0]
    linear = load_preset(name).checkpoint_layout == "kimi_linear"
    if name not in RELEASED:
        assert ("a shape of the Kimi-Linear class" in text, "a shape of the Kimi-K3 class" in text) == (
            linear,
            not linear,
        )


def test_what_was_pushed_needs_its_code_everywhere(checkpoint, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text((checkpoint / "config.json").read_text())
    (folder / "tokenizer_config.json").write_text("{}")
    text = checkpoint_card(folder, repo="somebody/mine", revision="abc")
    assert 'AutoTokenizer.from_pretrained("somebody/mine", revision="abc", trust_remote_code=True)' in text
    assert 'AutoTokenizer.from_pretrained("mine")' in checkpoint_card(folder)


@pytest.fixture
def run_folder(tmp_path):
    """A run of two stages that are over and one that is not, with what its log would hold and a model after each."""
    folder = tmp_path / "run"
    stages = [
        {"name": name, "sequence_length": length, "tokens": 4096, "micro_batch": 1}
        for name, length in (("short", 64), ("longer", 128), ("late", 256))
    ]
    words = ["--stages=" + json.dumps(stages), "--tokens_per_step=1024", f"--output_dir={folder}"]
    recipe = load_recipe("nano-cpu", [*words, '--data.folders={"books": "/somewhere/private"}'])
    with RunLog(folder, total_tokens=12_288) as log:
        for step, (stage, loss) in enumerate((("short", 7.5), ("short", 6.25), ("longer", 5.125), ("late", 4.0)), 1):
            log.write(STEP, step, 1024 * step, {"stage": stage, "loss": loss, "tokens_per_second": 1.0})
            if step in (2, 3):
                losses = {"loss": loss + 1, "losses": {"books": loss + 1}}
                log.write(VALIDATION, step, 1024 * step, {"stage": stage, **losses})
                log.write(STAGE, step, 1024 * step, {"stage": stage, "by_position": None})
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    for name in ("short", "longer"):
        MoeLcForCausalLM(load_preset("tiny")).save_pretrained(folder / "models" / name)
    return folder


def test_a_trained_model_tells_its_run_up_to_its_own_stage(run_folder):
    text = checkpoint_card(run_folder / "models" / "short")
    assert "| short | 64 | 1,024 | 2,048 | 6.2500 |" in text
    assert "| books | short | 7.2500 |" in text
    assert "The longest trained sequence has 64 tokens" in text
    assert "longer" not in text and "4.0000" not in text and "late" not in text.split("## Training")[1].split("##")[0]
    text = checkpoint_card(run_folder / "models" / "longer")
    assert "| longer | 128 | 1,024 | 3,072 | 5.1250 |" in text
    assert "The longest trained sequence has 128 tokens" in text
    assert "From scratch, preset `nano`, seed 0, adamw" in text
    assert "private" not in text, "where data lie is nobody's business"


def test_a_run_may_be_named_and_must_be_one(run_folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (run_folder / "models" / "short").rename(elsewhere)
    assert "| longer | 128" in checkpoint_card(elsewhere, About(run=run_folder))
    assert "Not known here" in checkpoint_card(elsewhere)
    with pytest.raises(ValueError, match="run: expected a folder with recipe.yaml, got"):
        checkpoint_card(elsewhere, About(run=tmp_path))
    log = run_folder / "log.jsonl"
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    with pytest.raises(ValueError, match="run: expected a stage that is over"):
        checkpoint_card(elsewhere, About(run=run_folder))


def test_what_a_demo_measured_is_told_with_the_machine(run_folder):
    recipe = yaml.safe_load((run_folder / "recipe.yaml").read_text())
    recipe["stages"] = recipe["stages"][:2]
    (run_folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    results = {
        "machine": {"processor": "A processor", "threads": "2"},
        "held_out": {"files": 3, "bytes": 12_345},
        "bits_per_byte": {"nano": 2.125, "xz -9": 2.5},
        "command": "moe-lc demo --corpus /somewhere/private",
    }
    (run_folder / "results.json").write_text(json.dumps(results))
    text = checkpoint_card(run_folder / "models" / "longer")
    assert "| nano | 2.125 |" in text and "12,345 held-out bytes" in text
    assert "processor A processor, threads 2." in text and "private" not in text
    assert "2.125" not in checkpoint_card(run_folder / "models" / "short"), "it is another model that was measured"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "mine"
    MoeLcForCausalLM(load_preset("tiny")).save_pretrained(folder)
    return folder


def test_what_is_not_known_is_said(checkpoint):
    text = checkpoint_card(checkpoint)
    data = ModelCard(text).data
    assert data.license is None and data.base_model is None and data.library_name == "transformers"
    for sentence in ("Not known here", "Nothing was measured", "Up to which length it was trained is not known"):
        assert sentence in text
    assert "Nobody has stated a licence" in text
    assert "revision" not in text and "trust_remote_code" not in text


def test_the_licence_of_a_released_source_holds_unless_another_is_given(checkpoint):
    inherited = ModelCard(checkpoint_card(checkpoint, About(base_model="moonshotai/Kimi-K3"))).data
    assert (inherited.license, inherited.license_name) == ("other", "kimi-k3-license")
    assert inherited.base_model == "moonshotai/Kimi-K3"
    other = About(license="apache-2.0", base_model="somebody/model")
    assert ModelCard(checkpoint_card(checkpoint, other)).data.license == "apache-2.0"
    text = checkpoint_card(checkpoint, dataclasses.replace(other, license=None))
    assert "that of somebody/model may bind them" in text
    for half in ({"license": "other"}, {"license": "mit", "license_name": "a", "license_link": "b"}):
        with pytest.raises(ValueError, match="license: expected license_name and license_link with 'other'"):
            About(**half)


def test_the_command_writes_a_card_once(checkpoint, tmp_path, capsys):
    assert main(["card", str(checkpoint), "--license", "mit"]) == 0
    card = checkpoint / "README.md"
    assert ModelCard.load(card).data.license == "mit"
    card.write_text("mine\n")
    assert main(["card", str(checkpoint)]) == 2
    assert card.read_text() == "mine\n" and "out: expected a new file (or --overwrite)" in capsys.readouterr().err
    assert main(["card", str(checkpoint), "--overwrite"]) == 0
    assert ModelCard.load(card).data.license is None
    assert main(["card", "tiny"]) == 0
    assert capsys.readouterr().out.endswith(preset_card("tiny"))
    assert main(["card", "tiny", "--license", "mit"]) == 2
    assert "expected a checkpoint with these options, got the preset tiny" in capsys.readouterr().err
    assert main(["card", str(tmp_path / "nothing")]) == 2
    assert "checkpoint: expected a folder with config.json" in capsys.readouterr().err
