"""`moe-lc bench lora`: ours and stock PEFT's formulation train the same adapter, and what is wrong gets no speed."""

import json
from argparse import ArgumentParser

import pytest
import torch

from modeling_moe_lc import latent_moe
from modeling_moe_lc.training import bench_lora
from modeling_moe_lc.training.bench_lora import LAUNCHED, LIMIT, STOCK, Training, check, worst_difference
from modeling_moe_lc.training.cli import main


WIDE = "nano-kimi-linear"  # the tiny one has experts of 16 inputs, which are no block of MXFP4


class Machine:
    """In place of a GPU."""

    name, device, started, has_graphs = "an H200 that is none", torch.device("cpu"), 0, False

    def synchronize(self):
        pass

    def start_memory(self):
        self.started += 1

    def peak_memory(self):
        return 3_000_000_000 * self.started


def arguments(*options):
    parser = ArgumentParser()
    parser.set_defaults(command="moe-lc bench lora")
    bench_lora.add_arguments(parser)
    small = ("--preset", "tiny", "--backend", "moe_lc_reference", "--layers", "2", "--tokens", "24")
    args = parser.parse_args([*small, "--steps", "2", "--warm-up", "2", "--rank", "4", *options])
    bench_lora.check_arguments(args)
    return args


def test_ours_stock_and_their_ratio(tmp_path, capsys):
    output = tmp_path / "lines.jsonl"
    assert bench_lora.bench(arguments("--stock", "--output", str(output)), Machine()) == 0
    ours, stock, ratio = [json.loads(line) for line in output.read_text().splitlines()]
    assert [ours["what"], stock["what"], ratio["what"]] == [LAUNCHED, STOCK, f"{LAUNCHED} / {STOCK}"]
    assert ours["layers"] == stock["layers"] == 2 and ours["tokens"] == 24 and ours["steps"] == 2
    assert ours["weight_bytes"] == stock["weight_bytes"] and ours["state_bytes"] == stock["state_bytes"] > 0
    assert ours["seconds"] > 0 and ours["experts"] == stock["experts"] == "bfloat16"
    assert ratio["rate"] == pytest.approx(stock["seconds"] / ours["seconds"])
    above = [row["peak_bytes"] - row["weight_bytes"] for row in (ours, stock)]
    assert ratio["above"] == pytest.approx(above[0] / above[1])
    assert ours["command"] == "moe-lc bench lora" and ours["peft"] and 0 < ours["difference"] < LIMIT
    printed = capsys.readouterr().out
    assert "grouped_mm" in printed and f"{ratio['rate']:.2f}" in printed


def test_experts_in_mxfp4_beside_stock_in_bf16(tmp_path):
    output = tmp_path / "lines.jsonl"
    args = arguments("--preset", WIDE, "--experts", "mxfp4", "--stock", "--output", str(output))
    assert bench_lora.bench(args, Machine()) == 0
    ours, stock, _ = [json.loads(line) for line in output.read_text().splitlines()]
    assert (ours["experts"], stock["experts"]) == ("mxfp4", "bfloat16")
    assert ours["weight_bytes"] < stock["weight_bytes"]


def test_only_the_adapter_is_trained():
    training = Training(arguments(), torch.device("cpu"), LAUNCHED, 2, 24)
    model, before = training.model, {name: t.clone() for name, t in training.model.state_dict().items()}
    training.step()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if ".lora_" in name}
    assert all(before[name].dtype == torch.float32 for name in changed)
    assert training.state_bytes() == 14 * sum(before[name].numel() for name in changed)  # 4 + 2 + 8


def test_stock_is_called_as_peft_wraps_it_and_only_inside(monkeypatch):
    """W + B A is built only there; our own path is back afterwards, whatever happened."""
    from peft.tuners.lora.layer import ParamWrapper

    called = []
    forward = ParamWrapper.forward
    monkeypatch.setattr(ParamWrapper, "forward", lambda self, *x, **k: (called.append(1), forward(self, *x, **k))[1])
    args, ours = arguments(), latent_moe.run_experts
    bench_lora.measure(args, Machine(), LAUNCHED)
    assert not called
    bench_lora.measure(args, Machine(), STOCK)
    assert called and latent_moe.run_experts is ours
    with pytest.raises(RuntimeError), bench_lora.as_called(STOCK):
        raise RuntimeError
    assert latent_moe.run_experts is ours


@pytest.mark.parametrize("what, implementation", [(LAUNCHED, "eager"), (STOCK, "grouped_mm")])
def test_the_experts_implementation(what, implementation):
    assert (
        Training(arguments(), torch.device("cpu"), what, 2, 24).model.config._experts_implementation == implementation
    )


@pytest.mark.parametrize("options", [[], ["--no-checkpointing"]], ids=["checkpointed", "kept"])
def test_layers_are_checkpointed_unless_told_otherwise(options):
    model = Training(arguments(*options), torch.device("cpu"), LAUNCHED, 2, 24).model
    assert all(layer.gradient_checkpointing is not bool(options) for layer in model.model.layers)


