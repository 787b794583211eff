"""Fine-tuning beside experts that stay in MXFP4: the same numbers as beside plain ones, and not a bit of the base changes."""

import runpy
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from modeling_moe_lc import MoeLcForCausalLM, MoeLcMxfp4Config, load_lora
from modeling_moe_lc.adapters import prepare_packed_experts
from modeling_moe_lc.packed_experts import PackedExperts
from modeling_moe_lc.training import finetune
from modeling_moe_lc.training.checkpoint_files import latest, step_folders
from modeling_moe_lc.training.cli import main
from modeling_moe_lc.training.prepare_chat import prepare_conversations
from modeling_moe_lc.training.pretrain import Run
from modeling_moe_lc.training.processes import processes
from modeling_moe_lc.training.recipe import load_recipe
from modeling_moe_lc.training.run_log import STEP, VALIDATION, read_log, records_of


chats = runpy.run_path(str(Path(__file__).with_name("chat_documents.py")))
PACKED = "--model.dequantize=false"
STEPS = 3
LIMIT = 1e-5  # relative, FP32
IDS = torch.randint(3, 300, (2, 17), generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds the base, its twin with experts in MXFP4, and the conversations."""
    folder = tmp_path_factory.mktemp("packed")
    chats["make"](folder, routed_expert_hidden_size=64)
    assert main(["convert", str(folder / "base"), str(folder / "mxfp4"), "--dtype", "mxfp4"]) == 0
    return folder


@pytest.fixture(scope="module")
def overrides(folder):
    base = ("--model.base", str(folder / "mxfp4"), "--model.dtype=float32", f"--stages.0.tokens={512 * STEPS}")
    return lambda out, *more: [*base, "--output_dir", str(out), *more]


@pytest.fixture(scope="module")
def call(folder, overrides):
    return lambda out, *more: main(["finetune", str(folder / "recipe.yaml"), *overrides(out, *more)])


@pytest.fixture(scope="module")
def trained(folder, overrides, tmp_path_factory):
    """The folder of a run beside packed experts, and its model."""
    out = tmp_path_factory.mktemp("runs") / "packed"
    recipe = load_recipe(folder / "recipe.yaml", overrides(out, PACKED))
    prepare_conversations(recipe)
    with processes() as ours:
        run = Run(recipe, ours)
        assert run.train()
    return out, run.model


@pytest.fixture(scope="module")
def packed(trained):
    return trained[0]


@pytest.fixture(scope="module")
def plain(call, trained, tmp_path_factory):
    """The folder of a run beside the same weights, dequantised to FP32."""
    out = tmp_path_factory.mktemp("runs") / "plain"
    assert call(out) == 0
    return out


def base_of(folder, **kwargs):
    return MoeLcForCausalLM.from_pretrained(folder / "mxfp4", dtype=torch.float32, **kwargs).eval()


def packed_base(folder):
    return base_of(folder, quantization_config=MoeLcMxfp4Config(dequantize=False))


def losses(run):
    log = read_log(run)
    return [record["loss"] for kind in (STEP, VALIDATION) for record in records_of(log, kind)]


def adapter(run, place="adapter"):
    return load_file(run / place / "adapter_model.safetensors")


def relative(x, reference):
    return ((x - reference).norm() / reference.norm()).item()


def worst(got, expected):
    assert got.keys() == expected.keys()
    return max(relative(got[name], tensor) for name, tensor in expected.items())


def test_an_adapter_learns_beside_packed_experts_what_it_learns_beside_plain_ones(packed, plain):
    assert len(losses(packed)) == STEPS + 1
    assert losses(packed) == pytest.approx(losses(plain), rel=LIMIT)
    assert worst(adapter(packed), adapter(plain)) < LIMIT
    assert any(".experts." in name for name in adapter(packed))
    assert all(tensor.any() for tensor in adapter(packed).values())


def test_no_bit_of_the_base_changes_and_none_is_saved(trained, folder):
    out, model = trained
    stored = {name: tensor for name, tensor in packed_base(folder).state_dict().items() if ".experts." in name}
    held = {name.replace(".base_layer", ""): tensor for name, tensor in model.state_dict().items()}
    assert stored and all(tensor.dtype == torch.uint8 for tensor in stored.values())
    assert all(torch.equal(held[name], tensor) for name, tensor in stored.items())
    assert {name for name in held if ".experts." in name and ".lora_" not in name} == stored.keys()
    assert sum(isinstance(module, PackedExperts) for module in model.modules()) == 4

    dcp_to_torch_save(latest(out / "checkpoints"), out / "contents.pt")
    saved = torch.load(out / "contents.pt", weights_only=False)
    assert any(".experts." in name for name in saved) and not any("_packed" in name for name in saved)


@torch.no_grad()
def test_the_adapter_loads_on_either_form_of_the_base_and_merges(packed, folder, tmp_path):
    expected = PeftModel.from_pretrained(base_of(folder), packed / "adapter").eval()(IDS).logits
    assert relative(expected, base_of(folder)(IDS).logits) > 1e-3
    ours = load_lora(packed_base(folder), str(packed / "adapter"))
    base = packed_base(folder)
    prepare_packed_experts(base)
    stock = PeftModel.from_pretrained(base, packed / "models" / "sft").eval()
    for model in (ours, stock):
        assert relative(model(IDS).logits, expected) < LIMIT
    merge = ["merge", str(folder / "mxfp4"), str(packed / "adapter"), str(tmp_path / "merged"), "--dtype=float32"]
    assert main(merge) == 0
    merged = MoeLcForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert relative(merged(IDS).logits, expected) < LIMIT


def test_a_run_that_stops_is_the_same_run(packed, call, tmp_path):
    assert call(tmp_path, PACKED, "--limits.max_minutes=1e-9") == 0
    assert list(step_folders(tmp_path / "checkpoints")) == [1]
    assert call(tmp_path, PACKED) == 0
    assert losses(tmp_path) == losses(packed)
    torch.testing.assert_close(adapter(tmp_path), adapter(packed), rtol=0, atol=0)


def test_a_run_may_go_on_with_the_other_form(plain, call, tmp_path):
    assert call(tmp_path, "--limits.max_minutes=1e-9") == 0
    assert call(tmp_path, PACKED) == 0
    assert losses(tmp_path) == pytest.approx(losses(plain), rel=LIMIT)
    assert worst(adapter(tmp_path), adapter(plain)) < LIMIT


def test_in_bf16_without_an_adapter_on_the_experts(call, tmp_path):
    assert call(tmp_path, PACKED, "--adapter.targets=attention", "--model.dtype=bfloat16") == 0
    assert losses(tmp_path)[STEPS - 1] < losses(tmp_path)[0]


@pytest.mark.parametrize(
    "more, message",
    (
        (["--adapter", "null"], "model.dequantize: expected true without an adapter, since packed experts are frozen, got False"),
        (["--model.base=BASE"], "BASE, whose experts are not in MXFP4 (`moe-lc convert BASE OUT --dtype mxfp4` makes a base whose experts are), got False"),
        (["--model.experts_implementation=grouped_mm"], "model.experts_implementation: expected null, 'eager' or 'moe_lc_triton' with packed experts, got 'grouped_mm'"),
    ),
)  # fmt: skip
def test_refused_before_anything_is_read(call, folder, tmp_path, capsys, monkeypatch, more, message):
    monkeypatch.setattr(finetune, "prepare_conversations", None)
    base = str(folder / "base")
    assert call(tmp_path / "run", PACKED, *(word.replace("BASE", base) for word in more)) == 2
    error = capsys.readouterr().err
    assert message.replace("BASE", base) in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()
