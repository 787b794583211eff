"""Training: checkpointing, chunked loss and micro-batches change nothing; starting values are as published."""

import weakref

import pytest
import torch

from modeling_moe_lc import MoeLcForCausalLM, update_router_bias
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.loss import chunked_causal_lm_loss


def gradients(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit(tiny, ids, reentrant):
    model = tiny().train()
    inputs = {"input_ids": ids(2, 20), "labels": ids(2, 20), "use_cache": True}
    loss, expected = gradients(model, **inputs)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again, grads = gradients(model, **inputs)
    assert torch.equal(loss, again)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, expected[name]), name


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("items", [None, 17])
def test_loss_in_chunks_equals_the_loss(tiny, ids, chunk, items):
    model = tiny().train()
    labels = ids(2, 20).masked_fill(torch.rand(2, 20) < 0.3, -100)
    inputs = {"input_ids": ids(2, 20), "labels": labels, "num_items_in_batch": items}
    loss, expected = gradients(model, **inputs)
    model.config.loss_chunk_size = chunk
    assert model(**inputs).logits is None
    chunked, grads = gradients(model, **inputs)
    assert abs(chunked - loss) < 1e-5
    for name, grad in grads.items():
        assert (grad - expected[name]).norm() <= 1e-5 * expected[name].norm() + 1e-8, name
    assert model.eval()(**inputs).logits.shape == (2, 20, 512)


@pytest.mark.parametrize("trained", [True, False])
def test_the_logits_of_one_chunk_at_a_time_are_there(trained):
    class Head(torch.nn.Linear):
        def forward(self, hidden):
            assert not any(logits() is not None for logits in self.given)
            logits = super().forward(hidden)
            self.given.append(weakref.ref(logits))
            return logits

    head = Head(8, 32, bias=False).requires_grad_(trained)
    head.given = []
    hidden = torch.randn(2, 20, 8, requires_grad=True)
    labels = torch.randint(32, (2, 20))
    loss = chunked_causal_lm_loss(hidden, head, labels, 7)
    loss.backward()
    assert len(head.given) == 6
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert torch.equal(chunked_causal_lm_loss(hidden, head, labels, 7), loss)


def test_train_and_eval_agree_and_every_parameter_learns(tiny, ids):
    model = tiny()
    logits = model(ids(2, 40)).logits
    assert torch.allclose(model.train()(ids(2, 40)).logits, logits, atol=1e-6)
    _, grads = gradients(model, input_ids=ids(4, 60), labels=ids(4, 60))
    silent = {name for name, _ in model.named_parameters() if not grads[name].any()}
    first = "model.layers.0.self_attention_res"  # mixes one source: nothing to learn, but a gradient for DDP
    assert silent == {f"{first}.query", f"{first}.key_norm"}


