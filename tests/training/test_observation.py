"""What is observed is what the forward pass computed, and looking changes nothing."""

import math

import pytest
import torch

from modeling_moe_lc import MoeLcForCausalLM, gated_mla
from modeling_moe_lc.attn_res import AttnRes
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.kda import KimiDeltaAttention
from modeling_moe_lc.kernels.kda.reference import activate
from modeling_moe_lc.latent_moe import MoeLcExperts
from modeling_moe_lc.situ_glu import SiTUGLU
from modeling_moe_lc.training.observation import log_decay, modules_of, observe, observing
from modeling_moe_lc.training.packing import Pack, collate


TOKENS = 16


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = MoeLcForCausalLM(load_preset("tiny", initializer_range=0.3))
    for site in modules_of(model, AttnRes):
        torch.nn.init.normal_(site.query, std=0.1)
    return model


def ids(tokens=TOKENS, rows=1):
    return torch.randint(3, 512, (rows, tokens), generator=torch.Generator().manual_seed(1))


def numbers(observation):
    return {name: value.tolist() for name, value in observation.numbers().items()}


def test_looking_changes_nothing_and_leaves_nothing(model):
    expected = model(input_ids=ids()).logits
    with observing(model) as seen:
        assert torch.equal(model(input_ids=ids()).logits, expected)
    kept = numbers(seen)
    assert torch.equal(model(input_ids=ids()).logits, expected)
    assert numbers(seen) == kept
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert "delta_rule" not in vars(module)


def test_every_place_has_a_finite_number(model):
    seen = numbers(observe(model, {"input_ids": ids(), "labels": ids()}))
    assert {name: len(values) for name, values in seen.items()} == {
        "attn_res_entropy": 2 * 5 + 1,
        "kda_decay": 3,
        "kda_state_norm": 3,
        "mla_max_logit": 2,
        "situ_saturation": 5,
        "situ_saturation_routed": 4,
    }
    assert all(math.isfinite(value) for values in seen.values() for value in values)


def test_a_method_that_stood_in_place_of_the_delta_rule_is_put_back(model):
    layer = modules_of(model, KimiDeltaAttention)[0]
    calls = []

    def other(*args):
        calls.append(args)
        return KimiDeltaAttention.delta_rule(layer, *args)

    layer.delta_rule = other
    observe(model, {"input_ids": ids()})
    assert layer.delta_rule is other and len(calls) == 1


def test_a_pseudo_query_of_zero_mixes_evenly(model):
    for site in modules_of(model, AttnRes):
        torch.nn.init.zeros_(site.query)
    # blocks of two layers: the embedding, then one more source for every block begun
    sources = [1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4]
    seen = numbers(observe(model, {"input_ids": ids()}))
    assert seen["attn_res_entropy"] == pytest.approx([math.log(number) for number in sources], abs=1e-6)


def test_entropy_is_that_of_the_weights(model):
    expected = []

    def look(site, args):
        blocks, partial, _ = args
        keys = [torch.nn.functional.rms_norm(v, v.shape[-1:], site.key_norm, 1e-5) for v in (*blocks, partial)]
        weights = torch.stack([key @ site.query[0] for key in keys], dim=-1).softmax(-1)
        expected.append(torch.distributions.Categorical(weights).entropy().mean().item())

    handles = [site.register_forward_pre_hook(look) for site in modules_of(model, AttnRes)]
    model(input_ids=ids())
    for handle in handles:
        handle.remove()
    seen = numbers(observe(model, {"input_ids": ids()}))
    assert seen["attn_res_entropy"] == pytest.approx(expected, abs=1e-5)  # measured gap 2e-7
    assert max(expected) > 0.3 and min(expected[1:]) < math.log(2) - 0.01


