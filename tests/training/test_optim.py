"""The start of a run is embedding and head alone, each parameter is optimised once, and the learning rate has its shape."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.training.optim import EMBEDDING_RATE, adamw, initialise, set_learning_rate, warmup_cosine


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


def test_learning_rate_rises_to_its_peak_and_falls_to_a_tenth():
    rates = [warmup_cosine(step, 40, 0.5, warmup=8) for step in range(40)]
    assert rates[:8] == pytest.approx([0.5 * (step + 1) / 8 for step in range(8)])
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[7:]))
    assert rates[-1] == pytest.approx(0.05)
