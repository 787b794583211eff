"""A KDA layer, and the model around it, compile without a graph break and compute what they compute eagerly."""

import pytest
import torch
from transformers import CompileConfig, StaticCache

from modeling_moe_lc.quantizer_mxfp4 import pack_experts
from modeling_moe_lc.segments import Segments


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is chosen when Triton is imported")


@pytest.fixture
def model(tiny):
    """One KDA and one MLA layer; the experts' reference sorts tokens by values, so transformers' own stand in for it."""
    torch.compiler.reset()
    layers = {"num_heads": 1, "head_dim": 16, "kda_layers": [1], "full_attn_layers": [2]}
    model = tiny(num_hidden_layers=2, linear_attn_config=layers, num_experts=4)
    model.set_attn_implementation("moe_lc_triton")
    model.set_experts_implementation("grouped_mm")
    return model


@pytest.fixture
def layer(model):
    return model.model.layers[0].self_attn


def compiled(fn, backend, **kwargs):
    return torch.compile(fn, fullgraph=True, backend=backend, **kwargs)


def gradients(module, output):
    module.zero_grad()
    output.square().sum().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("borders", [None, [0, 2, 3]], ids=["row", "documents"])
def test_layer_trains(layer, borders):
    x = torch.randn(1, 3, 64)
    segments = None if borders is None else Segments(torch.tensor(borders, dtype=torch.int32))
    ours = gradients(layer, compiled(layer, "aot_eager")(x, segments=segments)[0])
    torch.testing.assert_close(ours, gradients(layer, layer(x, segments=segments)[0]))


@torch.no_grad()
def test_layer_prefills_and_decodes(model, layer):
    ours, theirs = (StaticCache(config=model.config, max_cache_len=8) for _ in range(2))
    step = compiled(layer, "eager")
    for length in (3, 1, 1):
        x = torch.randn(1, length, 64)
        torch.testing.assert_close(step(x, past_key_values=ours), layer(x, past_key_values=theirs))
    states = [cache.layers[0].recurrent_states[0] for cache in (ours, theirs)]
    torch.testing.assert_close(*states)


@torch.no_grad()
def test_layer_is_exported_for_every_length(layer):
    lengths = {"hidden_states": {1: torch.export.Dim("T", min=2, max=4096)}}
    exported = torch.export.export(layer, (torch.randn(1, 3, 64),), dynamic_shapes=lengths)
    ours = [str(node.target) for node in exported.graph.nodes if str(node.target).startswith("moe_lc")]
    assert ours == ["moe_lc.short_convs.default", "moe_lc.kda.default", "moe_lc.gated_rms_norm.default"]
    x = torch.randn(1, 5, 64)
    torch.testing.assert_close(exported.module()(x)[0], layer(x)[0])


def test_model_trains_with_activation_checkpointing(model, ids):
    model.train()
    router, tokens = model.model.layers[1].block_sparse_moe.gate, ids(1, 4)
    expected = model(tokens, labels=tokens).loss
    expected_gradients = gradients(model, expected)
    counts, histogram = router.counts.clone(), router.histogram.clone()
    model.gradient_checkpointing_enable()
    loss = compiled(model, "aot_eager")(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, expected)
    # The compiled backward pass computes again what the eager one has kept: FP32 sums in another order.
    torch.testing.assert_close(gradients(model, loss), expected_gradients, rtol=1e-4, atol=5e-5)
    assert torch.equal(router.counts, 2 * counts) and torch.equal(router.histogram, 2 * histogram)


def test_model_generates(model, ids):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    kwargs = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(ids(1, 4), **kwargs)
    assert torch.equal(model.generate(ids(1, 4), compile_config=config, **kwargs), expected)
    assert len(graphs) == 1


@torch.no_grad()
def test_packed_experts_are_a_node_of_the_graph(tiny, ids):
    torch.compiler.reset()
    layers = {"num_heads": 1, "head_dim": 16, "kda_layers": [1], "full_attn_layers": [2]}
    widths = {"routed_expert_hidden_size": 32, "moe_intermediate_size": 32}
    model = pack_experts(tiny(num_hidden_layers=2, linear_attn_config=layers, num_experts=4, **widths))
    model.set_attn_implementation("moe_lc_triton")
    nodes = []

    def backend(graph, inputs):
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    tokens = ids(1, 3)
    torch.testing.assert_close(
        compiled(model, backend)(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits
    )
    assert nodes.count("moe_lc.expert_mlp_mxfp4") == 1
