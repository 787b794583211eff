"""The chat template: what it writes, and that a longer conversation begins with the text of a shorter one."""

import itertools
import random
import re
import tomllib
from pathlib import Path

import pytest
import torch
from PIL import Image

from modeling_moe_lc.chat import CHAT_TOKENS, load_chat_template
from modeling_moe_lc.configuration.presets import load_multimodal_preset
from modeling_moe_lc.processing_moe_lc import MEDIA_PAD
from modeling_moe_lc.training.tokenizer import train_tokenizer


ROOT = Path(__file__).resolve().parents[2]
END = "<|close|>message<|sep|><|end_of_msg|>"
PICTURE = Image.new("RGB", (30, 30))
WORDS = ["hello", " two  words ", "\n", "", 'a & "b" <c>', "naïve \U0001f642", "<|open|>", "{{ x }}", "  {%- if -%}"]
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "run", "parameters": {"b": 1, "a": [2]}}},
]


def words(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randrange(4)))


def content(rng: random.Random):
    if rng.random() < 0.5:
        return words(rng)
    items = [
        lambda: {"type": "text", "text": words(rng)},
        lambda: {"type": "image", "image": PICTURE},
        lambda: {"type": "video", "video": [PICTURE] * rng.randrange(1, 6), "fps": 1.0},
    ]
    return [rng.choice(items)() for _ in range(rng.randrange(4))]


def value(rng: random.Random, depth: int = 0):
    simple = [words(rng), rng.randrange(9), rng.random(), True, False, None]
    if depth > 1 or rng.random() < 0.6:
        return rng.choice(simple)
    if rng.random() < 0.5:
        return [value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {words(rng): value(rng, depth + 1) for _ in range(rng.randrange(3))}


def conversation(seed: int) -> list[dict]:
    rng = random.Random(seed)
    messages: list[dict] = [{"role": "system", "content": words(rng)}] * rng.randrange(2)
    for _ in range(rng.randrange(1, 5)):
        messages.append(
            {"role": "user", "content": content(rng)} | ({"name": words(rng)} if rng.random() < 0.2 else {})
        )
        while True:
            calls = [
                {
                    "id": f"call_{place}",
                    "type": "function",
                    "function": {
                        "name": rng.choice(["look", "run", words(rng)]),
                        "arguments": words(rng) if rng.random() < 0.2 else {words(rng): value(rng) for _ in range(2)},
                    },
                }
                for place in range(rng.randrange(3))
            ]
            answer = {"role": "assistant", "content": rng.choice([words(rng), None])}
            answer |= {"tool_calls": calls} if calls else {}
            answer |= {"reasoning_content": words(rng)} if rng.random() < 0.5 else {}
            messages.append(answer)
            for call in rng.sample(calls, len(calls)):
                named = {"tool_call_id": call["id"]} if rng.random() < 0.7 else {"name": words(rng)}
                messages.append({"role": "tool", "content": content(rng), **named})
            if not calls or rng.random() < 0.5:
                break
    return messages


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("seed", range(25))
def test_a_longer_conversation_begins_with_the_shorter_one(processor, seed, thinking):
    messages, tools = conversation(seed), TOOLS if seed % 2 else None
    options = {"tools": tools, "thinking": thinking, "thinking_effort": "low" if seed % 3 else None}
    texts = [processor.apply_chat_template(messages[:count], **options) for count in range(1, len(messages) + 1)]
    for count, (shorter, longer) in enumerate(itertools.pairwise(texts), 1):
        assert longer.startswith(shorter) and len(longer) > len(shorter)
        if messages[count]["role"] == "assistant":
            prompt = processor.apply_chat_template(messages[:count], add_generation_prompt=True, **options)
            assert longer.startswith(prompt) and prompt.startswith(shorter)


@pytest.mark.parametrize("seed", range(8))
def test_so_do_its_tokens_and_patches(processor, seed):
    messages = conversation(seed)

    def inputs(count, **options):
        return processor.apply_chat_template(
            messages[:count], tools=TOOLS, tokenize=True, return_dict=True, return_tensors="pt", **options
        )

    whole = inputs(len(messages))
    for count in range(1, len(messages)):
        prompt = messages[count]["role"] == "assistant"
        features = inputs(count, add_generation_prompt=prompt)
        for name, values in features.items():
            along = 0 if name in ("pixel_values", "grid_thws") else 1
            assert torch.equal(values, whole[name].narrow(along, 0, values.shape[along])), name


def test_every_section_as_it_is_written(processor):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "name": 'A & "B"', "content": ["See ", {"type": "image"}, {"type": "text", "text": "!"}, {"type": "video"}]},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "x", "function": {"name": "look", "arguments": {"at": "a<b", "n": 1, "f": 0.5, "t": True, "z": None}}},
                {"id": "y", "function": {"name": "run", "arguments": {"l": [1, "a"], "o": {"k": "v"}}}},
                {"id": "z", "function": {"name": "run", "arguments": '{"broken": '}},
            ],
        },
        {"role": "tool", "tool_call_id": "y", "content": "two"},
        {"role": "tool", "name": "look", "content": "one"},
        {"role": "assistant", "content": "done"},
    ]  # fmt: skip
    written = processor.apply_chat_template(
        messages, tools=TOOLS[1:], thinking_effort="high", add_generation_prompt=True
    )
    message, argument = '<|open|>message role="', '<|open|>argument key="'
    assert written == "".join(
        [
            f'{message}system" type="tool-declare"<|sep|>',
            '[{"function":{"name":"run","parameters":{"a":[2],"b":1}},"type":"function"}]',
            f'{END}{message}system" type="thinking-effort"<|sep|>high{END}',
            f'{message}system"<|sep|>Be brief.{END}',
            f'{message}user" name="A &amp; &quot;B&quot;"<|sep|>',
            "See <|media_begin|>image<|media_content|><|media_pad|><|media_end|>!",
            f"<|media_begin|>video<|media_content|><|media_pad|><|media_end|>{END}",
            f'{message}assistant"<|sep|><|open|>think<|sep|>hm<|close|>think<|sep|>',
            "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>",
            '<|open|>call tool="look" index="1"<|sep|>',
            f'{argument}at" type="string"<|sep|>a<b<|close|>argument<|sep|>',
            f'{argument}n" type="number"<|sep|>1<|close|>argument<|sep|>',
            f'{argument}f" type="number"<|sep|>0.5<|close|>argument<|sep|>',
            f'{argument}t" type="boolean"<|sep|>true<|close|>argument<|sep|>',
            f'{argument}z" type="null"<|sep|>null<|close|>argument<|sep|><|close|>call<|sep|>',
            '<|open|>call tool="run" index="2"<|sep|>',
            f'{argument}l" type="array"<|sep|>[1, "a"]<|close|>argument<|sep|>',
            f'{argument}o" type="object"<|sep|>{{"k": "v"}}<|close|>argument<|sep|><|close|>call<|sep|>',
            '<|open|>call tool="run" index="3"<|sep|>',
            '<|open|>json type="object"<|sep|>{"broken": <|close|>json<|sep|><|close|>call<|sep|>',
            f"<|close|>tools<|sep|>{END}",
            f'{message}tool" tool="run" index="2"<|sep|>two{END}',
            f'{message}tool" tool="look" index="2"<|sep|>one{END}',
            f'{message}assistant"<|sep|><|open|>think<|sep|><|close|>think<|sep|>',
            f"<|open|>response<|sep|>done<|close|>response<|sep|>{END}",
            f'{message}assistant"<|sep|><|open|>think<|sep|>',
        ]
    )


