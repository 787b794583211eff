"""On a GPU packed documents go through one launch for each operator: the same as one document at a time."""

import pytest
import torch

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.configuration.presets import load_preset


pytestmark = pytest.mark.gpu
LENGTHS = (37, 1, 300, 129, 64)


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    # Without experts: those of an untrained router are near ties, and any rounding chooses others for some tokens.
    config = load_preset("200m-a90m", first_k_dense_replace=12)
    return MoeLcForCausalLM(config).to("cuda", torch.bfloat16)


def gradients(model, loss):
    names = ("layers.3.self_attn.kv_b_proj", "layers.3.self_attn.q_b_proj", "layers.0.self_attn.q_proj")
    return torch.autograd.grad(loss, [model.model.get_submodule(name).weight for name in names])


def test_packed_equals_separate(model):
    model.eval()
    ids = torch.randint(model.config.vocab_size, (1, sum(LENGTHS)), device="cuda")
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].cuda()
    weight = torch.randn(sum(LENGTHS), model.config.vocab_size, device="cuda")
    packed = model(ids, position_ids=positions, use_cache=False).logits[0].float()
    parts = [model(part, use_cache=False).logits[0].float() for part in ids.split(LENGTHS, dim=1)]
    apart = torch.cat(parts)
    assert relative(packed, apart) < 2e-2
    for ours, theirs in zip(
        gradients(model, (packed * weight).sum()), gradients(model, (apart * weight).sum()), strict=True
    ):
        assert relative(ours.float(), theirs.float()) < 5e-2


def test_memory_is_linear_in_the_length(model):
    model.train()
    peaks = []
    for tokens in (16384, 32768):
        ids = torch.randint(model.config.vocab_size, (1, tokens), device="cuda")
        positions = torch.arange(tokens, device="cuda").remainder(5000)[None]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model.model(ids, position_ids=positions, use_cache=False).last_hidden_state.sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2.3 * peaks[0]
