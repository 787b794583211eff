"""Whatever way a text is generated, the cache changes nothing but the time."""

import pytest
import torch
from transformers import DynamicCache

from modeling_moe_lc import MoeLcForCausalLM, gated_mla
from modeling_moe_lc.gated_mla import GatedMLA


LIMIT = 1e-9  # FP64, relative; measured: at most 1e-12
NEW = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 2}


@pytest.fixture(params=["k3", "kimi-linear"])
def model(request, tiny, kimi_linear):
    return (tiny() if request.param == "k3" else kimi_linear).double()


def relative(x, reference):
    return ((x - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 66])
def test_short_prompts_token_by_token(model, ids, length):
    with torch.no_grad():
        tokens = ids(2, length + 6)
        whole = model(tokens).logits
        out = model(tokens[:, :length], use_cache=True)
        pieces = [out.logits]
        for t in range(length, length + 6):
            out = model(tokens[:, t : t + 1], past_key_values=out.past_key_values)
            pieces.append(out.logits)
    assert relative(torch.cat(pieces, dim=1), whole) < LIMIT


@pytest.mark.parametrize("filled", [1, 2, 63, 64, 65])
@pytest.mark.parametrize("more", [2, 3, 17, 70])
def test_filled_cache_goes_on_with_many_tokens(model, ids, filled, more):
    with torch.no_grad():
        tokens = ids(2, filled + more)
        cache = model(tokens[:, :filled], use_cache=True).past_key_values
        logits = model(tokens[:, filled:], past_key_values=cache).logits
        assert relative(logits, model(tokens).logits[:, filled:]) < LIMIT


def test_many_tokens_behind_others_need_no_mask_where_kernels_know_the_place(model, ids, monkeypatch):
    """As on a GPU: the first 33 tokens with a mask of their own, the rest without any; a padded row keeps its mask."""
    monkeypatch.setattr(GatedMLA, "is_flash", lambda self, q: True)
    calls, real = [], gated_mla.lower_right_attention
    monkeypatch.setattr(gated_mla, "lower_right_attention", lambda *args: calls.append(args) or real(*args))
    with torch.no_grad():
        tokens = ids(2, 70)
        cache = model(tokens[:, :33], use_cache=True).past_key_values
        assert not calls
        logits = model(tokens[:, 33:], past_key_values=cache).logits
        assert len(calls) == model.config.layer_types.count("full_attention")
        assert relative(logits, model(tokens).logits[:, 33:]) < LIMIT

        calls.clear()
        mask = torch.ones_like(tokens)
        mask[1, :5] = 0
        cache = model(tokens[:, :33], attention_mask=mask[:, :33], use_cache=True).past_key_values
        logits = model(tokens[:, 33:], attention_mask=mask, past_key_values=cache).logits
        assert not calls and relative(logits[1], model(tokens[1:, 5:]).logits[0, 28:]) < LIMIT


@pytest.mark.parametrize("padding", [0, 5])
def test_chunks_go_into_a_static_cache_without_a_mask_where_kernels_know_the_place(model, ids, monkeypatch, padding):
    """As on a GPU, where a padded row keeps the mask of `generate`."""
    prompt = ids(2, 90)
    mask = torch.ones_like(prompt)
    mask[0, :padding] = 0
    expected = model.generate(prompt, attention_mask=mask, do_sample=False, **NEW)
    monkeypatch.setattr(GatedMLA, "is_flash", lambda self, q: True)
    calls, real = [], gated_mla.lower_right_attention
    monkeypatch.setattr(
        gated_mla, "lower_right_attention", lambda *args: calls.append(args[1].shape[2]) or real(*args)
    )
    settings = {"cache_implementation": "static", "prefill_chunk_size": 32, "do_sample": False, **NEW}
    assert torch.equal(model.generate(prompt, attention_mask=mask, **settings), expected)
    layers = model.config.layer_types.count("full_attention")
    assert calls == ([] if padding else [64] * layers + [90] * layers)


def test_states_after_two_calls_equal_those_after_one(model, ids):
    with torch.no_grad():
        tokens, caches = ids(2, 70), []
        for first in (70, 33):
            cache = DynamicCache(config=model.config)
            for piece in (tokens[:, :first], tokens[:, first:]):
                if piece.shape[1]:
                    model(piece, past_key_values=cache)
            caches.append(cache)
    for one, two, kind in zip(caches[0].layers, caches[1].layers, model.config.layer_types, strict=True):
        if kind == "linear_attention":
            assert relative(two.recurrent_states[0], one.recurrent_states[0]) < LIMIT
            assert relative(two.conv_states[0], one.conv_states[0]) < LIMIT
        else:
            assert one.keys.shape[-1] == model.config.kv_lora_rank and one.keys.shape[1] == 1
            assert relative(two.keys, one.keys) < LIMIT


@pytest.mark.parametrize("padding", [0, 1, 4, 66])
@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": False},
        {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
        {"num_beams": 3, "num_return_sequences": 3, "do_sample": False},
        {"num_beams": 2, "do_sample": True},
    ],
    ids=["greedy", "sampling", "beams", "beam sampling"],
)
def test_generate_equals_generate_without_cache(model, ids, how, padding):
    prompt = ids(2, 5 + padding)
    mask = torch.ones_like(prompt)
    mask[0, :padding] = 0
    results = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        out = model.generate(
            prompt, attention_mask=mask, use_cache=use_cache, return_dict_in_generate=True, output_scores=True, **NEW, **how
        )  # fmt: skip
        results.append(out)
    assert torch.equal(results[0].sequences, results[1].sequences)
    if "num_beams" in how:
        assert torch.allclose(results[0].sequences_scores, results[1].sequences_scores, atol=1e-4)


