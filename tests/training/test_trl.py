"""The short script with TRL's `SFTTrainer` does the job of `moe-lc finetune`: an adapter, learned from what the assistant says."""

import runpy
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.training.chat_encoding import ChatEncoder


chats = runpy.run_path(str(Path(__file__).with_name("chat_documents.py")))
SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from modeling_moe_lc import lora_targets

trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained("base"),
    processing_class=AutoTokenizer.from_pretrained("base"),
    train_dataset=load_dataset("json", data_files="chat.jsonl", split="train"),
    peft_config=LoraConfig(r=16, lora_alpha=32, **lora_targets("attention", "experts")),
    args=SFTConfig("adapter", assistant_only_loss=True, packing=True, max_length=512, learning_rate=2e-3),
)
trainer.train()
trainer.save_model()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Runs it beside a base and conversations, for a few steps on the CPU; returns its variables."""
    pytest.importorskip("trl")
    from trl import SFTConfig

    chats["make"](tmp_path)
    monkeypatch.chdir(tmp_path)
    quick = {"max_steps": 6, "logging_steps": 1, "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True}

    monkeypatch.setattr("trl.SFTConfig", lambda *args, **kwargs: SFTConfig(*args, **{**kwargs, **quick}))
    (tmp_path / "script.py").write_text(SCRIPT)
    return lambda: runpy.run_path("script.py")


def taught(trainer):
    """What `trainer` packed: ids and labels of each conversation."""
    for pack in trainer.train_dataset:
        begin = 0
        for length in pack["seq_lengths"]:
            yield pack["input_ids"][begin : begin + length], pack["labels"][begin : begin + length]
            begin += length


def test_the_script_trains_an_adapter_that_stock_peft_loads(script, tmp_path):
    """From the tokens and labels of `moe-lc finetune`."""
    trainer = script()["trainer"]
    encoder = ChatEncoder(trainer.processing_class, {})
    rows = [{**row, "thinking": True} for row in chats["conversations"]()]  # what a template does that is told nothing
    expected = [
        (ids, [token if mine else -100 for token, mine in zip(ids, learned, strict=True)])
        for ids, learned in map(encoder, rows)
    ]
    assert sorted(taught(trainer)) == sorted(expected)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.3
    ids = torch.randint(3, 300, (1, 17))
    with torch.no_grad():
        expected = trainer.model.eval()(ids).logits
        loaded = PeftModel.from_pretrained(MoeLcForCausalLM.from_pretrained("base"), "adapter").eval()(ids).logits
    assert (loaded - expected).norm() < 1e-5 * expected.norm()
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_" in name for name in trained) and any(".experts." in name for name in trained)
