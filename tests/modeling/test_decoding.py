"""`generate` with a cache of fixed size by replayed steps gives the text that it gives without; what cannot be replayed is not."""

import pytest
import torch
from transformers import CompileConfig, DynamicCache, StaticCache
from transformers.modeling_outputs import CausalLMOutput

from modeling_moe_lc import MoeLcForCausalLM, MoeLcForConditionalGeneration, decoding
from modeling_moe_lc.configuration.presets import load_multimodal_preset, load_preset
from modeling_moe_lc.decoding import fixed_size, is_replayable
from modeling_moe_lc.training.random_model import first_layers


IDS = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


class Replayed:
    """In place of a CUDA graph: computes nothing when made, reads its own inputs, and writes its result in place."""

    made: list["Replayed"] = []

    def __init__(self, call, inputs):
        self.call, self.own, self.replays, self.result = call, clone(inputs), 0, None
        self.made.append(self)

    def replay(self, inputs):
        self.replays += 1
        result = self.call(clone(inputs))
        self.result = result if self.result is None else self.result.copy_(result)
        return self.result


def clone(inputs):
    return {
        name: x.clone() if isinstance(x, torch.Tensor) else clone(x) if isinstance(x, dict) else x
        for name, x in inputs.items()
    }


@pytest.fixture
def replayed(monkeypatch):
    """The graphs that were made, on a machine that makes them."""
    monkeypatch.setattr(Replayed, "made", [])
    monkeypatch.setattr(decoding, "Captured", Replayed)
    monkeypatch.setattr(decoding, "watched", lambda call: (call(), False))
    monkeypatch.setattr(decoding, "is_replayable", lambda model: True)

    def criteria(self, kwargs, config):
        return kwargs["past_key_values"].is_compileable and not config.disable_compile

    for kind in (MoeLcForCausalLM, MoeLcForConditionalGeneration):
        monkeypatch.setattr(kind, "_valid_auto_compile_criteria", criteria)
    return Replayed.made


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return MoeLcForCausalLM(load_preset("tiny")).eval()


def generated(model, **options):
    torch.manual_seed(1)
    settings = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static", "pad_token_id": 0}
    return model.generate(IDS, attention_mask=MASK, **settings | options)


@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True, "top_k": 0}, {"eos_token_id": list(range(0, 500, 3))}, {"num_return_sequences": 3, "do_sample": True},
     {"prefill_chunk_size": 2}, {"repetition_penalty": 1.5}],
    ids=["greedy", "sampled", "ends", "several", "chunks", "penalty"],
)  # fmt: skip
def test_text_is_the_same(model, replayed, options):
    expected = generated(model, disable_compile=True, **options)
    assert not replayed
    assert torch.equal(generated(model, **options), expected)
    assert (
        len(replayed) == 1 and replayed[0].replays == expected.shape[1] - IDS.shape[1] - 2 or "eos_token_id" in options
    )


def test_logits_that_are_kept_are_not_written_over(model, replayed):
    found, expected = (
        generated(model, return_dict_in_generate=True, output_logits=True, disable_compile=plain).logits
        for plain in (False, True)
    )
    assert len(replayed) == 1 and torch.equal(torch.stack(found), torch.stack(expected))


def test_a_second_text_has_a_graph_of_its_own(model, replayed):
    first = generated(model)
    with torch.no_grad():
        model.lm_head.weight.neg_()
        other = generated(model)
        model.lm_head.weight.neg_()
    assert not torch.equal(first, other) and torch.equal(generated(model), first) and len(replayed) == 3


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"output_hidden_states": True, "return_dict_in_generate": True}], ids=str
)
def test_what_cannot_be_replayed_is_launched(model, replayed, options):
    found, expected = (generated(model, disable_compile=plain, **options) for plain in (False, True))
    assert not replayed
    if "num_beams" in options:
        assert torch.equal(found, expected)
    else:
        assert torch.equal(found.sequences, expected.sequences) and len(found.hidden_states) == 8


def test_a_cache_in_the_memory_of_the_host_is_not_replayed(model, replayed):
    cache = StaticCache(config=model.config, max_cache_len=20)
    cache.offloading = True  # on a CPU it moves nothing
    step = decoding.DecodingStep(lambda **inputs: CausalLMOutput(logits=torch.zeros(1)))
    for _ in range(4):
        step(input_ids=IDS[:, :1], past_key_values=cache)
    assert not replayed


def test_a_model_that_reads_pictures_decodes_as_well(replayed):
    torch.manual_seed(0)
    model = MoeLcForConditionalGeneration(load_multimodal_preset("tiny")).eval()
    assert torch.equal(generated(model), generated(model, disable_compile=True)) and len(replayed) == 1


@pytest.mark.parametrize("rows", [1, 2])
def test_behind_a_long_prompt_a_cache_of_fixed_size_goes_on(model, replayed, rows):
    torch.manual_seed(2)
    prompt = torch.randint(1, model.config.vocab_size, (rows, 60))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for part in prompt[:, :-1].split(16, dim=1):
            model(part, past_key_values=cache)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **settings)
    fixed = fixed_size(cache, model.config, room=9)
    assert torch.equal(model.generate(prompt, past_key_values=fixed, **settings), expected)
    assert len(replayed) == 1 and cache.get_seq_length() == 59


def test_sequences_behind_one_prompt(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS[1:], past_key_values=cache)
        token = torch.tensor([[3], [3], [3]])
        several = model(token, past_key_values=fixed_size(cache, model.config, 4, batch=3)).logits
        expected = model(token[:1], past_key_values=cache).logits
        assert torch.allclose(several, expected.expand_as(several), atol=1e-5)
    with pytest.raises(ValueError, match="room: expected at least 1 token, got 0"):
        fixed_size(cache, model.config, 0)
    with torch.no_grad():
        two = model(IDS, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="batch: expected a cache of one sequence to repeat, got one of 2"):
        fixed_size(two, model.config, 4, batch=3)


