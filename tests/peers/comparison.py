"""Models to export, and the comparison of what an engine computes with them: one law for every engine.

An engine runs in a process of its own and leaves a safetensors file: `input_ids` int32 [T], `logits` float32 [T, V] without
a cache, `tokens` int32 [STEPS] chosen greedily with the cache, `step_logits` float32 [STEPS, V] from which each was chosen.
"""

import json
import os
import subprocess
from pathlib import Path

import torch
from safetensors.torch import load_file

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.conversion.checkpoint_reader import read_json
from modeling_moe_lc.training.cli import main
from modeling_moe_lc.training.tokenizer import train_tokenizer


FIXTURES = Path(__file__).parents[1] / "fixtures"
LIMIT = 1e-3  # norm of the difference over norm, of FP32 logits
CLOSE = 1e-5  # a choice between two tokens whose logits are nearer than this share of the largest is nobody's mistake
STEPS = 64
PROMPT = "class Reader:\n    def __init__(self, path, mode='r'):\n        self.path = path\n\n    def read(self):\n"


def python_of(engine):
    """The Python of an engine's environment, or None where `make test-peers` has not made it."""
    python = Path(os.environ.get("MOE_LC_PEERS", "missing"), engine, "bin", "python")
    return python if python.exists() else None


def trained(preset, texts, folder, steps=100):
    """A model of FP32 weights that has left its initial values behind, with its tokenizer."""
    tokenizer = train_tokenizer(texts, 1024, 4096)
    config = load_preset(preset, vocab_size=1024, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    model = MoeLcForCausalLM(config).train()
    ids = torch.tensor(tokenizer("".join(texts))["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        starts = torch.randint(len(ids) - 128, (4,))
        batch = torch.stack([ids[start : start + 128] for start in starts])
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.block_sparse_moe.gate.e_score_correction_bias.normal_(std=0.05)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval(), tokenizer


def reference(fixture, texts, folder, *options, **fields):
    """A fixture in our layout, with a tokenizer, which they lack.

    `options` of `moe-lc convert` and other values for `fields` of the text model's config may be given.
    """
    tokenizer = train_tokenizer(texts, 400, 4096)
    assert main(["convert", str(FIXTURES / fixture), str(folder), "--layout", "own", *options]) == 0
    config = read_json(folder / "config.json")
    config.get("text_config", config).update(fields)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    return MoeLcForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


def export(source, out, target):
    assert main(["export", str(source), str(out), "--to", target]) == 0
    return out


def run(command, out):
    subprocess.run([*map(str, command)], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return load_file(out)


def relative(ours, theirs):
    return ((ours - theirs).norm() / ours.norm()).item()


def difference(model, found):
    with torch.no_grad():
        return relative(model(found["input_ids"][None].long()).logits[0], found["logits"])


def check(model, found, report, capsys):
    ids = found["input_ids"].long()
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
        made = model.generate(
            ids[None], do_sample=False, max_new_tokens=STEPS, min_new_tokens=STEPS, eos_token_id=None,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    ours, step_logits = made.sequences[0, len(ids) :], torch.cat(made.logits)
    agreed = 0
    for token, its, row in zip(ours, found["tokens"], step_logits, strict=True):
        if token != its:
            first, second = row.topk(2).values
            gap = (first - second) / row.abs().max()
            assert gap < CLOSE, f"step {agreed}: {token} here, {its} there, top-2 gap {gap} of the largest"
            break
        agreed += 1
    assert agreed >= 8, "the model decides too little to compare anything"
    steps = relative(step_logits[:agreed], found["step_logits"][:agreed])
    with capsys.disabled():
        print(
            f"\n{report}: logits {relative(logits, found['logits']):.1e}, largest {logits.abs().max():.1f}; "
            f"{agreed} of {STEPS} greedy tokens, their logits {steps:.1e}"
        )
    assert relative(logits, found["logits"]) < LIMIT
    assert steps < LIMIT