@pytest.mark.parametrize("padding", [(6, 2, 0), (7, 4, 3)], ids=["longest row full", "every row padded"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_prefill_in_chunks_equals_one_prefill(tiny, kimi_linear, ids, chunk, padding):
    prompt = ids(3, 11)
    mask = (torch.arange(11) >= torch.tensor(padding)[:, None]).long()
    for model in (tiny(), kimi_linear):
        kwargs = {"attention_mask": mask, "do_sample": False, **NEW}
        expected = model.generate(prompt, **kwargs)
        assert torch.equal(model.generate(prompt, prefill_chunk_size=chunk, **kwargs), expected)


def test_reordering_moves_every_kind_of_state(model, ids):
    with torch.no_grad():
        tokens = ids(3, 9)
        cache = model(tokens, use_cache=True).past_key_values
        order = torch.tensor([2, 0, 1])
        cache.reorder_cache(order)
        following = ids(3, 1)
        logits = model(following, past_key_values=cache).logits
        expected = model(torch.cat([tokens[order], following], dim=1)).logits[:, -1:]
    assert relative(logits, expected) < LIMIT


def test_static_cache_generates_the_same(model, ids):
    prompt = ids(2, 7)
    dynamic = model.generate(prompt, do_sample=False, **NEW)
    static = model.generate(prompt, do_sample=False, cache_implementation="static", disable_compile=True, **NEW)
    assert torch.equal(dynamic, static)


def test_length_of_the_cache_is_not_read_from_layer_0(model, ids):
    cache = model(ids(1, 7), use_cache=True).past_key_values
    assert cache.get_seq_length() == 7


def test_embeddings_instead_of_ids(model, ids):
    prompt = ids(2, 7)
    embeds = model.get_input_embeddings()(prompt)
    assert torch.equal(
        model.generate(inputs_embeds=embeds, do_sample=False, **NEW), model.generate(prompt, do_sample=False, **NEW)[:, 7:]
    )  # fmt: skip


def test_second_turn_with_padding_inside_equals_the_rows_alone(model, ids):
    first, second = ids(2, 6), ids(2, 5, seed=1)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :2] = 0
    mask[0, 6:9] = 0  # the shorter second turn is padded on its left
    with torch.no_grad():
        cache = model(first, attention_mask=mask[:, :6], use_cache=True).past_key_values
        logits = model(second, attention_mask=mask, past_key_values=cache).logits
        alone = model(torch.cat([first[:1, 2:], second[:1, 3:]], dim=1)).logits[:, 4:]
    assert relative(logits[:1, 3:], alone) < LIMIT


def test_packed_batch_with_a_cache_is_refused(model, ids):
    borders = torch.tensor([0, 3, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="packed"):
        model(ids(1, 8), cu_seq_lens_q=borders, use_cache=True)
    assert model(ids(1, 8), cu_seq_lens_q=borders).past_key_values is None


def test_right_padded_prefill_with_a_cache_is_refused(model, ids):
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0
    with pytest.raises(ValueError, match="right"):
        model(ids(2, 8), attention_mask=mask, use_cache=True)
    assert model(ids(2, 8), attention_mask=mask).past_key_values is None


def test_speculative_and_continuous_batching_are_refused_by_transformers(model, ids):
    with pytest.raises(ValueError):
        model.generate(ids(1, 5), assistant_model=model, **NEW)


def test_error_of_long_decoding_does_not_grow_with_position(tiny, ids):
    model, tokens, errors = tiny(), ids(1, 1024), []
    with torch.no_grad():
        whole = model(tokens).logits
        cache = DynamicCache(config=model.config)
        for t in range(1024):
            logits = model(tokens[:, t : t + 1], past_key_values=cache).logits
            errors.append(relative(logits, whole[:, t : t + 1]))
    assert sorted(errors[512:])[256] < 3 * sorted(errors[:512])[256] + 1e-6  # FP32; measured: 2e-6 in both halves


def test_state_of_a_bf16_model_is_fp32(tiny, ids):
    model = tiny().to(torch.bfloat16)
    cache = model(ids(1, 7), use_cache=True).past_key_values
    assert cache.layers[0].recurrent_states[0].dtype == torch.float32
    address = cache.layers[0].recurrent_states[0].data_ptr()
    with torch.no_grad():
        model(ids(1, 1), past_key_values=cache)
    assert cache.layers[0].recurrent_states[0].data_ptr() == address


def test_chosen_positions_get_logits(model, ids):
    tokens = ids(2, 9)
    whole = model(tokens).logits
    assert relative(model(tokens, logits_to_keep=2).logits, whole[:, -2:]) < LIMIT
    assert relative(model(tokens, logits_to_keep=torch.tensor([1, 4])).logits, whole[:, [1, 4]]) < LIMIT
    marked = torch.zeros(2, 9, dtype=torch.bool).index_fill_(1, torch.tensor([3]), True)
    assert relative(model(tokens, logits_to_keep=marked).logits, whole[:, 3]) < LIMIT


def test_model_made_anew_from_its_class(tmp_path, model, ids):
    model.save_pretrained(tmp_path)
    again = MoeLcForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids(2, 5)).logits, model(ids(2, 5)).logits)
