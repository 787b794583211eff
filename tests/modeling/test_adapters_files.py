"""Adapter files: PEFT's layout and released names hold the same updates; what does not fit is refused, by name.

Known problems 56 to 60 (55 and 61: tests/training/test_sharded_adapters.py).
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from modeling_moe_lc import (
    MoeLcForCausalLM,
    MoeLcMxfp4Config,
    add_lora,
    load_lora,
    lora_targets,
    pack_experts,
)
from modeling_moe_lc.adapter_names import fused_adapter, multimodal_names, per_expert_adapter
from modeling_moe_lc.conversion.merge import export_adapter, merge_adapter
from modeling_moe_lc.training.cli import main


MXFP4 = Path(__file__).parents[1] / "fixtures" / "k3-text-tiny-mxfp4"
SPARSE_LAYERS, EXPERTS = 4, 8  # of the tiny preset
LAYER = "base_model.model.model.layers.1.block_sparse_moe"


def relative(x, reference):
    return ((x - reference).norm() / reference.norm()).item()


def lora(*groups, r=4, seed=0, **kwargs):
    torch.manual_seed(seed)
    return LoraConfig(r=r, lora_alpha=6, init_lora_weights=False, **lora_targets(*groups), **kwargs)


def state_of(adapted):
    return get_peft_model_state_dict(adapted, save_embedding_layers=False)


@pytest.fixture
def saved(tiny, tmp_path):
    """`saved(*groups)`: folders of a model and of an adapter, and the adapted model."""

    def save(*groups, **kwargs):
        tiny().save_pretrained(tmp_path / "base")
        adapted = add_lora(tiny(), lora(*groups, **kwargs)).eval()
        adapted.save_pretrained(tmp_path / "adapter")
        return tmp_path / "base", tmp_path / "adapter", adapted

    return save


def test_exported_names_hold_every_update(saved, tmp_path):
    """58: as many tensors as there are, and W + scale B A of each released projection is what PEFT merges."""
    base, folder, adapted = saved("experts", "shared_experts", "attention")
    export_adapter(base, folder, tmp_path / "engine")
    tensors = load_file(tmp_path / "engine" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "engine" / "adapter_config.json").read_text())
    assert sum(".experts." in name for name in tensors) == SPARSE_LAYERS * EXPERTS * 3 * 2
    assert sum(".shared_experts." in name for name in tensors) == SPARSE_LAYERS * 3 * 2
    assert {"w1", "w2", "w3", "gate_proj", "up_proj", "down_proj", "q_proj"} <= set(config["target_modules"])
    assert (config["r"], config["lora_alpha"], config["target_parameters"]) == (4, 6, None)

    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    before, after = (load_file(f / "model.safetensors") for f in (base, tmp_path / "merged"))
    for name in sorted(after):
        module = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (tensors.pop(f"{module}.lora_{part}.weight", None) for part in "AB")
        expected = before[name] if a is None else before[name] + config["lora_alpha"] / config["r"] * (b @ a)
        assert relative(after[name], expected) < 1e-6, name
    assert not tensors  # no key that an engine would ignore


@pytest.mark.parametrize("groups", [("experts",), ("experts", "shared_experts", "attention")])
def test_released_names_come_back_the_same(tiny, groups):
    adapted = add_lora(tiny(), lora(*groups))
    state, config = state_of(adapted), adapted.peft_config["default"]
    released, _ = per_expert_adapter(state, config, EXPERTS)
    back, again = fused_adapter(released, config)
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)
    assert set(again.target_parameters) == set(config.target_parameters)
    assert (again.rank_pattern, again.alpha_pattern) == ({}, {})


@pytest.mark.parametrize("only", ["gate_up_proj", "down_proj"])
def test_one_projection_alone(tiny, only):
    config = lora("experts")
    config.target_parameters = [f"block_sparse_moe.experts.{only}"]
    adapted = add_lora(tiny(), config)
    state = state_of(adapted)
    released, _ = per_expert_adapter(state, config, EXPERTS)
    assert len(released) == SPARSE_LAYERS * EXPERTS * (4 if only == "gate_up_proj" else 2)
    back, again = fused_adapter(released, config)
    assert all(torch.equal(back[name], state[name]) for name in state) and len(back) == len(state)
    assert again.target_parameters == config.target_parameters


def test_ranks_and_alphas_of_their_own_go_into_the_tensors(tiny):
    pattern = r".*\.experts\.(gate_up_proj|down_proj)"
    adapted = add_lora(
        tiny(), lora("experts", "attention", rank_pattern={pattern: 2}, alpha_pattern={pattern: 5}, use_rslora=True)
    )
    released, config = per_expert_adapter(state_of(adapted), adapted.peft_config["default"], EXPERTS)
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({}, {})
    assert {t.shape[0] for name, t in released.items() if "lora_A" in name} == {config["r"]}
    wrapper = adapted.get_submodule(f"{LAYER}.experts")
    delta = wrapper.get_delta_weight("default")[3]
    a, b = (released[f"{LAYER}.experts.3.w2.lora_{part}.weight"] for part in "AB")
    assert relative(config["lora_alpha"] / config["r"] ** 0.5 * b @ a, delta) < 1e-6


def test_multimodal_names_are_the_released_ones(tiny_multimodal):
    adapted = add_lora(tiny_multimodal(), lora("experts", "vision", "projector"))
    released, _ = per_expert_adapter(state_of(adapted), adapted.peft_config["default"], EXPERTS)
    back, _ = fused_adapter(released, adapted.peft_config["default"])
    back, state = multimodal_names(back), state_of(adapted)
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)
    heads = {name.removeprefix("base_model.model.").split(".")[0] for name in released}
    assert heads == {"language_model", "vision_tower", "mm_projector"}
    assert "base_model.model.language_model.model.layers.1.block_sparse_moe.experts.0.w1.lora_A.weight" in released


def test_an_adapter_of_single_linear_layers_loads(tiny, ids, tmp_path):
    """57: gate and up with an A each, as trainers wrote them when every expert was a module."""
    torch.manual_seed(0)
    r, alpha, state = 3, 6, {}
    for layer in range(1, 5):
        for e in range(EXPERTS):
            for name, (rows, inputs) in {"w1": (32, 48), "w3": (32, 48), "w2": (48, 32)}.items():
                path = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{e}.{name}"
                state[f"{path}.lora_A.weight"] = 0.1 * torch.randn(r, inputs)
                state[f"{path}.lora_B.weight"] = 0.1 * torch.randn(rows, r)
    save_file(state, tmp_path / "adapter_model.safetensors")
    LoraConfig(r=r, lora_alpha=alpha, target_modules=["w1", "w2", "w3"]).save_pretrained(tmp_path)
    adapted = load_lora(tiny(), str(tmp_path))
    inner, outer = (adapted.get_submodule(f"{LAYER}.experts{end}") for end in (".base_layer", ""))
    for e in range(EXPERTS):

        def delta(name, e=e):
            return (
                alpha
                / r
                * state[f"{LAYER}.experts.{e}.{name}.lora_B.weight"]
                @ state[f"{LAYER}.experts.{e}.{name}.lora_A.weight"]
            )

        assert relative(inner.get_delta_weight("default")[e], torch.cat([delta("w1"), delta("w3")])) < 1e-6
        assert relative(outer.get_delta_weight("default")[e], delta("w2")) < 1e-6
    with torch.no_grad():
        split = adapted(ids(2, 9)).logits
        assert relative(adapted.merge_and_unload()(ids(2, 9)).logits, split) < 1e-5


def test_a_missing_expert_is_named(tiny, tmp_path):
    adapted = add_lora(tiny(), lora("experts"))
    released, _ = per_expert_adapter(state_of(adapted), adapted.peft_config["default"], EXPERTS)
    released = {name: tensor for name, tensor in released.items() if ".experts.5.w3." not in name}
    with pytest.raises(ValueError, match=r"layers\.1\..*experts\.\*\.w3: .*missing \[5\]"):
        fused_adapter(released, adapted.peft_config["default"])


@pytest.mark.parametrize("experts_too", [False, True])
def test_a_target_that_matches_nothing_raises(tiny, experts_too):
    """57: the names of experts that were modules once."""
    targets = lora_targets("experts") if experts_too else {}
    for names in (["gate_proj"], ["q_proj", "w1"]):
        with pytest.raises(ValueError, match=f"target_modules: .*{names[-1]}, which match nothing"):
            add_lora(tiny(), LoraConfig(r=2, **{**targets, "target_modules": names}))
    with pytest.raises(ValueError, match="target_modules: expected names of linear layers"):
        add_lora(tiny(), LoraConfig(r=2, target_modules=r".*\.w1"))
    with pytest.raises(ValueError, match="target_parameters: .*mlp.experts.down_proj"):
        add_lora(tiny(), LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.down_proj"]))
    with pytest.raises(ValueError):  # and where nothing at all matches, PEFT does
        get_peft_model(tiny(), LoraConfig(r=2, target_modules=["gate_proj"]))


@pytest.mark.parametrize("kwargs", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}])
@pytest.mark.parametrize("group", ["experts", "router"])
def test_what_experts_cannot_have_raises(tiny, kwargs, group):
    model = tiny()
    with pytest.raises(ValueError, match=f"{next(iter(kwargs))}: expected none on experts and router"):
        add_lora(model, lora("attention", group, **kwargs))
    assert not any("lora_" in name for name, _ in model.named_parameters())


def test_groups_are_checked(tiny):
    for groups in ((), ("atention",)):
        with pytest.raises(ValueError, match="groups: expected some of attention, kda"):
            lora_targets(*groups)
    with pytest.raises(ValueError, match="config: expected that of the model for 'kda'"):
        lora_targets("kda")


def test_an_adapter_for_another_architecture_is_refused(saved, tiny, ids):
    """Names and shapes are listed, and the model computes and trains as before."""
    _, folder, _ = saved("attention", "experts")
    for other, message in (
        (tiny(hidden_size=32), r"lora_A\.weight: \[4, 32\] in this model, \[4, 64\] in the adapter"),
        (tiny(num_experts=4), r"experts\.lora_B\.weight: \[48, 16\] in this model, \[48, 32\] in the adapter"),
        (tiny("nano-kimi-linear"), r"q_a_proj\.lora_A\.weight \[4, 64\]"),
    ):
        before, wanted = other(ids(1, 5)).logits, [p.requires_grad for p in other.parameters()]
        with pytest.raises(ValueError, match=f"expected an adapter for this architecture(.|\n)*{message}"):
            load_lora(other, str(folder))
        assert torch.equal(other(ids(1, 5)).logits, before)
        assert [p.requires_grad for p in other.parameters()] == wanted


def test_a_name_in_use_and_other_parameters_are_refused(tiny):
    """56: two adapters on different parameters are a documented error of PEFT."""
    adapted = add_lora(tiny(), lora("experts"))
    with pytest.raises(ValueError, match="adapter_name: expected a new one"):
        add_lora(adapted, lora("experts"))
    other = lora("experts")
    other.target_parameters = ["block_sparse_moe.experts.down_proj"]
    with pytest.raises(ValueError, match="same set of parameters"):
        add_lora(adapted, other, "other")


def test_what_is_trained_is_what_comes_back(saved, tiny):
    """59: from `adapter_config.json` alone."""
    _, folder, adapted = saved("experts", "shared_experts", "router")
    again = PeftModel.from_pretrained(tiny(), folder, is_trainable=True)
    before, after = ({n: p.shape for n, p in m.named_parameters() if p.requires_grad} for m in (adapted, again))
    assert before == after and sum(".experts." in name for name in before) == SPARSE_LAYERS * 2 * 2
    assert sum(".shared_experts." in name for name in before) == SPARSE_LAYERS * 2 * 2


def packed():
    stored = MoeLcMxfp4Config(dequantize=False)
    return MoeLcForCausalLM.from_pretrained(MXFP4, dtype=torch.float32, quantization_config=stored).eval()


def test_adapters_on_experts_in_mxfp4(tmp_path):
    """60: the experts stay at 0.27 of their bytes, train, and the adapter is that of plain experts."""
    ids = torch.randint(3, 500, (2, 9), generator=torch.Generator().manual_seed(0))
    model = packed()
    before = model(ids).logits
    config = lora("attention", "experts")
    adapted = add_lora(model, copy.deepcopy(config))
    stored = {name: b for name, b in adapted.named_buffers() if name.endswith(("_packed", "proj_scale"))}
    in_bf16 = sum(2 * 2 * b.numel() for name, b in stored.items() if name.endswith("_packed"))
    assert stored and sum(b.nbytes for b in stored.values()) <= 0.30 * in_bf16
    assert not any(name.endswith("gate_up_proj") for name in adapted.state_dict())
    loss = adapted(ids, labels=ids).loss
    loss.backward()
    gradients = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
    assert all(g is not None and g.isfinite().all() for g in gradients.values())
    with adapted.disable_adapter():
        assert torch.equal(adapted(ids).logits, before)

    adapted.save_pretrained(tmp_path)
    plain = load_lora(MoeLcForCausalLM.from_pretrained(MXFP4, dtype=torch.float32), str(tmp_path), is_trainable=True)
    theirs = plain(ids, labels=ids)
    assert relative(adapted(ids).logits, theirs.logits) < 1e-5
    theirs.loss.backward()
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            assert relative(gradients[name], parameter.grad) < 1e-5, name
    again = load_lora(packed(), str(tmp_path))
    assert torch.equal(again(ids).logits, adapted(ids).logits)


def test_packed_experts_refuse_a_merge_and_hooks():
    for safe in (False, True):
        adapted = add_lora(packed(), lora("experts"))
        with pytest.raises(ValueError, match="experts in MXFP4: expected an adapter beside them"):
            adapted.merge_adapter(safe_merge=safe)
    adapted = add_lora(packed(), lora("experts"))
    adapted.get_submodule(f"{LAYER}.experts").get_base_layer().register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="experts in MXFP4: expected no forward hooks"):
        adapted(torch.tensor([[5, 6]]))


def test_experts_packed_after_the_fact_take_adapters(tiny, ids):
    model = tiny(routed_expert_hidden_size=64)
    pack_experts(model)
    adapted = add_lora(model, lora("experts"))
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == SPARSE_LAYERS * 2
    assert adapted(ids(1, 5)).logits.isfinite().all()


def test_hooks_on_experts_are_called(tiny, ids):
    adapted = add_lora(tiny(), lora("experts")).eval()
    with torch.no_grad():
        split, called = adapted(ids(1, 5)).logits, []
        base = adapted.get_submodule(f"{LAYER}.experts").get_base_layer()
        base.register_forward_hook(lambda *_: called.append(1))
        assert relative(adapted(ids(1, 5)).logits, split) < 1e-5 and called


def test_rows_with_adapters_of_their_own_are_refused(tiny, ids):
    """By PEFT; they must not be ignored on the way."""
    adapted = add_lora(tiny(), lora("experts")).eval()
    with pytest.raises(ValueError, match="mixed"):
        adapted(input_ids=ids(2, 5), adapter_names=["default", "__base__"])


@torch.no_grad()
def test_merge_command(saved, ids, tmp_path):
    base, folder, adapted = saved("attention", "experts")
    logits = adapted(ids(2, 9)).logits
    assert main(["merge", str(base), str(folder), str(tmp_path / "merged")]) == 0
    assert relative(MoeLcForCausalLM.from_pretrained(tmp_path / "merged").eval()(ids(2, 9)).logits, logits) < 1e-5
    assert main(["merge", str(base), str(folder), str(tmp_path / "engine"), "--adapter-only"]) == 0
    again = load_lora(MoeLcForCausalLM.from_pretrained(base), str(tmp_path / "engine"))
    assert torch.equal(again(ids(2, 9)).logits, logits)
    for taken in ("merged", "engine"):
        assert main(["merge", str(base), str(folder), str(tmp_path / taken)]) == 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@torch.no_grad()
def test_merging_into_experts_in_mxfp4_writes_plain_ones(tmp_path):
    ids = torch.randint(3, 500, (2, 9), generator=torch.Generator().manual_seed(0))
    adapted = add_lora(MoeLcForCausalLM.from_pretrained(MXFP4, dtype=torch.float32), lora("experts")).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    merge_adapter(MXFP4, tmp_path / "adapter", tmp_path / "merged", dtype="float32")
    names = load_file(tmp_path / "merged" / "model.safetensors").keys()
    assert not any("packed" in name for name in names)
    merged = MoeLcForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert relative(merged(ids).logits, adapted(ids).logits) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("groups", [("attention",), ("experts", "shared_experts")])
def test_merging_into_a_released_kimi_linear(groups, tmp_path):
    """`AutoModelForCausalLM` is transformers' own class for it."""
    base, ids = MXFP4.with_name("kimi-linear-tiny"), torch.randint(3, 60, (2, 9))
    adapted = add_lora(MoeLcForCausalLM.from_pretrained(base, dtype=torch.float32), lora(*groups)).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged", dtype="float32")
    merged = MoeLcForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert relative(merged(ids).logits, adapted(ids).logits) < 1e-5


