"""An export is the same model where the package is missing: it loads, generates, saves, and what it saves does too."""

import argparse
import json
import os
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import save_file

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.conversion.export_remote_code import add_arguments, export_remote_code, run


AUTO_MAP = {
    "AutoConfig": "configuration_configuration_moe_lc.MoeLcTextConfig",
    "AutoModel": "modeling_moe_lc.MoeLcTextModel",
    "AutoModelForCausalLM": "modeling_moe_lc.MoeLcForCausalLM",
}

WITHOUT_THE_PACKAGE = """
    sys.modules |= {"modeling_moe_lc": None, "triton": None}


    def check(folder):
        assert AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type == "moe_lc_text"
        model = compare(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True))
        assert type(model).__module__.startswith("transformers_modules.")
        assert not hasattr(torch.ops.moe_lc, "kda")
        assert torch.equal(model.generate(input_ids, max_new_tokens=5, do_sample=False), expected["generated"])
        if folder == folders[0]:
            model.save_pretrained(folders[1])
        with torch.no_grad():
            hidden = AutoModel.from_pretrained(folder, trust_remote_code=True)(input_ids).last_hidden_state
        assert torch.equal(hidden, expected["hidden"])
    """

BESIDE_THE_PACKAGE = """
    from modeling_moe_lc import MoeLcForCausalLM


    def check(folder):
        local = compare(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True))
        assert type(local) is MoeLcForCausalLM
        remote_class = get_class_from_dynamic_module("modeling_moe_lc.MoeLcForCausalLM", folder)
        remote = compare(remote_class.from_pretrained(folder))
        assert not isinstance(remote, MoeLcForCausalLM)
        assert type(compare(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True))) is MoeLcForCausalLM
        compare(local)
    """

# Importing torch and transformers is most of the time: every folder is loaded in its own process, forked after that.
IN_FRESH_PROCESSES = """
    import os
    import sys

    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    threads, expected, *folders = sys.argv[1:]
    torch.set_num_threads(int(threads))
    expected = load_file(expected)
    input_ids = expected["input_ids"]


    def compare(model):
        with torch.no_grad():
            assert torch.equal(model(input_ids).logits, expected["logits"])
        return model


    exec({script!r})
    for folder in folders:
        child = os.fork()
        if child == 0:
            check(folder)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, folder
    """


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder as save_pretrained leaves it, with tokenizer, pickle and old code; beside it the expected outputs."""
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    torch.manual_seed(0)
    model = MoeLcForCausalLM(load_preset("tiny")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    input_ids = torch.randint(model.config.vocab_size, (2, 37))
    with torch.no_grad():
        expected = {
            "input_ids": input_ids,
            "logits": model(input_ids).logits,
            "hidden": model.model(input_ids).last_hidden_state,
            "generated": model.generate(input_ids, max_new_tokens=5, do_sample=False),
        }
    save_file(expected, folder.parent / "expected.safetensors")
    for name in ("tokenizer.json", "README.md", "chat_template.jinja"):
        (folder / name).write_text("{}", encoding="utf-8")
    (folder / "training_args.bin").write_bytes(pickle.dumps({}))
    (folder / "old_code.py").write_text("raise RuntimeError\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def exported(checkpoint):
    return export_remote_code(checkpoint, checkpoint.parent / "ex-port.v1")


def check_in_fresh_processes(script, *folders):
    """Run `check(folder)` of `script`, one process per folder, outside the checkout and with a new module cache."""
    root = folders[0].parent
    environment = {"HF_HOME": str(root / "home"), "HF_MODULES_CACHE": str(root / "modules"), "HF_HUB_OFFLINE": "1"}
    text = textwrap.dedent(IN_FRESH_PROCESSES).replace("{script!r}", repr(textwrap.dedent(script)))
    arguments = [torch.get_num_threads(), root / "expected.safetensors", *folders]
    command = [sys.executable, "-I", "-c", text, *map(str, arguments)]
    done = subprocess.run(command, check=False, cwd=root, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_the_package_an_export_is_the_same_model_and_saves_another(exported):
    saved = exported.parent / "saved"
    check_in_fresh_processes(WITHOUT_THE_PACKAGE, exported, saved)
    assert {file.name for file in saved.glob("*.py")} == {file.name for file in exported.glob("*.py")}
    assert json.loads((saved / "config.json").read_text())["auto_map"] == AUTO_MAP


def test_beside_the_package_local_code_wins_and_remote_code_agrees(exported):
    check_in_fresh_processes(BESIDE_THE_PACKAGE, exported)


def test_a_checkpoint_gives_its_files_but_no_pickle_and_no_old_code(checkpoint, exported):
    carried = {file.name for file in checkpoint.iterdir()} - {"training_args.bin", "old_code.py"}
    assert {file.name for file in exported.iterdir() if file.suffix != ".py"} == carried
    for name in carried - {"config.json"}:
        assert (exported / name).read_bytes() == (checkpoint / name).read_bytes()
    config = json.loads((checkpoint / "config.json").read_text())
    assert json.loads((exported / "config.json").read_text()) == {**config, "auto_map": AUTO_MAP}
    weights = next(checkpoint.glob("*.safetensors"))
    assert os.path.samefile(weights, exported / weights.name)


def test_code_that_the_tokenizer_brings_travels_with_it(checkpoint, tmp_path):
    source, code = tmp_path / "source", {"auto_map": {"AutoTokenizer": [None, "tokenization_k.TokenizerK"]}}
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (source / name).write_bytes((checkpoint / name).read_bytes())
    (source / "tokenizer_config.json").write_text(json.dumps(code), encoding="utf-8")
    (source / "tokenization_k.py").write_text("from .encoding_k import encode\n", encoding="utf-8")
    (source / "encoding_k.py").write_text("encode = str.encode\n", encoding="utf-8")
    out = export_remote_code(source, tmp_path / "out")
    assert (out / "tokenization_k.py").read_text() == "from .encoding_k import encode\n"
    assert (out / "encoding_k.py").is_file()
    (source / "tokenization_k.py").unlink()
    with pytest.raises(ValueError, match=r"tokenizer_config.json: .*expected tokenization_k.py"):
        export_remote_code(source, tmp_path / "out2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_only_an_earlier_export_is_overwritten(checkpoint, tmp_path):
    out = tmp_path / "deep" / "out"
    out.mkdir(parents=True)
    export_remote_code(checkpoint, out)
    (out / "stale.py").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="out: expected a new or empty folder"):
        export_remote_code(checkpoint, out)
    assert (out / "stale.py").exists()
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    run(parser.parse_args([str(checkpoint), str(out), "--overwrite"]))
    assert not (out / "stale.py").exists()
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    (out / "config.json").unlink()
    with pytest.raises(ValueError, match="expected an earlier export to overwrite"):
        export_remote_code(checkpoint, out, overwrite=True)
    for holder in (checkpoint, checkpoint.parent):
        with pytest.raises(ValueError, match="does not hold the checkpoint"):
            export_remote_code(checkpoint, holder, overwrite=True)


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "expected a folder with config.json"),
        ({"config.json": '{"model_type": "llama"}'}, r"expected model_type in .*'moe_lc_text'.*, got 'llama'"),
        (
            {"config.json": '{"model_type": "moe_lc_text"}', "pytorch_model.bin": ""},
            r"expected weights in \*.safetensors",
        ),
    ],
)
def test_other_folders_are_refused_before_writing(tmp_path, files, message):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for name, text in files.items():
        (source / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        export_remote_code(source, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
