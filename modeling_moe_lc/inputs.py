"""What a forward pass takes, checked at the door by shapes alone: nothing here waits for a device."""

from typing import Any

import torch

from .cache import holds_tokens


def check_tokens(input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> None:
    """Raises `ValueError` unless exactly one is given, ids `[B, T]` or embeddings `[B, T, D]`."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("input_ids, inputs_embeds: expected exactly one of them")
    if input_ids is not None and input_ids.dim() != 2:
        raise ValueError(f"input_ids: expected [B, T], got {list(input_ids.shape)}")
    if inputs_embeds is not None and inputs_embeds.dim() != 3:
        raise ValueError(f"inputs_embeds: expected [B, T, D], got {list(inputs_embeds.shape)}")


def check_cache(cache: Any, config) -> None:
    """Raises `ValueError` unless the cache, if any, has a layer for each of the model: it cannot guess the recurrent ones."""
    if cache is None or "linear_attention" not in config.layer_types:
        return
    if len(getattr(cache, "layers", ())) >= config.num_hidden_layers:
        return
    layers = f" of {len(cache.layers)} layers" if hasattr(cache, "layers") else ""
    raise ValueError(
        f"past_key_values: expected DynamicCache(config=model.config) of {config.num_hidden_layers} layers, "
        f"got {type(cache).__name__}{layers}"
    )


def check_attention_mask(mask: torch.Tensor | dict | None, x: torch.Tensor, cache) -> None:
    """Raises `ValueError` unless the mask is None, a dict by kind of layer or `[B, past + T]` for the tokens `x` `[B, T, D]`.

    Recurrent layers can obey no other mask. How many tokens a static cache holds stands on the device: there a mask may
    be longer than `T` by any number, and ends with the new tokens unless they are the first.
    """
    if mask is None or isinstance(mask, dict):
        return
    batch, length, _ = x.shape
    static = cache is not None and cache.is_compileable
    total = length if cache is None or static else cache.get_seq_length() + length
    fits = len(mask.shape) == 2 and mask.shape[0] == batch
    if fits and (mask.shape[1] >= total if static else mask.shape[1] == total):
        return
    expected = f"[{batch}, {total} or more]" if static else f"[{batch}, {total}]"
    raise ValueError(f"attention_mask: expected [B, past + T] = {expected}, got {list(mask.shape)}")


def mask_of_first_tokens(mask: torch.Tensor | dict | None, length: int, cache, layer_types: list[str]):
    """The mask, or where it covers all that an empty static cache has room for, the part `[B, T]` of its first tokens."""
    if not isinstance(mask, torch.Tensor) or cache is None or not cache.is_compileable:
        return mask
    return mask if holds_tokens(cache, layer_types) else mask[:, :length]
