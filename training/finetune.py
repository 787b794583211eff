"""`moe-lc finetune`: a model learns from conversations, all of it or an adapter beside it, from a recipe.

The recipe is one of `moe-lc train` with `chat` (conversations, of which only the assistant's part is learned), `adapter`
(LoRA), or both, and the loop is the same one: context stages, FSDP2, context parallelism, exact resume. Conversations are
encoded into shards first, once.
"""

import argparse

from transformers.utils.logging import disable_progress_bar

from .checkpoint import on_first_rank
from .prepare_chat import prepare_conversations
from .pretrain import add_arguments, pretrain
from .processes import Processes, processes
from .recipe import Recipe, load_recipe
from .start import model_config


__all__ = ["add_arguments", "finetune", "run"]


def run(args: argparse.Namespace) -> None:
    disable_progress_bar()  # of transformers' loading and saving: ours is the one to watch
    recipe = load_recipe(args.recipe, args.overrides)
    with processes() as ours:
        finetune(recipe, ours)


def finetune(recipe: Recipe, ours: Processes) -> bool:
    """Prepares the conversations of a recipe and trains to its end; False: it was stopped before, and saved.

    With an adapter, `output_dir`/adapter holds the one of the last checkpoint, `output_dir`/models/STAGE the one at the end of
    a stage, in PEFT's layout and with the tokenizer; without, models/STAGE holds the whole model.

    Raises:
        ValueError: a recipe for `moe-lc train`; as `prepare_conversations` and `pretrain`.
    """
    if not recipe.finetunes:
        raise ValueError("chat, adapter: expected one of them in fine-tuning, got a recipe for `moe-lc train`")
    model_config(recipe)  # what does not fit the base is refused before conversations are read
    if recipe.chat.sources:
        on_first_rank(lambda: prepare_conversations(recipe), ours.host)
    return pretrain(recipe, ours)
