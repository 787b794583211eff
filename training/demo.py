"""`moe-lc demo`: a small model from nothing to generated text on a CPU, in minutes.

Reads the source files of Python's standard library, prepares them as `moe-lc prepare` does, trains through stages of
growing context as `moe-lc train` does, by the recipe `nano-cpu`, evaluates the model on files it never saw, and writes a
report. Interrupted, it goes on from its last checkpoint.
"""

import argparse
import dataclasses
import itertools
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from .. import MoeLcForCausalLM
from ..configuration.presets import load_preset
from ..kernels.router import max_violation, sampling_floor
from . import prepare
from .balance import without_bias
from .checkpoint_files import latest
from .corpus import Document, fingerprint, iterate_documents, split_corpus, standard_library
from .evaluate import Evaluation, evaluate, loss_by_position, xz_bits_per_byte
from .figure import plot_run
from .optim import initialise
from .packing import pack
from .plan import CHECKPOINTS, SETTINGS, Settings, faster_threads, fitting_steps, remove_run, settings_of
from .pretrain import MODELS, pretrain
from .processes import processes
from .recipe import Recipe, load_recipe
from .report import build_tables, machine, write_report
from .run_log import STAGE, STEP, VALIDATION, read_log, records_of
from .shards import MANIFEST, TokenShards, write_atomically
from .start import model_config


