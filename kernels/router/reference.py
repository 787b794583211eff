"""The definition of the router, in torch."""

import torch

from ..dispatch import compute_dtype, without_autocast
from .balance import histogram_range


@without_autocast
def route_reference(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    *,
    num_groups: int = 1,
    topk_group: int = 1,
    renormalize: bool = True,
    scaling: float = 1.0,
    token_mask: torch.Tensor | None = None,
    histogram: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(indices, weights, counts, cutoff) for `logits` [N, E] and `bias` [E]; see `route`."""
    N, E = logits.shape
    scores = logits.to(compute_dtype(logits)).sigmoid()  # [N, E]

    with torch.no_grad():
        biased = scores + bias.to(scores.dtype)
        if topk_group < num_groups:
            biased = _keep_best_groups(biased, num_groups, topk_group)
        # A stable sort puts equal scores in the order of the experts, which topk does not promise.
        ranked, order = biased.sort(dim=-1, descending=True, stable=True)
        # Clones, so that the [N, E] results of the sort are not kept alive by the backward of the gather below.
        indices = order[:, :top_k].clone()  # [N, k]
        cutoff = ranked[:, top_k].clone() if top_k < E else ranked.new_full((N,), float("-inf"))  # [N]

        counted = torch.ones(N, dtype=torch.int64, device=logits.device) if token_mask is None else token_mask.long()
        counts = torch.zeros(E, dtype=torch.int64, device=logits.device)
        counts.scatter_add_(0, indices.flatten(), counted.repeat_interleave(top_k))
        if histogram is not None:
            _add_required_bias(histogram, cutoff.unsqueeze(-1) - scores, bias, counted)

    weights = scores.gather(-1, indices)  # [N, k]
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return indices, weights * scaling, counts, cutoff


def _keep_best_groups(biased: torch.Tensor, num_groups: int, topk_group: int) -> torch.Tensor:
    """Hide the experts of all but the `topk_group` best groups of each token behind -inf."""
    grouped = biased.unflatten(-1, (num_groups, -1))  # [N, groups, E / groups]
    group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)  # [N, groups]
    best = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, :topk_group]
    dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
    # Zero would not do: with a negative bias it beats every expert that is left.
    return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)


def _add_required_bias(
    histogram: torch.Tensor, required: torch.Tensor, bias: torch.Tensor, counted: torch.Tensor
) -> None:
    """Add each expert's `required` bias [N, E] of the `counted` tokens [N] to its row of `histogram` [E, bins]."""
    E, bins = histogram.shape
    low, width = histogram_range(bias, bins)
    index = ((required - low) / width).floor().long().clamp_(0, bins - 1)  # [N, E]
    histogram.scatter_add_(1, index.T, counted.expand(E, -1))
