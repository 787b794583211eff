"""`MoeLcCallback` balances inside `Trainer` and `SFTTrainer` as a loop of one's own does, and its numbers are logged."""

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from modeling_moe_lc import MoeLcForCausalLM, update_router_bias
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.kernels.router import max_violation, sampling_floor
from modeling_moe_lc.training import callback
from modeling_moe_lc.training.balance import routers
from modeling_moe_lc.training.callback import MoeLcCallback


NAMES = {"max_violation", "max_violation_worst", "floor", "dead_experts", "bias_range"}
ROWS, LENGTH, STEPS, ACCUMULATED = 4, 24, 4, 2
ARGUMENTS = {
    "per_device_train_batch_size": ROWS,
    "gradient_accumulation_steps": ACCUMULATED,
    "max_steps": STEPS,
    "learning_rate": 1e-2,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "use_cpu": True,
    "disable_tqdm": True,
}


def tiny(**overrides):
    torch.manual_seed(0)
    return MoeLcForCausalLM(load_preset("tiny", **overrides))


def blocks():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 512, (STEPS, ACCUMULATED, ROWS, LENGTH), generator=generator)


def trainer_of(tmp_path, model, **kwargs):
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in blocks().flatten(0, 2)]

    class InOrder(Trainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    arguments = TrainingArguments(
        tmp_path, **ARGUMENTS, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0
    )
    return InOrder(model=model, args=arguments, train_dataset=rows, **kwargs)


def by_hand():
    """The same training as a loop of one's own: biases of the routers, and MaxVio of every step."""
    model = tiny().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    violations = []
    for step in blocks():
        for micro_batch in step:
            predicted = ACCUMULATED * ROWS * (LENGTH - 1)
            model(input_ids=micro_batch, labels=micro_batch, num_items_in_batch=predicted).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        violations.append(max_violation(torch.stack([router.counts for router in routers(model)])))
        update_router_bias(model)
    return biases_of(model), violations


def biases_of(model):
    return torch.stack([router.e_score_correction_bias for router in routers(model)])


def logged(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_balances_as_a_loop_by_hand(tmp_path):
    model = tiny()
    trainer = trainer_of(tmp_path, model, callbacks=[MoeLcCallback()])
    trainer.train()
    biases, violations = by_hand()
    assert biases.abs().max() > 1e-3
    torch.testing.assert_close(biases_of(model), biases, rtol=0, atol=1e-6)
    entries = logged(trainer)
    assert len(entries) == STEPS and all(set(entry) >= NAMES for entry in entries)
    assert [entry["max_violation"] for entry in entries] == pytest.approx([row.mean().item() for row in violations])
    assert [entry["max_violation_worst"] for entry in entries] == pytest.approx(
        [row.max().item() for row in violations]
    )
    assert entries[0]["floor"] == sampling_floor(ACCUMULATED * ROWS * LENGTH, 8, 2)
    assert entries[0]["bias_range"] == 0.0 and entries[-1]["bias_range"] > 0.0
    assert not any(router.statistics().any() for router in routers(model))


class Listener(TrainerCallback):
    """Hears the logs as a tracker does: only on the way."""

    heard: list

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.heard.append(dict(logs))


def test_attached_it_speaks_before_trackers(tmp_path):
    listener = Listener()
    listener.heard = []
    trainer = trainer_of(tmp_path, tiny(), callbacks=[listener])
    MoeLcCallback.attach(trainer)
    trainer.train()
    with_loss = [logs for logs in listener.heard if "loss" in logs]
    assert len(with_loss) == STEPS and all(set(logs) >= NAMES for logs in with_loss)
    assert [logs["max_violation"] for logs in with_loss] == [entry["max_violation"] for entry in logged(trainer)]
    [last] = [logs for logs in listener.heard if "train_runtime" in logs]
    assert not NAMES & set(last)


def test_trackers_that_would_not_hear_it_are_named(monkeypatch):
    said = []
    monkeypatch.setattr(callback.logger, "warning", said.append)
    args = SimpleNamespace(report_to=["tensorboard"])
    MoeLcCallback().on_train_begin(args, None, None)
    assert "tensorboard: will not show" in said.pop()
    MoeLcCallback().on_train_begin(SimpleNamespace(report_to=[]), None, None)
    MoeLcCallback.attach(SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[]))).on_train_begin(
        args, None, None
    )
    assert not said


def test_ranks_are_summed(tmp_path):
    """Two ranks with the same tokens: the same balance, of twice the tokens."""
    trainer = trainer_of(
        tmp_path, model := tiny(), callbacks=[MoeLcCallback(all_reduce=lambda tensor: tensor.mul_(2))]
    )
    trainer.train()
    torch.testing.assert_close(biases_of(model), by_hand()[0], rtol=0, atol=1e-6)
    assert logged(trainer)[0]["floor"] == sampling_floor(2 * ACCUMULATED * ROWS * LENGTH, 8, 2)


def test_a_frozen_bias_is_watched_and_stays(tmp_path):
    trainer = trainer_of(tmp_path, model := tiny(router_balance={"method": "none"}), callbacks=[MoeLcCallback()])
    trainer.train()
    assert not biases_of(model).any()
    assert logged(trainer)[-1]["max_violation"] > 0.0


def test_a_dense_model_has_nothing_to_balance(tmp_path):
    trainer = trainer_of(tmp_path, tiny(first_k_dense_replace=5), callbacks=[MoeLcCallback()])
    trainer.train()
    assert not NAMES & set(logged(trainer)[0])


def test_packed_rows_are_balanced(tmp_path):
    rows = [{"input_ids": row.tolist()} for row in blocks().flatten(0, 2)]
    trainer = Trainer(
        model=(model := tiny()),
        args=TrainingArguments(tmp_path, **ARGUMENTS),
        train_dataset=rows,
        data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=True),
        callbacks=[MoeLcCallback()],
    )
    trainer.train()
    assert biases_of(model).any() and logged(trainer)[0]["floor"] == sampling_floor(192, 8, 2)


TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' : ' + message['content'] + ' ; ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)
WORDS = ["user", "assistant", ":", ";", "how", "many", "is", "one", "two", "three", "four", "and", "plus"]


def chat_tokenizer():
    """A word for a token, and a chat template."""
    vocabulary = {word: number for number, word in enumerate(["<s>", "</s>", "<pad>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special)


@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packed"])
def test_sft_trainer_learns_and_balances(tmp_path, packing):
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    numbers = ["one", "two", "three", "four"]
    chats = [
        [
            {"role": "user", "content": f"how many is {a} {join} {b}"},
            {"role": "assistant", "content": f"{a} {join} {b} is {b}"},
        ]
        for a in numbers
        for b in numbers
        for join in ("and", "plus")
    ]
    trainer = SFTTrainer(
        model=(model := tiny()),
        args=SFTConfig(tmp_path, **ARGUMENTS | {"max_steps": 8}, max_length=64, packing=packing, bf16=False),
        train_dataset=Dataset.from_dict({"messages": chats}),
        processing_class=chat_tokenizer(),
    )
    MoeLcCallback.attach(trainer)
    trainer.train()
    entries = logged(trainer)
    assert all(set(entry) >= NAMES for entry in entries)
    assert entries[-1]["loss"] < entries[0]["loss"] - 0.5
    assert biases_of(model).any() and not any(router.statistics().any() for router in routers(model))
