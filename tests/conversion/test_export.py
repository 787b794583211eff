"""An export is the same tensors under the released names; what the target cannot say is refused before anything is written."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.kimi_linear import KimiLinearForCausalLM

from modeling_moe_lc import MoeLcForCausalLM, MoeLcForConditionalGeneration, MoeLcTextConfig
from modeling_moe_lc.configuration.presets import load_multimodal_preset, load_preset
from modeling_moe_lc.conversion import convert as convert_module
from modeling_moe_lc.training.cli import main


FIXTURES = Path(__file__).parents[1] / "fixtures"
LIMIT = 1e-4  # norm of the difference over norm, of FP32 logits
TARGETS = {
    "k3-text-tiny": "kimi-k3",
    "k3-text-tiny-mxfp4": "kimi-k3",
    "k3-vision-tiny": "kimi-k3",
    "kimi-linear-tiny": "kimi-linear",
}
UNUSED = {"auto_map", "transformers_version"}  # of a released config: the code that is not beside it, and who wrote it


def run(command, *arguments):
    assert main([command, *map(str, arguments)]) == 0
    return arguments[1]


def refused(capsys, source, out, target):
    before = sorted(out.parent.iterdir())
    assert main(["export", str(source), str(out), "--to", target]) == 2
    assert sorted(out.parent.iterdir()) == before, "something was written"
    return capsys.readouterr().err


def tensors(folder):
    return {name: one for file in sorted(folder.glob("model*.safetensors")) for name, one in load_file(file).items()}


def assert_same_tensors(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(ours[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def linked(first, second):
    return os.path.samefile(first, second)


def randomised(model):
    """Weights of which none is neutral: queries of AttnRes, gains of norms, biases of the router."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith(("query", "e_score_correction_bias")):
                tensor.normal_(std=0.1)
            elif "norm" in name:
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
    return model.eval()


def test_only_the_folder_that_is_left_is_named(tmp_path, capsys):
    out = run("export", FIXTURES / "k3-text-tiny", tmp_path / "served", "--to", "kimi-k3")
    said = capsys.readouterr().out
    assert str(out) in said and f".{out.name}.export" not in said


@pytest.mark.parametrize(("fixture", "target"), TARGETS.items())
def test_there_and_back_twice_is_the_same_to_the_byte(fixture, target, tmp_path):
    released, source = load_file(FIXTURES / fixture / "model.safetensors"), FIXTURES / fixture
    for trip in ("1", "2"):
        ours = run("convert", source, tmp_path / f"own{trip}", "--layout", "own", "--shard-size", "500KB")
        source = run("export", ours, tmp_path / f"export{trip}", "--to", target)
        assert_same_tensors(tensors(source), released)
        back = run("convert", source, tmp_path / f"back{trip}", "--layout", "own")
        assert_same_tensors(tensors(back), tensors(ours))
        before, after = (MoeLcTextConfig.from_pretrained(folder).to_dict() for folder in (FIXTURES / fixture, source))
        graph = MoeLcTextConfig.__annotations__.keys()
        assert {key: before[key] for key in graph & before.keys()} == {key: after[key] for key in graph & after.keys()}


@pytest.mark.parametrize(("fixture", "target"), TARGETS.items())
def test_a_released_folder_is_linked_and_keeps_its_config(fixture, target, tmp_path):
    out = run("export", FIXTURES / fixture, tmp_path / "out", "--to", target)
    again = run("export", out, tmp_path / "again", "--to", target)
    for folder in (out, again):
        assert linked(folder / "model.safetensors", FIXTURES / fixture / "model.safetensors")
        released = config_of(FIXTURES / fixture)
        released.pop("auto_map")
        released.get("text_config", {}).pop("auto_map", None)
        assert config_of(folder) == released


def test_a_kimi_linear_becomes_a_k3_and_comes_back(tmp_path):
    source = FIXTURES / "kimi-linear-tiny"
    k3 = run("export", source, tmp_path / "k3", "--to", "kimi-k3")
    assert all(name.startswith("language_model.") for name in tensors(k3))
    assert_same_tensors(
        tensors(run("export", k3, tmp_path / "back", "--to", "kimi-linear")), load_file(source / "model.safetensors")
    )


