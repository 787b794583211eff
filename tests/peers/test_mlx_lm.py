"""mlx-lm serves what `moe-lc export` writes of models trained here, and computes the same. `make test-peers` runs it.

Measured with mlx-lm 0.32.2, mlx 0.32.4 and torch 2.13.0 on a CPU, FP32 logits, relative: 2e-7 for the models trained here,
1e-5 for the reference checkpoints (their weights are scaled to show small constants); all 64 greedy tokens equal.
"""

import runpy
from pathlib import Path

import pytest
import torch


HERE = Path(__file__).parent
common = runpy.run_path(str(HERE / "comparison.py"))
check, difference, export, reference, trained = (
    common[name] for name in ("check", "difference", "export", "reference", "trained")
)
PYTHON = common["python_of"]("mlx_lm")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="MOE_LC_PEERS has no Python with mlx-lm (make test-peers)")


def peer(folder, tokenizer, scratch, *options):
    out = scratch / "peer.safetensors"
    script, prompt = HERE / "run_mlx_lm.py", common["PROMPT"]
    found = common["run"]([PYTHON, script, folder, prompt, common["STEPS"], out, *options], out)
    ids = torch.tensor(tokenizer(prompt)["input_ids"])
    assert torch.equal(found["input_ids"], ids.int()), "the tokenizer of the export cuts the text differently"
    return found


def test_as_kimi_k3(texts, tmp_path, capsys):
    model, tokenizer = trained("nano", texts, tmp_path / "own")
    out = export(tmp_path / "own", tmp_path / "out", "kimi-k3")
    check(model, peer(out, tokenizer, tmp_path), "mlx-lm, nano as kimi-k3", capsys)


def test_as_kimi_linear(texts, tmp_path, capsys):
    """mlx-lm norms the MLA latent of Kimi-Linear with eps 1e-5; the release, transformers and we have 1e-6."""
    model, tokenizer = trained("nano-kimi-linear", texts, tmp_path / "own")
    out = export(tmp_path / "own", tmp_path / "out", "kimi-linear")
    found = peer(out, tokenizer, tmp_path, "1e-6")
    check(model, found, "mlx-lm with eps 1e-6, nano-kimi-linear as kimi-linear", capsys)
    as_shipped = difference(model, peer(out, tokenizer, tmp_path))
    with capsys.disabled():
        print(f"mlx-lm as it is (eps 1e-5), nano-kimi-linear as kimi-linear: logits {as_shipped:.1e}")


@pytest.mark.parametrize("fixture", ["k3-text-tiny", "k3-text-tiny-mxfp4"])
def test_reference_checkpoints_as_kimi_k3(fixture, texts, tmp_path, capsys):
    """Their weights show constants, such as an eps, that those of a young model hide; the second is in MXFP4."""
    model, tokenizer = reference(fixture, texts, tmp_path / "own")
    out = export(tmp_path / "own", tmp_path / "out", "kimi-k3")
    check(model, peer(out, tokenizer, tmp_path), f"mlx-lm, {fixture} as kimi-k3", capsys)


def test_reference_checkpoint_as_kimi_linear(texts, tmp_path, capsys):
    model, tokenizer = reference("kimi-linear-tiny", texts, tmp_path / "own")
    out = export(tmp_path / "own", tmp_path / "out", "kimi-linear")
    found = peer(out, tokenizer, tmp_path, "1e-6")
    check(model, found, "mlx-lm with eps 1e-6, kimi-linear-tiny as kimi-linear", capsys)
