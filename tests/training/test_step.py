"""The steps that CUDA graphs replay, by plain calls: gradients and inputs that stay in their place change nothing."""

import pytest
import torch

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.adapters import add_lora, lora_targets
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.training import step as step_module
from modeling_moe_lc.training.low_precision import LowPrecision
from modeling_moe_lc.training.optim import adamw, muon
from modeling_moe_lc.training.processes import processes
from modeling_moe_lc.training.step import Step


@pytest.fixture(autouse=True)
def plain_calls(monkeypatch):
    """In place of graphs."""
    monkeypatch.setattr(step_module, "Pool", lambda largest: None)
    monkeypatch.setattr(step_module, "Graphs", lambda call, pool, within: call)


def trained(*, graphs, make_optimizer, adapter):
    """Losses and norms of steps of two micro-batches, and the parameters after them."""
    torch.manual_seed(0)
    model = MoeLcForCausalLM(load_preset("tiny", loss_chunk_size=16)).train()
    if adapter:
        peft = pytest.importorskip("peft")
        targets = lora_targets("attention", "experts", config=model.config)
        add_lora(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **targets))
    precision = LowPrecision(model, torch.bfloat16)
    precision.refresh()
    history = []
    with processes() as ours:
        step = Step(model, make_optimizer(model), ours, precision, clip_norm=1.0, graphs=graphs)
        for number in range(4):
            for ids in torch.randint(model.config.vocab_size, (2, 1, 24)):
                history.append(step.backward({"input_ids": ids, "labels": ids}))
            history.append(step.update(1e-2 / (1 + number)))
            step.balance()
    return torch.stack(history), [p.detach() for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("make_optimizer", "adapter"), [(muon, False), (adamw, False), (adamw, True)], ids=["muon", "adamw", "adapter"]
)
def test_what_is_replayed_is_what_is_launched(make_optimizer, adapter):
    settings = {"make_optimizer": make_optimizer, "adapter": adapter}
    (history, ours), (expected, theirs) = (trained(graphs=graphs, **settings) for graphs in (True, False))
    assert history.isfinite().all() and torch.allclose(history, expected, rtol=1e-5)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
