"""Documents with pictures behind one another are what they are apart, and placeholders are not learned."""

import numpy as np
import pytest
import torch
from PIL import Image

from modeling_moe_lc import MoeLcConfig, MoeLcForConditionalGeneration, MoeLcImageProcessor, MoeLcProcessor
from modeling_moe_lc.configuration.presets import load_multimodal_preset
from modeling_moe_lc.training.collate_images import CollateImages, MediaDocument, media_document, pack_media
from modeling_moe_lc.training.packing import IGNORED, Pack, collate


@pytest.fixture
def small(tokenizer):
    return MoeLcProcessor(MoeLcImageProcessor(patch_size=4), tokenizer)


@pytest.fixture(scope="module")
def config() -> MoeLcConfig:
    return load_multimodal_preset("tiny", vocab_size=512)


def features(processor, *pictures, words="What is in the image?", answer="A picture.", **options):
    content = [{"type": "image", "image": picture} for picture in pictures] + [{"type": "text", "text": words}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt", **options)


def picture(seed: int, size=(20, 12)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


@pytest.fixture
def examples(small):
    return [
        features(small, picture(0), picture(1, (9, 30))),
        features(small, words="no picture here"),
        features(small, picture(2, (40, 8)), answer="Long. " * 9),
    ]


def test_the_batch_is_the_documents_behind_one_another(small, examples):
    batch = CollateImages(small.image_token_id)(examples)
    plain = collate([Pack(example.input_ids[0].tolist(), [0, example.input_ids.shape[1]]) for example in examples])
    for name in ("input_ids", "position_ids", "cu_seq_lens_q"):
        assert torch.equal(batch[name], plain[name])
    for name in ("pixel_values", "grid_thws"):
        assert torch.equal(batch[name], torch.cat([example[name] for example in examples if name in example]))
    placeholders = batch["input_ids"] == small.image_token_id
    assert placeholders.sum() == batch["grid_thws"].prod(1).sum() // 4 > 0
    assert torch.equal(batch["labels"], plain["labels"].masked_fill(placeholders, IGNORED))


def test_only_the_answers_are_learned_where_masks_say_so(small):
    one = features(small, picture(0), return_assistant_tokens_mask=True)
    batch = CollateImages(small.image_token_id)([one, one])
    learned = batch["labels"] != IGNORED
    assert torch.equal(learned, torch.cat([one.assistant_masks.bool()] * 2, 1))
    assert torch.equal(batch["labels"][learned], batch["input_ids"][learned])


def test_text_alone_has_no_patches(small):
    batch = CollateImages(small.image_token_id)([features(small)])
    assert set(batch) == {"input_ids", "labels", "position_ids", "cu_seq_lens_q"}


def test_packed_documents_lose_what_they_lose_apart(small, examples, config):
    model = MoeLcForConditionalGeneration(config).double().eval()
    model.config.media_placeholder_token_id = small.image_token_id
    collator = CollateImages(small.image_token_id)

    def nats(documents):
        batch = collator(documents)
        batch |= {name: batch[name].double() for name in ("pixel_values",) if name in batch}
        return model(**batch, use_cache=False).loss * (batch["labels"] != IGNORED).sum()

    with torch.no_grad():
        together, apart = nats(examples), sum(nats([example]) for example in examples)
    torch.testing.assert_close(together, apart, rtol=1e-6, atol=0)


def test_documents_are_packed_whole(small):
    rng = np.random.default_rng(0)
    documents = [MediaDocument(rng.integers(11, 400, size)) for size in rng.integers(1, 100, 50)]
    packs = pack_media(documents, 100)
    assert all(sum(map(len, pack)) <= 100 for pack in packs)
    assert sorted(id(document) for pack in packs for document in pack) == sorted(map(id, documents))
    with pytest.raises(ValueError, match=r"expected 1 to 50 tokens each, got \d+ \(document 0\)"):
        pack_media([MediaDocument(np.arange(60)), *documents], 50)
    assert pack_media([], 10) == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CollateImages(10)([]), "examples: expected at least one document"),
        (lambda: media_document({"input_ids": [[1], [2]]}), "features: expected those of one prompt, got 2"),
    ],
)
def test_bad_input_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