@pytest.mark.parametrize(("fixture", "target"), TARGETS.items())
def test_the_config_has_the_fields_of_the_release(fixture, target, tmp_path):
    ours = run("convert", FIXTURES / fixture, tmp_path / "own", "--layout", "own")
    found, released = config_of(run("export", ours, tmp_path / "out", "--to", target)), config_of(FIXTURES / fixture)
    if target == "kimi-linear":
        assert found == {key: value for key, value in released.items() if key not in UNUSED}
        return
    text, theirs = found.pop("text_config"), released.pop("text_config")
    vision, its = found.pop("vision_config"), released.pop("vision_config")
    assert found == {key: value for key, value in released.items() if key not in UNUSED}
    assert vision == {key: value for key, value in its.items() if not key.startswith("_")}
    assert text == {key: theirs[key] for key in text}
    effective = MoeLcTextConfig.__annotations__.keys() | {"quantization_config"}
    assert (theirs.keys() & effective) - text.keys() == set()


def save(model, folder, **options):
    model.save_pretrained(folder, **options)
    return folder


class TestModelsTrainedHere:
    def test_multimodal_shards_are_linked(self, tmp_path):
        model = MoeLcForConditionalGeneration(load_multimodal_preset("tiny"))
        source = save(model, tmp_path / "own", max_shard_size="200KB")
        out = run("export", source, tmp_path / "out", "--to", "kimi-k3")
        files = sorted(source.glob("*.safetensors"))
        assert len(files) > 2
        assert [linked(file, out / file.name) for file in files] == [True] * len(files)
        weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
        assert weight_map == json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
        again = MoeLcForConditionalGeneration.from_pretrained(out)
        for (name, tensor), other in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
            assert torch.equal(tensor, other), name

    def test_a_text_model_gets_the_prefix_shard_by_shard(self, tmp_path):
        model = MoeLcForCausalLM(load_preset("tiny"))
        source = save(model, tmp_path / "own", max_shard_size="200KB")
        out = run("export", source, tmp_path / "out", "--to", "kimi-k3")
        assert_same_tensors(tensors(out), {f"language_model.{name}": one for name, one in tensors(source).items()})
        assert len(list(out.glob("*.safetensors"))) == len(list(source.glob("*.safetensors")))
        for file in out.glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                assert opened.metadata() == {"format": "pt"}
        config = config_of(out)
        assert config["model_type"] == "kimi_k3" and config["architectures"] == ["KimiK3ForConditionalGeneration"]
        assert config["text_config"]["model_type"] == "kimi_linear" and "vision_config" not in config
        assert not {"router_balance", "layer_types", "checkpoint_layout"} & config["text_config"].keys()
        again = MoeLcForCausalLM.from_pretrained(out)
        for (name, tensor), other in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
            assert torch.equal(tensor, other), name

    def test_kimi_linear_of_its_own_layout_is_linked(self, tmp_path):
        model = MoeLcForCausalLM(load_preset("nano-kimi-linear", vocab_size=512))
        source = save(model, tmp_path / "own")
        out = run("export", source, tmp_path / "out", "--to", "kimi-linear")
        assert linked(source / "model.safetensors", out / "model.safetensors")
        config = config_of(out)
        assert config.keys() == config_of(FIXTURES / "kimi-linear-tiny").keys() - UNUSED
        assert config["head_dim"] == 32 and config["dtype"] == "float32"

    def test_tied_head(self, tmp_path):
        model = MoeLcForCausalLM(load_preset("tiny", tie_word_embeddings=True))
        out = run("export", save(model, tmp_path / "own"), tmp_path / "out", "--to", "kimi-k3")
        assert "language_model.lm_head.weight" not in tensors(out)
        assert config_of(out)["text_config"]["tie_word_embeddings"] is config_of(out)["tie_word_embeddings"] is True


