"""Steps of `generate` with a cache of fixed size, launched as one CUDA graph.

A decoding step is a thousand launches of a few microseconds: from Python it takes ten times as long as on the device.
"""

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache, DynamicCache, StaticCache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.utils import ModelOutput

from .backends import operator_impl
from .cache import addresses, holds_tokens, read_linear_state, write_linear_state
from .cuda_graph import Captured, signature


# Versions of transformers without it drop pictures from the chunks of a prefill, and read again what a static cache holds.
CHUNKS_ARE_WHOLE = hasattr(GenerationMixin, "_supports_mm_encoder_outputs")
RECORDED = ("output_hidden_states", "output_attentions", "output_router_logits")  # a graph returns logits alone


def fixed_size(cache: DynamicCache, config, room: int, batch: int | None = None) -> StaticCache:
    """A cache of fixed size that goes on where `cache` stands, which is left as it is, with room for `room` more tokens.

    A long prompt is read faster, and in less memory, with a `DynamicCache`; decoding is replayed with a `StaticCache`.

    Args:
        cache: filled by a model with `config`, of its text model.
        batch: as many sequences in place of the one in `cache`, all behind the same prompt.

    Raises:
        ValueError: no room; a cache that holds nothing; several sequences to begin with.
    """
    if room < 1:
        raise ValueError(f"room: expected at least 1 token, got {room}")
    if not holds_tokens(cache, config.layer_types):
        raise ValueError("cache: expected one that a forward pass has filled, got an empty one")
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


class Decoding:
    """Where `generate` of our models is not that of transformers."""

    config: Any

    def init_continuous_batching(self, *args, **kwargs) -> NoReturn:
        """Raises `ValueError`, also for what is built on it: `generate_batch` and `continuous_batching_context_manager`."""
        raise ValueError(
            "generate_batch: expected generate, since a recurrent state cannot be rolled back, got continuous batching"
        )

    def _prepare_generation_config(self, generation_config: GenerationConfig | None, **kwargs):
        """A prefill goes by two tokens at least: whether one alone is padding stands on the device, and no decoding step waits
        for that. A static cache is as long as its text asks for, not as the longest before."""
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)  # type: ignore[misc]
        if generation_config.prefill_chunk_size is not None:
            self._check_chunks(generation_config, model_kwargs)
        if generation_config.compile_config is None:
            self._previous_max_cache_length = -1
        return generation_config, model_kwargs

    def _check_chunks(self, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
        generation_config.prefill_chunk_size = max(2, generation_config.prefill_chunk_size)
        if CHUNKS_ARE_WHOLE:
            return
        if model_kwargs.get("pixel_values") is not None:
            raise ValueError(
                "prefill_chunk_size: expected None with pictures, which this version of transformers drops from chunks, "
                f"got {generation_config.prefill_chunk_size}"
            )
        cache = model_kwargs.get("past_key_values")
        if cache is not None and holds_tokens(cache, self.config.get_text_config().layer_types):
            generation_config.prefill_chunk_size = None  # it would read again what the cache holds

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        """As in transformers, but a given cache of fixed size that would overflow is refused: on a GPU that would end the process."""
        cache = model_kwargs.get("past_key_values")
        if isinstance(cache, Cache) and cache.is_compileable and cache.get_max_length() < max_cache_length:
            raise ValueError(
                f"past_key_values: expected room for {max_cache_length} tokens, prompt and new ones, got {cache.get_max_length()}"
            )
        return super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    def _get_static_cache_init_shape(self) -> None:
        """None: latents are cached, which have no heads for transformers to tell their shape by."""

    def get_compiled_call(self, compile_config) -> Callable:
        """What `generate` calls for a token where the cache has a fixed size, on a GPU: the model as one CUDA graph; what
        torch.compile makes of it where a `compile_config` is given, or the model cannot be replayed."""
        if compile_config is None and is_replayable(self):  # type: ignore[arg-type]
            return DecodingStep(self)  # type: ignore[arg-type]
        return super().get_compiled_call(compile_config)  # type: ignore[misc]


class DecodingStep:
    """`model(input_ids, past_key_values=cache, ...)` for one token after another.

    The first step is computed as it is, which compiles kernels; the second one is captured and, like those after it, replayed.
    What differs is computed as it is: several tokens (a prefill), what is to be recorded, a cache in the memory of the host,
    what waited for the device in the step before, which no graph can, and all steps whose cache or inputs are not where and
    what they were, such as those of beams.
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
            outputs, waited = watched(lambda: self.model(past_key_values=past_key_values, **inputs))
            self.key, self.graph, self.output = None if waited else key, None, type(outputs)
            return outputs
        if self.graph is None:
            self.graph = Captured(lambda own: self.model(past_key_values=past_key_values, **own).logits, inputs)
        logits = self.graph.replay(inputs).clone()  # [B, 1, vocabulary]
        return self.output(logits=logits, past_key_values=past_key_values)


def _is_one_token(inputs: dict[str, Any]) -> bool:
    ids = inputs.get("input_ids")
    return isinstance(ids, torch.Tensor) and ids.shape[1] == 1 and not any(inputs.get(name) for name in RECORDED)


def watched(call: Callable[[], Any]) -> tuple[Any, bool]:
    """The result of a call, and whether it waited for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            result = call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    messages = [str(one.message) for one in found]
    for one, message in zip(found, messages, strict=True):
        if not message.startswith(("called a synchronizing CUDA operation", "Synchronization debug mode")):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return result, any("synchronizing CUDA operation" in message for message in messages)


def is_replayable(model: torch.nn.Module) -> bool:
    """Whether all of `model` is on one CUDA device, none of it shared with other processes, and a step is what kernels do alone:
    the references wait for the device, hooks of others would not be called, and compiled code may hold graphs of its own."""
    if getattr(model, "_device_mesh", None) is not None:  # tensor or expert parallelism
        return False
    if operator_impl(model.config.get_text_config()) == "reference" or _is_compiled(model) or _has_hooks(model):
        return False
    return _is_on_one_gpu(model)


def _is_on_one_gpu(model: torch.nn.Module) -> bool:
    tensors = (*model.parameters(), *model.buffers())
    devices = {tensor.device for tensor in tensors}
    plain = all(type(tensor.data) is torch.Tensor for tensor in tensors)
    return len(devices) == 1 and devices.pop().type == "cuda" and plain


def _is_compiled(model: torch.nn.Module) -> bool:
    return model._compiled_call_impl is not None or hasattr(model.forward, "_torchdynamo_orig_callable")


def _has_hooks(model: torch.nn.Module) -> bool:
    """But those by which transformers records hidden states: steps that record are not replayed."""
    return any(
        not getattr(hook, "__module__", "").startswith("transformers.utils.output_capturing")
        for module in model.modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    )
