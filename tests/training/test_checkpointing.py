"""Checkpointed layers give the same gradients, and compute attention once."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.training.batches import OneShape
from modeling_moe_lc.training.checkpointing import KEPT, checkpoint_activations
from modeling_moe_lc.training.packing import Pack, collate


class Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.attention = self.products = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.attention += operator in KEPT
        self.products += operator is torch.ops.aten.mm.default
        return operator(*args, **(kwargs or {}))


def run(inputs, checkpoint):
    torch.manual_seed(0)
    tiny = load_preset("tiny", loss_chunk_size=16)
    # With values narrower than keys, torch has no attention of its own for a CPU.
    tiny.v_head_dim = tiny.qk_nope_head_dim + tiny.qk_rope_head_dim
    model = MoeLcForCausalLM(tiny).train()
    checkpoint(model)
    loss = model(**inputs, use_cache=False).loss
    with Counter() as counter:
        loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None], counter


@pytest.mark.parametrize("packed", [False, True])
def test_attention_is_computed_once_and_nothing_changes(packed):
    packs = [Pack(list(range(2, 18)), [0, 6, 16]), Pack(list(range(3, 12)), [0, 9])]
    rows = [Pack(list(range(16)), [0, 16]), Pack(list(range(5, 21)), [0, 16])]
    inputs = collate(packs) if packed else OneShape(2, 16)(rows)
    loss, gradients, plain = run(inputs, lambda model: None)
    again, same, kept = run(inputs, checkpoint_activations)
    _, _, recomputed = run(inputs, lambda model: checkpoint_activations(model, keep_attention=False))
    assert torch.equal(loss, again)
    assert all(torch.equal(one, other) for one, other in zip(gradients, same, strict=True))
    assert plain.attention == kept.attention == 0 < recomputed.attention
    assert kept.products > plain.products  # the rest is computed again
