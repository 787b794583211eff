"""transformers' Trainer trains the model unchanged, from packed batches, and balances its routers."""

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.training.callback import MoeLcCallback


@pytest.mark.parametrize("flattening", [True, False], ids=["packed", "rows"])
def test_trainer_learns_and_balances(tmp_path, flattening):
    torch.manual_seed(0)
    model = MoeLcForCausalLM(load_preset("tiny"))
    rows = [{"input_ids": (torch.arange(24) * 7 % 50 + i).tolist()} for i in range(16)]
    if not flattening:
        rows = [{**row, "labels": row["input_ids"]} for row in rows]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            tmp_path,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=8,
            learning_rate=3e-3,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=rows,
        data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=True) if flattening else None,
        callbacks=[MoeLcCallback()],
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.5
    for layer in model.model.layers[1:]:
        gate = layer.block_sparse_moe.gate
        assert gate.e_score_correction_bias.any() and not gate.statistics().any()
