"""The whole loop on one process: it resumes to the bit, packs as if documents were apart, and refuses before it works."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.kda import Decay, ShortConv
from modeling_moe_lc.norm import GatedRMSNorm
from modeling_moe_lc.training import pretrain
from modeling_moe_lc.training.batches import Batches
from modeling_moe_lc.training.checkpoint_files import latest, step_folders
from modeling_moe_lc.training.cli import main
from modeling_moe_lc.training.packing import count_tokens
from modeling_moe_lc.training.processes import processes
from modeling_moe_lc.training.recipe import load_recipe
from modeling_moe_lc.training.run_log import read_log, records_of
from modeling_moe_lc.training.start import build_model, fill_model, model_config


TIMES = {"seconds", "tokens_per_second", "mfu", "step_tokens"}  # of the stretch since the last record
RECIPE = """
model: {base: tiny, dtype: float64, activation_checkpointing: false, loss_chunk_size: 100}
data: {folders: {python: DATA}, validation_tokens: 512}
tokens_per_step: 512
stages:
  - {name: short, sequence_length: 64, tokens: 3072, micro_batch: 4}
  - {name: long, sequence_length: 256, tokens: 2048, micro_batch: 1}
optimizer: {learning_rate: 1e-2}
logging: {every_steps: 1}
checkpoints: {every_minutes: null}
"""
FIRST, LAST = 6, 10  # steps when the stages end

pytestmark = pytest.mark.usefixtures("one_thread")


def make_data(folder: Path, parts: int = 24) -> Path:
    """Prepares pieces of a module of this Python, of 1 to 50 lines, as documents."""
    lines = Path(textwrap.__file__).read_text().splitlines(keepends=True)
    source = folder / "source"
    source.mkdir(parents=True)
    for part in range(parts):
        begin, length = part * 17, 1 + 7 * part % 50
        (source / f"part_{part}.py").write_text("".join(lines[begin : begin + length]) or "pass\n")
    arguments = ["--train-tokenizer", "300", "--validation-share", "0.3", "--workers", "1", "--suffixes", ".py"]
    assert main(["prepare", str(source), "--out", str(folder / "data"), *arguments]) == 0
    return folder / "data"


def make_recipe(folder: Path, data: Path) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("DATA", str(data)))
    return path


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    return make_recipe(folder, make_data(folder))


@pytest.fixture(scope="module")
def call(recipe):
    return lambda out, *overrides: main(["train", str(recipe), "--output_dir", str(out), *overrides])


@pytest.fixture(scope="module")
def whole(call, tmp_path_factory):
    """A run that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert call(out) == 0
    return out


def contents(run: Path) -> dict:
    """All that the last checkpoint holds, whole."""
    dcp_to_torch_save(latest(run / "checkpoints"), run / "contents.pt")
    return torch.load(run / "contents.pt", weights_only=False)


def records(run: Path) -> list[dict]:
    """The log without what no two runs share."""
    return [{name: value for name, value in one.items() if name not in TIMES} for one in read_log(run)]


def saved_tensors(run: Path, stage: str) -> dict:
    return MoeLcForCausalLM.from_pretrained(run / "models" / stage).state_dict()


def assert_equal_runs(got: Path, expected: Path) -> None:
    """Weights, router biases, optimiser and random states, data order and metrics, to the bit."""
    one, two = contents(got), contents(expected)
    assert one.keys() == two.keys()
    assert any("e_score_correction_bias" in name for name in one)
    assert any("momentum_buffer" in name for name in one)
    torch.testing.assert_close(
        {name: value for name, value in one.items() if isinstance(value, torch.Tensor)},
        {name: value for name, value in two.items() if isinstance(value, torch.Tensor)},
        rtol=0,
        atol=0,
    )
    assert one["param_groups"] == two["param_groups"]
    assert torch.equal(one["random.0"]["torch"], two["random.0"]["torch"])
    assert records(got) == records(expected)
    for stage in ("short", "long"):
        torch.testing.assert_close(saved_tensors(got, stage), saved_tensors(expected, stage), rtol=0, atol=0)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).norm() / expected.norm().clamp_min(1e-12)).item()


def worst_difference(got: dict, expected: dict) -> float:
    """Over all tensors of two checkpoints."""
    assert got.keys() >= {name for name in expected if not name.startswith("random.")}
    tensors = [name for name, value in expected.items() if isinstance(value, torch.Tensor)]
    return max(relative(got[name].double(), expected[name].double()) for name in tensors)


