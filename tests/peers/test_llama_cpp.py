"""llama.cpp converts and serves what `moe-lc export` writes, and computes the same. `make test-peers` runs it.

Measured with llama-cpp-python 0.3.36 and torch 2.13.0 on a CPU, FP32 weights, cache and logits, relative: 8e-7 for nano as
Kimi-K3, 5e-6 for nano-kimi-linear as Kimi-Linear, 2e-5 for the reference checkpoints where one eps is left to both; all 64
greedy tokens equal. With llama.cpp's own eps the reference checkpoints, whose weights are scaled to show it, differ by 0.06
to 0.09. With experts in MXFP4 the weights are equal and the logits 0.05 apart: its activations are rounded to 8 bits.

Token ids are compared, since llama.cpp has no pre-tokenizer that cuts as our tokenizers do (run_llama_cpp.py). With the one
of GPT-2 in its place, `textwrap.py` becomes 9 % more tokens (8,396, not 7,710) than the model was trained to read it in.
"""

import json
import runpy
from pathlib import Path

import pytest
import torch


HERE = Path(__file__).parent
common = runpy.run_path(str(HERE / "comparison.py"))
check, difference, export, reference, trained = (
    common[name] for name in ("check", "difference", "export", "reference", "trained")
)
PYTHON = common["python_of"]("llama_cpp")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="MOE_LC_PEERS has no Python with llama.cpp (make test-peers)")


def script(name, *arguments, out):
    """What a script of this folder leaves in `out`, run with llama.cpp's source at hand."""
    return common["run"]([PYTHON, HERE / name, PYTHON.parents[1] / "source", *arguments, out], out)


def peer(folder, tokenizer, scratch):
    ids = tokenizer(common["PROMPT"])["input_ids"]
    return script("run_llama_cpp.py", folder, json.dumps(ids), common["STEPS"], out=scratch / "peer.safetensors")


@pytest.mark.parametrize("preset, target", [("nano", "kimi-k3"), ("nano-kimi-linear", "kimi-linear")])
def test_trained_here(preset, target, texts, tmp_path, capsys):
    model, tokenizer = trained(preset, texts, tmp_path / "own")
    out = export(tmp_path / "own", tmp_path / "out", target)
    check(model, peer(out, tokenizer, tmp_path), f"llama.cpp, {preset} as {target}", capsys)


@pytest.mark.parametrize(
    "fixture, target, options",
    [
        ("k3-text-tiny", "kimi-k3", ()),
        ("k3-text-tiny-mxfp4", "kimi-k3", ("--dtype", "float32")),
        ("kimi-linear-tiny", "kimi-linear", ()),
    ],
)
def test_reference_checkpoints(fixture, target, options, texts, tmp_path, capsys):
    """Their weights show constants that those of a young model hide.

    llama.cpp norms q and k of KDA and the latents of MLA with `rms_norm_eps`, 1e-5 (kimi-k3.cpp and kimi-linear.cpp in its
    src/models); the release, mlx-lm and we have 1e-6 there, but for mlx-lm's Kimi-Linear. With 1e-6 as `rms_norm_eps`, too,
    no other eps is left, and what differs is arithmetic.
    """
    model, tokenizer = reference(fixture, texts, tmp_path / "one-eps", *options, rms_norm_eps=1e-6)
    out = export(tmp_path / "one-eps", tmp_path / "one-eps-out", target)
    check(model, peer(out, tokenizer, tmp_path), f"llama.cpp, {fixture} with eps 1e-6 as {target}", capsys)

    model, tokenizer = reference(fixture, texts, tmp_path / "own", *options)
    out = export(tmp_path / "own", tmp_path / "out", target)
    as_shipped = difference(model, peer(out, tokenizer, tmp_path))
    with capsys.disabled():
        print(f"llama.cpp, {fixture} as it is (eps 1e-5) as {target}: logits {as_shipped:.1e}")


def test_packed_experts(texts, tmp_path, capsys):
    """Its converter repacks MXFP4 without a change of value; its runtime multiplies with activations rounded to 8 bits."""
    model, tokenizer = reference("k3-text-tiny-mxfp4", texts, tmp_path / "own", rms_norm_eps=1e-6)
    out = export(tmp_path / "own", tmp_path / "out", "kimi-k3")
    rounded = difference(model, peer(out, tokenizer, tmp_path))
    with capsys.disabled():
        print(f"\nllama.cpp, k3-text-tiny-mxfp4 with eps 1e-6, experts packed: logits {rounded:.1e}")
    theirs = script("read_gguf.py", tmp_path / "peer.gguf", out=tmp_path / "weights.safetensors")
    for number, layer in enumerate(model.model.layers[1:], 1):
        experts = layer.block_sparse_moe.experts
        gate_up = [theirs[f"blk.{number}.ffn_{name}_exps.weight"] for name in ("gate", "up")]
        assert torch.equal(torch.cat(gate_up, dim=1), experts.gate_up_proj), number
        assert torch.equal(theirs[f"blk.{number}.ffn_down_exps.weight"], experts.down_proj), number
