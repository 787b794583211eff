"""What a forward pass does not take, it refuses by the name of the argument, with what it expected and what it got."""

import pytest
import torch
from transformers import DynamicCache, StaticCache


@pytest.fixture(params=["k3", "kimi-linear"])
def model(request, tiny, kimi_linear):
    return tiny() if request.param == "k3" else kimi_linear


def refused(name, expected, got):
    """The message, as a pattern."""
    return pytest.raises(ValueError, match=rf"^{name}: expected .*{expected}.*, got {got}")


@torch.no_grad()
@pytest.mark.parametrize("shape", [(1, 1, 4, 4), (1, 3), (1, 5), (2, 4), (4,), (1, 1, 4)], ids=str)
def test_mask_of_another_shape(model, ids, shape):
    mask = torch.ones(shape, dtype=torch.bool)
    got = r"\[" + ", ".join(str(n) for n in shape) + r"\]"
    with refused("attention_mask", r"\[B, past \+ T\] = \[1, 4\]", got):
        model(ids(1, 4), attention_mask=mask, use_cache=False)
    with refused("attention_mask", r"\[B, past \+ T\] = \[1, 4\]", got):
        model(ids(1, 4), attention_mask=mask, past_key_values=DynamicCache(config=model.config))


@torch.no_grad()
@pytest.mark.parametrize("more", [1, 3])
def test_mask_behind_a_cache_covers_all_that_was_seen(model, ids, more):
    cache = model(ids(2, 5), use_cache=True).past_key_values
    for width in (1, 5, more + 4, more + 6):
        with refused("attention_mask", rf"\[2, {more + 5}\]", rf"\[2, {width}\]"):
            model(ids(2, more), attention_mask=torch.ones(2, width), past_key_values=cache)
    assert cache.get_seq_length() == 5
    model(ids(2, more), attention_mask=torch.ones(2, more + 5), past_key_values=cache)
    assert cache.get_seq_length() == 5 + more


@torch.no_grad()
def test_mask_with_a_static_cache_may_be_longer_but_no_shorter(model, ids):
    """How many tokens it holds stands on the device, and is not waited for."""
    tokens = ids(2, 5)
    for width in (5, 9):
        cache = StaticCache(config=model.config, max_cache_len=9)
        logits = model(tokens, attention_mask=torch.ones(2, width), past_key_values=cache).logits
        assert torch.allclose(logits, model(tokens).logits, atol=1e-4)
    with refused("attention_mask", r"\[2, 5 or more\]", r"\[2, 4\]"):
        model(tokens, attention_mask=torch.ones(2, 4), past_key_values=StaticCache(model.config, max_cache_len=9))


@torch.no_grad()
def test_masks_by_kind_of_layer_are_taken_as_they_are(model, ids):
    tokens = ids(1, 4)
    causal = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    masks = {"full_attention": causal, "linear_attention": None}
    assert torch.allclose(model(tokens, attention_mask=masks).logits, model(tokens).logits, atol=1e-4)


@torch.no_grad()
def test_cache_made_without_the_config(model, ids):
    kinds = rf"DynamicCache\(config=model.config\) of {model.config.num_hidden_layers} layers"
    with refused("past_key_values", kinds, "DynamicCache of 0 layers"):
        model(ids(1, 4), past_key_values=DynamicCache())
    with refused("past_key_values", kinds, "tuple"):
        model(ids(1, 4), past_key_values=())
    with refused("past_key_values", kinds, "DynamicCache of 0 layers"):
        model.generate(ids(1, 4), past_key_values=DynamicCache(), max_new_tokens=2)


@torch.no_grad()
def test_ids_and_embeddings_of_another_rank(model, ids):
    width = model.config.hidden_size
    for tokens, got in ((ids(1, 4)[0], r"\[4\]"), (ids(1, 4)[None], r"\[1, 1, 4\]")):
        with refused("input_ids", r"\[B, T\]", got):
            model(tokens)
    with refused("inputs_embeds", r"\[B, T, D\]", rf"\[4, {width}\]"):
        model(inputs_embeds=torch.randn(4, width))
    assert model(ids(1, 4)[:, :0]).logits.shape == (1, 0, model.config.vocab_size)


@torch.no_grad()
def test_multimodal_models_say_the_same(tiny_multimodal, ids):
    model = tiny_multimodal()
    with refused("input_ids", r"\[B, T\]", r"\[4\]"):
        model(ids(1, 4)[0])
    with refused("attention_mask", r"\[1, 4\]", r"\[1, 1, 4, 4\]"):
        model(ids(1, 4), attention_mask=torch.ones(1, 1, 4, 4))
    with refused("past_key_values", "DynamicCache", "DynamicCache of 0 layers"):
        model(ids(1, 4), past_key_values=DynamicCache())


def test_what_would_roll_a_state_back(model, ids):
    with pytest.raises(ValueError, match=r"generate_batch.*recurrent state"):
        model.generate_batch([[3, 4, 5]], max_new_tokens=2)
    with pytest.raises(ValueError, match="recurrent state"), model.continuous_batching_context_manager():
        pass
    for how in ({"assistant_model": model}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            model.generate(ids(1, 5), max_new_tokens=2, **how)


@torch.no_grad()
def test_mask_for_all_that_a_static_cache_has_room_for(model, ids):
    """As the rows of a batch that are as long as it: nothing stands behind the prompt yet."""
    tokens, mask = ids(2, 5), torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    expected = model(tokens, attention_mask=mask).logits
    for behind in (0, 1):
        cache = StaticCache(config=model.config, max_cache_len=9)
        wide = torch.nn.functional.pad(mask, (0, 4), value=behind)
        logits = model(tokens, attention_mask=wide, past_key_values=cache).logits
        assert torch.allclose(logits[mask.bool()], expected[mask.bool()], atol=1e-4)


@pytest.mark.parametrize("shape", [(6,), (3, 1, 6), (1, 5), (4, 6)], ids=str)
def test_positions_and_documents_of_another_shape(model, ids, shape):
    got = r"\[" + ", ".join(map(str, shape)) + r",?\]"
    for name in ("position_ids", "seq_idx"):
        with refused(name, r"\[B, T\] = \[2, 6\]", got):
            model(ids(2, 6), **{name: torch.zeros(shape, dtype=torch.int64)}, use_cache=False)