def test_without_thinking_there_is_no_channel_for_it(processor):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "reasoning_content": "hm", "content": "y"}]
    written = processor.apply_chat_template(messages, thinking=False, add_generation_prompt=True)
    assert "think" not in written and "hm" not in written
    assert written.endswith('<|open|>message role="assistant"<|sep|><|open|>response<|sep|>')


def test_a_final_message_can_be_continued(processor):
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is"}]},
    ]
    assert processor.apply_chat_template(messages, continue_final_message=True).endswith("<|sep|>It is")
    ids = processor.apply_chat_template(messages, continue_final_message=True, tokenize=True)
    assert processor.decode(ids[0]).endswith("<|sep|>It is")


@pytest.mark.parametrize(
    ("messages", "options", "what"),
    [
        ([{"role": "critic", "content": "x"}], {}, "role: expected system, user, assistant or tool, got critic"),
        (
            [{"role": "user", "content": "x"}],
            {"documents": [{"title": "a", "text": "b"}]},
            "documents: this format has no place",
        ),
    ],
)
def test_what_has_no_place_is_refused(processor, messages, options, what):
    with pytest.raises(Exception, match=what):
        processor.apply_chat_template(messages, **options)


def test_prepared_tokenizers_have_the_tokens_and_the_template(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    assert [tokenizer.convert_tokens_to_ids(token) for token in CHAT_TOKENS] == list(range(3, 11))
    assert load_multimodal_preset("nano").media_placeholder_token_id == tokenizer.convert_tokens_to_ids(MEDIA_PAD)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.chat_template == load_chat_template()
    messages = [{"role": "user", "content": "What is 2 + 17?"}]
    ids = loaded.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert sum(token in range(3, 11) for token in ids) == 9
    used = set(re.findall(r"<\|\w+\|>", load_chat_template()))
    assert used == set(CHAT_TOKENS)


def test_a_vocabulary_must_hold_them():
    with pytest.raises(ValueError, match="vocab_size: expected at least 267"):
        train_tokenizer(["x"], 266, 64)


def test_the_template_is_in_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "chat_template.jinja" in settings["package-data"]["modeling_moe_lc"]
