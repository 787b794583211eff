"""`moe-lc demo-vision`: a small multimodal model learns, on a CPU and in minutes, to read pictures of two digits.

Prepares the pictures as `moe-lc prepare-images` does, trains as `moe-lc train` does, by the recipe `nano-cpu` with a vision
tower, and asks about digits and pairs that were never shown. A second model, trained on the same texts without pictures
until it learns no more, says what can be known without looking. Interrupted, the same command goes on from the last
checkpoint.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.utils.logging import disable_progress_bar

from .collate_images import CollateImages, MediaDocument
from .digit_pairs import fingerprint, rows
from .figure import Table
from .figure_vision import draw
from .media_shards import MediaShards
from .plan import SETTINGS, remove_run
from .prepare import LONGEST_CONTEXT, SPLITS, TOKENIZER
from .prepare_images import Row, prepare, texts_of
from .pretrain import MODELS, pretrain
from .processes import processes
from .recipe import Recipe, load_recipe
from .report import machine
from .shards import write_atomically
from .tokenizer import train_tokenizer


if TYPE_CHECKING:
    from ..modeling_moe_lc_vl import MoeLcForConditionalGeneration
    from ..processing_moe_lc import MoeLcProcessor

SEEING, BLIND = "pictures", "text"  # the folders of the two runs, and of their data
DATA, STAGE, RESULTS, FIGURE = "data", "digits", "results.json", "digits.png"
VOCABULARY, ASKED_AT_ONCE, SHOWN = 300, 100, 6
ANSWER = 2  # tokens: a digit is one
BLIND_STEPS = 4  # times fewer: the frequencies of pairs are soon learned


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of a demo. `documents`: per step; `training`, `asked`: pictures of the splits."""

    steps: int
    documents: int
    training: int
    asked: int
    learning_rate: float
    preset: str
    seed: int
    digits: str

    def __post_init__(self):
        for name in ("steps", "documents", "training", "asked"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/demo-vision"), help="folder of the run (default: %(default)s)")
    add("--restart", action="store_true", help="delete the run in that folder and begin anew")
    add("--steps", type=int, default=220, help="of the model with pictures (default: %(default)s)")
    add("--documents", type=int, default=32, help="pictures in a step (default: %(default)s)")
    add("--training", type=int, default=6000, help="pictures to train on (default: %(default)s)")
    add("--asked", type=int, default=400, help="held-out pictures to read (default: %(default)s)")
    add("--learning-rate", type=float, default=1e-2, help="at its peak (default: %(default)s)")
    add("--preset", default="nano", help="shape of the model (default: %(default)s)")
    add("--threads", type=int, help="of torch (default: as torch would)")
    add("--seed", type=int, default=0, help="of initialisation, pictures and their order (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    started = time.monotonic()
    disable_progress_bar()  # of transformers' loading and saving: ours is the one to watch
    out: Path = args.out
    if args.restart:
        remove_run(out)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    names = [field.name for field in dataclasses.fields(Settings) if field.name != "digits"]
    settings = Settings(**{name: getattr(args, name) for name in names}, digits=fingerprint())
    keep_settings(out, settings)
    prepare_data(out, settings)
    with processes() as ours:
        for kind in (SEEING, BLIND):
            if not pretrain(recipe_of(out, kind, settings), ours):
                raise KeyboardInterrupt

    print("reading held-out pictures", flush=True)
    model, processor = loaded(out, SEEING)
    documents = documents_of(out, SEEING)
    blind, _ = loaded(out, BLIND)
    shown, unseen = asked(model, documents), asked(blind, documents_of(out, BLIND))
    answers = {"with pictures": shown, "without pictures": unseen}
    expected = [document.input_ids[-ANSWER - 1 : -1].tolist() for document in documents]
    results: dict[str, Any] = {"machine": machine(), "settings": dataclasses.asdict(settings)}
    results["accuracy"] = {name: accuracy(found, expected) for name, found in answers.items()}
    results["seconds"] = time.monotonic() - started
    write_atomically(out / RESULTS, json.dumps(results, indent=2).encode())
    draw(out / FIGURE, [example(model, processor, one, found) for one, found in zip(documents[:SHOWN], shown)])
    print("", table_of(results).plain(), "", *(f"wrote {out / name}" for name in (RESULTS, FIGURE)), sep="\n")


def keep_settings(out: Path, settings: Settings) -> None:
    """Raises ValueError if the folder holds a run with others."""
    content, file = dataclasses.asdict(settings), out / SETTINGS
    known = json.loads(file.read_text()) if file.exists() else content
    for name, value in content.items():
        if known[name] != value:
            raise ValueError(f"{name}: expected {known[name]!r}, as {out} began with, or --restart, got {value!r}")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(content, indent=2).encode())


def prepare_data(out: Path, settings: Settings) -> None:
    """The same pairs with and without their pictures, for one tokenizer."""
    chosen = {name: getattr(settings, name) for name in ("training", "asked", "seed", "digits")}
    documents = partial(rows, settings.training, settings.asked, settings.seed)
    folder = out / DATA / SEEING
    prepare(folder, documents, chosen, new_processor)
    without = partial(documents, with_pictures=False)
    prepare(out / DATA / BLIND, without, chosen, lambda rows: AutoProcessor.from_pretrained(folder / TOKENIZER))


def new_processor(documents: Iterable[Row]) -> "MoeLcProcessor":
    from ..image_processing_moe_lc import MoeLcImageProcessor
    from ..processing_moe_lc import MoeLcProcessor

    texts = set()
    for row in documents:
        width, height = row.content["content"][0]["image"].size
        texts.update([f"image {width}x{height}", *texts_of(row.content)])
    return MoeLcProcessor(MoeLcImageProcessor(), train_tokenizer(sorted(texts), VOCABULARY, LONGEST_CONTEXT))


def recipe_of(out: Path, kind: str, settings: Settings) -> Recipe:
    """The recipe `nano-cpu` with a tower; a step is one sequence of as many documents as the settings say."""
    length = int(MediaShards(out / DATA / kind).lengths[0]) * settings.documents
    steps = settings.steps if kind == SEEING else max(1, settings.steps // BLIND_STEPS)
    stage = {"name": STAGE, "sequence_length": length, "tokens": length * steps, "micro_batch": 1}
    values = {
        "output_dir": str(out / kind),
        "seed": settings.seed,
        "model.base": settings.preset,
        "model.vision": {},
        "data.folders": {kind: str(out / DATA / kind)},
        "tokens_per_step": length,
        "stages": [stage],
        "optimizer.kind": "muon",  # needs half as many pictures as AdamW
        "optimizer.learning_rate": settings.learning_rate,
        "checkpoints.keep": 1,
    }
    return load_recipe("nano-cpu", [f"--{name}={json.dumps(value)}" for name, value in values.items()])


def loaded(out: Path, kind: str) -> tuple["MoeLcForConditionalGeneration", "MoeLcProcessor"]:
    """A trained model and its processor, as anyone would load them."""
    folder = out / kind / MODELS / STAGE
    return AutoModelForImageTextToText.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)


def documents_of(out: Path, kind: str) -> list[MediaDocument]:
    """The held-out ones."""
    shards = MediaShards(out / DATA / kind, SPLITS[1])
    return [shards.media_document(index) for index in range(len(shards))]


@torch.no_grad()
def asked(model: "MoeLcForConditionalGeneration", documents: Sequence[MediaDocument]) -> list[list[int]]:
    """The tokens that a model writes, greedily, where the answer of each document stands; all of one length."""
    answers = []
    for first in range(0, len(documents), ASKED_AT_ONCE):
        inputs = prompts(documents[first : first + ASKED_AT_ONCE], model.config.media_placeholder_token_id)
        found = model.generate(**inputs, do_sample=False, min_new_tokens=ANSWER, max_new_tokens=ANSWER)
        answers += found[:, -ANSWER:].tolist()
    return answers


def prompts(documents: Sequence[MediaDocument], media_token_id: int) -> dict[str, torch.Tensor]:
    """Documents up to their answers, as rows."""
    inputs = CollateImages(media_token_id)(documents)
    rows = torch.from_numpy(np.stack([document.input_ids[: -ANSWER - 1] for document in documents]))
    media: dict[str, torch.Tensor] = {name: inputs[name] for name in ("pixel_values", "grid_thws") if name in inputs}
    return {"input_ids": rows, "attention_mask": torch.ones_like(rows), **media}


def accuracy(found: list[list[int]], expected: list[list[int]]) -> dict[str, float]:
    """Shares of documents: both digits in order, and each of them."""
    right = np.array(found) == np.array(expected)  # [documents, 2]
    return {"both": float(right.all(1).mean()), "left": float(right[:, 0].mean()), "right": float(right[:, 1].mean())}


@torch.no_grad()
def example(model, processor: "MoeLcProcessor", document: MediaDocument, answer: list[int]) -> dict[str, Any]:
    """What the figure shows of a document: its pixels [H, W], texts, and for each MLA layer and digit of the answer the mean
    over the heads of the attention to the tokens of the picture, [rows, columns]."""
    assert document.pixel_values is not None and document.grid_thws is not None
    ids = torch.from_numpy(np.concatenate((document.input_ids[: -ANSWER - 1], answer)))[None]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    layers = model(
        input_ids=ids,
        pixel_values=document.pixel_values,
        grid_thws=document.grid_thws,
        use_cache=False,
        output_attentions=True,
    ).attentions
    model.set_attn_implementation(before)
    _, rows, columns = document.grid_thws[0].tolist()
    patches = document.pixel_values.mean(1).unflatten(0, (rows, columns))  # [rows, columns, side, side]
    seen = torch.from_numpy(document.input_ids == model.config.media_placeholder_token_id)[: ids.shape[1]]
    maps = [
        [weights[0, :, query, seen].mean(0).view(rows // 2, columns // 2).numpy() for query in (-ANSWER - 1, -ANSWER)]
        for weights in layers
        if weights is not None
    ]
    return {
        "pixels": patches.transpose(1, 2).flatten(2).flatten(0, 1).numpy(),
        "expected": processor.decode(document.input_ids[-ANSWER - 1 : -1]),
        "answer": processor.decode(answer),
        "maps": maps,
    }


def table_of(results: dict[str, Any]) -> Table:
    names = "both", "left", "right"
    return Table(
        f"Held-out pictures of two digits, read in order ({results['settings']['asked']} of them)",
        ("", *names),
        [(kind, *(f"{found[name]:.1%}" for name in names)) for kind, found in results["accuracy"].items()],
        f"By chance: 1% both, 10% each; no pair of these was trained on. {results['seconds']:.0f} seconds.",
    )