@pytest.mark.parametrize("preset", ["tiny", "nano-kimi-linear"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_starting_values_are_as_published_and_finite(preset, dtype):
    for seed in range(5):
        torch.manual_seed(seed)
        model = MoeLcForCausalLM._from_config(load_preset(preset), dtype=dtype)
        assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
        for name, p in model.named_parameters():
            if name.endswith("query"):
                assert not p.any()
            if name.endswith("A_log"):
                rate = p.exp()
                assert p.dtype == torch.float32
                assert not p.any() if preset == "tiny" else ((rate >= 1) & (rate <= 16)).all()
            if name.endswith("dt_bias"):
                dt = torch.nn.functional.softplus(p)
                assert p.dtype == torch.float32 and dt.min() >= 0.99e-3 and dt.max() <= 0.101


def test_starting_values_do_not_depend_on_the_dtype(tiny):
    models = []
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        models.append(MoeLcForCausalLM._from_config(load_preset("nano-kimi-linear"), dtype=dtype))
    for a, b in zip(models[0].model.layers, models[1].model.layers, strict=True):
        if hasattr(a.self_attn, "decay"):
            spread = [(x.self_attn.decay.A_log.exp().mean() - 8.5).abs() for x in (a, b)]
            assert max(spread) < 8


def statistics(model):
    return [layer.block_sparse_moe.gate.statistics().clone() for layer in model.model.layers[1:]]


@pytest.mark.parametrize("method", ["quantile", "load_quantile", "sign"])
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
def test_update_does_not_depend_on_micro_batches_or_checkpointing(tiny, ids, method, checkpointing):
    model = tiny(router_balance={"method": method, "eta": 0.01}).train()
    tokens = ids(8, 16)
    model(tokens, labels=tokens).loss.backward()
    expected_statistics = statistics(model)
    update_router_bias(model)
    expected = [layer.block_sparse_moe.gate.e_score_correction_bias.clone() for layer in model.model.layers[1:]]

    model = tiny(router_balance={"method": method, "eta": 0.01}).train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    for piece in tokens.split(1):
        model(piece, labels=piece).loss.backward()
    for ours, theirs in zip(statistics(model), expected_statistics, strict=True):
        assert torch.equal(ours, theirs)
    update_router_bias(model)
    for layer, bias in zip(model.model.layers[1:], expected, strict=True):
        gate = layer.block_sparse_moe.gate
        assert torch.equal(gate.e_score_correction_bias, bias)
        assert not gate.statistics().any()


def test_padding_and_evaluation_are_not_counted(tiny, ids):
    model, tokens = tiny().train(), ids(2, 12)
    mask = torch.ones_like(tokens)
    mask[0, 7:] = 0
    model.eval()(tokens)
    assert not any(s.any() for s in statistics(model))
    model.train()(tokens, attention_mask=mask)
    for layer, s in zip(model.model.layers[1:], statistics(model), strict=True):
        assert s.sum() == 19 * 8  # every expert's histogram holds every real token
        assert layer.block_sparse_moe.gate.counts.sum() == 19 * 2


def test_all_reduce_is_called_once_and_sums(tiny, ids):
    one, two = tiny().train(), tiny().train()
    first, second = ids(4, 16), ids(4, 16, seed=1)
    one(torch.cat([first, second]))
    two(first)
    mine = tiny().train()
    mine(second)
    calls = []

    def all_reduce(tensor):
        calls.append(tensor.dtype)
        theirs = torch.cat([*(s.flatten() for s in statistics(two)), two.model.documents_seen])
        tensor.add_(theirs)

    update_router_bias(one)
    update_router_bias(mine, all_reduce)
    assert calls == [torch.int64]
    for a, b in zip(one.model.layers[1:], mine.model.layers[1:], strict=True):
        assert torch.equal(
            a.block_sparse_moe.gate.e_score_correction_bias, b.block_sparse_moe.gate.e_score_correction_bias
        )


def test_bias_gets_no_gradient_and_balances(tiny, ids):
    model = tiny(num_experts=16, num_experts_per_token=4).train()
    gate = model.model.layers[-1].block_sparse_moe.gate
    tokens = ids(16, 64)
    loads = []
    for _ in range(4):
        model(tokens, labels=tokens).loss.backward()
        loads.append((gate.counts.max() / gate.counts.float().mean() - 1).item())
        update_router_bias(model)
    assert loads[-1] < 0.5 * loads[0]
    assert not gate.e_score_correction_bias.requires_grad
    assert abs(gate.e_score_correction_bias.mean()) < 1e-6


@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)], ids=str)
def test_a_batch_without_labels_has_no_loss_and_no_gradients(items):
    hidden, head = torch.randn(1, 5, 8, requires_grad=True), torch.nn.Linear(8, 16, bias=False)
    labels = torch.full((1, 5), -100)
    loss = chunked_causal_lm_loss(hidden, head, labels, 2, num_items_in_batch=items)
    loss.backward()
    assert not loss and not hidden.grad.any() and not head.weight.grad.any()