class TestTransformersOwnClass:
    """Its `kimi_linear` reads what we write, and computes the same."""

    def logits(self, folder, ids):
        model, info = KimiLinearForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        with torch.no_grad():
            return model.eval()(ids).logits

    @torch.no_grad()
    def test_what_it_saves_is_read_here(self, tmp_path):
        """Its dense layers come under the name of the sparse ones."""
        theirs = KimiLinearForCausalLM.from_pretrained(FIXTURES / "kimi-linear-tiny", dtype=torch.float32).eval()
        theirs.save_pretrained(tmp_path)
        ours, report = MoeLcForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        ids = torch.randint(3, 60, (2, 9))
        expected = theirs(ids).logits
        assert (ours.eval()(ids).logits - expected).norm() < LIMIT * expected.norm()

    def test_agrees_on_a_model_made_here(self, tmp_path):
        model = randomised(MoeLcForCausalLM(load_preset("nano-kimi-linear", vocab_size=512)))
        out = run("export", save(model, tmp_path / "own"), tmp_path / "out", "--to", "kimi-linear")
        assert type(AutoModelForCausalLM.from_pretrained(out)) is KimiLinearForCausalLM
        ids = torch.randint(512, (2, 70))
        with torch.no_grad():
            ours = model(ids).logits
        assert (self.logits(out, ids) - ours).norm() / ours.norm() < LIMIT

    def test_agrees_with_the_reference_values(self, tmp_path):
        fixture = FIXTURES / "kimi-linear-tiny"
        ours = run("convert", fixture, tmp_path / "own", "--layout", "own")
        out = run("export", ours, tmp_path / "out", "--to", "kimi-linear")
        inputs, expected = (load_file(fixture / f"{name}.safetensors") for name in ("inputs", "expected"))
        reference = expected["logits.t70"]
        logits = self.logits(out, inputs["input_ids.t70"])
        assert (logits - reference).norm() / reference.norm() < LIMIT


class TestRefusals:
    def test_k3_as_kimi_linear_names_every_field(self, tmp_path, capsys):
        message = refused(capsys, FIXTURES / "k3-vision-tiny", tmp_path / "out", "kimi-linear")
        for field in (
            "attn_res_block_size 2",
            "hidden_act 'situ'",
            "activation_situ_beta 4.0",
            "activation_situ_linear_beta 25.0",
            "routed_expert_hidden_size",
            "latent_moe_use_norm True",
            "mla_use_output_gate True",
            "q_lora_rank",
            "linear_attn_config.gate_lower_bound -5.0",
            "linear_attn_config.use_full_rank_gate True",
            "vision_config",
            "--text-only",
        ):
            assert field in message, field

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"attn_res_block_size": 3}, "attn_res_block_size 3"),
            ({"mla_use_output_gate": True}, "mla_use_output_gate True"),
            ({"q_lora_rank": 16}, "q_lora_rank 16"),
            ({"hidden_act": "situ"}, "hidden_act 'situ'"),
            ({"routed_expert_hidden_size": 64}, "routed_expert_hidden_size 64"),
            ({"tie_word_embeddings": True}, "tie_word_embeddings True"),
            ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ],
    )
    def test_a_kimi_linear_with_one_field_too_many(self, changes, field, tmp_path, capsys):
        model = MoeLcForCausalLM(load_preset("nano-kimi-linear", vocab_size=512, **changes))
        message = refused(capsys, save(model, tmp_path / "own"), tmp_path / "out", "kimi-linear")
        assert message.strip().endswith(f"got {field}")

    def test_bounded_gate(self, tmp_path, capsys):
        linear = {**load_preset("nano-kimi-linear").linear_attn_config, "gate_lower_bound": -5.0}
        model = MoeLcForCausalLM(load_preset("nano-kimi-linear", vocab_size=512, linear_attn_config=linear))
        message = refused(capsys, save(model, tmp_path / "own"), tmp_path / "out", "kimi-linear")
        assert message.strip().endswith("got linear_attn_config.gate_lower_bound -5.0")

    def test_a_field_hidden_in_a_folder_that_says_kimi_linear(self, tmp_path, capsys):
        source = tmp_path / "source"
        source.mkdir()
        (source / "config.json").write_text(
            json.dumps(config_of(FIXTURES / "kimi-linear-tiny") | {"attn_res_block_size": 4})
        )
        (source / "model.safetensors").write_bytes((FIXTURES / "kimi-linear-tiny/model.safetensors").read_bytes())
        assert "attn_res_block_size 4" in refused(capsys, source, tmp_path / "out", "kimi-linear")

    def test_mxfp4_as_kimi_linear(self, tmp_path, capsys):
        preset = load_preset("nano-kimi-linear", vocab_size=512)
        own = save(MoeLcForCausalLM(preset), tmp_path / "own")
        packed = run("convert", own, tmp_path / "packed", "--dtype", "mxfp4")
        message = refused(capsys, packed, tmp_path / "out", "kimi-linear")
        assert "expert_quantization" in message and "--dtype bfloat16" in message
        k3 = run("export", packed, tmp_path / "k3", "--to", "kimi-k3")
        assert config_of(k3)["text_config"]["quantization_config"]["format"] == "mxfp4-pack-quantized"
        assert "quantization_config" not in config_of(k3)

    def test_another_eps_of_the_tower(self, tmp_path, capsys):
        config = load_multimodal_preset("tiny", vision_config={"rms_norm_eps": 1e-5})
        source = save(MoeLcForConditionalGeneration(config), tmp_path / "own")
        assert "vision_config.rms_norm_eps 1e-05" in refused(capsys, source, tmp_path / "out", "kimi-k3")

    def test_tensors_that_do_not_belong(self, tmp_path, capsys):
        source = save(MoeLcForCausalLM(load_preset("tiny")), tmp_path / "own")
        config = config_of(source) | {"attn_res_block_size": None}
        (source / "config.json").write_text(json.dumps(config))
        message = refused(capsys, source, tmp_path / "out", "kimi-k3")
        assert "unexpected" in message and "model.output_attn_res_proj.weight" in message

    def test_a_folder_that_is_not_empty(self, tmp_path, capsys):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").touch()
        message = refused(capsys, FIXTURES / "k3-text-tiny", tmp_path / "out", "kimi-k3")
        assert "out: expected a new or an empty folder" in message

    def test_an_empty_one_is_filled(self, tmp_path):
        (tmp_path / "out").mkdir()
        run("export", FIXTURES / "k3-text-tiny", tmp_path / "out", "--to", "kimi-k3")


