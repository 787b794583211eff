"""Recurrent state in transformers' stock caches, the same way in every supported version.

A KDA layer keeps two tensors: the last inputs of its convolutions `[B, 3 * H * K, W - 1]` (q, k and v side by side) and
its FP32 state `[B, H, K, V]`. Both live at fixed addresses, so that decoding can be captured in a CUDA graph.
"""

import torch


def read_linear_state(cache, layer_idx: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The convolution inputs and the recurrent state of a layer, `(None, None)` before the first token."""
    if cache is None or not cache.has_previous_state(layer_idx):
        return None, None
    layer = cache.layers[layer_idx]
    return layer.conv_states[0], layer.recurrent_states[0]


def write_linear_state(cache, layer_idx: int, conv: torch.Tensor, state: torch.Tensor) -> None:
    """Stores both in place, without their graph; a `state` that already is the cached tensor is not copied."""
    cache.update_conv_state(conv.detach(), layer_idx, conv_kernel_size=conv.shape[-1])
    layer = cache.layers[layer_idx]
    if state is not layer.recurrent_states[0]:
        cache.update_recurrent_state(state.detach(), layer_idx)


def holds_tokens(cache, layer_types: list[str]) -> bool:
    """Whether anything was put into the cache, without a wait for the device."""
    if "linear_attention" in layer_types:
        return cache.has_previous_state(layer_types.index("linear_attention"))
    return cache.is_initialized if cache.is_compileable else cache.get_seq_length() > 0


def addresses(cache) -> tuple[int, ...]:
    """Where the tensors of a cache of fixed size are: a beam search, for one, puts others in their place."""
    found = []
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):
            found += [layer.conv_states[0], layer.recurrent_states[0]]
        else:
            found += [layer.keys, layer.values]
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in found)
