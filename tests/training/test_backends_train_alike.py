"""A model trained with the Triton kernels follows the one trained with the definitions."""

from pathlib import Path

import pytest
import torch

from modeling_moe_lc import MoeLcForCausalLM, update_router_bias
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.training.optim import adamw, cosine, initialise, set_learning_rate


STEPS, BATCH, LENGTH, SMOOTH = 200, 4, 1024, 10


def batches():
    """Bytes of this repository's own text, the same for every model."""
    root = Path(__file__).resolve().parents[2]
    text = b"".join(path.read_bytes() for path in sorted(root.rglob("*.py")) if ".venv" not in path.parts)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        starts = torch.randint(len(tokens) - LENGTH, (BATCH,), generator=generator)
        yield torch.stack([tokens[start : start + LENGTH] for start in starts.tolist()]).cuda()


def losses(attention, experts):
    torch.manual_seed(0)
    model = MoeLcForCausalLM(load_preset("200m-a90m")).cuda().train()
    initialise(model)
    model.set_attn_implementation(attention)
    model.set_experts_implementation(experts)
    optimizer = adamw(model)
    history = []
    for step, ids in enumerate(batches()):
        set_learning_rate(optimizer, cosine(step, STEPS, 3e-4, 3e-5, warmup=20))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update_router_bias(model)
        history.append(loss.detach())
    return torch.stack(history).cpu()


@pytest.mark.gpu
def test_fused_and_reference_losses_stay_together():
    fused, reference = losses("moe_lc_triton", "moe_lc_triton"), losses("moe_lc_reference", "grouped_mm")
    assert reference[-SMOOTH:].mean() < 0.7 * reference[:SMOOTH].mean()
    smooth = (fused - reference).unfold(0, SMOOTH, 1).mean(-1)
    assert smooth.abs().max() < 0.01, (smooth.abs().max().item(), (fused - reference).abs().max().item())
