"""The start of a run is embedding and head alone, each parameter is treated once and as listed, rates have their shapes."""

import itertools
import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.training.optim import (
    EMBEDDING_RATE,
    SCHEDULES,
    adamw,
    clip_grad_norm,
    cosine,
    initialise,
    muon,
    set_learning_rate,
    treatments,
    warmup_steps,
    wsd,
)


DECAYS_ON_ADAMW = {"embed_tokens", "lm_head", "block_sparse_moe.gate"}
RESTS_ON_ADAMW = {
    *("norm", "input_layernorm", "post_attention_layernorm", "block_sparse_moe.routed_expert_norm"),
    *("kda.q_conv1d", "kda.k_conv1d", "kda.v_conv1d", "kda.decay.A_log", "kda.decay.dt_bias", "kda.o_norm"),
    *("mla.q_a_layernorm", "mla.kv_a_layernorm"),
    *(f"{site}_res.{part}" for site in ("self_attention", "mlp", "output_attn") for part in ("query", "key_norm")),
}
ON_MUON = {  # rows that are orthogonalised together, in tiny and in nano; None: the whole matrix
    **dict.fromkeys(("kda.q_proj", "kda.k_proj", "kda.v_proj", "kda.f_b_proj", "kda.g_proj"), ((16,), (32,))),
    **dict.fromkeys(("kda.f_a_proj", "kda.b_proj", "kda.o_proj"), (None, None)),
    **dict.fromkeys(("mla.q_a_proj", "mla.kv_a_proj_with_mqa", "mla.o_proj"), (None, None)),
    "mla.q_b_proj": ((24,), (48,)),
    "mla.kv_b_proj": ((16, 12), (32, 32)),
    "mla.g_proj": ((12,), (32,)),
    "mlp.gate_up_proj": ((96,), (384,)),
    "mlp.down_proj": (None, None),
    "block_sparse_moe.experts.gate_up_proj": ((32,), (64,)),
    "block_sparse_moe.experts.down_proj": (None, None),
    "block_sparse_moe.routed_expert_down_proj": (None, None),
    "block_sparse_moe.routed_expert_up_proj": (None, None),
    "block_sparse_moe.shared_experts.gate_up_proj": ((32,), (64,)),
    "block_sparse_moe.shared_experts.down_proj": (None, None),
}
KIMI_LINEAR = {"kda.g_b_proj": (32,), "kda.g_a_proj": None, "mla.q_proj": (48,)}


def meta_model(preset, **overrides):
    with torch.device("meta"):
        return MoeLcForCausalLM(load_preset(preset, **overrides))


def by_kind(model, treated):
    """{name without numbers, with the kind of attention: treatment}; all layers of a kind are treated alike."""
    kinds = {"linear_attention": "kda.", "full_attention": "mla."}
    found = {}
    for name, treatment in treated.items():
        name = re.sub(r"layers\.(\d+)\.self_attn\.", lambda m: kinds[model.config.layer_types[int(m[1])]], name)
        name = re.sub(r"^model\.|layers\.\d+\.|\.weight$", "", name)
        assert found.setdefault(name, treatment) == treatment, name
    return found


@pytest.fixture(params=("tiny", "tiny without a latent"))
def model(request):
    overrides = {} if request.param == "tiny" else {"routed_expert_hidden_size": None, "latent_moe_use_norm": False}
    return MoeLcForCausalLM(load_preset("tiny", **overrides))


def test_an_initialised_model_is_its_embedding_and_its_head_and_learns_everywhere(model):
    initialise(model)
    ids = torch.randint(0, model.config.vocab_size, (1, 37))
    output = model(input_ids=ids, labels=ids, use_cache=False)
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    # a uniform mix of the embedding and of empty blocks, whatever their number, has the embedding's direction
    expected = F.rms_norm(table[ids], table.shape[-1:], eps=1e-12) @ head.T
    torch.testing.assert_close(output.logits, expected, rtol=1e-3, atol=1e-3)

    optimizer = adamw(model)
    for _ in range(3):
        set_learning_rate(optimizer, 1e-2)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
    still = [name for name, parameter in model.named_parameters() if not parameter.grad.any()]
    assert still == [f"model.layers.0.self_attention_res.{name}" for name in ("query", "key_norm")]  # mixes one block


