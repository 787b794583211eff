"""Steps of `generate` with a cache of fixed size, launched as one CUDA graph.

A decoding step is a thousand launches of a few microseconds: from Python it takes ten times as long as on the device.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, StaticCache
from transformers.utils import ModelOutput

from .cache import addresses, read_linear_state, write_linear_state
from .cuda_graph import Captured, signature


RECORDED = ("output_hidden_states", "output_attentions", "output_router_logits")  # a graph returns logits alone


def fixed_size(cache: DynamicCache, config, room: int, batch: int | None = None) -> StaticCache:
    """A cache of fixed size that goes on where `cache` stands, which is left as it is, with room for `room` more tokens.

    A long prompt is read faster, and in less memory, with a `DynamicCache`; decoding is replayed with a `StaticCache`.

    Args:
        cache: filled by a model with `config`, of its text model.
        batch: as many sequences in place of the one in `cache`, all behind the same prompt.

    Raises:
        ValueError: no room; several sequences to begin with.
    """
    if room < 1:
        raise ValueError(f"room: expected at least 1 token, got {room}")
    fixed = StaticCache(config=config, max_cache_len=cache.get_seq_length() + room)
    for i, kind in enumerate(config.layer_types):
        if kind == "linear_attention":
            conv, state = (_rows(x, batch) for x in read_linear_state(cache, i))
            write_linear_state(fixed, i, conv, state)
        else:
            fixed.update(_rows(cache.layers[i].keys, batch), _rows(cache.layers[i].values, batch), i)
    return fixed


def _rows(x: torch.Tensor, batch: int | None) -> torch.Tensor:
    if batch is None:
        return x
    if len(x) != 1:
        raise ValueError(f"batch: expected a cache of one sequence to repeat, got one of {len(x)}")
    return x.expand(batch, *x.shape[1:])


class DecodingStep:
    """`model(input_ids, past_key_values=cache, ...)` for one token after another.

    The first step is computed as it is, which compiles kernels; the second one is captured and, like those after it, replayed.
    What differs is computed as it is: several tokens (a prefill), what is to be recorded, a cache in the memory of the host, and
    all steps whose cache or inputs are not where and what they were, such as those of beams.
    """

    def __init__(self, model: Callable[..., ModelOutput]):
        self.model = model
        self.key: tuple | None = None  # of the step before
        self.graph: Captured | None = None
        self.output: type[ModelOutput] = ModelOutput

    def __call__(self, *, past_key_values: Cache, **inputs: Any) -> ModelOutput:
        if past_key_values.offloading or not _is_one_token(inputs):
            return self.model(past_key_values=past_key_values, **inputs)
        key = (id(past_key_values), addresses(past_key_values), *signature(inputs))
        if key != self.key:
            self.key, self.graph = key, None
            outputs = self.model(past_key_values=past_key_values, **inputs)
            self.output = type(outputs)
            return outputs
        if self.graph is None:
            self.graph = Captured(lambda own: self.model(past_key_values=past_key_values, **own).logits, inputs)
        logits = self.graph.replay(inputs).clone()  # [B, 1, vocabulary]
        return self.output(logits=logits, past_key_values=past_key_values)


def _is_one_token(inputs: dict[str, Any]) -> bool:
    ids = inputs.get("input_ids")
    return isinstance(ids, torch.Tensor) and ids.shape[1] == 1 and not any(inputs.get(name) for name in RECORDED)


def is_replayable(model: torch.nn.Module) -> bool:
    """Whether all of `model` is on one CUDA device, and none of it is shared with other processes."""
    if getattr(model, "_device_mesh", None) is not None:  # tensor or expert parallelism
        return False
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    plain = all(type(tensor.data) is torch.Tensor for tensor in model.parameters())
    return len(devices) == 1 and devices.pop().type == "cuda" and plain