STEPS = [72, 18, 10]
MINUTES_BETWEEN_CHECKPOINTS = 1.0
PROMPT, NEW_TOKENS, TEMPERATURE, TOP_K = "def ", 160, 0.8, 50
DATA, CORPUS, START = "data", "corpus", "start.json"  # in the folder of the run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/demo"), help="folder of the run (default: %(default)s)")
    add("--restart", action="store_true", help="delete the run in that folder and begin anew")
    add(
        "--minutes",
        type=float,
        default=2.7,
        help="of training steps, about: a slow machine trains fewer; reading, evaluation and saving take minutes "
        "more (default: %(default)s)",
    )
    add("--steps", type=int, nargs="+", help=f"of each stage, however long they take (default: {STEPS}, if they fit)")
    add("--lengths", type=int, nargs="+", default=[512, 2048, 8192], help="tokens per sequence of each stage")
    add("--tokens-per-step", type=int, default=8192, help="the same in all stages (default: %(default)s)")
    add("--learning-rate", type=float, default=1e-2, help="at its peak (default: %(default)s)")
    add("--warmup", type=int, default=5, help="steps up to the peak (default: %(default)s)")
    add("--preset", default="nano", help="shape of the model (default: %(default)s)")
    add("--balance", default="quantile", help="method of router_balance (default: %(default)s)")
    add("--threads", type=int, help="of torch (default: 1 or one per core, whichever is faster at the start)")
    add("--seed", type=int, default=0, help="of initialisation, data order and sample (default: %(default)s)")
    add("--corpus", type=Path, default=standard_library(), help="folder of .py files (default: the standard library)")
    add("--held-out-share", type=float, default=0.03, help="share of the files, by name (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    started = time.monotonic()
    disable_progress_bar()  # of transformers' loading and saving: ours is the one to watch
    out: Path = args.out
    if args.restart:
        remove_run(out)
    settings = settings_of(args)
    vocab_size = load_preset(settings.preset).vocab_size
    recipe = recipe_of(out, settings)
    training, held_out = split_corpus(iterate_documents(Path(settings.corpus)), settings.held_out_share)
    begun = latest(out / CHECKPOINTS) is not None
    keep_corpus(out, fingerprint([*training, *held_out]), settings, begun)
    prepare_data(out, [*training, *held_out], settings, vocab_size)
    unseen = documents_of(out, "validation")
    amounts = [
        f"{len(files)} files, {sum(map(len, documents_of(out, split))):,} tokens"
        for files, split in ((training, "train"), (held_out, "validation"))
    ]
    print(f"corpus {settings.corpus}: {amounts[0]} to train on; {amounts[1]} held out", flush=True)

    if not begun:
        settings, routing = look_ahead(recipe, settings, unseen, 60.0 * args.minutes)
        write_json(out / START, {**read_json(out / START), "routing": routing})
        write_json(out / SETTINGS, dataclasses.asdict(settings))
    torch.set_num_threads(settings.threads)
    recipe = recipe_of(out, settings)
    with processes() as ours:
        if not pretrain(recipe, ours):
            raise KeyboardInterrupt

    print("evaluating the saved model on the held-out files", flush=True)
    model_folder, log = out / MODELS / recipe.stages[-1].name, read_log(out)
    history = history_of(records_of(log, STEP), recipe)
    results: dict[str, Any] = {
        "machine": machine(),
        "command": settings.command(),
        "facts": {
            "model": f"{settings.preset}, {count_parameters(model_folder):,} parameters",
            "corpus": f"{amounts[0]} to train on; {amounts[1]} held out",
            "tokens trained on": f"{history[-1]['tokens']:,}",
            "seconds in training steps": f"{sum(record['seconds'] for record in history):.0f}",
        },
        "history": history,
        "stages": [
            stage_row(length, history, stage, validation["loss"])
            for stage, (length, validation) in enumerate(
                zip(settings.lengths, records_of(log, VALIDATION), strict=True)
            )
        ],
        **assess(
            model_folder, settings, read_json(out / START)["routing"], [one.text.encode() for one in held_out], unseen
        ),
        "sample": sample(model_folder, settings.seed),
    }
    results["by_position"] = records_of(log, STAGE)[-1]["by_position"] or short_text_by_position(
        model_folder, unseen, settings.lengths[-1]
    )
    results["facts"]["seconds of this command"] = f"{time.monotonic() - started:.0f}"
    (out / "results.json").write_text(json.dumps(results))
    plot_run(out / "curves.png", results)
    write_report(out / "report.md", results, [*sorted(out.iterdir()), out / "report.md"])
    for table in build_tables(results):
        print("", table.plain(), sep="\n")
    print("", "Sample", results["sample"], "", *(f"wrote {path}" for path in sorted(out.iterdir())), sep="\n")


def recipe_of(out: Path, settings: Settings) -> Recipe:
    """The recipe `nano-cpu` with what the settings say; steps that are still to be measured count as one."""
    steps = settings.steps or [1] * len(settings.lengths)
    stages = [
        {
            "name": str(length),
            "sequence_length": length,
            "tokens": count * settings.tokens_per_step,
            "micro_batch": settings.tokens_per_step // length,
        }
        for length, count in zip(settings.lengths, steps, strict=True)
    ]
    values = {
        "output_dir": str(out),
        "seed": settings.seed,
        "model.base": settings.preset,
        "data.folders.python": str(out / DATA),
        "tokens_per_step": settings.tokens_per_step,
        "stages": stages,
        "optimizer.learning_rate": settings.learning_rate,
        "optimizer.warmup_share": min(settings.warmup, sum(steps) - 1) / sum(steps),
        "router_balance.method": settings.balance,
        "checkpoints.every_minutes": MINUTES_BETWEEN_CHECKPOINTS,
        "checkpoints.keep": 1,
    }
    return load_recipe("nano-cpu", [f"--{name}={json.dumps(value)}" for name, value in values.items()])


def keep_corpus(out: Path, corpus: str, settings: Settings, begun: bool) -> None:
    """Notes the digest of the corpus of a run. Where it is another than before, what was prepared is deleted.

    Raises ValueError if the run has `begun` with that other one.
    """
    known = read_json(out / START)["corpus"] if (out / START).exists() else None
    if known == corpus:
        return
    if begun:
        raise ValueError(f"corpus: expected the files that {out} began with, got others in {settings.corpus}")
    shutil.rmtree(out / DATA, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / START, {"corpus": corpus})


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


def write_json(path: Path, content: dict) -> None:
    write_atomically(path, json.dumps(content, indent=2).encode())


def prepare_data(out: Path, documents: Sequence[Document], settings: Settings, vocab_size: int) -> None:
    """`moe-lc prepare` of a copy of the documents, which holds nothing that is not read."""
    if (out / DATA / MANIFEST).exists():
        return
    copy = out / CORPUS
    for document in documents:
        path = copy / document.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(document.text.encode())
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    options = {"out": out / DATA, "train-tokenizer": vocab_size, "validation-share": settings.held_out_share}
    words = [str(word) for name, value in {**options, "suffixes": ".py", "workers": 1}.items()
             for word in (f"--{name}", value)]  # fmt: skip
    prepare.run(parser.parse_args([str(copy), *words]))
    shutil.rmtree(copy)


def documents_of(out: Path, split: str) -> list[list[int]]:
    """Token ids of the prepared documents."""
    shards = TokenShards(out / DATA, split)
    return [shards.document(number).tolist() for number in range(len(shards))]


def look_ahead(
    recipe: Recipe, settings: Settings, unseen: list[list[int]], seconds: float
) -> tuple[Settings, list[dict]]:
    """The settings with what has to be measured on this machine, and the routing before the first step."""
    torch.manual_seed(recipe.seed)
    model = MoeLcForCausalLM(model_config(recipe))
    initialise(model)
    data = [recipe.stage_data(stage) for stage in range(len(recipe.stages))]
    if settings.threads is None:
        settings = dataclasses.replace(settings, threads=faster_threads(model, data[0][0][:2]))
    torch.set_num_threads(settings.threads)
    at_start = evaluate(model, pack(unseen, settings.lengths[-1], unseen[0][:1]), settings.tokens_per_step)
    if settings.steps is None:
        settings = dataclasses.replace(settings, steps=fitting_steps(model, data, STEPS, seconds))
    return settings, [routing_row("initialised", at_start, model.config)]


def history_of(steps: Sequence[dict], recipe: Recipe) -> list[dict]:
    """The log of the steps, with one number for all layers."""
    names = [stage.name for stage in recipe.stages]
    kept = ("tokens", "loss", "gradient_norm", "floor", "seconds", "step_tokens")
    return [
        {
            "stage": names.index(step["stage"]),
            "max_violation": sum(step["max_violation"]) / len(step["max_violation"]),
            **{name: step[name] for name in kept},
        }
        for step in steps
    ]


def count_parameters(folder: Path) -> int:
    return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(folder).parameters())