@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, LIMIT), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("options", [[], ["--preset", WIDE, "--experts", "mxfp4"]], ids=str)
def test_gradients_are_those_of_stock(options, dtype, limit, monkeypatch):
    monkeypatch.setattr(bench_lora, "DTYPE", dtype)
    assert 0 < check(arguments(*options), Machine()) < limit


def test_the_worst_difference():
    expected = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([5.0, 0.0]), "tiny": torch.tensor([1e-9, 0.0])}
    found = {**expected, "b": torch.tensor([5.0, 0.5]), "tiny": torch.tensor([2e-9, 0.0])}
    assert worst_difference(found, expected) == pytest.approx(0.1)
    assert worst_difference({**found, "tiny": torch.tensor([torch.nan, 0.0])}, expected) != pytest.approx(0.1)
    assert not worst_difference({**found, "a": torch.tensor([torch.inf, 4.0])}, expected) <= 1e9


def forget(monkeypatch, part):
    """From here on ours runs without one of the experts' updates, or with half of its scale."""
    seen = latent_moe.run_experts.__globals__
    updates = seen["active_updates"]

    def forgetting(experts):
        gate_up, down = updates(experts)
        if part == "scaling":
            return gate_up, down and down._replace(b=down.b / 2)
        return (None, down) if part == "gate_up_proj" else (gate_up, None)

    monkeypatch.setitem(seen, "active_updates", forgetting)


@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj", "scaling"])
def test_what_is_forgotten_is_a_difference(part, monkeypatch):
    forget(monkeypatch, part)
    assert check(arguments(), Machine()) > 5 * LIMIT


def test_what_is_wrong_gets_no_speed(monkeypatch, capsys):
    forget(monkeypatch, "down_proj")
    assert bench_lora.bench(arguments("--stock"), Machine()) == 1
    printed = capsys.readouterr().out
    assert "no speed is measured" in printed and "tokens/s" not in printed


@pytest.mark.parametrize("when", ["first", "later"])
def test_what_is_not_finite_gets_no_speed(when, monkeypatch, capsys):
    backward, steps = Training.backward, []

    def exploding(self):
        loss = backward(self)
        steps.append(loss)
        if (len(steps) == 1) == (when == "first"):
            next(p for p in self.model.parameters() if p.requires_grad).grad.fill_(torch.nan)
        return loss

    monkeypatch.setattr(bench_lora, "check", lambda *_: 1e-3)
    monkeypatch.setattr(Training, "backward", exploding)
    assert bench_lora.bench(arguments(), Machine()) == 1
    assert "wrong: not finite" in capsys.readouterr().out


def test_an_adapter_without_a_gradient_gets_no_speed(monkeypatch, capsys):
    backward = Training.backward

    def forgetting(self):
        loss = backward(self)
        next(p for p in self.model.parameters() if p.requires_grad).grad = None
        return loss

    monkeypatch.setattr(bench_lora, "check", lambda *_: 1e-3)
    monkeypatch.setattr(Training, "backward", forgetting)
    assert bench_lora.bench(arguments(), Machine()) == 1


@pytest.mark.parametrize(
    "error, said",
    [(torch.OutOfMemoryError(), "out of memory"), (RuntimeError("no room\nhere"), "failed: RuntimeError: no room")],
)
def test_stock_that_fails_leaves_ours(error, said, monkeypatch, capsys, tmp_path):
    from peft.tuners.lora.layer import ParamWrapper

    def crowded(*_, **__):
        raise error

    monkeypatch.setattr(bench_lora, "check", lambda *_: 1e-3)
    monkeypatch.setattr(ParamWrapper, "forward", crowded)
    output = tmp_path / "lines.jsonl"
    assert bench_lora.bench(arguments("--stock", "--output", str(output)), Machine()) == 0
    ours, stock = [json.loads(line) for line in output.read_text().splitlines()]
    assert ours["seconds"] > 0 and (stock["seconds"], stock["skipped"]) == (None, said)
    assert said in capsys.readouterr().out


def test_the_slice_that_is_checked():
    args = arguments("--preset", "kimi-k3", "--layers", "5", "--tokens", "8192")
    assert bench_lora.checked_slice(args) == (2, 1024, 256)
    assert bench_lora.checked_slice(arguments()) == (2, 24, 8)
    assert bench_lora.checked_slice(arguments("--layers", "1", "--targets", "attention")) == (1, 24, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "steps: expected a number of at least 1, got 0"),
        (["--warm-up", "1"], "warm_up: expected a number of at least 2, got 1"),
        (["--tokens", "1"], "tokens: expected a number of at least 2, got 1"),
        (["--output", "/nowhere/lines"], "output: expected a file in a folder that exists"),
        (["--layers", "99"], "layers: expected 1 to 27"),
        (["--targets", "latent"], "target_modules: expected names of this model"),
        (["--layers", "1", "--targets", "experts"], "target_parameters: expected names of this model"),
    ],
)
def test_options_are_checked_first(capsys, options, message):
    assert main(["bench", "lora", *options]) == 2
    assert message in capsys.readouterr().err