def test_a_run_folder_holds_what_is_promised(whole):
    log = read_log(whole)
    assert [record["step"] for record in records_of(log, "step")] == list(range(1, LAST + 1))
    assert [record["step"] for record in records_of(log, "validation")] == [FIRST, LAST]
    assert [record["stage"] for record in records_of(log, "stage")] == ["short", "long"]
    assert list(step_folders(whole / "checkpoints")) == [FIRST, LAST]
    assert records_of(log, "stage")[-1]["by_position"]["trained_length"] == 256
    assert load_recipe(whole / "recipe.yaml").output_dir == str(whole)
    balance = records_of(log, "validation")[-1]
    assert (
        len(balance["max_violation"]) == len(balance["dead_experts"]) == len(records_of(log, "step")[-1]["bias_range"])
    )
    steps = records_of(log, "step")
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["attn_res_entropy"] and "attn_res_entropy" not in steps[-2]
    assert {path.name for path in (whole / "models" / "long").iterdir()} >= {"config.json", "tokenizer.json"}


def test_tokens_are_those_that_were_read(whole):
    recipe = load_recipe(whole / "recipe.yaml")
    read = [count_tokens(recipe.stage_data(0)[step]) for step in range(FIRST)]
    read += [count_tokens(recipe.stage_data(1)[step]) for step in range(LAST - FIRST)]
    steps = records_of(read_log(whole), "step")
    assert [record["tokens"] for record in steps] == list(itertools.accumulate(read))
    assert [record["step_tokens"] for record in steps] == read


def test_a_finished_run_stays_as_it_is(whole, call, tmp_path, capsys):
    """What its recipe says is what it was trained with, whatever the same command says afterwards."""
    shutil.copytree(whole, tmp_path / "run")
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in (tmp_path / "run").rglob("*")}
    assert call(tmp_path / "run", "--optimizer.learning_rate", "3", "--output_dir", str(tmp_path / "run")) == 0
    assert f"{LAST} of {LAST} steps: the run is complete" in capsys.readouterr().out
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in (tmp_path / "run").rglob("*")} == before


def test_the_recipe_is_shown_once_it_has_been_checked(call, tmp_path, capsys):
    assert call(tmp_path / "run", "--data.folders.python=nowhere") == 2
    assert capsys.readouterr().out == ""


def test_a_folder_that_cannot_be_made_is_named_before_anything_is_built(call, tmp_path, capsys, unbuilt):
    (tmp_path / "file").write_text("")
    assert call(tmp_path / "file" / "run") == 2
    assert f"moe-lc: error: {tmp_path / 'file' / 'run'}" in capsys.readouterr().err