def test_state_norm_is_that_of_the_states_that_a_cache_would_keep(model):
    cache = model.eval()(input_ids=ids(rows=2), use_cache=True).past_key_values
    states = [cache.layers[layer.layer_idx].recurrent_states for layer in modules_of(model, KimiDeltaAttention)]
    states = [state[0] if isinstance(state, dict) else state for state in states]
    expected = [state.flatten(-2).norm(dim=-1).mean().item() for state in states]
    seen = numbers(observe(model, {"input_ids": ids(rows=2)}))
    assert seen["kda_state_norm"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_decay_is_the_one_that_the_operator_applies(lower_bound):
    q, g = torch.randn(2, 1, 7, 3, 4)
    A_log, dt_bias, beta = torch.randn(3), torch.randn(3, 4), torch.randn(1, 7, 3)
    _, _, expected, _ = activate(q, q, g, beta, A_log, dt_bias, lower_bound)
    torch.testing.assert_close(log_decay(g, A_log, dt_bias, lower_bound).exp(), expected.exp2())


def test_mean_decay_is_over_tokens_and_channels(model):
    layer = modules_of(model, KimiDeltaAttention)[0]
    found = {}
    handle = layer.f_b_proj.register_forward_hook(lambda module, args, output: found.update(g=output))
    seen = numbers(observe(model, {"input_ids": ids()}))
    handle.remove()
    g = found["g"].unflatten(-1, (-1, layer.head_dim))
    expected = log_decay(g, *layer.decay(g), layer.lower_bound).exp().mean().item()
    assert seen["kda_decay"][0] == pytest.approx(expected, rel=1e-6)


def largest_logits(model, inputs, monkeypatch):
    """Of every call of the definition of attention: one for each document and layer."""
    found = []

    def attention(module, query, key, value, mask, scaling, **kwargs):
        scores = query @ key.transpose(-1, -2) * scaling
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        found.append(scores.masked_fill(future, -torch.inf).amax().item())
        return real(module, query, key, value, mask, scaling, **kwargs)

    real = gated_mla.eager_attention_forward
    monkeypatch.setattr(gated_mla, "eager_attention_forward", attention)
    model(**inputs, use_cache=False)
    return found


def test_max_logit_is_exact_for_a_short_sequence(model, monkeypatch):
    model.eval().set_attn_implementation("eager")
    seen = numbers(observe(model, {"input_ids": ids()}))
    assert seen["mla_max_logit"] == pytest.approx(largest_logits(model, {"input_ids": ids()}, monkeypatch), rel=1e-5)


def test_max_logit_of_a_packed_batch_is_that_of_its_longest_document(model, monkeypatch):
    model.eval().set_attn_implementation("eager")
    inputs = collate([Pack(ids(24)[0].tolist(), [0, 5, 18, 24])])
    seen = numbers(observe(model, inputs))
    documents = largest_logits(model, inputs, monkeypatch)
    assert len(documents) == 2 * 3
    assert seen["mla_max_logit"] == pytest.approx(documents[1::3], rel=1e-5)


def test_padding_is_no_key(model):
    padded = torch.cat([torch.full((1, 9), 2), ids()], dim=1)
    rows = torch.cat([padded, ids(tokens=25)[:, :25]])
    rows[1, :20] = 2
    mask = torch.ones_like(rows)
    mask[0, :9] = mask[1, :20] = 0
    seen = numbers(observe(model, {"input_ids": rows, "attention_mask": mask}))
    alone = numbers(observe(model, {"input_ids": ids()}))
    assert seen["mla_max_logit"] == pytest.approx(alone["mla_max_logit"], rel=1e-5)


def test_saturation_is_the_share_of_gates_beyond_beta(model):
    beta = model.config.activation_situ_beta
    shares, routed = [], []

    def of_mlp(module, args, output):
        shares.append((output.chunk(2, -1)[0].abs() > beta).double().mean().item())

    def of_experts(module, args):
        tokens, indices, _ = args
        gates = torch.einsum("eif,nf->nei", module.gate_up_proj.chunk(2, 1)[0], tokens)  # [N, E, I]
        chosen = gates.gather(1, indices[..., None].expand(-1, -1, gates.shape[-1]))
        routed.append((chosen.abs() > beta).double().mean().item())

    handles = [mlp.gate_up_proj.register_forward_hook(of_mlp) for mlp in modules_of(model, SiTUGLU)]
    handles += [experts.register_forward_pre_hook(of_experts) for experts in modules_of(model, MoeLcExperts)]
    model.eval()(input_ids=ids())
    for handle in handles:
        handle.remove()
    seen = numbers(observe(model, {"input_ids": ids()}))
    assert seen["situ_saturation"] == pytest.approx(shares) and sum(shares) > 0
    assert seen["situ_saturation_routed"] == pytest.approx(routed) and sum(routed) > 0


def test_a_model_without_caps_and_depth_mix_shows_what_it_has():
    caps = {"activation_situ_beta": None, "activation_situ_linear_beta": None}
    config = load_preset("tiny", hidden_act="silu", attn_res_block_size=None, **caps)
    seen = numbers(observe(MoeLcForCausalLM(config), {"input_ids": ids()}))
    assert set(seen) == {"kda_decay", "kda_state_norm", "mla_max_logit"}


def test_recomputation_is_not_counted_again(model):
    def trained(checkpointing):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        with observing(model) as seen:
            model(input_ids=ids(), labels=ids(), use_cache=False).loss.backward()
        return seen

    plain, again = trained(False), trained(True)
    for name, sums in plain.sums.items():
        torch.testing.assert_close(again.sums[name], sums, rtol=0, atol=0)


def test_compiled_layers_are_observed_and_stay_compiled(model):
    model.eval()
    expected = numbers(observe(model, {"input_ids": ids()}))
    traced = []

    def backend(graph, example):
        traced.append(graph)
        return graph.forward

    layer = model.model.layers[0]
    layer.mlp.compile(backend=backend)
    model(input_ids=ids())
    assert traced
    assert numbers(observe(model, {"input_ids": ids()})) == expected
    count = len(traced)
    model(input_ids=ids())
    assert len(traced) == count


def test_ranks_pool_sums_and_maxima(model):
    one, other = (observe(model, {"input_ids": part}) for part in ids(rows=2).split(1))
    sent = []
    other.numbers(lambda tensor: sent.append(tensor.clone()), lambda tensor: sent.append(tensor.clone()))
    pooled = one.numbers(
        lambda tensor: tensor.add_(sent.pop(0)), lambda tensor: torch.maximum(tensor, sent.pop(0), out=tensor)
    )
    both = observe(model, {"input_ids": ids(rows=2)}).numbers()
    for name in ("attn_res_entropy", "kda_decay", "kda_state_norm", "situ_saturation"):
        torch.testing.assert_close(pooled[name], both[name], rtol=1e-5, atol=0)
    largest = torch.maximum(one.numbers()["mla_max_logit"], other.numbers()["mla_max_logit"])
    assert torch.equal(pooled["mla_max_logit"], largest)


def test_a_long_batch_is_sampled(model, monkeypatch):
    module = "modeling_moe_lc.training.observation"
    whole = observe(model, {"input_ids": ids(tokens=70)})
    monkeypatch.setattr(f"{module}.SAMPLE", 8)
    monkeypatch.setattr(f"{module}.SCORES", 140)
    seen = observe(model, {"input_ids": ids(tokens=70)})
    assert whole.sums["attn_res_entropy"][:, 1].tolist() == [70] * 11
    assert seen.sums["attn_res_entropy"][:, 1].tolist() == [8] * 11
    # Of the last two queries only: no more than the maximum over all of them.
    assert (seen.maxima["mla_max_logit"] < whole.maxima["mla_max_logit"]).all()
