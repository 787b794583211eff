"""Pictures in a prompt: whatever stands beside them, before them or behind them, they say the same."""

import inspect
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.generation import GenerationMixin

from modeling_moe_lc import MoeLcForCausalLM, MoeLcForConditionalGeneration, freeze_vision, update_router_bias


FIXTURE = Path(__file__).parents[1] / "fixtures" / "k3-vision-tiny"
PARITY = 1e-4  # FP32, norm of the difference over norm; measured: at most 5e-6
LIMIT = 1e-9  # FP64
PICTURE = 505
NEW = {"max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 2}


def relative(x, reference):
    return ((x - reference).norm() / reference.norm()).item()


class Released:
    def __init__(self):
        self.model = MoeLcForConditionalGeneration.from_pretrained(FIXTURE, dtype=torch.float32).eval()
        self.inputs = load_file(FIXTURE / "inputs.safetensors")
        self.expected = load_file(FIXTURE / "expected.safetensors")
        grids = self.inputs["grid_thws"]
        self.items = list(zip(self.inputs["pixel_values"].split(grids.prod(-1).tolist()), grids, strict=True))

    def prompt(self, tag):
        pixels, grids = zip(*(self.items[i] for i in self.inputs[f"media_items.{tag}"]), strict=True)
        return {
            "input_ids": self.inputs[f"input_ids.{tag}"],
            "pixel_values": torch.cat(pixels),
            "grid_thws": torch.stack(grids),
        }


@pytest.fixture(scope="module")
def released():
    return Released()


@pytest.fixture(params=["all", "one", "two"])
def tag(request):
    return request.param


@pytest.mark.parametrize("attention", ["sdpa", "eager", "moe_lc_reference"])
@torch.no_grad()
def test_logits_of_a_released_checkpoint(released, tag, attention):
    released.model.set_attn_implementation(attention)
    logits = released.model(**released.prompt(tag)).logits
    assert relative(logits, released.expected[f"logits.{tag}"]) < PARITY
    assert torch.equal(logits.argmax(-1), released.expected[f"logits.{tag}"].argmax(-1))


@torch.no_grad()
def test_logits_equal_a_run_of_the_parts_by_hand(released, tag):
    model, prompt = released.model, released.prompt(tag)
    tower = model.model.vision_tower(prompt["pixel_values"], prompt["grid_thws"])
    features = model.model.mm_projector(tower.pooler_output)
    embeds = model.get_input_embeddings()(prompt["input_ids"]).clone()
    embeds[prompt["input_ids"] == PICTURE] = features
    text = MoeLcForCausalLM.from_pretrained(FIXTURE, dtype=torch.float32).eval()
    assert relative(model(**prompt).logits, text(inputs_embeds=embeds).logits) < 1e-6


class Rows:
    """Three prompts: with two pictures, with none, with a clip."""

    shapes = [[(1, 2, 4), (1, 4, 2)], [], [(2, 2, 2)]]
    layouts = [[5, 2, 1, 2, 3], [7], [1, 1, 4]]  # tokens of text and of pictures in turn

    def __init__(self, pictures):
        generator = torch.Generator().manual_seed(1)
        self.media = [pictures(*shapes, seed=i) if shapes else {} for i, shapes in enumerate(self.shapes)]
        self.ids = []
        for layout in self.layouts:
            parts = [
                torch.full((n,), PICTURE) if i % 2 else torch.randint(3, 500, (n,), generator=generator)
                for i, n in enumerate(layout)
            ]
            self.ids.append(torch.cat(parts)[None])

    def alone(self, i):
        return {"input_ids": self.ids[i], **self.media[i]}

    def media_of(self, *rows):
        media = [self.media[i] for i in rows if self.media[i]]
        return {key: torch.cat([m[key] for m in media]) for key in ("pixel_values", "grid_thws")} if media else {}

    def padded(self, *rows, left=True):
        width = max(self.ids[i].shape[1] for i in rows) + 1
        sides = [(width - self.ids[i].shape[1], 0) if left else (0, width - self.ids[i].shape[1]) for i in rows]
        pad = torch.nn.functional.pad
        ids = torch.cat([pad(self.ids[i], side, value=2) for i, side in zip(rows, sides, strict=True)])
        mask = torch.cat([pad(torch.ones_like(self.ids[i]), side) for i, side in zip(rows, sides, strict=True)])
        return {"input_ids": ids, "attention_mask": mask, **self.media_of(*rows)}


@pytest.fixture
def rows(pictures):
    return Rows(pictures)


@pytest.fixture
def two_layers(tiny_multimodal):
    """Dense KDA and sparse MLA behind a tower of two blocks."""
    linear = {"num_heads": 4, "head_dim": 16, "use_full_rank_gate": True, "gate_lower_bound": -5.0}
    return tiny_multimodal(num_hidden_layers=2, linear_attn_config=linear)


@pytest.fixture
def model(two_layers):
    return two_layers.double()


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@torch.no_grad()
def test_padded_rows_equal_each_alone(model, rows, left):
    logits = model(**rows.padded(0, 1, 2, left=left)).logits
    for i in range(3):
        alone = model(**rows.alone(i)).logits
        ours = logits[i : i + 1, -alone.shape[1] :] if left else logits[i : i + 1, : alone.shape[1]]
        assert relative(ours, alone) < LIMIT


def test_packed_documents_equal_separate_ones_in_logits_and_gradients(model, rows):
    ids = torch.cat(rows.ids, dim=1)
    lengths = [x.shape[1] for x in rows.ids]
    probe = torch.randn(1, sum(lengths), 512, dtype=torch.float64)
    told = {
        "cu_seq_lens_q": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
    }
    separate = [model(**rows.alone(i)).logits for i in range(3)]
    sum((x * p).sum() for x, p in zip(separate, probe.split(lengths, dim=1), strict=True)).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for name, how in told.items():
        model.zero_grad()
        packed = model(ids, **rows.media_of(0, 1, 2), **{name: how}).logits
        (packed * probe).sum().backward()
        assert relative(packed, torch.cat(separate, dim=1)) < LIMIT
        for parameter, gradient in expected.items():
            if gradient.norm() > 0:
                assert relative(model.get_parameter(parameter).grad, gradient) < 1e-8, parameter


@torch.no_grad()
def test_text_alone_is_the_text_model(model, ids, tmp_path):
    model.save_pretrained(tmp_path)
    text = MoeLcForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    tokens = ids(2, 9)
    tokens[tokens == PICTURE] = 3
    assert relative(model(tokens).logits, text(tokens).logits) < LIMIT
    assert torch.equal(model.generate(tokens, do_sample=False, **NEW), text.generate(tokens, do_sample=False, **NEW))


HOW = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
    "beams": {"num_beams": 2, "num_return_sequences": 2, "do_sample": False},
    "static": {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
}


def generated(model, inputs, how, **kwargs):
    torch.manual_seed(3)
    return model.generate(**inputs, **NEW, **HOW[how], **kwargs)


@pytest.mark.parametrize("how", ["sampling", "beams"])
def test_generation_with_a_cache_equals_generation_without(model, rows, how):
    inputs = rows.padded(0, 1, 2)
    assert torch.equal(generated(model, inputs, how), generated(model, inputs, how, use_cache=False))


@pytest.mark.parametrize("how", ["beams", "static"])
def test_generation_of_a_batch_equals_each_row_alone(model, rows, how):
    together = generated(model, rows.padded(0, 1, 2), how).unflatten(0, (3, -1))[..., -4:]
    for i in range(3):
        alone = generated(model, rows.alone(i), "greedy" if how == "static" else how)
        assert torch.equal(together[i], alone[:, rows.ids[i].shape[1] :])


def test_pixels_are_read_in_the_prefill_only(model, rows, monkeypatch):
    calls = []
    tower = model.model.vision_tower.forward
    monkeypatch.setattr(model.model.vision_tower, "forward", lambda *a, **k: calls.append(1) or tower(*a, **k))
    generated(model, rows.padded(0, 2), "greedy")
    assert len(calls) == 1


def test_media_of_a_row_are_repeated_as_a_group(model, rows):
    inputs = rows.padded(0, 1, 2)
    _, repeated = model._expand_inputs_for_generation(expand_size=2, **inputs)
    first, clip = rows.media[0]["grid_thws"], rows.media[2]["grid_thws"]
    assert torch.equal(repeated["grid_thws"], torch.cat([first, first, clip, clip]))
    pixels = [rows.media[i]["pixel_values"] for i in (0, 0, 2, 2)]
    assert torch.equal(repeated["pixel_values"], torch.cat(pixels))


@pytest.mark.skipif(
    "mm_encoder_outputs" not in inspect.getsource(GenerationMixin.generate),
    reason="pixels are not encoded before the prefill",
)
@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_prefill_in_chunks_equals_one_prefill(model, rows, chunk):
    inputs = rows.padded(0, 1, 2)
    assert torch.equal(
        generated(model, inputs, "greedy", prefill_chunk_size=chunk), generated(model, inputs, "greedy")
    )


@torch.no_grad()
def test_a_later_turn_brings_its_own_picture(model, rows):
    first, second = rows.alone(0), rows.alone(2)
    cache = model(**first, use_cache=True).past_key_values
    logits = model(**second, past_key_values=cache).logits
    whole = {"input_ids": torch.cat([first["input_ids"], second["input_ids"]], dim=1), **rows.media_of(0, 2)}
    assert relative(logits, model(**whole).logits[:, -second["input_ids"].shape[1] :]) < LIMIT


@torch.no_grad()
def test_embeddings_and_ready_features_say_the_same(model, rows):
    inputs = rows.padded(0, 1, 2)
    logits = model(**inputs).logits
    ids = inputs.pop("input_ids")
    embeds = model.get_input_embeddings()(ids)
    assert relative(model(inputs_embeds=embeds, **inputs).logits, logits) < LIMIT
    features = model.get_image_features(inputs.pop("pixel_values"), inputs.pop("grid_thws"))
    assert relative(model(ids, **inputs, mm_encoder_outputs={"image": features}).logits, logits) < LIMIT
    assert isinstance(model.get_image_features(**rows.media_of(0), return_dict=False), tuple)


def test_types_of_tokens_may_come_along(model, rows):
    inputs = rows.alone(0)
    types = (inputs["input_ids"] == PICTURE).long()
    assert torch.equal(
        generated(model, inputs | {"mm_token_type_ids": types}, "greedy"), generated(model, inputs, "greedy")
    )


def test_numbers_that_differ_are_both_told(model, rows, pictures):
    inputs = rows.alone(0)
    with pytest.raises(ValueError, match="4 placeholders and 3 features"):
        model(inputs["input_ids"], **pictures((1, 6, 2)))
    with pytest.raises(ValueError, match="4 placeholders and 3 features"):
        model.generate(inputs["input_ids"], **pictures((1, 6, 2)), num_beams=2, **NEW)
    rows_split = torch.tensor([[PICTURE, PICTURE, PICTURE], [5, 6, PICTURE]])
    with pytest.raises(ValueError, match=r"rows of \[3, 1\] placeholders and items of \[2, 2\] features"):
        model.generate(rows_split, **rows.media[0], num_beams=2, **NEW)
    with pytest.raises(ValueError, match="3 placeholders and 4 features"):
        model(inputs["input_ids"][:, :-4], **rows.media[0])
    with pytest.raises(ValueError, match="4 placeholders and 0 features"):
        model(inputs["input_ids"])


def test_inputs_that_contradict_each_other_are_refused(model, rows):
    inputs = rows.alone(0)
    with pytest.raises(ValueError, match="grid_thws.*only pixel_values"):
        model(inputs["input_ids"], pixel_values=inputs["pixel_values"])
    with pytest.raises(ValueError, match="only grid_thws"):
        model(inputs["input_ids"], grid_thws=inputs["grid_thws"])
    features = model.get_image_features(**rows.media[0])
    with pytest.raises(ValueError, match="mm_encoder_outputs"):
        model(**inputs, mm_encoder_outputs={"image": features})
    with pytest.raises(ValueError, match="exactly one"):
        model(**inputs, inputs_embeds=model.get_input_embeddings()(inputs["input_ids"]))


def gradients(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit(two_layers, rows, reentrant):
    model, inputs = two_layers.train(), rows.padded(0, 1, 2)
    inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    loss, expected = gradients(model, **inputs)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again, grads = gradients(model, **inputs)
    assert torch.equal(loss, again) and grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, expected[name]), name


def test_every_part_learns_and_the_tower_can_be_frozen(two_layers, rows):
    model, inputs = two_layers.train(), rows.padded(0, 1, 2)
    inputs["labels"] = inputs["input_ids"]
    _, grads = gradients(model, **inputs)
    assert {name for name, _ in model.named_parameters()} == set(grads)
    assert all(grad.any() for name, grad in grads.items() if "vision_tower" in name or "mm_projector" in name)
    update_router_bias(model)
    freeze_vision(model)
    _, frozen = gradients(model, **inputs)
    assert {name for name in grads if name not in frozen} == {n for n in grads if n.startswith("model.vision_tower.")}
    assert frozen["model.mm_projector.proj.0.weight"].any()


def test_loss_in_chunks_equals_the_loss(two_layers, rows):
    model, inputs = two_layers.train(), rows.padded(0, 1, 2)
    inputs["labels"] = inputs["input_ids"]
    loss, expected = gradients(model, **inputs)
    model.config.text_config.loss_chunk_size = 7
    assert model(**inputs).logits is None
    chunked, grads = gradients(model, **inputs)
    assert abs(chunked - loss) < 1e-5
    for name, grad in grads.items():
        assert (grad - expected[name]).norm() <= 1e-5 * expected[name].norm() + 1e-8, name


def test_a_bf16_model_keeps_what_must_be_fp32_and_reads_fp32_pixels(two_layers, rows):
    model = two_layers.to(torch.bfloat16)
    assert model.model.language_model.layers[0].self_attn.decay.A_log.dtype == torch.float32
    assert model.model.vision_tower.patch_embed.pos_emb.weight.dtype == torch.bfloat16
    features = torch.cat(model.get_image_features(**rows.media_of(0, 2)).pooler_output)
    exact = torch.cat(model.float().get_image_features(**rows.media_of(0, 2)).pooler_output)
    assert features.dtype == torch.bfloat16 and relative(features.float(), exact) < 0.05


@torch.no_grad()
def test_a_chat_goes_on_with_a_cache_and_another_picture(model, rows):
    first, second = rows.alone(0), rows.alone(2)
    whole = {"input_ids": torch.cat([first["input_ids"], second["input_ids"]], dim=1)}
    cache = model(**first, use_cache=True).past_key_values
    ours = model.generate(**whole, **rows.media_of(2), past_key_values=cache, do_sample=False, **NEW)
    assert torch.equal(ours, generated(model, whole | rows.media_of(0, 2), "greedy"))


@pytest.mark.parametrize("how", ["greedy", "beams"])
def test_generation_from_embeddings(model, rows, how):
    inputs = rows.padded(0, 1, 2)
    expected = generated(model, inputs, how)[:, inputs["input_ids"].shape[1] :]
    embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
    assert torch.equal(generated(model, inputs | {"inputs_embeds": embeds}, how), expected)