class TestInterrupted:
    @pytest.fixture
    def source(self, tmp_path):
        return save(MoeLcForCausalLM(load_preset("tiny")), tmp_path / "own", max_shard_size="200KB")

    def test_goes_on_with_what_is_finished(self, source, tmp_path, monkeypatch):
        whole = run("export", source, tmp_path / "whole", "--to", "kimi-k3")
        finish, finished = convert_module.ShardFile.finish, []

        def cut_short(file):
            if len(finished) == 2:
                raise KeyboardInterrupt
            finish(file)
            finished.append(file.path.name)

        command = ["export", str(source), str(tmp_path / "out"), "--to", "kimi-k3"]
        with monkeypatch.context() as patch:
            patch.setattr(convert_module.ShardFile, "finish", cut_short)
            assert main(command) == 130
        assert not (tmp_path / "out").exists(), "a folder that is not whole"
        written = []
        monkeypatch.setattr(
            convert_module.ShardFile, "finish", lambda file: (written.append(file.path.name), finish(file))
        )
        assert main(command) == 0
        assert len(finished) == 2 and not set(finished) & set(written)
        assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == {
            p.name: p.read_bytes() for p in whole.iterdir()
        }
        assert {path.name for path in tmp_path.iterdir()} == {"own", "whole", "out"}

    def test_while_linking(self, tmp_path, monkeypatch):
        model = MoeLcForConditionalGeneration(load_multimodal_preset("tiny"))
        source, link, made = save(model, tmp_path / "own", max_shard_size="200KB"), os.link, []

        def cut_short(file, place):
            if "probe" not in Path(place).name:
                made.append(place)
                if len(made) == 3:
                    raise KeyboardInterrupt
            link(file, place)

        command = ["export", str(source), str(tmp_path / "out"), "--to", "kimi-k3"]
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", cut_short)
            assert main(command) == 130
        assert not (tmp_path / "out").exists()
        assert main(command) == 0
        assert_same_tensors(tensors(tmp_path / "out"), tensors(source))

    def test_what_nothing_vouches_for_is_not_taken(self, source, tmp_path, monkeypatch):
        command = ["export", str(source), str(tmp_path / "out"), "--to", "kimi-k3"]
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            assert main(command) == 130
        save(MoeLcForCausalLM(load_preset("tiny")), source, max_shard_size="200KB")
        assert main(command) == 0
        assert_same_tensors(
            tensors(tmp_path / "out"), {f"language_model.{name}": one for name, one in tensors(source).items()}
        )

    def test_without_links_the_bytes_are_copied(self, tmp_path, monkeypatch):
        def no_link(*_):
            raise OSError("another device")

        monkeypatch.setattr(os, "link", no_link)
        out = run("export", FIXTURES / "k3-text-tiny-mxfp4", tmp_path / "out", "--to", "kimi-k3")
        assert not linked(out / "model.safetensors", FIXTURES / "k3-text-tiny-mxfp4/model.safetensors")
        assert_same_tensors(tensors(out), load_file(FIXTURES / "k3-text-tiny-mxfp4/model.safetensors"))
