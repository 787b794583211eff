"""The loss on held-out documents, over all processes, packed and split as in training."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from ..kernels.router import max_violation
from .balance import counting
from .batches import Batches
from .chat_shards import ChatShards
from .evaluate import evaluating
from .media_shards import MediaShards, open_shards
from .metrics import DEAD
from .mixture import StageData
from .processes import Processes
from .recipe import Recipe
from .shards import TokenShards


BY_POSITION, TEXTS = 4, 8  # times the length of a stage: so long, and so many, texts give its loss by position


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
    """`losses`: nats per predicted token of each folder of `data`, by its name; `loss`: their mean, weighted as in training;
    with experts, their balance over all that was read, in each MoE layer: `max_violation` and `dead_experts`.

    At most `data.validation_tokens` of a folder are read, in whole steps, and at least one step.
    """
    weights, losses = recipe.mixture(stage), {}
    with chunked_evaluation(model), counting(model) as counts:
        for name, documents in data.items():
            available = int(TokenShards(recipe.data.folders[name], documents.split).lengths.sum())
            steps = max(1, min(recipe.data.validation_tokens, available) // recipe.step_tokens(stage))
            sums = torch.zeros(2, dtype=torch.float64, device=processes.device)  # nats, predictions
            for batch in itertools.chain.from_iterable(batches.steps(documents, 0, steps)):
                sums[0] += batch.nats(model(**batch.inputs).loss)
                sums[1] += batch.predictions
            processes.sum(sums)
            nats, predictions = sums.tolist()
            losses[name] = nats / predictions if predictions else math.nan
    share = {name: weights[recipe.data.folders[name]] for name in losses}
    mean = sum(losses[name] * share[name] for name in losses) / sum(share.values())
    return {"loss": mean, "losses": losses} | _balance(counts.to(processes.device), processes)


def _balance(counts: torch.Tensor, processes: Processes) -> dict:
    """Of `counts` int64 [L, E] of this process, added to those of the others."""
    if not counts.numel():
        return {}
    processes.sum(counts)
    loads = counts.double()
    dead = (loads < DEAD * loads.mean(-1, keepdim=True)).sum(-1)
    return {"max_violation": max_violation(counts).tolist(), "dead_experts": dead.tolist()}


def long_texts(recipe: Recipe, stage: int) -> list[list[int]]:
    """Held-out tokens of the first folder of a stage that holds text alone, documents end to end, each text BY_POSITION
    times the stage's length: as many as `data.validation_tokens` hold, TEXTS at most; if those are too few, one."""
    wanted = BY_POSITION * recipe.stages[stage].sequence_length
    most = min(TEXTS, max(1, recipe.data.validation_tokens // wanted))
    folders = (open_shards(folder, recipe.data.validation_split) for folder in recipe.mixture(stage))
    shards = next((one for one in folders if not isinstance(one, (MediaShards, ChatShards))), None)
    if shards is None:
        return []
    documents = (shards.document(i).tolist() for i in range(len(shards)))
    tokens = list(itertools.islice(itertools.chain.from_iterable(documents), most * wanted))
    return [tokens[end - wanted : end] for end in range(wanted, len(tokens) + 1, wanted)]


@contextlib.contextmanager
def chunked_evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation, but the head computes its loss over chunks of tokens as in training: all logits would not fit. Eager:
    what a compiled layer runs without gradients would be compiled once more."""
    with evaluating(model), torch.compiler.set_stance("force_eager"):
        model.training = True  # of the head alone; the layers stay in evaluation
        yield