def test_only_matrices_decay_and_every_parameter_is_optimised_once(model):
    groups = adamw(model).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert sorted(id(one) for group in groups for one in group["params"]) == sorted(names)
    vectors = ("norm", "conv1d", "A_log", "dt_bias", "_res.")
    for group in groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            assert (group["weight_decay"] == 0) == any(kind in name for kind in vectors), name
            assert group["rate"] == (EMBEDDING_RATE if "embed_tokens" in name else 1.0), name


@pytest.mark.parametrize(("column", "preset"), [(0, "tiny"), (1, "nano")])
def test_every_parameter_is_treated_as_listed(column, preset):
    model = meta_model(preset)
    found = by_kind(model, treatments(model, embedding_rate=3.0))
    assert {name: one.rows for name, one in found.items() if one.use_muon} == {
        n: r[column] for n, r in ON_MUON.items()
    }
    assert {name for name, one in found.items() if not one.use_muon and one.decays} == DECAYS_ON_ADAMW
    assert {name for name, one in found.items() if not one.decays} == RESTS_ON_ADAMW
    assert {name for name, one in found.items() if one.rate != 1.0} == {"embed_tokens"}


def test_older_projections_the_router_switch_a_tied_head_and_frozen_parameters():
    model = meta_model("nano-kimi-linear", tie_word_embeddings=True)
    model.model.norm.weight.requires_grad_(False)
    found = by_kind(model, treatments(model, router_on_muon=True))
    assert {name: found[name].rows for name in KIMI_LINEAR} == KIMI_LINEAR
    assert found["block_sparse_moe.gate"].use_muon and not found["embed_tokens"].use_muon
    assert not {"norm", "lm_head"} & found.keys()


def test_muon_has_every_parameter_once_and_learns(model):
    initialise(model)
    optimizer = muon(model, embedding_rate=EMBEDDING_RATE)
    optimised = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(optimised) == sorted(map(id, model.parameters()))
    ids = torch.randint(0, model.config.vocab_size, (1, 37))
    losses = []
    for _ in range(8):
        set_learning_rate(optimizer, 1e-2)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_nothing_but_matrices_decays(model):
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = muon(model, weight_decay=0.5)
    set_learning_rate(optimizer, 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim >= 2 and 1 not in parameter.shape[-2:]
        torch.testing.assert_close(parameter, before[name] * (0.95 if matrix else 1.0), msg=name)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_plain_gradients_is_that_of_torch(max_norm):
    ours, theirs = ([nn.Parameter(torch.ones(shape)) for shape in ((7,), (3, 4), (2,))] for _ in range(2))
    for one, two in zip(ours[:2], theirs[:2], strict=True):  # the last has no gradient
        one.grad = torch.randn_like(one)
        two.grad = one.grad.clone()
    torch.testing.assert_close(clip_grad_norm(ours, max_norm), nn.utils.clip_grad_norm_(theirs, max_norm))
    for one, two in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(one.grad, two.grad)
    assert clip_grad_norm(ours[2:], max_norm) == 0.0


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_stage_goes_from_its_start_to_its_end(schedule):
    rates = [schedule(step, 100, start=0.5, end=0.2, warmup=10) for step in range(100)]
    assert rates[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert max(rates) == rates[9] == 0.5 and rates[-1] == pytest.approx(0.2)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[9:]))
    assert schedule(0, 1, start=0.5, end=0.2) == pytest.approx(0.2)  # a stage of one step is at its end


def test_cosine_and_wsd_have_their_shapes():
    assert cosine(54, 100, 1.0, 0.0, warmup=10) == pytest.approx(0.5)
    rates = [wsd(step, 100, decay=0.2) for step in range(100)]
    assert rates[:80] == [1.0] * 80
    assert rates[80:] == pytest.approx([1.0 - math.sqrt((step + 1) / 20) for step in range(20)])
    assert [warmup_steps(steps) for steps in (1, 149, 151, 10_000)] == [1, 1, 2, 100]


def test_learning_rate_rises_to_its_peak_and_falls_to_a_tenth():
    rates = [cosine(step, 40, 0.5, 0.05, warmup=8) for step in range(40)]
    assert rates[:8] == pytest.approx([0.5 * (step + 1) / 8 for step in range(8)])
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[7:]))
    assert rates[-1] == pytest.approx(0.05)
