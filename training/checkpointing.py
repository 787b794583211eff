"""Activation checkpointing: what a layer computed is computed again for its backward pass, but for attention.

Attention over long sequences costs more than all the rest of a layer, and what it needs for its backward pass is small:
its output and a number for each token and head.
"""

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel


aten = torch.ops.aten
KEPT = frozenset(
    {
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._flash_attention_forward.default,
    }
)


def checkpoint_activations(model: PreTrainedModel, *, keep_attention: bool = True, random: bool = False) -> None:
    """From now on every layer of `model` keeps in a training forward its inputs and, `keep_attention`, what softmax
    attention gave. Layers that go through torch.compile decide for themselves: without it.

    Unless layers are `random` (dropout), no state of a generator is looked at, which a CUDA graph could not.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
    if keep_attention:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    # The name that transformers is moving to, where it has it.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable(options)


def _policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