@torch.no_grad()
def test_an_adapter_of_the_head_as_peft_saves_it(saved, ids, tmp_path):
    """With the weights of the head itself."""
    base, folder, adapted = saved("head", "attention")
    assert any(name.endswith("lm_head.base_layer.weight") for name in load_file(folder / "adapter_model.safetensors"))
    logits = adapted(ids(2, 9)).logits
    assert torch.equal(load_lora(MoeLcForCausalLM.from_pretrained(base), str(folder))(ids(2, 9)).logits, logits)
    merge_adapter(base, folder, tmp_path / "merged")
    assert relative(MoeLcForCausalLM.from_pretrained(tmp_path / "merged").eval()(ids(2, 9)).logits, logits) < 1e-5


@torch.no_grad()
def test_an_adapter_beside_a_vocabulary_of_another_size(tiny, ids, tmp_path):
    def longer():
        model = tiny()
        torch.manual_seed(5)
        model.resize_token_embeddings(520)
        return model

    adapted = add_lora(longer(), lora("attention")).eval()
    adapted.save_pretrained(tmp_path, save_embedding_layers=True)
    torch.manual_seed(6)
    other = tiny()
    other.resize_token_embeddings(520)
    assert torch.equal(load_lora(other, str(tmp_path))(ids(2, 9)).logits, adapted(ids(2, 9)).logits)
    with pytest.raises(ValueError, match=r"embed_tokens.weight: .512, 64. in this model, .520, 64. in the adapter"):
        load_lora(tiny(), str(tmp_path))


