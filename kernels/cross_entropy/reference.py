"""Cross-entropy and its gradient in plain torch."""

import torch

from ..dispatch import compute_dtype


def cross_entropy_with_gradient_reference(logits, targets, ignore_index):
    """Arguments and results as in `api.cross_entropy_with_gradient`."""
    wide = torch.log_softmax(logits.to(compute_dtype(logits)), dim=-1)  # [N, V]
    counted = targets != ignore_index
    chosen = targets.where(counted, 0)[:, None]
    nats = -wide.gather(1, chosen)[:, 0].where(counted, 0.0)
    gradient = wide.exp_()
    gradient.scatter_add_(1, chosen, gradient.new_full(chosen.shape, -1.0))
    logits.copy_(gradient.masked_fill_(~counted[:, None], 0.0))
    return nats, logits
