"""`moe-lc demo-lora`: the model of `moe-lc demo` learns a new task by a small adapter, on a CPU and in two minutes.

The task: what does this line of Python's standard library do? The base has read the library, but no questions and no
answers. Trains as `moe-lc finetune` does, by the recipe `lora-chat`, and asks about lines of files that the adapter has never
seen, before and after. Interrupted, the same command goes on from the last checkpoint.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from ..adapters import load_lora
from .chat_encoding import ChatEncoder
from .corpus import standard_library
from .evaluate import evaluate
from .figure import Table
from .finetune import finetune
from .library_questions import HELD_OUT, KINDS, questions
from .packing import Pack
from .plan import SETTINGS, remove_run
from .pretrain import ADAPTER, MODELS, RECIPE
from .processes import processes
from .recipe import Recipe, load_recipe
from .report import machine
from .shards import write_atomically


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

CHAT, TEMPLATE, DATA, RESULTS = "questions.jsonl", "template.jinja", "data", "results.json"
LENGTH, ASKED_AT_ONCE, EXAMPLES, LONGEST_ANSWER = 512, 100, 5, 8
# The base has never seen the control tokens of chats, and their rows in its embedding and head are frozen.
QUESTION = """{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}
# kind:{% else %}{% generation %} {{ message.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base", type=Path, default=Path("runs/demo"), help="run of `moe-lc demo`, or a model (default: %(default)s)")
    add("--out", type=Path, default=Path("runs/demo-lora"), help="folder of the run (default: %(default)s)")
    add("--restart", action="store_true", help="delete the run in that folder and begin anew")
    add("--steps", type=int, default=80, help="of 1,024 tokens (default: %(default)s)")
    add("--rank", type=int, default=8, help="of the adapter (default: %(default)s)")
    add("--learning-rate", type=float, default=1e-2, help="at its peak (default: %(default)s)")
    add("--asked", type=int, default=200, help="held-out questions (default: %(default)s)")
    add("--threads", type=int, help="of torch (default: as torch would)")
    add("--seed", type=int, default=0, help="of the adapter and the order of questions (default: %(default)s)")
    add("--corpus", type=Path, default=standard_library(), help="folder of .py files (default: the standard library)")


def run(args: argparse.Namespace) -> None:
    started = time.monotonic()
    disable_progress_bar()  # of transformers' loading and saving: ours is the one to watch
    base, out = model_of(args.base), args.out
    if args.restart:
        remove_run(out)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    learned, held_out = questions(args.corpus)
    asked = held_out[: args.asked]
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / SETTINGS, json.dumps({name: str(value) for name, value in vars(args).items()}).encode())
    write_atomically(out / CHAT, "".join(json.dumps(row) + "\n" for row in learned).encode())
    write_atomically(out / TEMPLATE, QUESTION.encode())
    with processes() as ours:
        if not finetune(recipe_of(out, base, args), ours):
            raise KeyboardInterrupt

    print("asking about files that the adapter has not seen", flush=True)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base).eval(), AutoTokenizer.from_pretrained(out / ADAPTER)
    weights = sum(parameter.numel() for parameter in model.parameters())
    answers, losses = {}, {}
    for when in ("before", "after"):
        if when == "after":
            model = load_lora(model, str(out / ADAPTER))
        answers[when] = answers_of(model, tokenizer, asked)
        losses[when] = loss_of(model, tokenizer, asked)
    added = sum(parameter.numel() for name, parameter in model.named_parameters() if ".lora_" in name)
    expected = [row["messages"][1]["content"] for row in asked]
    results: dict[str, Any] = {
        "machine": machine(),
        "questions": {"learned": len(learned), "held out": len(asked)},
        "parameters": {"base": weights, "adapter": added},
        "right": {when: share_right(given, expected) for when, given in answers.items()},
        "loss": losses,
        "examples": [
            {"question": row["messages"][0]["content"], "expected": right, **{when: answers[when][number] for when in answers}}
            for number, (row, right) in enumerate(zip(asked[:EXAMPLES], expected, strict=False))
        ],
        "seconds": time.monotonic() - started,
    }  # fmt: skip
    write_atomically(out / RESULTS, json.dumps(results, indent=2).encode())
    print("", table_of(results).plain(), "", *examples_of(results), sep="\n")
    print(f"wrote {out / ADAPTER}, {out / RESULTS}")