def start(recipe: Path, out: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "modeling_moe_lc.training.cli", "train", str(recipe), "--output_dir", str(out)]
    return subprocess.Popen(
        [*command, "--checkpoints.every_steps", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for_step(out: Path, step: int, process: subprocess.Popen) -> None:
    """Until the log shows a step."""
    while not (out / "log.jsonl").exists() or all(record["step"] < step for record in read_log(out)):
        assert process.poll() is None, f"the run ended before step {step}"
        time.sleep(0.005)


def test_killed_and_terminated_runs_go_on_to_the_bit(whole, recipe, call, tmp_path):
    process = start(recipe, tmp_path)
    wait_for_step(tmp_path, 1, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "stopped; the same command goes on from there" in output
    stopped = max(step_folders(tmp_path / "checkpoints"))
    assert 1 <= stopped < 4
    assert max(record["step"] for record in read_log(tmp_path)) == stopped  # saved where it stood

    process = start(recipe, tmp_path)
    wait_for_step(tmp_path, 4, process)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    found = latest(tmp_path / "checkpoints")
    assert found is not None and int(found[-6:]) < LAST

    assert call(tmp_path) == 0
    assert_equal_runs(tmp_path, whole)


def test_a_run_that_stops_after_every_step_is_the_same_run(call, tmp_path):
    few = ["--stages.0.tokens", "1536", "--stages.1.tokens", "1024"]  # 3 and 2 steps
    logging = ["--logging.every_steps", "4", "--logging.evaluate_every_steps", "2"]
    assert call(tmp_path / "whole", *few, *logging) == 0
    for step in (1, 2, 3, 4, 5, 5):
        assert not (tmp_path / "parts" / "models" / "long").exists()
        assert call(tmp_path / "parts", *few, *logging, "--limits.max_minutes", "1e-9") == 0
        assert max(step_folders(tmp_path / "parts" / "checkpoints")) == step
    # Every stop saves, but what is logged does not depend on where a run was stopped.
    assert [(record["kind"], record["step"]) for record in read_log(tmp_path / "whole")] == [
        *[("validation", 2), ("step", 3), ("validation", 3), ("stage", 3)],
        *[("step", 4), ("validation", 4), ("step", 5), ("validation", 5), ("stage", 5)],
    ]
    assert_equal_runs(tmp_path / "parts", tmp_path / "whole")


def test_a_stage_whose_end_was_lost_is_ended_again(whole, call, tmp_path):
    """Killed between the checkpoint of the last step and the model that anyone can load."""
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "models" / "long")
    log = tmp_path / "run" / "log.jsonl"
    log.write_text("".join(line + "\n" for line in log.read_text().splitlines()[:-2]))
    assert call(tmp_path / "run") == 0
    assert_equal_runs(tmp_path / "run", whole)


def test_a_run_goes_on_without_its_folder(whole, call, tmp_path):
    """Checkpoints elsewhere, on object storage say, are all that a new machine needs."""
    elsewhere = tmp_path / "checkpoints"
    shutil.copytree(whole / "checkpoints", elsewhere)
    shutil.rmtree(elsewhere / f"step-{LAST:06}")
    assert call(tmp_path / "run", "--checkpoints.folder", str(elsewhere)) == 0
    assert records(tmp_path / "run") == records(whole)[-len(records(tmp_path / "run")) :]
    assert call(tmp_path / "run", "--checkpoints.folder", str(elsewhere), "--seed", "3") == 2


def test_one_micro_batch_of_eight_is_eight_of_one(call, tmp_path):
    stage = ["--stages.0.tokens", "1536", "--stages.1.tokens", "512"]
    for size in (8, 1):
        assert call(tmp_path / f"{size}", *stage, "--stages.0.micro_batch", f"{size}") == 0
    one, eight = (contents(tmp_path / f"{size}") for size in (1, 8))
    assert worst_difference(one, eight) < 1e-9
    losses = [[step["loss"] for step in records_of(read_log(tmp_path / f"{size}"), "step")] for size in (1, 8)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_packed_documents_have_the_loss_and_gradients_of_separate_ones(recipe):
    settings = load_recipe(recipe, ["--output_dir", "unused", "--stages.0.micro_batch", "8"])
    data = settings.stage_data(0)
    assert any(len(pack.cu_seqlens) > 2 for pack in data[0])
    with processes() as ours:
        model = build_model(settings, model_config(settings), ours)
        fill_model(model, settings, ours)
        torch.nn.init.normal_(model.model.layers[-1].self_attn.o_proj.weight, std=0.1)
        [batch] = next(iter(Batches(ours.mesh(1), 8, ours).steps(data, 0, 1)))
        losses, gradients = [], []
        separate = [
            torch.tensor([pack.input_ids[begin:end]])
            for pack in data[0]
            for begin, end in itertools.pairwise(pack.cu_seqlens)
        ]
        predictions = sum(ids.shape[1] - 1 for ids in separate)
        assert batch.predictions == predictions == int(batch.inputs["num_items_in_batch"])
        whole = [batch.inputs]
        apart = [{"input_ids": ids, "labels": ids, "num_items_in_batch": predictions} for ids in separate]
        for inputs in (whole, apart):
            model.zero_grad()
            parts = [model(**one).loss for one in inputs]
            for part in parts:
                part.backward()
            losses.append(sum(parts).item())
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    for name, gradient in gradients[1].items():
        assert (gradients[0][name] - gradient).norm() <= 1e-9 * gradient.norm() + 1e-15, name


def test_continue_starts_from_the_bits_of_a_saved_model(whole, recipe, tmp_path):
    base = whole / "models" / "long"
    overrides = ["--output_dir", str(tmp_path), "--model.base", str(base), "--model.start", "continue"]
    settings = load_recipe(recipe, overrides)
    assert settings.embedding_rate == 1.0
    expected = saved_tensors(whole, "long")
    assert any(bias.any() for name, bias in expected.items() if name.endswith("e_score_correction_bias"))
    with processes() as ours:
        model = build_model(settings, model_config(settings), ours)
        fill_model(model, settings, ours)
        got = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in model.state_dict().items()}
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert main(["train", str(recipe), *overrides, "--stages.0.tokens", "512", "--stages.1.tokens", "512"]) == 0
    first = records(tmp_path)[0]["loss"]
    assert first < records_of(records(whole), "step")[4]["loss"]  # where that run had come to, and not the beginning


def test_bf16_keeps_full_precision_where_it_must_and_learns(call, tmp_path, monkeypatch):
    seen = set()

    def watch(kind, name):
        def forward(module, *args, real=kind.forward, **kwargs):
            seen.add((name, *(parameter.dtype for parameter in module.parameters())))
            return real(module, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", forward)

    for kind, name in ((ShortConv, "conv"), (Decay, "decay"), (GatedRMSNorm, "o_norm"), (torch.nn.Linear, "linear")):
        watch(kind, name)
    assert call(tmp_path, "--model.dtype", "bfloat16", "--model.activation_checkpointing", "true") == 0
    full = torch.float32
    assert seen == {("conv", full), ("decay", full, full), ("o_norm", full), ("linear", torch.bfloat16)}
    tensors = {name: x for name, x in contents(tmp_path).items() if name.startswith(("model.", "optimizer."))}
    assert {x.dtype for x in tensors.values() if x.is_floating_point()} == {full}  # masters, moments and biases
    losses = [record["loss"] for record in records_of(read_log(tmp_path), "step")]
    assert losses[-1] < losses[0] - 0.3


@pytest.fixture
def unbuilt(monkeypatch):
    """A run that is refused has built nothing."""

    def build(*args):
        raise AssertionError("the model is being built")

    monkeypatch.setattr(pretrain, "build_model", build)


@pytest.mark.parametrize(
    ("overrides", "message"),
    (
        ("--model.config.vocab_size=290", "data.folders: expected token ids below the model's vocabulary of 290, got 300"),
        ("--stages.1.context_parallel=2", "stages.1.context_parallel: expected a divisor of the 1 processes, got 2"),
        ("--stages.0.micro_batch=3", "stages.0.sequence_length x micro_batch (64 x 3)"),
        ("--model.cuda_graphs=true", "model.cuda_graphs: expected bfloat16 on a CUDA device, text, a sequence on one GPU and no dropout, got cpu"),
        ("--data.folders.python=nowhere", "expected a folder that `moe-lc prepare` has finished, got 'nowhere'"),
        ("--data.validation_split=test", "split: expected one of 'train', 'validation', got 'test'"),
        ("--data.folders.python=nothing_held_out", "expected documents in the split 'validation', got none (prepare again with a larger --validation-share"),
    ),
)  # fmt: skip
def test_refused_before_anything_is_built(recipe, call, tmp_path, capsys, unbuilt, monkeypatch, overrides, message):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(recipe.parent / "data", "nothing_held_out")
    manifest = json.loads(Path("nothing_held_out/manifest.json").read_text())
    manifest["splits"]["validation"]["shards"] = []
    Path("nothing_held_out/manifest.json").write_text(json.dumps(manifest))
    assert call(tmp_path / "run", overrides) == 2
    error = capsys.readouterr().err
    assert error.startswith("moe-lc: error: ") and message in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_under_its_own_past_only(whole, recipe, call, tmp_path, capsys, unbuilt):
    log = read_log(whole)
    assert call(whole, "--seed", "5") == 2
    assert "seed: expected 0, as the run began with, got 5" in capsys.readouterr().err
    other = make_data(tmp_path, parts=20)
    assert call(whole, "--data.folders.python", str(other)) == 2
    assert "stages.0: expected the data that the run began with, got other in" in capsys.readouterr().err
    assert read_log(whole) == log


@pytest.mark.parametrize("kind", ["adapter", "llama", "nothing", "nowhere"])
def test_a_base_that_is_no_model_of_ours_is_refused(recipe, tmp_path, kind, capsys):
    """transformers would make up a configuration, of tens of billions of parameters."""
    base = tmp_path / "base"
    base.mkdir()
    if kind == "nowhere":
        base = tmp_path / "bse"
    if kind == "adapter":
        (base / "adapter_config.json").write_text("{}")
    if kind == "llama":
        (base / "config.json").write_text('{"model_type": "llama"}')
    assert main(["train", str(recipe), "--output_dir", str(tmp_path / "run"), "--model.base", str(base)]) == 2
    told = {"adapter": "moe-lc merge BASE", "llama": "got 'llama'", "nothing": "expected a folder with a config.json"}
    told["nowhere"] = "model.base: expected a preset, a folder or a model of the Hub"
    assert told[kind] in capsys.readouterr().err


def test_a_finished_run_without_its_checkpoints_is_not_begun_again(recipe, whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "run")
    log = (tmp_path / "run" / "log.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert main(["train", str(recipe), "--output_dir", str(tmp_path / "run")]) == 2
    assert "checkpoints.folder: expected the checkpoints of the run" in capsys.readouterr().err
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == log


def test_two_runs_do_not_share_a_folder(recipe, tmp_path, capsys):
    held = """
import sys, time
from pathlib import Path
from modeling_moe_lc.training.claim import claim
held = claim(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""
    other = subprocess.Popen([sys.executable, "-c", held, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        assert main(["train", str(recipe), "--output_dir", str(tmp_path)]) == 2
        assert "output_dir: expected a folder to which no other run writes" in capsys.readouterr().err
    finally:
        other.kill()
        other.wait()
    assert main(["train", str(recipe), "--output_dir", str(tmp_path), "--limits.max_minutes", "0.0001"]) == 0
