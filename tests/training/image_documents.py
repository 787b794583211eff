"""Image-text documents for tests: pictures as files, JSON lines that name them, and a folder that `prepare-images` wrote."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from modeling_moe_lc.configuration.presets import load_multimodal_preset
from modeling_moe_lc.training.cli import main


SIZES = [(20, 12), (9, 30), (40, 8), (16, 16)]
VOCABULARY = 300


def picture(number: int) -> Image.Image:
    width, height = SIZES[number % len(SIZES)]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def rows(count: int) -> list[dict]:
    """Conversations, documents of one or two pictures, documents of none, in turn."""
    made = []
    for number in range(count):
        items = [{"type": "image", "image": f"pictures/{number}.png"}, {"type": "text", "text": f"This is {number}. "}]
        answer = {"role": "assistant", "content": f"number {number}"}
        made.append(
            (
                {"messages": [{"role": "user", "content": items}, answer], "thinking": False},
                {"content": [{"type": "text", "text": "Before <|media_pad|> and "}, *items, *items[:1]]},
                {"content": items[1:]},
            )[number % 3]
        )
    return made


def write_source(folder: Path, count: int) -> Path:
    (folder / "pictures").mkdir(parents=True)
    for number in range(count):
        picture(number).save(folder / "pictures" / f"{number}.png")
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(count)))
    return path


def prepare(source: Path, out: Path, *options: str) -> int:
    arguments = ["--train-tokenizer", str(VOCABULARY), "--patch-size", "4", "--validation-share", "0.3", *options]
    return main(["prepare-images", str(source), "--out", str(out), *arguments])


def write_base(folder: Path) -> Path:
    """The configuration of the preset "tiny", whose placeholder is that of a trained tokenizer."""
    load_multimodal_preset("tiny", media_placeholder_token_id=3).save_pretrained(folder)
    return folder
