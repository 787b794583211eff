"""What does not fit on the device waits on the CPU or on disk, and comes for each module when it runs."""

import pytest
import torch
from accelerate import cpu_offload

from modeling_moe_lc import MoeLcForCausalLM


GREEDY = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}


@pytest.fixture(params=["k3", "kimi-linear"])
def model(request, tiny, kimi_linear):
    return tiny() if request.param == "k3" else kimi_linear


def on_disk(model, folder):
    """All but embedding and head, which make the CPU the device that runs it."""
    model.save_pretrained(folder / "model")
    layers = {f"model.layers.{i}": "disk" for i in range(model.config.num_hidden_layers)}
    places = layers | {"model.norm": "disk", "model.output_attn_res": "disk"}
    places |= dict.fromkeys(("model.embed_tokens", "lm_head"), "cpu")
    return MoeLcForCausalLM.from_pretrained(folder / "model", device_map=places, offload_folder=folder / "off").eval()


@torch.no_grad()
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_model_computes_the_same(tmp_path, model, ids, place):
    tokens = ids(2, 6)
    expected = model(tokens).logits, model.generate(tokens, **GREEDY)
    away = on_disk(model, tmp_path) if place == "disk" else cpu_offload(model, execution_device="cpu")
    assert all(p.is_meta for p in away.model.layers.parameters())
    torch.testing.assert_close(away(tokens).logits, expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(away.generate(tokens, **GREEDY), expected[1])
