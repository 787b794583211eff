"""mlx-lm serves what `moe-lc export` writes of models trained here, and computes the same. `make test-peers` runs it.

Measured with mlx-lm 0.32.2, mlx 0.32.4 and torch 2.13.0 on a CPU, FP32 logits, relative: 2e-7 for the models trained here,
1e-5 for the reference checkpoints (their weights are scaled to show small constants); all greedy tokens equal, up to a tie.
"""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.training.cli import main
from modeling_moe_lc.training.tokenizer import train_tokenizer


PYTHON = os.environ.get("MOE_LC_PEERS_PYTHON")
pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="MOE_LC_PEERS_PYTHON names no Python with mlx-lm (make test-peers)"
)

FIXTURES = Path(__file__).parents[1] / "fixtures"
LIMIT = 1e-3  # norm of the difference over norm, of FP32 logits
CLOSE = 1e-5  # a choice between two tokens whose logits are nearer than this share of the largest is nobody's mistake
STEPS = 64
PROMPT = "class Reader:\n    def __init__(self, path, mode='r'):\n        self.path = path\n\n    def read(self):\n"


@pytest.fixture(scope="module")
def texts():
    library = Path(sysconfig.get_paths()["stdlib"])
    return [(library / name).read_text(encoding="utf-8") for name in ("argparse.py", "zipfile/__init__.py", "tarfile.py")
            if (library / name).exists()]  # fmt: skip


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


def peer(folder, scratch, *options):
    out = scratch / "peer.safetensors"
    script = Path(__file__).with_name("run_mlx_lm.py")
    command = [PYTHON, script, folder, PROMPT, str(STEPS), out, *options]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return load_file(out)


def relative(ours, theirs):
    return ((ours - theirs).norm() / ours.norm()).item()


def check(model, tokenizer, found, report, capsys):
    ids = torch.tensor(tokenizer(PROMPT)["input_ids"])
    assert torch.equal(found["input_ids"], ids.int()), "the tokenizer of the export cuts the text differently"
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
        made = model.generate(
            ids[None], do_sample=False, max_new_tokens=STEPS, min_new_tokens=STEPS, eos_token_id=None,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    ours, step_logits = made.sequences[0, len(ids) :], torch.cat(made.logits)
    agreed = 0
    for token, its, row in zip(ours, found["tokens"], step_logits, strict=True):
        first, second = row.topk(2).values
        if first - second < CLOSE * row.abs().max():
            break
        assert token == its, f"step {agreed}: {token} here, {its} there, top-2 gap {first - second}"
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


def export(source, out, target):
    assert main(["export", str(source), str(out), "--to", target]) == 0
    return out


def test_as_kimi_k3(texts, tmp_path, capsys):
    model, tokenizer = trained("nano", texts, tmp_path / "own")
    out = export(tmp_path / "own", tmp_path / "out", "kimi-k3")
    check(model, tokenizer, peer(out, tmp_path), "mlx-lm, nano as kimi-k3", capsys)


def test_as_kimi_linear(texts, tmp_path, capsys):
    """mlx-lm norms the MLA latent of Kimi-Linear with eps 1e-5; the release, transformers and we have 1e-6."""
    model, tokenizer = trained("nano-kimi-linear", texts, tmp_path / "own")
    out = export(tmp_path / "own", tmp_path / "out", "kimi-linear")
    check(
        model, tokenizer, peer(out, tmp_path, "1e-6"), "mlx-lm with eps 1e-6, nano-kimi-linear as kimi-linear", capsys
    )
    as_shipped, ids = peer(out, tmp_path)["logits"], torch.tensor(tokenizer(PROMPT)["input_ids"])[None]
    with torch.no_grad():
        difference = relative(model(ids).logits[0], as_shipped)
    with capsys.disabled():
        print(f"mlx-lm as it is (eps 1e-5), nano-kimi-linear as kimi-linear: logits {difference:.1e}")


@pytest.mark.parametrize("fixture", ["k3-text-tiny", "k3-text-tiny-mxfp4"])
def test_reference_checkpoints_as_kimi_k3(fixture, texts, tmp_path, capsys):
    """Their weights show constants, such as an eps, that those of a young model hide; the second is in MXFP4."""
    model, tokenizer = reference(fixture, texts, tmp_path / "own")
    out = export(tmp_path / "own", tmp_path / "out", "kimi-k3")
    check(model, tokenizer, peer(out, tmp_path), f"mlx-lm, {fixture} as kimi-k3", capsys)


def test_reference_checkpoint_as_kimi_linear(texts, tmp_path, capsys):
    model, tokenizer = reference("kimi-linear-tiny", texts, tmp_path / "own")
    out = export(tmp_path / "own", tmp_path / "out", "kimi-linear")
    check(
        model, tokenizer, peer(out, tmp_path, "1e-6"), "mlx-lm with eps 1e-6, kimi-linear-tiny as kimi-linear", capsys
    )


def reference(fixture, texts, folder):
    """A fixture in our layout, with a tokenizer, which they lack."""
    tokenizer = train_tokenizer(texts, 400, 4096)
    assert main(["convert", str(FIXTURES / fixture), str(folder), "--layout", "own"]) == 0
    tokenizer.save_pretrained(folder)
    return MoeLcForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer
