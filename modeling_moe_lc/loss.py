"""Which positions get logits, and the loss over chunks of tokens for vocabularies whose logits would not fit."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def keep_logits(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """The positions of `[B, T, D]` whose logits are wanted.

    An int keeps the last n (0: all), a vector these positions of every row, `[B, n]` integers those of each row, and a
    `[B, T]` boolean mask the marked ones, flattened.
    """
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:]
    if logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    if logits_to_keep.dim() == 1:
        return hidden_states[:, logits_to_keep]
    return torch.take_along_dim(hidden_states, logits_to_keep[..., None], dim=1)


def chunked_causal_lm_loss(
    hidden_states: torch.Tensor,
    lm_head: nn.Module,
    labels: torch.Tensor,
    chunk_size: int,
    *,
    num_items_in_batch: torch.Tensor | int | None = None,
    shift_labels: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Equals transformers' causal loss on `lm_head(hidden_states)`, holding the logits of `chunk_size` tokens at a time.

    `hidden_states` `[B, T, D]`, `labels` `[B, T]` (shifted here unless `shift_labels` brings them shifted). The logits
    are computed again in the backward pass. The sum is divided by `num_items_in_batch`, or by the number of labels.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    hidden_states, targets = hidden_states.flatten(0, -2), shift_labels.flatten().to(hidden_states.device)

    def chunk_loss(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = lm_head(hidden)  # [chunk, vocabulary]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")

    chunks = zip(hidden_states.split(chunk_size), targets.split(chunk_size), strict=True)
    total = sum(checkpoint(chunk_loss, hidden, target, use_reentrant=False) for hidden, target in chunks)
    items = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return total / items
