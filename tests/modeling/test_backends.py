"""Which implementation runs is chosen by name, openly, before and after loading."""

from collections import Counter

import pytest
import torch
from transformers import DynamicCache, StaticCache

from modeling_moe_lc import KDAInterface, MoeLcForCausalLM
from modeling_moe_lc.backends import operator_impl
from modeling_moe_lc.kernels.kda.reference import kda_recurrent


# Of Triton kernels; logits in FP32, up to 2. Measured against FP64: 1.5e-4, and 5e-5 for the reference.
ERROR = 5e-4
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is chosen when Triton is imported")


@pytest.mark.parametrize(
    ("attention", "impl", "without_kernel"),
    [
        ("moe_lc_reference", "reference", "reference"),
        ("eager", "reference", "reference"),
        ("sdpa", "auto", "auto"),
        pytest.param("moe_lc_triton", "triton", "auto", marks=INTERPRETED),
    ],
)
@torch.no_grad()
def test_operators_follow_the_attention_key(tiny, ids, attention, impl, without_kernel):
    model = tiny()
    expected = model(ids(2, 20)).logits
    model.set_attn_implementation(attention)
    assert operator_impl(model.config, triton=True) == impl
    assert operator_impl(model.config, triton=False) == without_kernel
    assert torch.allclose(model(ids(2, 20)).logits, expected, atol=ERROR if impl == "triton" else 1e-4)


def test_a_third_party_kda_can_be_registered_and_chosen(tiny, ids):
    calls = []

    def recurrent(*args, **kwargs):
        calls.append(kwargs)
        return kda_recurrent(*args, **kwargs)

    KDAInterface.register("recurrent", recurrent)
    model = tiny()
    expected = model(ids(2, 20)).logits
    model.config.kda_implementation = "recurrent"
    assert torch.allclose(model(ids(2, 20)).logits, expected, atol=1e-4)
    assert len(calls) == model.config.layer_types.count("linear_attention")


def test_unknown_kda_names_the_known_ones(tiny, ids):
    model = tiny(kda_implementation="cuda")
    with pytest.raises(ValueError, match="kda_implementation.*reference"):
        model(ids(1, 3))


@pytest.mark.parametrize(
    "chosen", [{"kda_implementation": "triton"}, {"attn_implementation": "moe_lc_triton"}], ids=str
)
def test_triton_never_falls_back(tiny, ids, monkeypatch, chosen):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="'triton' needs a CUDA tensor"):
        tiny(**chosen)(ids(1, 3))


@INTERPRETED
@torch.no_grad()
def test_triton_kda_runs_in_the_model(tiny, ids):
    model = tiny()
    expected = model(ids(2, 20)).logits
    model.config.kda_implementation = "triton"
    assert torch.allclose(model(ids(2, 20)).logits, expected, atol=ERROR)


@INTERPRETED
@torch.no_grad()
def test_kernels_run_in_a_loaded_model(tiny, ids, tmp_path, monkeypatch):
    from modeling_moe_lc.kernels.gated_norm import fused as gated_norm
    from modeling_moe_lc.kernels.kda import fused, fused_step
    from modeling_moe_lc.kernels.short_conv import fused as short_conv

    launched = Counter()

    def watch(module, name):
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: launched.update([name]) or run(*args, **kwargs))

    watch(short_conv, "short_convs_fused")
    watch(fused, "kda_fused")
    watch(fused_step, "kda_step_fused")
    watch(gated_norm, "gated_rms_norm_fused")
    tiny().save_pretrained(tmp_path)
    model = MoeLcForCausalLM.from_pretrained(tmp_path, attn_implementation="moe_lc_triton").eval()
    cache = DynamicCache(config=model.config)
    logits = [model(ids(1, 3), past_key_values=cache).logits, model(ids(1, 1), past_key_values=cache).logits]
    assert launched == {"short_convs_fused": 6, "kda_fused": 3, "kda_step_fused": 3, "gated_rms_norm_fused": 6}
    model.set_attn_implementation("moe_lc_reference")
    expected = model(torch.cat([ids(1, 3), ids(1, 1)], dim=1)).logits
    assert torch.allclose(torch.cat(logits, dim=1), expected, atol=ERROR)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_expert_backends_of_transformers_agree_with_ours(tiny, ids, tmp_path, experts):
    model = tiny()
    model.save_pretrained(tmp_path)
    other = MoeLcForCausalLM.from_pretrained(tmp_path, experts_implementation=experts).eval()
    assert other.config._experts_implementation == experts
    assert torch.allclose(other(ids(2, 20)).logits, model(ids(2, 20)).logits, atol=1e-4)


def test_our_experts_are_the_default(tiny):
    assert tiny().config._experts_implementation == "eager"


@torch.no_grad()
def test_one_decoded_token_is_one_graph(tiny, ids):
    model = tiny()
    model.set_experts_implementation("grouped_mm")
    cache = StaticCache(config=model.config, max_cache_len=32)
    model(ids(2, 8), past_key_values=cache)
    explained = torch._dynamo.explain(lambda token: model(token, past_key_values=cache).logits)(ids(2, 1))
    assert explained.graph_break_count == 0, explained.break_reasons


def test_outputs_that_transformers_records(tiny, ids):
    model = tiny()
    model.set_attn_implementation("eager")
    out = model(ids(2, 7), output_hidden_states=True, output_attentions=True, output_router_logits=True)
    layers = model.config.num_hidden_layers
    assert len(out.hidden_states) == layers + 1 and out.hidden_states[0].shape == (2, 7, 64)
    assert len(out.attentions) == model.config.layer_types.count("full_attention")
    assert out.attentions[0].shape == (2, 4, 7, 7)
    assert len(out.router_logits) == layers - 1 and out.router_logits[0].shape == (14, 8)
