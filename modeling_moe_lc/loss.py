"""Which positions get logits, and the loss over chunks of tokens for vocabularies whose logits would not fit."""

import torch
from torch import nn
from torch.nn import functional as F

from .kernels.cross_entropy import cross_entropy_with_gradient


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


@torch.compiler.disable
def chunked_causal_lm_loss(
    hidden_states: torch.Tensor,
    lm_head: nn.Module,
    labels: torch.Tensor,
    chunk_size: int,
    *,
    num_items_in_batch: torch.Tensor | int | None = None,
    shift_labels: torch.Tensor | None = None,
    ignore_index: int = -100,
    impl: str = "auto",
) -> torch.Tensor:
    """Equals transformers' causal loss on `lm_head(hidden_states)`, holding the logits of `chunk_size` tokens at a time.

    `hidden_states` `[B, T, D]`, `labels` `[B, T]` (shifted here unless `shift_labels` brings them shifted). The gradients
    of the sum are computed with it, chunk by chunk, so that no logits are kept or computed twice: beside the gradient of
    `hidden_states` there is one of each parameter of the head, in FP32. The sum is divided by `num_items_in_batch`, or by
    the number of labels. Without any the loss is 0, where transformers' is NaN; the gradients are 0 in both.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    hidden_states, targets = hidden_states.flatten(0, -2), shift_labels.flatten().to(hidden_states.device)
    parameters = [parameter for parameter in lm_head.parameters() if parameter.requires_grad]
    learns = torch.is_grad_enabled()  # inside of a function of autograd it never is
    total = _SummedLoss.apply(hidden_states, targets, lm_head, chunk_size, ignore_index, impl, learns, *parameters)
    items = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return total / (items.where(items != 0, 1) if isinstance(items, torch.Tensor) else items or 1)


class _SummedLoss(torch.autograd.Function):
    """Nats of all targets; its gradients are there before the backward pass, which only scales them."""

    @staticmethod
    def forward(ctx, hidden_states, targets, lm_head, chunk_size, ignore_index, impl, learns, *parameters):
        wanted = parameters if learns and any(ctx.needs_input_grad) else None
        nats, by_hidden, by_parameter = [], [], [None] * len(parameters)
        for hidden, target in zip(hidden_states.split(chunk_size), targets.split(chunk_size), strict=True):
            loss, gradients = _loss_of_chunk(hidden, target, lm_head, ignore_index, impl, wanted)
            nats.append(loss)
            if gradients:
                d_hidden, *others = gradients
                by_hidden.append(d_hidden)
                by_parameter = [_plus(total, d) for total, d in zip(by_parameter, others, strict=True)]
        if wanted is not None:
            ctx.save_for_backward(torch.cat(by_hidden), *by_parameter)
            ctx.dtypes = [parameter.dtype for parameter in parameters]
        return torch.stack(nats).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, scale):
        by_hidden, *by_parameter = ctx.saved_tensors
        scaled = ((scale * d).to(dtype) for d, dtype in zip(by_parameter, ctx.dtypes, strict=True))
        return (scale * by_hidden).to(by_hidden.dtype), *6 * [None], *scaled


def _loss_of_chunk(hidden, target, lm_head, ignore_index, impl, wanted):
    """The sum of the losses and its gradients by `hidden` and by the parameters `wanted`, or none if that is None.

    A function of its own, so that the logits are gone before those of the next chunk come.
    """
    hidden = hidden.detach().requires_grad_()
    with torch.set_grad_enabled(wanted is not None):
        logits = lm_head(hidden)  # [chunk, vocabulary]
    loss, gradient = cross_entropy_with_gradient(logits.detach(), target, ignore_index=ignore_index, impl=impl)
    gradients = () if wanted is None else torch.autograd.grad(logits, [hidden, *wanted], gradient)
    return loss.sum(), gradients


def _plus(total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
    """Sums over chunks need more digits than BF16 has."""
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return wide if total is None else total.add_(wide)
