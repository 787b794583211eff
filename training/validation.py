"""The loss on held-out documents, over all processes, packed and split as in training."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from .batches import Batches
from .chat_shards import ChatShards
from .evaluate import evaluating
from .media_shards import MediaShards, open_shards
from .mixture import StageData
from .processes import Processes
from .recipe import Recipe
from .shards import TokenShards


BY_POSITION = 4  # times the length of a stage: the text whose loss by position is measured at its end


def held_out(recipe: Recipe, stage: int) -> dict[str, StageData]:
    """The validation documents of each folder of a stage, by its name in the recipe, in packs of the stage's length.

    Raises:
        ValueError: a folder without any, or without such a split.
    """
    settings, weights = recipe.stages[stage], recipe.mixture(stage)
    return {
        name: StageData(
            {folder: 1.0},
            sequence_length=settings.sequence_length,
            sequences_per_step=recipe.sequences_per_step(stage),
            split=recipe.data.validation_split,
        )
        for name, folder in recipe.data.folders.items()
        if folder in weights
    }


def validation_losses(
    model: nn.Module,
    recipe: Recipe,
    stage: int,
    data: Mapping[str, StageData],
    batches: Batches,
    processes: Processes,
) -> dict:
    """`losses`: nats per predicted token of each folder of `data`, by its name; `loss`: their mean, weighted as in training.

    At most `data.validation_tokens` of a folder are read, in whole steps, and at least one step.
    """
    weights, losses = recipe.mixture(stage), {}
    for name, documents in data.items():
        available = int(TokenShards(recipe.data.folders[name], documents.split).lengths.sum())
        steps = max(1, min(recipe.data.validation_tokens, available) // recipe.step_tokens(stage))
        sums = torch.zeros(2, dtype=torch.float64, device=processes.device)  # nats, predictions
        with chunked_evaluation(model):
            for batch in itertools.chain.from_iterable(batches.steps(documents, 0, steps)):
                sums[0] += batch.nats(model(**batch.inputs).loss)
                sums[1] += batch.predictions
        processes.sum(sums)
        nats, predictions = sums.tolist()
        losses[name] = nats / predictions
    share = {name: weights[recipe.data.folders[name]] for name in losses}
    mean = sum(losses[name] * share[name] for name in losses) / sum(share.values())
    return {"loss": mean, "losses": losses}


def long_text(recipe: Recipe, stage: int) -> list[int] | None:
    """Held-out tokens of the first folder of a stage that holds text alone, documents end to end, BY_POSITION times its
    length; None: too few."""
    wanted = BY_POSITION * recipe.stages[stage].sequence_length
    folders = (open_shards(folder, recipe.data.validation_split) for folder in recipe.mixture(stage))
    shards = next((one for one in folders if not isinstance(one, (MediaShards, ChatShards))), None)
    if shards is None:
        return None
    documents = (shards.document(i).tolist() for i in range(len(shards)))
    tokens = list(itertools.islice(itertools.chain.from_iterable(documents), wanted))
    return tokens if len(tokens) == wanted else None


@contextlib.contextmanager
def chunked_evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation, but the head computes its loss over chunks of tokens as in training: all logits would not fit. Eager:
    what a compiled layer runs without gradients would be compiled once more."""
    with evaluating(model), torch.compiler.set_stance("force_eager"):
        model.training = True  # of the head alone; the layers stay in evaluation
        yield
