"""Loss, bits per byte, routing load and loss by position on held-out text."""

import contextlib
import itertools
import lzma
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from .balance import counting
from .packing import IGNORED, Pack, collate, count_tokens


SCORES, SCORES_ON_CPU = 1 << 31, 1 << 25  # per head that attention may hold in a prefill: tokens of a slice x length


@dataclass(frozen=True)
class Evaluation:
    """Sums over held-out text. `nats`: negative log-likelihood of `predictions` predicted tokens; `tokens`: tokens that
    went through the routers; `counts` int64 [layers, E]: tokens per expert."""

    nats: float
    predictions: int
    tokens: int
    counts: torch.Tensor

    @property
    def loss(self) -> float:
        """Nats per predicted token."""
        return self.nats / self.predictions

    def bits_per_byte(self, size: int) -> float:
        """Bits per byte if the predicted tokens spell `size` bytes."""
        return self.nats / math.log(2.0) / size


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside: evaluation mode and no gradients; afterwards the mode is as it was."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Nats of each label under the logits of the position before it; `logits` [N, V], `labels` [N], returns float32
    [N - 1] with NaN where the label is -100."""
    labels = labels[1:]
    losses = F.cross_entropy(logits[:-1].float(), labels, ignore_index=IGNORED, reduction="none")
    return losses.masked_fill(labels == IGNORED, math.nan)


def evaluate(model: nn.Module, packs: Sequence[Pack], tokens_per_forward: int) -> Evaluation:
    """Evaluates packed documents, each on its own, about `tokens_per_forward` tokens at a time."""
    nats, predictions, tokens = 0.0, 0, 0
    with evaluating(model), counting(model) as counts:
        for batch in _batches(packs, tokens_per_forward):
            inputs = {name: x.to(_device(model)) for name, x in collate(batch).items()}
            labels = inputs.pop("labels")[0]
            losses = token_losses(model(**inputs, use_cache=False).logits[0], labels)
            nats += losses.nansum(dtype=torch.float64).item()
            predictions += int(losses.isfinite().sum())
            tokens += len(labels)
    return Evaluation(nats, predictions, tokens, counts)


def _batches(packs: Sequence[Pack], tokens: int) -> Iterator[list[Pack]]:
    batch: list[Pack] = []
    for pack in packs:
        if batch and count_tokens([*batch, pack]) > tokens:
            yield batch
            batch = []
        batch.append(pack)
    if batch:
        yield batch


def losses_in_one_document(model: nn.Module, input_ids: list[int], slice_length: int) -> torch.Tensor:
    """Nats of each token but the first of one long document, float32 [N - 1]: a prefill in slices through the cache, so
    that memory holds one slice and the cache whatever the length."""
    tokens = torch.tensor(input_ids, device=_device(model))
    losses, cache = [], None
    with evaluating(model):
        for start in range(0, len(tokens) - 1, slice_length):
            piece = tokens[start : start + slice_length]
            output = model(input_ids=piece[None], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            following = tokens[start + 1 : start + 1 + len(piece)]
            losses.append(F.cross_entropy(output.logits[0, : len(following)].float(), following, reduction="none"))
    return torch.cat(losses)


def losses_in_windows(model: nn.Module, input_ids: list[int], length: int) -> torch.Tensor:
    """As `losses_in_one_document`, but no token sees more than `length` - 1 before it, and each beyond them at least
    `length` / 2: that is its loss in the second half of a document of `length` tokens."""
    step = max(1, length // 2)
    losses = [losses_in_one_document(model, input_ids[:length], slice_length(model, length))]
    for start in range(step, len(input_ids) - length + step, step):
        window = input_ids[start : start + length]
        losses.append(losses_in_one_document(model, window, slice_length(model, length))[length - step - 1 :])
    return torch.cat(losses)


def slice_length(model: nn.Module, length: int) -> int:
    """Tokens of a slice of a prefill of `length` tokens."""
    scores = SCORES_ON_CPU if _device(model).type == "cpu" else SCORES
    return max(1, scores // length)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def loss_by_position(model: nn.Module, texts: Sequence[list[int]], trained_length: int) -> dict:
    """Mean loss over ranges of positions of long texts of one length N, each read as one document and in windows of
    `trained_length`: the same tokens with less in front of them, so that what differs does not hang on what they say.

    Returns `texts` (how many), `borders` (0, then N / 64 doubled up to N), and for each range between two borders the nats
    per token in `one_document` and in `windows`.
    """
    length = len(texts[0])
    borders = [0, *(length >> halvings for halvings in range(6, -1, -1))]
    one_document = sum(losses_in_one_document(model, text, slice_length(model, length)).double() for text in texts)
    windows = sum(losses_in_windows(model, text, trained_length).double() for text in texts)
    # losses[i] is of position i + 1: nothing is predicted at position 0
    ranges = [slice(max(0, start - 1), end - 1) for start, end in itertools.pairwise(borders)]
    return {
        "trained_length": trained_length,
        "texts": len(texts),
        "borders": borders,
        "one_document": [one_document[positions].mean().item() / len(texts) for positions in ranges],
        "windows": [windows[positions].mean().item() / len(texts) for positions in ranges],
    }


def xz_bits_per_byte(texts: Sequence[bytes]) -> float:
    """Bits per byte of `xz -9`, each text compressed on its own."""
    return 8.0 * sum(len(lzma.compress(text, preset=9)) for text in texts) / sum(len(text) for text in texts)
