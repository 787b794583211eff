"""A small model, its tokenizer, conversations about colours, and a recipe that fine-tunes the one on the others."""

import json
from pathlib import Path

import torch

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.training.tokenizer import train_tokenizer


COLOURS = ("red", "green", "blue", "black", "white")
RECIPE = """
output_dir: FOLDER/run
model: {base: FOLDER/base, start: continue, dtype: float64, activation_checkpointing: false, loss_chunk_size: 100}
adapter: {r: 3, alpha: 6, targets: [attention, experts, router]}
data: {folders: {chat: FOLDER/data}, validation_tokens: 512}
chat: {sources: {chat: FOLDER/chat.jsonl}, validation_share: 0.2}
tokens_per_step: 512
stages:
  - {name: sft, sequence_length: 256, tokens: 2048, micro_batch: 1}
optimizer: {kind: adamw, learning_rate: 1e-2}
logging: {every_steps: 1}
checkpoints: {every_minutes: null}
"""


def conversations() -> list[dict]:
    """Of one or two questions; some think aloud."""
    rows = []
    for a in COLOURS:
        for number, b in enumerate(COLOURS):
            asked = [{"role": "user", "content": f"mix {a} and {b}"}, {"role": "assistant", "content": f"{b}{a}ish"}]
            if number % 2:
                asked += [{"role": "user", "content": "and back"}, {"role": "assistant", "content": f"{a} {b}"}]
            rows.append({"messages": asked, "thinking": number == 3})
    return rows


def tokenizer():
    texts = [message["content"] for row in conversations() for message in row["messages"]]
    return train_tokenizer([*texts, 'message role="assistant" user response think system'], 300, 1 << 20)


def make(folder: Path, **config) -> Path:
    """Writes all of it, with `config` in place of fields of the preset; returns the path of the recipe."""
    torch.manual_seed(0)
    model = MoeLcForCausalLM(load_preset("tiny", **config))
    for layer in model.model.layers[1:]:
        torch.nn.init.normal_(layer.block_sparse_moe.gate.e_score_correction_bias, std=0.01)
    model.save_pretrained(folder / "base")
    tokenizer().save_pretrained(folder / "base")
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in conversations()))
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("FOLDER", str(folder)))
    return path
