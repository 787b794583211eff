"""`moe-lc convert --bound-gate`: the fit finds what it can find, says how far it is off, and changes nothing but the gates."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.conversion import bound_gate
from modeling_moe_lc.conversion.bound_gate import REPORT, gates_folder
from modeling_moe_lc.conversion.card import checkpoint_card
from modeling_moe_lc.conversion.export_config import exported
from modeling_moe_lc.conversion.gate_fit import fit_gate, softplus_gate, tail_match
from modeling_moe_lc.conversion.layouts import GATE_LABEL, describe
from modeling_moe_lc.training.cli import main
from modeling_moe_lc.training.shards import write_manifest, write_shard


FIXTURES = Path(__file__).parents[1] / "fixtures"
SOFTPLUS, BOUNDED = FIXTURES / "kimi-linear-tiny", FIXTURES / "k3-text-tiny"
VOCABULARY = json.loads((SOFTPLUS / "config.json").read_text())["vocab_size"]
TOKENS = 192


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    rng = np.random.default_rng(0)
    shards = [
        write_shard(folder, f"train-{n}", [rng.integers(0, VOCABULARY, 50).astype(np.uint16) for _ in range(3)])
        for n in range(2)
    ]
    tokenizer = {"fingerprint": "none", "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": 0}
    write_manifest(folder, {"tokenizer": tokenizer, "splits": {"train": {"shards": shards}}})
    return folder


def run(source, out, calibration, *options):
    """`options` come last: of an option that is given twice the later one holds."""
    command = ["convert", str(source), str(out), "--bound-gate", "-5", "--calibration-tokens", str(TOKENS)]
    return main([*command, *([] if calibration is None else ["--calibration", str(calibration)]), *options])


@pytest.fixture(scope="module")
def converted(prepared, tmp_path_factory):
    out = tmp_path_factory.mktemp("converted") / "out"
    assert run(SOFTPLUS, out, prepared, "--verify") == 0
    return out


class TestFit:
    def inputs(self, spread=2.0):
        generator = torch.Generator().manual_seed(0)
        x = spread * torch.randn(500, 2, 8, dtype=torch.float64, generator=generator)
        dt_bias = -2 + torch.randn(2, 8, dtype=torch.float64, generator=generator)
        return x + torch.randn(2, 8, dtype=torch.float64, generator=generator), dt_bias

    def test_a_bounded_gate_is_found_again(self):
        x, dt_bias = self.inputs()
        A_log = torch.tensor([-0.7, 0.4], dtype=torch.float64)
        log_decay = -5 * (A_log.exp()[:, None] * (x + dt_bias)).sigmoid()
        found = fit_gate(x, log_decay, -5.0, tail_match(torch.zeros_like(A_log), dt_bias + 0.5, -5.0))
        torch.testing.assert_close(found.A_log, A_log, rtol=0, atol=1e-6)
        torch.testing.assert_close(found.dt_bias, dt_bias, rtol=0, atol=1e-6)

    def test_a_gate_far_inside_the_bound_is_fitted_closely(self):
        x, dt_bias = self.inputs(spread=0.5)
        A_log = torch.tensor([-2.0, 0.0], dtype=torch.float64)
        log_decay = softplus_gate(x, A_log, dt_bias - 4)
        assert log_decay.min() > -0.2
        gate = fit_gate(x, log_decay, -5.0, tail_match(A_log, dt_bias - 4, -5.0))
        made = -5 * (gate.A_log.exp()[:, None] * (x + gate.dt_bias)).sigmoid()
        assert (made - log_decay).norm() / log_decay.norm() < 2e-2 and (made - log_decay).abs().max() < 3e-3

    def test_a_fit_is_better_than_its_start_where_gates_pass_the_bound(self):
        x, dt_bias = self.inputs()
        A_log = torch.tensor([0.5, 2.0], dtype=torch.float64)
        log_decay = softplus_gate(x, A_log, dt_bias)
        assert log_decay.min() < -20
        start = tail_match(A_log, dt_bias, -5.0)
        errors = [
            (torch.exp(-5 * (gate.A_log.exp()[:, None] * (x + gate.dt_bias)).sigmoid()) - log_decay.exp()).norm()
            for gate in (start, fit_gate(x, log_decay, -5.0, start))
        ]
        assert errors[1] < 0.6 * errors[0] and errors[1] / log_decay.exp().norm() < 0.03

    def test_gates_that_are_always_open_or_shut_give_finite_parameters(self):
        x, dt_bias = self.inputs()
        A_log = torch.zeros(2, dtype=torch.float64)
        for shift in (-60.0, 60.0):
            log_decay = softplus_gate(x, A_log, dt_bias + shift)
            gate = fit_gate(x, log_decay, -5.0, tail_match(A_log, dt_bias + shift, -5.0))
            assert all(tensor.isfinite().all() for tensor in gate)


def test_only_gates_and_their_labels_change(converted):
    before, after = (load_file(folder / "model.safetensors") for folder in (SOFTPLUS, converted))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (after[name].dtype, after[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(after[name], tensor) != name.endswith(("A_log", "dt_bias")), name
    config = json.loads((converted / "config.json").read_text())
    assert config["linear_attn_config"]["gate_lower_bound"] == -5.0
    assert config[GATE_LABEL] == {"of": "a softplus gate", "gate_lower_bound": -5.0, "calibration_tokens": TOKENS}
    assert not gates_folder(converted).exists()


def test_the_report_is_what_the_two_models_do(converted, prepared):
    report = json.loads((converted / REPORT).read_text())
    ids = torch.from_numpy(np.fromfile(prepared / "train-0.tokens", "<u2").astype(np.int64))
    ids = torch.cat([ids, torch.from_numpy(np.fromfile(prepared / "train-1.tokens", "<u2").astype(np.int64))])[
        None, :TOKENS
    ]
    theirs, ours = (
        MoeLcForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (SOFTPLUS, converted)
    )
    errors = {}

    def compare(layer, args, kwargs, output):
        made = ours.model.layers[layer.layer_idx].self_attn(*args, **kwargs)[0]
        errors[layer.layer_idx] = ((made - output[0]).norm() / output[0].norm()).item()

    with torch.no_grad():
        for index in (i for i, kind in enumerate(theirs.config.layer_types) if kind == "linear_attention"):
            theirs.model.layers[index].self_attn.register_forward_hook(compare, with_kwargs=True)
        losses = [model(ids, labels=ids, use_cache=False).loss.item() for model in (theirs, ours)]
    assert [layer["layer"] for layer in report["layers"]] == sorted(errors)
    for layer in report["layers"]:
        assert layer["output_error"] == pytest.approx(errors[layer["layer"]], rel=0.1) and layer["output_error"] < 0.03
        assert 0 <= layer["below_bound"] < 0.05
    assert [report["loss"][gate] for gate in ("softplus", "bounded")] == pytest.approx(losses, rel=3e-2)  # in BF16
    assert "approximation" in report


def test_a_checkpoint_inside_the_bound_keeps_its_outputs(prepared, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    tensors = load_file(SOFTPLUS / "model.safetensors")
    tensors = {name: tensor - 3 if name.endswith("dt_bias") else tensor for name, tensor in tensors.items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text((SOFTPLUS / "config.json").read_text())
    assert run(source, tmp_path / "out", prepared) == 0
    layers = json.loads((tmp_path / "out" / REPORT).read_text())["layers"]
    assert all(layer["output_error"] < 3e-3 and layer["below_bound"] == 0 for layer in layers)


def test_it_is_said_to_be_an_approximation_wherever_one_reads(converted, prepared, tmp_path, capsys):
    assert "fitted to a softplus gate: an approximation" in checkpoint_card(converted)
    MoeLcForCausalLM.from_pretrained(converted).save_pretrained(tmp_path / "saved")
    assert GATE_LABEL in json.loads((tmp_path / "saved" / "config.json").read_text())
    text = exported(describe(json.loads((converted / "config.json").read_text())), "kimi-k3").raw["text_config"]
    assert text[GATE_LABEL]["of"] == "a softplus gate"
    assert run(SOFTPLUS, tmp_path / "out", prepared) == 0
    printed = capsys.readouterr().out
    assert "approximation of a softplus gate by one bounded at -5" in printed and "output error" in printed


def test_the_nested_layout_of_k3(converted, prepared, tmp_path):
    assert main(["convert", str(SOFTPLUS), str(tmp_path / "k3"), "--layout", "kimi-k3"]) == 0
    assert run(tmp_path / "k3", tmp_path / "out", prepared) == 0
    text = json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]
    assert text["linear_attn_config"]["gate_lower_bound"] == -5.0 and GATE_LABEL in text
    ours, theirs = load_file(tmp_path / "out" / "model.safetensors"), load_file(converted / "model.safetensors")
    name = "model.layers.1.self_attn."
    assert ours[f"language_model.{name}A_log"].shape == (128,)
    torch.testing.assert_close(ours[f"language_model.{name}A_log"][:4], theirs[f"{name}A_log"].flatten())
    assert torch.equal(ours[f"language_model.{name}dt_bias"], theirs[f"{name}dt_bias"])


def test_text_is_read_by_the_tokenizer_of_the_checkpoint(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (source / name).write_bytes((SOFTPLUS / name).read_bytes())
    (tmp_path / "text.txt").write_text(" ".join(f"w{n % 7}" for n in range(1000)))
    word_level = Tokenizer(models.WordLevel({f"w{n}": n for n in range(7)}, "w0"))
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=word_level, unk_token="w0").save_pretrained(source)
    assert run(source, tmp_path / "out", tmp_path / "text.txt") == 0
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    assert report["calibration"]["tokens"] == TOKENS and (tmp_path / "out" / "tokenizer.json").exists()


class TestInterrupted:
    @pytest.fixture
    def stopped(self, prepared, tmp_path, monkeypatch):
        """A run that ends in the third layer."""
        fitted = bound_gate.fitted

        def failing(layer, *args):
            if layer.layer_idx == 2:
                raise KeyboardInterrupt
            return fitted(layer, *args)

        monkeypatch.setattr(bound_gate, "fitted", failing)
        assert run(SOFTPLUS, tmp_path / "out", prepared) == 130
        seen = []
        monkeypatch.setattr(
            bound_gate, "fitted", lambda layer, *args: seen.append(layer.layer_idx) or fitted(layer, *args)
        )
        return tmp_path / "out", seen

    def test_it_goes_on_where_it_was_and_ends_with_the_same_bytes(self, stopped, prepared, converted):
        out, seen = stopped
        assert not out.exists() and len(list(gates_folder(out).glob("layer-*"))) == 2
        assert run(SOFTPLUS, out, prepared, "--resume") == 0
        assert seen == [2, 4, 5]
        contents = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (out, converted))
        assert next(contents) == next(contents)

    def test_only_asked_to_and_only_the_same(self, stopped, prepared, capsys):
        out, seen = stopped
        assert run(SOFTPLUS, out, prepared) == 2
        assert "expected --resume to go on with the gates" in capsys.readouterr().err
        assert run(SOFTPLUS, out, prepared, "--resume", "--bound-gate", "-4") == 2
        assert "bound_gate: expected -5.0" in capsys.readouterr().err
        assert run(SOFTPLUS, out, prepared, "--resume", "--calibration-tokens", "128") == 2
        assert "calibration: expected" in capsys.readouterr().err and not seen

    def test_a_finished_one_is_complete(self, converted, prepared, capsys):
        assert run(SOFTPLUS, converted, prepared, "--resume") == 0
        assert "is complete" in capsys.readouterr().out and not gates_folder(converted).exists()


def test_a_dry_run_fits_nothing(prepared, tmp_path, capsys):
    assert run(SOFTPLUS, tmp_path / "out", prepared, "--dry-run") == 0
    assert REPORT in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (BOUNDED, [], "bound_gate: expected a softplus gate (gate_lower_bound null), got -5.0"),
        (SOFTPLUS, ["--bound-gate", "0"], "bound_gate: expected a number below 0, got 0.0"),
        (SOFTPLUS, ["--layout", "kimi-linear"], "can express, got gate_lower_bound -5.0"),
        (SOFTPLUS, ["--calibration-tokens", "8"], "calibration_tokens: expected at least 64, got 8"),
        (SOFTPLUS, ["--calibration", "nowhere"], "(--calibration), got nowhere"),
        (SOFTPLUS, ["--calibration", str(FIXTURES)], "expected a folder that `moe-lc prepare` has finished"),
        (SOFTPLUS, ["--calibration", __file__], "expected a tokenizer in"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(source, options, message, prepared, tmp_path, capsys):
    assert run(source, tmp_path / "out", prepared, *options) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_calibration_has_no_default(tmp_path, capsys):
    assert run(SOFTPLUS, tmp_path / "out", None) == 2
    assert "fit the bounded gate on (--calibration), got none" in capsys.readouterr().err


def test_ids_that_the_model_has_not_are_refused(tmp_path, capsys):
    entry = write_shard(tmp_path, "train-0", [np.full(100, VOCABULARY, np.uint16)])
    write_manifest(tmp_path, {"tokenizer": {"fingerprint": "none"}, "splits": {"train": {"shards": [entry]}}})
    assert run(SOFTPLUS, tmp_path / "out", tmp_path) == 2
    assert f"calibration: expected ids below {VOCABULARY}" in capsys.readouterr().err