def assess(folder: Path, settings: Settings, routing: list[dict], texts: list[bytes], tokens: list[list[int]]) -> dict:
    """All that is measured on held-out files, given as bytes and as token ids, with the model saved in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    longest, size = settings.lengths[-1], sum(map(len, texts))
    packs = pack(tokens, longest, tokens[0][:1])
    with without_bias(model):
        unbalanced = evaluate(model, packs, settings.tokens_per_step)
    final = evaluate(model, packs, settings.tokens_per_step)
    return {
        "held_out": {"files": len(texts), "bytes": size},
        "bits_per_byte": {
            settings.preset: final.bits_per_byte(size),
            "xz -9, each file": xz_bits_per_byte(texts),
            "xz -9, one stream": xz_bits_per_byte([b"".join(texts)]),
        },
        "routing": [
            *routing,
            routing_row("trained, bias set to zero", unbalanced, model.config),
            routing_row(f"trained, {settings.balance}", final, model.config),
        ],
    }


def short_text_by_position(folder: Path, tokens: list[list[int]], trained_length: int) -> dict:
    """What the loop leaves out where the held-out files are less than four times the longest trained length."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return loss_by_position(model, [list(itertools.chain.from_iterable(tokens))], trained_length)


def stage_row(length: int, history: list[dict], stage: int, held_out_loss: float) -> dict:
    """One row of the table of stages: the training loss is the mean over the last quarter of the stage's steps."""
    steps = [record for record in history if record["stage"] == stage]
    late = steps[-max(1, len(steps) // 4) :]
    return {
        "length": length,
        "steps": len(steps),
        "tokens": steps[-1]["tokens"],
        "train_loss": sum(record["loss"] for record in late) / len(late),
        "held_out_loss": held_out_loss,
        "tokens_per_second": sum(record["step_tokens"] for record in steps)
        / sum(record["seconds"] for record in steps),
    }


def routing_row(name: str, held_out: Evaluation, config) -> dict:
    """One row of the table of routing."""
    violation = max_violation(held_out.counts)
    return {
        "model": name,
        "mean": violation.mean().item(),
        "worst": violation.max().item(),
        "floor": sampling_floor(held_out.tokens, config.num_experts, config.num_experts_per_token),
        "loss": held_out.loss,
    }


def sample(folder: Path, seed: int) -> str:
    """Text that the model in `folder` writes after `PROMPT`, as anyone would load it; the seed fixes it."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer(tokenizer.bos_token + PROMPT, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(seed)
    ids = model.generate(**prompt, do_sample=True, temperature=TEMPERATURE, top_k=TOP_K, max_new_tokens=NEW_TOKENS)
    return tokenizer.decode(ids[0], skip_special_tokens=True)
