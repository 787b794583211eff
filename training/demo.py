"""`moe-lc demo`: a small model from nothing to generated text on a CPU, in minutes.

Reads the source files of Python's standard library, trains a tokenizer and a model in stages of growing context,
evaluates the model on files it never saw, and writes a report. Interrupted, it goes on from its last checkpoint.
"""

import argparse
import bisect
import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from .. import MoeLcForCausalLM, update_router_bias
from ..configuration.presets import load_preset
from ..kernels.router import max_violation, sampling_floor
from .balance import routers, without_bias
from .checkpoint import checkpoints, prune, read_state, restore, save_checkpoint
from .corpus import fingerprint, iterate_documents, split_corpus, standard_library
from .evaluate import Evaluation, evaluate, loss_by_position, xz_bits_per_byte
from .figure import plot_run
from .optim import adamw, initialise, set_learning_rate, warmup_cosine
from .packing import Pack, PackedBatches, collate, count_tokens, pack
from .plan import Settings, faster_threads, fitting_steps, remove_run, settings_of
from .report import build_tables, machine, write_report
from .tokenizer import encode_documents, train_tokenizer


STEPS = [72, 18, 10]
TRAINING_SHARE = 0.75  # of the minutes; the rest is for reading, evaluation and saving
SECONDS_BETWEEN_CHECKPOINTS = 60.0
CLIP = 1.0
PROMPT, NEW_TOKENS, TEMPERATURE, TOP_K = "def ", 160, 0.8, 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/demo"), help="folder of the run (default: %(default)s)")
    add("--restart", action="store_true", help="delete the run in that folder and begin anew")
    add(
        "--minutes", type=float, default=3.6, help="on a slow machine, train fewer steps to fit (default: %(default)s)"
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
    config = load_preset(settings.preset, router_balance={"method": settings.balance})

    training, held_out = split_corpus(iterate_documents(Path(settings.corpus)), settings.held_out_share)
    texts = [document.text for document in training]
    tokenizer = train_tokenizer(texts, config.vocab_size, settings.lengths[-1])
    documents, unseen = (encode_documents(tokenizer, [one.text for one in part]) for part in (training, held_out))
    prefix = [tokenizer.bos_token_id]
    batches = [
        PackedBatches(pack(documents, length, prefix), settings.tokens_per_step // length, settings.seed + stage)
        for stage, length in enumerate(settings.lengths)
    ]
    held_out_packs = {length: pack(unseen, length, prefix) for length in settings.lengths}
    amounts = [f"{len(part)} files, {sum(map(len, part)):,} tokens" for part in (documents, unseen)]
    print(f"corpus {settings.corpus}: {amounts[0]} to train on; {amounts[1]} held out", flush=True)

    checkpoint = next(reversed(checkpoints(out)), None)
    if checkpoint is None:
        torch.manual_seed(settings.seed)
        model = MoeLcForCausalLM(config)
        initialise(model)
        if settings.threads is None:
            settings = dataclasses.replace(settings, threads=faster_threads(model, batches[0][0][:2]))
        torch.set_num_threads(settings.threads)
        optimizer = adamw(model)
        at_start = evaluate(model, held_out_packs[settings.lengths[-1]], settings.tokens_per_step)
        state: dict[str, Any] = {
            "corpus": fingerprint([*training, *held_out]),
            "step": 0,
            "history": [],
            "stages": [],
            "routing": [routing_row("initialised", at_start, config)],
        }
        if settings.steps is None:
            seconds = TRAINING_SHARE * 60.0 * args.minutes
            settings = dataclasses.replace(settings, steps=fitting_steps(model, batches, STEPS, seconds))
    else:
        print(f"going on from {checkpoint}", flush=True)
        torch.set_num_threads(settings.threads)
        state = read_state(checkpoint)
        if state["corpus"] != fingerprint([*training, *held_out]):
            raise ValueError(f"corpus: expected the files that {out} began with, got others in {settings.corpus}")
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        optimizer = adamw(model)
        restore(checkpoint, optimizer)
    out.mkdir(parents=True, exist_ok=True)
    (out / "settings.json").write_text(json.dumps(dataclasses.asdict(settings), indent=2))
    try:
        train(out, model, optimizer, state, settings, batches, held_out_packs)
    except KeyboardInterrupt:
        saved = next(reversed(checkpoints(out)), "nothing yet")
        print(f"\ninterrupted after step {state['step']}; saved: {saved}; the same command goes on from there")
        raise
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")

    print("evaluating the saved model on the held-out files", flush=True)
    results: dict[str, Any] = {
        "machine": machine(),
        "command": settings.command(),
        "facts": {
            "model": f"{settings.preset}, {sum(parameter.numel() for parameter in model.parameters()):,} parameters",
            "corpus": f"{amounts[0]} to train on; {amounts[1]} held out",
            "tokens trained on": f"{state['history'][-1]['tokens']:,}",
            "seconds in training steps": f"{sum(record['seconds'] for record in state['history']):.0f}",
        },
        "history": state["history"],
        "stages": state["stages"],
        **assess(out / "model", settings, state["routing"], [one.text.encode() for one in held_out], unseen),
        "sample": sample(out / "model", settings.seed),
    }
    results["facts"]["seconds of this command"] = f"{time.monotonic() - started:.0f}"
    (out / "results.json").write_text(json.dumps(results))
    plot_run(out / "curves.png", results)
    write_report(out / "report.md", results, [*sorted(out.iterdir()), out / "report.md"])
    for table in build_tables(results):
        print("", table.plain(), sep="\n")
    print("", "Sample", results["sample"], "", *(f"wrote {path}" for path in sorted(out.iterdir())), sep="\n")


def train(
    out: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict,
    settings: Settings,
    batches: Sequence[PackedBatches],
    held_out_packs: dict[int, list[Pack]],
) -> None:
    """Trains from `state["step"]` to the end, with a checkpoint at the end of each stage and every minute.

    `state` is JSON: with the model, the optimiser and torch's random state it is all that a checkpoint needs.
    """
    ends = list(itertools.accumulate(settings.steps))
    config, history = model.config, state["history"]
    plan = [batches[stage][step] for stage, count in enumerate(settings.steps) for step in range(count)]
    seen = sum(map(count_tokens, plan[: state["step"]]))
    saved = time.monotonic()
    model.train()
    progress = tqdm(total=sum(map(count_tokens, plan)), initial=seen, unit="tok", unit_scale=True)
    for step in range(state["step"], ends[-1]):
        begun = time.monotonic()
        stage = bisect.bisect_right(ends, step)
        set_learning_rate(optimizer, warmup_cosine(step, ends[-1], settings.learning_rate, settings.warmup))
        loss = model(**collate(plan[step]), use_cache=False).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        violation = max_violation(torch.stack([router.counts for router in routers(model)]))
        update_router_bias(model)

        tokens = count_tokens(plan[step])
        seen += tokens
        history.append(
            {
                "stage": stage,
                "tokens": seen,
                "loss": loss.item(),
                "gradient_norm": norm.item(),
                "max_violation": violation.mean().item(),
                "floor": sampling_floor(tokens, config.num_experts, config.num_experts_per_token),
                "seconds": time.monotonic() - begun,
            }
        )
        progress.update(tokens)
        progress.set_postfix(context=f"{settings.lengths[stage]:,}", loss=f"{loss.item():.3f}", refresh=False)
        state["step"] = step + 1
        if state["step"] == ends[stage]:
            held_out = evaluate(model, held_out_packs[settings.lengths[stage]], settings.tokens_per_step)
            state["stages"].append(stage_row(settings.lengths[stage], history, stage, held_out))
        if state["step"] == ends[stage] or time.monotonic() - saved > SECONDS_BETWEEN_CHECKPOINTS:
            save_checkpoint(out, state["step"], model, optimizer, state)
            prune(out, keep=set(ends))
            saved = time.monotonic()
    progress.close()


def assess(folder: Path, settings: Settings, routing: list[dict], texts: list[bytes], tokens: list[list[int]]) -> dict:
    """All that is measured on held-out files, given as bytes and as token ids, with the model saved in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    longest, size = settings.lengths[-1], sum(map(len, texts))
    packs = pack(tokens, longest, tokens[0][:1])
    with without_bias(model):
        unbalanced = evaluate(model, packs, settings.tokens_per_step)
    final = evaluate(model, packs, settings.tokens_per_step)
    one_text = tokens[0][:1] + [token for document in tokens for token in document[1:-1]]
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
        "by_position": loss_by_position(model, one_text[: 4 * longest], longest),
    }


def stage_row(length: int, history: list[dict], stage: int, held_out: Evaluation) -> dict:
    """One row of the table of stages: the training loss is the mean over the last quarter of the stage's steps."""
    steps = [record for record in history if record["stage"] == stage]
    late = steps[-max(1, len(steps) // 4) :]
    tokens = steps[-1]["tokens"] - (history[-len(steps) - 1]["tokens"] if len(history) > len(steps) else 0)
    return {
        "length": length,
        "steps": len(steps),
        "tokens": steps[-1]["tokens"],
        "train_loss": sum(record["loss"] for record in late) / len(late),
        "held_out_loss": held_out.loss,
        "tokens_per_second": tokens / sum(record["seconds"] for record in steps),
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
