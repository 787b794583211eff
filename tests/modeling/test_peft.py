"""Stock PEFT wraps the linear layers: the adapter trains, and saved and loaded gives the same logits."""

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from modeling_moe_lc import MoeLcForCausalLM


def test_lora_on_linear_layers_trains_and_comes_back(tiny, ids, tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path / "base")
    before = model(ids(2, 9)).logits
    targets = ["q_proj", "v_proj", "o_proj", "kv_b_proj", "routed_expert_up_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).eval()
    logits = adapted(ids(2, 9)).logits
    assert not torch.allclose(logits, before, atol=1e-3)
    adapted(ids(2, 9), labels=ids(2, 9)).loss.backward()
    assert all(p.grad.any() for name, p in adapted.named_parameters() if "lora_" in name)
    adapted.save_pretrained(tmp_path / "adapter")
    base = MoeLcForCausalLM.from_pretrained(tmp_path / "base")
    again = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(again(ids(2, 9)).logits, logits)


@torch.no_grad()
def test_absorbed_decode_sees_the_adapter(tiny, ids):
    adapted = get_peft_model(
        tiny().double(), LoraConfig(r=4, target_modules=["kv_b_proj"], init_lora_weights=False)
    ).eval()
    tokens = ids(2, 9)
    cache = adapted(tokens[:, :8], use_cache=True).past_key_values
    last = adapted(tokens[:, 8:], past_key_values=cache).logits
    whole = adapted(tokens).logits[:, 8:]
    assert (last - whole).norm() < 1e-6 * whole.norm()
