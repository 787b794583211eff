"""Fine-tuning: only what the assistant says is learned, the base stays what it is, adapters are PEFT's, runs resume to the bit."""

import json
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_moe_lc import MoeLcForCausalLM, load_lora
from modeling_moe_lc.conversion.merge import merge_adapter
from modeling_moe_lc.training import pretrain
from modeling_moe_lc.training.chat_encoding import ChatEncoder
from modeling_moe_lc.training.checkpoint_files import latest, step_folders
from modeling_moe_lc.training.cli import main
from modeling_moe_lc.training.media_shards import open_shards
from modeling_moe_lc.training.processes import processes
from modeling_moe_lc.training.recipe import load_recipe
from modeling_moe_lc.training.run_log import STEP, VALIDATION, read_log, records_of
from modeling_moe_lc.training.start import build_model, fill_model, model_config, start_optimizer


chats = runpy.run_path(str(Path(__file__).with_name("chat_documents.py")))
ALL = ("--adapter", "null")
BIAS = "e_score_correction_bias"
TIMES = {"seconds", "tokens_per_second", "mfu", "step_tokens"}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds the base, the conversations and, once a run has prepared it, the data."""
    folder = tmp_path_factory.mktemp("chat")
    chats["make"](folder)
    return folder


@pytest.fixture(scope="module")
def call(folder):
    return lambda out, *overrides: main(
        ["finetune", str(folder / "recipe.yaml"), "--output_dir", str(out), *overrides]
    )


@pytest.fixture(scope="module")
def run(call, tmp_path_factory):
    """One that trains an adapter, uninterrupted."""
    out = tmp_path_factory.mktemp("adapter") / "run"
    assert call(out) == 0
    return out


@pytest.fixture(scope="module")
def whole(call, tmp_path_factory):
    """One that trains all weights and balances the routers."""
    out = tmp_path_factory.mktemp("weights") / "run"
    assert call(out, *ALL, "--optimizer.kind=muon", "--router_balance.method=sign") == 0
    return out


def contents(run):
    dcp_to_torch_save(latest(run / "checkpoints"), run / "contents.pt")
    return torch.load(run / "contents.pt", weights_only=False)


def base_of(folder):
    return MoeLcForCausalLM.from_pretrained(folder / "base", dtype=torch.float64).eval()


def tokens_of(folder):
    return torch.from_numpy(open_shards(folder / "data").document(0).astype("int64"))[None]


def test_the_adapter_is_one_that_stock_peft_loads(run, folder):
    ids = tokens_of(folder)
    for place in ("adapter", "models/sft"):
        base = base_of(folder)
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, run / place).eval()
        assert (adapted(ids).logits - before).norm() > 1e-3 * before.norm()
        tensors = load_file(run / place / "adapter_model.safetensors")
        saved = contents(run)
        for name, tensor in tensors.items():
            trained = saved["model." + name.removeprefix("base_model.model.").replace(".weight", ".default.weight")]
            assert torch.equal(tensor, trained)
        assert any(".experts." in name for name in tensors) and any(".gate." in name for name in tensors)
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / "base") and config["inference_mode"]
    assert (config["r"], config["lora_alpha"]) == (3, 6)
    auto = AutoPeftModelForCausalLM.from_pretrained(run / "adapter", dtype=torch.float64).eval()
    assert torch.equal(auto(ids).logits, adapted(ids).logits)
    assert AutoTokenizer.from_pretrained(run / "adapter").chat_template is not None


def test_it_merges(run, folder, tmp_path):
    merge_adapter(folder / "base", run / "adapter", tmp_path / "merged", dtype="float64")
    merged, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval(), tokens_of(folder)
    adapted = load_lora(base_of(folder), str(run / "adapter"))(ids).logits
    assert (merged(ids).logits - adapted).norm() < 1e-9 * adapted.norm()


def test_what_is_frozen_costs_nothing_and_is_not_saved(run, folder):
    saved = contents(run)
    for name in saved:
        if name.startswith(("model.", "optimizer.")):
            assert ".lora_" in name or name.endswith(BIAS)
    recipe = load_recipe(folder / "recipe.yaml", ["--model.dtype=bfloat16"])
    with processes() as ours:
        model = build_model(recipe, model_config(recipe), ours)
        fill_model(model, recipe, ours)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes["model.layers.0.self_attn.q_proj.base_layer.weight"] == torch.bfloat16
    narrow = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
    assert all(parameter.requires_grad == (".lora_" in name) for name, parameter in model.named_parameters())
    assert all(dtypes[name] == torch.float32 for name in dtypes if ".lora_" in name)
    assert all(".decay." in n or "conv1d" in n or ".o_norm." in n or ".lora_" in n for n in dtypes.keys() - narrow)
    held = [p for group in start_optimizer(recipe, model).param_groups for p in group["params"]]
    assert len(held) == sum(".lora_" in name for name in dtypes)


def test_the_first_loss_is_that_of_the_assistants_tokens(run, folder):
    """Computed conversation by conversation, without packing, by the base: B is zero before the first step."""
    recipe, base = load_recipe(folder / "recipe.yaml"), base_of(folder)
    encoder = ChatEncoder(AutoTokenizer.from_pretrained(folder / "base"), {})
    known = {tuple(ids): learned for ids, learned in map(encoder, chats["conversations"]())}
    nats, count = 0.0, 0
    for pack in recipe.stage_data(0)[0]:
        for begin, end in zip(pack.cu_seqlens, pack.cu_seqlens[1:]):
            ids = pack.input_ids[begin:end]
            losses = F.cross_entropy(base(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:]), reduction="none")
            learned = torch.tensor(known[tuple(ids)][1:])
            nats, count = nats + losses[learned].sum().item(), count + int(learned.sum())
    first = records_of(read_log(run), STEP)[0]
    assert first["loss"] == pytest.approx(nats / count, rel=1e-9)


def test_it_learns(run, whole):
    for out in (run, whole):
        steps, validations = (records_of(read_log(out), kind) for kind in (STEP, VALIDATION))
        assert steps[-1]["loss"] < steps[0]["loss"] - 0.2 and validations[-1]["loss"] < steps[0]["loss"] - 0.2


def test_router_biases_move_only_where_they_are_told_to(run, whole, folder, call, tmp_path):
    base = {name: tensor for name, tensor in base_of(folder).state_dict().items() if name.endswith(BIAS)}
    assert base and all(tensor.any() for tensor in base.values())
    assert call(tmp_path, *ALL, "--stages.0.tokens=512") == 0
    frozen, moved = (
        MoeLcForCausalLM.from_pretrained(out / "models" / "sft").state_dict() for out in (tmp_path, whole)
    )
    for name, tensor in base.items():
        adapted = contents(run)[f"model.{name}".replace(".gate.", ".gate.base_layer.")]
        assert torch.equal(adapted, tensor) and torch.equal(frozen[name], tensor)
        assert not torch.equal(moved[name], tensor)


def test_all_weights_leave_a_whole_model(whole, folder):
    model = AutoModelForCausalLM.from_pretrained(whole / "models" / "sft", dtype=torch.float64)
    before = base_of(folder).state_dict()
    still = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert still == {f"model.layers.0.self_attention_res.{name}" for name in ("query", "key_norm")}  # of one source
    assert not (whole / "adapter").exists()


def test_a_run_that_stops_twice_is_the_same_run(run, call, tmp_path):
    for step, limit in ((1, "1e-9"), (2, "1e-9"), (4, "null")):
        assert call(tmp_path, f"--limits.max_minutes={limit}") == 0
        assert max(step_folders(tmp_path / "checkpoints")) == step
        assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    one, two = contents(tmp_path), contents(run)
    tensors = [{name: x for name, x in saved.items() if isinstance(x, torch.Tensor)} for saved in (one, two)]
    assert any(name.startswith("optimizer.") for name in tensors[0])
    torch.testing.assert_close(*tensors, rtol=0, atol=0)
    files = [load_file(out / "models" / "sft" / "adapter_model.safetensors") for out in (tmp_path, run)]
    torch.testing.assert_close(*files, rtol=0, atol=0)
    logs = [[{n: v for n, v in line.items() if n not in TIMES} for line in read_log(out)] for out in (tmp_path, run)]
    assert logs[0] == logs[1]


def test_dropout_on_linear_layers(call, tmp_path):
    """A run that stopped, and computed activations again, is the same run to the bit."""
    linear = ("--adapter.targets", "attention", "shared_experts", "--stages.0.tokens=1024")
    dropout, again = "--adapter.dropout=0.3", "--model.activation_checkpointing=true"
    assert call(tmp_path / "without", *linear) == 0
    assert call(tmp_path / "whole", *linear, dropout) == 0
    assert call(tmp_path / "stopped", *linear, dropout, again, "--limits.max_minutes=1e-9") == 0
    assert call(tmp_path / "stopped", *linear, dropout, again) == 0
    without, whole, stopped = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")
        for name in ("without", "whole", "stopped")
    )
    assert any(not torch.equal(without[name], tensor) for name, tensor in whole.items())
    torch.testing.assert_close(stopped, whole, rtol=0, atol=0)
    config = json.loads((tmp_path / "whole" / "adapter" / "adapter_config.json").read_text())
    assert config["lora_dropout"] == 0.3


def test_text_may_be_mixed_in_and_bf16_learns(call, folder, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(8):
        (texts / f"{number}.txt").write_text(f"{chats['COLOURS'][number % 5]} is a colour. " * (number + 1))
    options = ["--tokenizer", str(folder / "base"), "--workers=1", "--validation-share=0.3"]
    assert main(["prepare", str(texts), "--out", str(tmp_path / "text"), *options]) == 0
    mixed = ["--data.folders.text", str(tmp_path / "text"), "--stages.0.mixture", "{chat: 3, text: 1}"]
    fast = [
        "--model.dtype=bfloat16",
        "--model.activation_checkpointing=true",
        "--adapter.targets",
        "attention",
        "latent",
    ]
    assert call(tmp_path / "run", *mixed, *fast) == 0
    log = read_log(tmp_path / "run")
    losses = records_of(log, VALIDATION)[-1]["losses"]
    assert losses.keys() == {"chat", "text"}
    steps = records_of(log, STEP)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1


@pytest.mark.parametrize(
    "overrides, message",
    (
        (["--adapter.targets", "atention"], "adapter.targets.0: expected one of attention, kda,"),
        (["--adapter.lora_dropout=0.1"], "adapter.lora_dropout: expected one of the fields r, alpha, dropout, targets"),
        (["--adapter.use_dora=true"], "adapter.use_dora: expected one of the fields r, alpha, dropout, targets"),
        (["--adapter.dropout=1"], "adapter.dropout: expected at least 0 and below 1, got 1.0"),
        (["--adapter.dropout=0.1"], "adapter.dropout: expected 0 on experts and router, got 0.1"),
        (["--adapter.dropout=0.1", "--adapter.targets", "attention", "router"], "adapter.dropout: expected 0 on router, got 0.1"),
        (["--adapter.r=0"], "adapter.r: expected more than 0, got 0"),
        (["--optimizer.kind=muon"], "optimizer.kind: expected 'adamw' with an adapter, got 'muon'"),
        (["--router_balance.method=sign"], "router_balance.method: expected 'none' with an adapter, whose files"),
        (["--model.start=scratch"], "model.start: expected 'continue' in fine-tuning, got 'scratch'"),
        (["--chat.sources.other=x.jsonl"], "chat.sources.other: expected a name in data.folders (chat), got 'other'"),
        (["--chat.sources.chat=nowhere.jsonl"], "source: expected a file, a folder, a URL or hf:NAME, got 'nowhere.jsonl'"),
        ([*ALL, "--chat.sources={}"], "chat, adapter: expected one of them in fine-tuning, got a recipe for `moe-lc train`"),
        (["--adapter.targets=vision"], "target_modules: expected names of this model, got fc0, fc1, wo, wqkv"),
        (["--adapter.targets=head", "--model.config.tie_word_embeddings=true"], "expected no head that is the embedding as well"),
        (["--data.folders.chat=DATA", "--chat.validation_share=0.5"], "validation_share: expected 0.2, with which"),
    ),
)  # fmt: skip
def test_refused_by_name(call, run, folder, tmp_path, capsys, monkeypatch, overrides, message):
    monkeypatch.chdir(tmp_path)
    overrides = [word.replace("DATA", str(folder / "data")) for word in overrides]
    assert call(tmp_path / "run", *overrides) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_as_it_began_only(run, call, folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "build_model", None)
    assert call(run, "--adapter.r=4") == 2
    assert "adapter: expected {'r': 3" in capsys.readouterr().err
    assert call(run, "--chat.sources.chat", str(folder / "chat.jsonl"), "--data.folders.chat", str(tmp_path / "d"), "--chat.validation_share=0.4") == 2  # fmt: skip
    assert "stages.0: expected the data that the run began with" in capsys.readouterr().err


def test_what_is_in_the_way_of_an_adapter_stays(run, call, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "adapter")
    (tmp_path / "run" / "adapter").mkdir()
    (tmp_path / "run" / "adapter" / "notes.txt").write_text("mine")
    for made in ("checkpoints", "models"):
        shutil.rmtree(tmp_path / "run" / made)
    assert call(tmp_path / "run", "--stages.0.tokens=512") == 2
    assert "with adapter_config.json, got" in capsys.readouterr().err
    assert (tmp_path / "run" / "adapter" / "notes.txt").read_text() == "mine"
