"""Adapters on every part of the model: split = merged = what PEFT computes without our path, and gradients likewise."""

import subprocess
import sys
import textwrap

import pytest
import torch
from peft import LNTuningConfig, LoraConfig, PeftModel, get_peft_model

from modeling_moe_lc import add_lora, latent_moe, load_lora, lora_targets
from modeling_moe_lc.adapters import GROUPS
from modeling_moe_lc.gated_mla import GatedMLA
from modeling_moe_lc.kda import KimiDeltaAttention


LIMIT = 1e-5  # relative, FP32
TEXT_GROUPS = [group for group in GROUPS if group not in ("vision", "projector")]


def relative(x, reference):
    return ((x - reference).norm() / reference.norm()).item()


def lora(*groups, r=4, seed=0, config=None, **kwargs):
    torch.manual_seed(seed)
    return LoraConfig(r=r, lora_alpha=r, init_lora_weights=False, **lora_targets(*groups, config=config), **kwargs)


@pytest.fixture
def as_peft_does(monkeypatch):
    """From here on the experts are called as PEFT wrapped them: W + B A is built."""
    return lambda: monkeypatch.setattr(latent_moe, "run_experts", lambda experts, *inputs: experts(*inputs))


def adapted_layers(model):
    return {
        name.split(".lora_A")[0].removeprefix("base_model.model.")
        for name, _ in model.named_parameters()
        if ".lora_A" in name
    }


def test_defaults_are_the_attention_projections(tiny, tiny_multimodal):
    for model in (tiny(), tiny_multimodal()):
        linear = {
            f"{name}.{part}"
            for name, module in model.named_modules()
            if isinstance(module, (KimiDeltaAttention, GatedMLA))
            for part, child in module.named_children()
            if isinstance(child, torch.nn.Linear)
        }
        assert adapted_layers(get_peft_model(model, LoraConfig(r=16))) == linear


@pytest.mark.parametrize("group, kind", [("kda", KimiDeltaAttention), ("mla", GatedMLA)])
def test_kda_and_mla_alone(tiny, group, kind):
    model = tiny()
    layers = [f"model.layers.{i}." for i, layer in enumerate(model.model.layers) if isinstance(layer.self_attn, kind)]
    found = adapted_layers(add_lora(model, lora(group, "latent", config=model.config)))
    attention = {name for name in found if ".self_attn." in name}
    assert attention and all(name.startswith(tuple(layers)) for name in attention) and found > attention


@pytest.mark.parametrize("group", TEXT_GROUPS)
def test_adapter_is_merged(tiny, ids, group):
    model = tiny()
    before = model(ids(2, 9)).logits
    adapted = add_lora(model, lora(group, config=model.config)).eval()
    with torch.no_grad():
        ours = adapted(ids(2, 9)).logits
        merged = adapted.merge_and_unload()(ids(2, 9)).logits
    assert relative(ours, before) > 1e-3
    assert relative(ours, merged) < LIMIT


@pytest.mark.parametrize("group", ["vision", "projector", "experts"])
@torch.no_grad()
def test_adapter_is_merged_in_a_multimodal_model(tiny_multimodal, pictures, ids, group):
    model = tiny_multimodal()
    tokens = ids(1, 12)
    tokens[0, 2:8] = model.config.media_placeholder_token_id
    inputs = {"input_ids": tokens, **pictures((1, 4, 6))}
    before = model(**inputs).logits
    adapted = add_lora(model, lora(group)).eval()
    ours = adapted(**inputs).logits
    assert relative(ours, before) > 1e-3
    assert relative(ours, adapted.merge_and_unload()(**inputs).logits) < LIMIT


@torch.no_grad()
def test_merge_and_unmerge_in_place(tiny, ids):
    adapted = add_lora(tiny(), lora("experts")).eval()
    split = adapted(ids(2, 9)).logits
    adapted.merge_adapter()
    assert relative(adapted(ids(2, 9)).logits, split) < LIMIT
    adapted.unmerge_adapter()
    assert relative(adapted(ids(2, 9)).logits, split) < LIMIT


@pytest.mark.parametrize("group", TEXT_GROUPS)
@torch.no_grad()
def test_a_disabled_adapter_changes_no_bit(tiny, ids, group):
    model = tiny()
    before = model(ids(2, 9)).logits
    adapted = add_lora(model, lora(group, config=model.config)).eval()
    with adapted.disable_adapter():
        assert torch.equal(adapted(ids(2, 9)).logits, before)