def model_of(folder: Path) -> Path:
    """The model at the end of a run, or the one in `folder` itself. Raises ValueError if there is none."""
    if (folder / "config.json").is_file():
        return folder
    if (folder / RECIPE).is_file():
        model = folder / MODELS / load_recipe(folder / RECIPE).stages[-1].name
        if (model / "config.json").is_file():
            return model
    raise ValueError(
        f"base: expected a model or a finished run of `moe-lc demo` (run `make demo` first, or give --base), got {str(folder)!r}"
    )


def recipe_of(out: Path, base: Path, args: argparse.Namespace) -> Recipe:
    """The recipe `lora-chat` for a CPU and short questions."""
    step = 2 * LENGTH
    values = {
        "output_dir": str(out),
        "seed": args.seed,
        "model.base": str(base),
        "model.dtype": "float32",
        "model.activation_checkpointing": False,
        "model.cuda_graphs": None,
        # The head as well: the base, trained for minutes, has hardly met the words that answers are made of.
        "adapter": {"r": args.rank, "alpha": 4 * args.rank, "targets": ["attention", "head"]},
        "data.folders.chat": str(out / DATA),
        "chat.sources.chat": str(out / CHAT),
        "chat.template": str(out / TEMPLATE),
        "tokens_per_step": step,
        "stages": [{"name": "questions", "sequence_length": LENGTH, "tokens": args.steps * step, "micro_batch": 2}],
        "optimizer.learning_rate": args.learning_rate,
        "checkpoints.every_minutes": 0.5,
        "checkpoints.keep": 1,
        "logging.every_steps": 1,
    }
    return load_recipe("lora-chat", [f"--{name}={json.dumps(value)}" for name, value in values.items()])


@torch.no_grad()
def answers_of(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", rows: Sequence[dict[str, Any]]
) -> list[str]:
    """What a model says to each question, greedily, as anyone would ask it."""
    answers = []
    for first in range(0, len(rows), ASKED_AT_ONCE):
        prompts = [row["messages"][:1] for row in rows[first : first + ASKED_AT_ONCE]]
        options = {"padding": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, **options)
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        found = model.generate(**inputs, do_sample=False, max_new_tokens=LONGEST_ANSWER)
        new = tokenizer.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        answers += [text.strip() for text in new]
    return answers


def loss_of(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", rows: Sequence[dict[str, Any]]) -> float:
    """Nats per token of the right answers."""
    encoder = ChatEncoder(tokenizer, {})
    packs = [Pack(ids, [0, len(ids)], learned=learned) for ids, learned in map(encoder, rows)]
    return evaluate(model, packs, 8 * LENGTH).loss


def share_right(answers: Sequence[str], expected: Sequence[str]) -> float:
    return sum(map(str.__eq__, answers, expected)) / len(expected)


def table_of(results: dict[str, Any]) -> Table:
    count, share = results["questions"], results["parameters"]["adapter"] / results["parameters"]["base"]
    return Table(
        f"What does this line do? {count['held out']} questions about held-out files",
        ("", "right answers", "loss of the right answer"),
        [(when, f"{results['right'][when]:.1%}", f"{results['loss'][when]:.3f}") for when in ("before", "after")],
        f"By chance, knowing the answers: {1 / len(KINDS):.0%}. Learned from {count['learned']:,} questions about other "
        f"files ({1 - HELD_OUT:.0%}). Adapter: {results['parameters']['adapter']:,} parameters, {share:.1%} of the base. "
        f"{results['seconds']:.0f} seconds.",
    )


def examples_of(results: dict[str, Any]) -> list[str]:
    lines = []
    for one in results["examples"]:
        shown = one["question"].strip().splitlines()[0]
        lines.append(
            f"  {shown[:70]!r}\n    {one['expected']}; before: {one['before'][:40]!r}; after: {one['after']!r}"
        )
    return ["Sample", *lines, ""]
