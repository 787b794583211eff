"""The LoRA demo asks about files that it never learned from, leaves what it promises, and goes on where it was interrupted."""

import json
import runpy
from pathlib import Path

import pytest
from safetensors.torch import load_file

from modeling_moe_lc.training import demo_lora
from modeling_moe_lc.training.cli import main
from modeling_moe_lc.training.corpus import standard_library
from modeling_moe_lc.training.library_questions import KINDS, PACKAGES, lines, questions


chats = runpy.run_path(str(Path(__file__).with_name("chat_documents.py")))
OPTIONS = ("--steps=2", "--asked=4", "--rank=2", "--threads=1")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    chats["make"](folder)
    return folder / "base"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Packages of small files with a line of each kind."""
    folder = tmp_path_factory.mktemp("corpus")
    for package in PACKAGES:
        (folder / package).mkdir()
        for n in range(8):
            text = (
                f"import {package}{n}\n{package} = {n}\nprint({package}, {n})\ndef f():\n    return {package}, {n}\n"
            )
            text += f"if {package} > {n}:\n    raise {package}({n})\nfor {package} in range({n}):\n    pass\n"
            (folder / package / f"part_{n}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def call(base, corpus):
    words = ("--base", str(base), "--corpus", str(corpus), *OPTIONS)
    return lambda out, *more: main(["demo-lora", "--out", str(out), *words, *more])


@pytest.fixture(scope="module")
def whole(call, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    assert call(out) == 0
    return out


def test_questions_are_real_lines_and_sides_share_none():
    sides = questions(standard_library())
    asked = [[row["messages"][0]["content"] for row in rows] for rows in sides]
    assert len(asked[0]) > 1000 and len(asked[1]) >= 200 and set(asked[0]).isdisjoint(asked[1])
    for rows in sides:
        answers = [row["messages"][1]["content"] for row in rows]
        assert all(answers.count(kind) == len(rows) // len(KINDS) for kind in KINDS)
    source = "import os\nx = os.getcwd()\nif x: pass\n'text'\nfor y in x:\n    print(y)\n"
    kinds = {"import os": "import", "x = os.getcwd()": "assignment", "if x: pass": "condition"}
    assert dict(lines(source)) == {**kinds, "for y in x:": "loop", "print(y)": "call"}


def test_it_leaves_what_it_promises(whole, capsys):
    results = json.loads((whole / "results.json").read_text())
    assert set(results["right"]) == set(results["loss"]) == {"before", "after"}
    tensors = load_file(whole / "adapter" / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) == results["parameters"]["adapter"]
    assert results["loss"]["after"] < results["loss"]["before"]
    table = demo_lora.table_of(results).plain()
    assert "By chance" in table and "before" in table and len(demo_lora.examples_of(results)) == 4 + 2


def test_the_adapter_of_the_real_demo_is_small():
    from peft import LoraConfig

    from modeling_moe_lc import MoeLcForCausalLM, add_lora, lora_targets
    from modeling_moe_lc.configuration.presets import load_preset

    model = MoeLcForCausalLM(load_preset("nano"))
    count = sum(parameter.numel() for parameter in model.parameters())
    adapted = add_lora(model, LoraConfig(r=8, **lora_targets("attention", "head")))
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) < 0.05 * count


def test_an_interrupted_demo_goes_on_to_the_bit(call, whole, tmp_path, monkeypatch):
    from modeling_moe_lc.training.pretrain import Run

    real = Run._save

    def save(*args, **kwargs):
        real(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_save", save)
        assert call(tmp_path / "run") == 130
    assert call(tmp_path / "run") == 0
    one, two = (load_file(out / "adapter" / "adapter_model.safetensors") for out in (tmp_path / "run", whole))
    assert all((one[name] == two[name]).all() for name in two)
    assert call(tmp_path / "run", "--seed=1") == 2
    assert call(tmp_path / "run", "--seed=1", "--restart") == 0


def test_without_a_base_it_says_what_to_do(tmp_path, capsys):
    assert main(["demo-lora", "--base", str(tmp_path), "--out", str(tmp_path / "run")]) == 2
    assert "run `make demo` first, or give --base" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