def test_a_compile_config_asks_for_torch_compile(model, monkeypatch):
    monkeypatch.setattr(decoding, "is_replayable", lambda model: True)
    monkeypatch.setattr(torch, "compile", lambda call, **options: options)
    assert model.get_compiled_call(CompileConfig(mode="default"))["mode"] == "default"


def test_steps_that_wait_for_the_device_are_launched(model, replayed, monkeypatch):
    monkeypatch.setattr(decoding, "watched", lambda call: (call(), True))
    assert torch.equal(generated(model), generated(model, disable_compile=True)) and not replayed


def test_a_cache_that_would_overflow_is_refused(model):
    chosen = {"attention_mask": MASK, "do_sample": False, "pad_token_id": 0, "max_new_tokens": 4}
    expected = model.generate(IDS, **chosen)
    enough = StaticCache(config=model.config, max_cache_len=8)
    assert torch.equal(model.generate(IDS, past_key_values=enough, **chosen), expected)
    with pytest.raises(ValueError, match="past_key_values: expected room for 8 tokens, prompt and new ones, got 7"):
        model.generate(IDS, past_key_values=StaticCache(config=model.config, max_cache_len=7), **chosen)


def test_one_token_alone_begins_a_text(model, replayed):
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "prefill_chunk_size": 4}
    expected = model.generate(IDS[1:, :1], **settings)
    assert torch.equal(model.generate(IDS[1:, :1], cache_implementation="static", **settings), expected)


def test_a_cache_is_as_long_as_its_text_asks_for(model):
    generated(model, max_new_tokens=40)
    long = model._previous_max_cache_length
    generated(model)
    assert model._previous_max_cache_length == long - 32


@pytest.mark.parametrize("padding", [0, 3])
def test_without_recurrent_layers(padding, replayed):
    torch.manual_seed(0)
    layers = {"kda_layers": [], "full_attn_layers": [1, 2, 3, 4, 5]}
    settings = load_preset("tiny").linear_attn_config | layers
    model = MoeLcForCausalLM(load_preset("tiny", linear_attn_config=settings)).eval()
    mask = torch.ones_like(IDS)
    mask[0, :padding] = 0
    chosen = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(IDS, **chosen)
    assert torch.equal(model.generate(IDS, cache_implementation="static", **chosen), expected) and len(replayed) == 1


def test_under_autocast_a_static_cache_has_one_dtype(model):
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(generated(model), generated(model, cache_implementation=None))


def test_chunks_where_transformers_would_lose_something(model, monkeypatch):
    monkeypatch.setattr(decoding, "CHUNKS_ARE_WHOLE", False)
    chosen, prompt = {"do_sample": False, "pad_token_id": 511, "max_new_tokens": 4}, IDS[1:]
    cache = DynamicCache(config=model.config)
    longer = torch.cat([model.generate(prompt, past_key_values=cache, **chosen), prompt], dim=1)
    expected = model.generate(longer, **chosen)
    assert torch.equal(model.generate(longer, past_key_values=cache, prefill_chunk_size=2, **chosen), expected)
    with pytest.raises(ValueError, match="prefill_chunk_size: expected None with pictures"):
        model.generate(prompt, prefill_chunk_size=2, pixel_values=torch.zeros(1), **chosen)


def test_which_models_are_replayed(monkeypatch):
    torch.manual_seed(0)
    model = MoeLcForCausalLM(load_preset("tiny")).eval()
    assert not is_replayable(model)  # it is on a CPU
    monkeypatch.setattr(decoding, "_is_on_one_gpu", lambda model: True)
    assert is_replayable(model)
    model(IDS, output_hidden_states=True)  # transformers' own hooks stay
    assert is_replayable(model)
    hook = model.model.layers[1].register_forward_hook(lambda *_: None)
    assert not is_replayable(model)
    hook.remove()
    model.set_attn_implementation("eager")
    assert not is_replayable(model)
    model.set_attn_implementation("sdpa")
    model._device_mesh = object()
    assert not is_replayable(model)
    del model._device_mesh
    assert is_replayable(model)
    model.forward = torch.compile(model.forward, backend="eager")
    assert not is_replayable(model)


@pytest.mark.gpu
def test_on_a_gpu_a_wait_is_seen():
    x = torch.randn(8, device="cuda")
    assert decoding.watched(lambda: x.sum().item()) == (x.sum().item(), True)
    result, waited = decoding.watched(lambda: x @ x)
    assert not waited and result.is_cuda


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 5])
def test_on_a_gpu_replayed_steps_are_those_that_were_launched(batch):
    torch.manual_seed(0)
    model = MoeLcForCausalLM(first_layers("200m-a90m", 4)).to("cuda", torch.bfloat16).eval()
    assert is_replayable(model)
    ids = torch.randint(1, 1000, (batch, 40), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 40, "cache_implementation": "static", "output_logits": True}
    settings |= {"return_dict_in_generate": True, "do_sample": False, "pad_token_id": 0}
    found, expected = (model.generate(ids, disable_compile=plain, **settings) for plain in (False, True))
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))


def test_a_cache_of_fixed_size_begins_with_one_that_was_filled(model):
    with pytest.raises(ValueError, match="cache: expected one that a forward pass has filled"):
        fixed_size(DynamicCache(config=model.config), model.config, room=4)