@torch.no_grad()
def test_two_adapters_in_either_order(tiny, ids, tmp_path, as_peft_does):
    """Each switched on gives what it gave alone, whichever came first; both together are what PEFT makes of them."""
    alone = {}
    for seed, name in enumerate(("one", "two")):
        adapted = add_lora(tiny(), lora("experts", "kda", "mla", seed=seed, r=3 + seed), name).eval()
        alone[name] = adapted(ids(2, 9)).logits
        adapted.save_pretrained(tmp_path)
    assert relative(alone["one"], alone["two"]) > 1e-3
    base = tiny()(ids(2, 9)).logits
    for order in (("one", "two"), ("two", "one")):
        model = tiny()
        for name in order:
            model = load_lora(model, str(tmp_path / name), name)
        for name in order:
            model.set_adapter(name)
            assert torch.equal(model(ids(2, 9)).logits, alone[name])
        with model.disable_adapter():
            assert torch.equal(model(ids(2, 9)).logits, base)
    model.base_model.set_adapter(["one", "two"])
    both = model(ids(2, 9)).logits
    as_peft_does()
    assert relative(both, model(ids(2, 9)).logits) < LIMIT


def test_stock_peft_reads_it_in_another_process(tiny, ids, tmp_path):
    tiny().save_pretrained(tmp_path / "base")
    groups = ("attention", "latent", "shared_experts", "experts", "router")
    adapted = add_lora(tiny(), lora(*groups)).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    program = """
        import sys, torch
        from peft import PeftModel
        from modeling_moe_lc import MoeLcForCausalLM, latent_moe
        latent_moe.run_experts = lambda experts, *inputs: experts(*inputs)  # PEFT's own forward
        folder = sys.argv[1]
        base = MoeLcForCausalLM.from_pretrained(f"{folder}/base")
        model = PeftModel.from_pretrained(base, f"{folder}/adapter").eval()
        ids = torch.load(f"{folder}/ids.pt")
        with torch.no_grad():
            results = [model(ids).logits, model.merge_and_unload()(ids).logits]
        torch.save(results, f"{folder}/logits.pt")
    """
    torch.save(ids(2, 9), tmp_path / "ids.pt")
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], check=True, timeout=120)
    with torch.no_grad():
        ours = adapted(ids(2, 9)).logits
    for theirs in torch.load(tmp_path / "logits.pt"):
        assert relative(ours, theirs) < LIMIT


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
def test_gradients_are_those_of_peft(tiny, dtype, limit, as_peft_does):
    """Of one layer of experts: in a whole model in bf16 the router's choices differ after a few of them."""
    moe = tiny().to(dtype).model.layers[1].block_sparse_moe
    config = LoraConfig(
        r=4,
        init_lora_weights=False,
        target_modules=[],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    adapted = get_peft_model(moe, config)
    x = torch.randn(2, 9, 64, dtype=dtype, requires_grad=True)
    dy = torch.randn(2, 9, 64, dtype=dtype)

    def results():
        y = adapted(x)
        leaves = [x, *(p for p in adapted.parameters() if p.requires_grad)]
        return y, *torch.autograd.grad(y, leaves, dy)

    ours = results()
    as_peft_does()
    for mine, theirs in zip(ours, results(), strict=True):
        assert mine.dtype == theirs.dtype and relative(mine.float(), theirs.float()) < limit


def test_experts_that_saw_a_token_have_gradients_and_others_none(tiny, ids):
    adapted = add_lora(tiny(), lora("experts"))
    routed = {}
    for name, module in adapted.named_modules():
        if name.endswith("block_sparse_moe.gate"):
            module.register_forward_hook(
                lambda _, __, out, name=name: routed.update({name: set(out[2].flatten().tolist())})
            )
    adapted(ids(1, 3)).logits.square().mean().backward()  # a loss would leave out the last token
    assert any(len(seen) < 8 for seen in routed.values())
    for name, seen in routed.items():
        outer = adapted.get_submodule(name.replace(".gate", ".experts"))
        for wrapper in (outer, outer.base_layer):
            by_expert = (
                wrapper.lora_A["default"].weight.grad.unflatten(0, (8, -1)),
                wrapper.lora_B["default"].weight.grad.unflatten(1, (-1, 8)).permute(2, 0, 1),
            )
            for gradient in by_expert:
                assert {e for e in range(8) if gradient[e].any()} == seen


def test_no_tensor_of_the_size_of_the_experts_is_made(tiny, ids):
    """W + B A would be one, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            tensors = [
                t for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, torch.Tensor)
            ]
            known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
            new = [t.numel() for t in tensors if t.untyped_storage().data_ptr() not in known]
            self.elements = max(self.elements, *new, 0)
            return result

    adapted = add_lora(tiny(num_experts=64), lora("experts", r=1))
    with Largest() as largest:
        adapted(ids(1, 9), labels=ids(1, 9)).loss.backward()
    experts = adapted.get_submodule("base_model.model.model.layers.1.block_sparse_moe.experts").get_base_layer()
    assert largest.elements < experts.down_proj.numel() / 2


def test_training_with_activation_checkpointing_and_dropout_on_attention(tiny, ids):
    adapted = add_lora(tiny(), lora("experts", "router")).train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            adapted.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
        adapted.zero_grad()
        adapted(ids(2, 9), labels=ids(2, 9)).loss.backward()
        gradients.append({name: p.grad for name, p in adapted.named_parameters() if p.requires_grad})
    assert all(torch.equal(gradient, gradients[0][name]) for name, gradient in gradients[1].items())


@torch.no_grad()
def test_decoding_sees_every_adapter(tiny, ids):
    adapted = add_lora(tiny().double(), lora(*TEXT_GROUPS)).double().eval()
    tokens = ids(2, 9)
    cache = adapted(tokens[:, :7], use_cache=True).past_key_values
    steps = [adapted(tokens[:, t : t + 1], past_key_values=cache).logits for t in (7, 8)]
    assert relative(torch.cat(steps, dim=1), adapted(tokens).logits[:, 7:]) < 1e-6


@torch.no_grad()
def test_absorbed_attention_takes_the_dtype_of_its_inputs(tiny, ids):
    """A quantised `kv_b_proj` has bytes for parameters."""

    class Bytes(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.codes = torch.nn.Parameter(linear.weight.view(torch.uint8), requires_grad=False)
            self.in_features = linear.in_features

        def forward(self, x):
            return x @ self.codes.view(torch.float32).T

    model, tokens = tiny(), ids(2, 9)
    for layer in model.model.layers:
        if isinstance(layer.self_attn, GatedMLA):
            layer.self_attn.kv_b_proj = Bytes(layer.self_attn.kv_b_proj)
    cache = model(tokens[:, :8], use_cache=True).past_key_values
    last = model(tokens[:, 8:], past_key_values=cache).logits
    assert relative(last, model(tokens).logits[:, 8:]) < 1e-4


@pytest.mark.parametrize("kind", ["modules_to_save", "ln_tuning"])
def test_norms_that_another_module_reads_are_adapted_too(tiny, ids, kind):
    model = tiny()
    before = model(ids(2, 9)).logits
    if kind == "ln_tuning":
        adapted = get_peft_model(model, LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm"]))
    else:
        adapted = get_peft_model(
            model, LoraConfig(r=2, modules_to_save=["input_layernorm", "post_attention_layernorm"])
        )
    trained = [p for name, p in adapted.named_parameters() if "layernorm" in name and p.requires_grad]
    assert trained
    with torch.no_grad():
        for parameter in trained:
            parameter.mul_(1.5)
    logits = adapted(ids(2, 9)).logits
    assert relative(logits, before) > 1e-3
    logits.sum().backward()
    assert all(parameter.grad.any() for parameter in trained)


def test_peft_model_is_the_result(tiny):
    assert isinstance(add_lora(tiny(), lora("mla", "kda")), PeftModel)


@torch.no_grad()
@pytest.mark.parametrize("batch", [2, 20])
def test_rows_with_adapters_of_their_own_decode_as_they_are_read(batch, tiny, ids):
    """Where the batch has as many rows as the latent has channels, too: PEFT's hooks see rows in whatever they are given."""
    model = tiny()
    assert model.config.kv_lora_rank == 20
    torch.manual_seed(0)
    adapted = add_lora(model, LoraConfig(r=4, init_lora_weights=False, **lora_targets("attention"))).eval()
    names, tokens = ["default", "__base__"] * (batch // 2), ids(batch, 6)
    whole = adapted(input_ids=tokens, adapter_names=names, use_cache=False).logits
    cache = adapted(input_ids=tokens[:, :4], adapter_names=names, use_cache=True).past_key_values
    rest = adapted(input_ids=tokens[:, 4:], adapter_names=names, past_key_values=cache).logits
    torch.testing.assert_close(rest, whole[:, 4:], rtol=1e-4, atol=1e-4)
