"""Evaluation adds up: packed = alone, one pass = slices, bits per byte are those of the whole text."""

import lzma
import math

import pytest
import torch
from torch.nn import functional as F

from modeling_moe_lc import MoeLcForCausalLM
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.kernels.router import route
from modeling_moe_lc.training.balance import routers, without_bias
from modeling_moe_lc.training.evaluate import (
    evaluate,
    loss_by_position,
    losses_in_one_document,
    losses_in_windows,
    xz_bits_per_byte,
)
from modeling_moe_lc.training.packing import collate, pack


TOLERANCE = 2e-5  # float32, measured 3e-6


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = MoeLcForCausalLM(load_preset("tiny", initializer_range=0.2))
    for router in routers(model):
        router.e_score_correction_bias.uniform_(-0.2, 0.2)
    return model


@pytest.fixture(scope="module")
def documents(model):
    sizes = (1, 2, 65, 130, 31, 7)
    return [torch.randint(3, model.config.vocab_size, (size,)).tolist() for size in sizes]


def nats(model, document):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([document]), use_cache=False).logits[0]
    return F.cross_entropy(logits[:-1], torch.tensor(document[1:]), reduction="none")


def test_packed_documents_cost_what_they_cost_alone_and_every_token_is_routed(model, documents):
    model.train()
    found = evaluate(model, pack(documents, 160), 200)
    assert model.training
    alone = sum(nats(model.eval(), document).sum().item() for document in documents if len(document) > 1)
    assert found.nats == pytest.approx(alone, rel=TOLERANCE)
    assert found.tokens == sum(map(len, documents))
    assert found.predictions == found.tokens - len(documents)
    assert found.bits_per_byte(1000) == pytest.approx(found.nats / math.log(2) / 1000)
    routed = found.tokens * model.config.num_experts_per_token
    assert found.counts.sum(-1).tolist() == [routed] * len(routers(model))
    assert not any(router.counts.any() for router in routers(model))


def test_counts_are_the_routers_own_choice_with_and_without_bias(model, documents):
    packs = pack(documents, 512)
    inputs = collate(packs)
    inputs.pop("labels")

    def expected():
        with torch.no_grad():
            logits = model.eval()(**inputs, output_router_logits=True, use_cache=False).router_logits
        biases = [router.e_score_correction_bias for router in routers(model)]
        top_k = model.config.num_experts_per_token
        return torch.stack([route(one, bias, top_k)[2] for one, bias in zip(logits, biases, strict=True)])

    biased = evaluate(model, packs, 512).counts
    assert torch.equal(biased, expected())
    kept = [router.e_score_correction_bias.clone() for router in routers(model)]
    with without_bias(model):
        unbiased = evaluate(model, packs, 512).counts
        assert torch.equal(unbiased, expected())
    assert not torch.equal(biased, unbiased)
    assert all(map(torch.equal, kept, [router.e_score_correction_bias for router in routers(model)]))


@pytest.mark.parametrize("length", (1, 50, 129, 130, 500))
def test_slices_through_the_cache_are_one_document(model, documents, length):
    document = documents[3]
    whole = nats(model.eval(), document)
    torch.testing.assert_close(losses_in_one_document(model, document, length), whole, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("length", [50, 33, 64, 200])
def test_in_windows_a_token_stands_in_the_second_half_of_a_document(model, documents, length):
    document = documents[3]
    losses = losses_in_windows(model, document, length)
    assert losses.shape == (129,)
    step = length // 2
    for position in (1, length - 1, length, length + step - 1, length + step, 129):
        if position < 130:
            start = 0 if position < length else step * ((position - length) // step + 1)
            assert position < length or length // 2 <= position - start < length
            alone = nats(model, document[start : start + length])[position - start - 1]
            torch.testing.assert_close(losses[position - 1], alone, rtol=TOLERANCE, atol=TOLERANCE)


def test_loss_by_position_covers_every_position_once_and_differs_beyond_a_window_only(model):
    texts = [torch.randint(3, model.config.vocab_size, (256,)).tolist() for _ in range(3)]
    found = loss_by_position(model, texts, 64)
    assert found["borders"] == [0, 4, 8, 16, 32, 64, 128, 256] and found["texts"] == 3
    sizes = [3, 4, 8, 16, 32, 64, 128]  # nothing predicts position 0
    for name, expected in (
        ("one_document", [nats(model, text) for text in texts]),
        ("windows", [losses_in_windows(model, text, 64) for text in texts]),
    ):
        total = sum(size * loss for size, loss in zip(sizes, found[name], strict=True))
        assert total == pytest.approx(torch.stack(expected).mean(0).sum().item(), rel=TOLERANCE)
    assert found["one_document"][:5] == pytest.approx(found["windows"][:5], rel=TOLERANCE)
    assert found["one_document"][5:] != pytest.approx(found["windows"][5:], rel=1e-4)


def test_xz_pays_for_each_text_on_its_own():
    texts = [b"import os\n" * 50, bytes(range(256))]
    sizes = [8 * len(lzma.compress(text, preset=9)) for text in texts]
    assert xz_bits_per_byte(texts) == pytest.approx(sum(sizes) / (500 + 256))