@torch.no_grad()
def test_an_adapter_beside_a_tied_head(tiny, ids, tmp_path):
    adapted = add_lora(tiny(tie_word_embeddings=True), lora("attention")).eval()
    adapted.save_pretrained(tmp_path, save_embedding_layers=True)
    again = load_lora(tiny(tie_word_embeddings=True), str(tmp_path))
    assert torch.equal(again(ids(2, 9)).logits, adapted(ids(2, 9)).logits)


@torch.no_grad()
@pytest.mark.parametrize("group", ["shared_experts", "router", "latent", "attention"])
def test_a_group_comes_back_from_an_engine(group, tiny, ids, tmp_path):
    """Ends of names do not tell which layers have an update."""
    torch.manual_seed(0)
    base = tiny()
    base.save_pretrained(tmp_path / "base")
    adapted = add_lora(base, lora(group)).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    export_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "engine")
    again = load_lora(MoeLcForCausalLM.from_pretrained(tmp_path / "base"), str(tmp_path / "engine"))
    assert relative(again(ids(2, 9)).logits, adapted(ids(2, 9)).logits) < 1e-6


def test_merging_hands_on_the_files_of_both(saved, tmp_path):
    base, folder, _ = saved("attention")
    (base / "tiktoken.model").write_bytes(b"base")
    (base / "tokenizer_config.json").write_text("{}")
    (base / "chat_template.jinja").write_text("of the base")
    (folder / "chat_template.jinja").write_text("of the adapter")
    merge_adapter(base, folder, tmp_path / "merged")
    assert (tmp_path / "merged" / "tiktoken.model").read_bytes() == b"base"
    assert (tmp_path / "merged" / "tokenizer_config.json").read_text() == "{}"
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == "of the adapter"


def test_merging_what_is_not_there(saved, tmp_path, capsys):
    base, folder, _ = saved("attention")
    out = str(tmp_path / "out")
    assert main(["merge", str(base), str(base), out]) == 2
    assert "adapter: expected a folder with adapter_config.json" in capsys.readouterr().err
    assert main(["merge", str(base), str(folder), out, "--dtype", "float17"]) == 2
    assert "dtype: expected auto or one of torch" in capsys.readouterr().err
