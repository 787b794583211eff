"""A call as a CUDA graph: what takes a thousand launches is launched once."""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _pytree as pytree


Inputs = dict[str, Any]


class Captured:
    """`call(inputs)`, to be replayed with other inputs of the same structure, shapes and dtypes.

    The call must have run before, which compiles kernels, and must wait for nothing. Capturing computes nothing: what the
    call writes in place, each replay writes. `pool`: memory that graphs share; `within`: a context that captures need.
    """

    def __init__(
        self,
        call: Callable[[Inputs], Any],
        inputs: Inputs,
        pool: tuple[int, int] | None = None,
        within: Callable[[], AbstractContextManager] = contextlib.nullcontext,
    ):
        leaves, structure = pytree.tree_flatten(inputs)
        own = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]
        self.tensors = _tensors(own)  # where the graph reads its inputs
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"), within():
            self.result = call(pytree.tree_unflatten(own, structure))

    def replay(self, inputs: Inputs) -> Any:
        """The result, in tensors that the next replay of any graph of the pool writes over."""
        for here, given in zip(self.tensors, _tensors(pytree.tree_leaves(inputs)), strict=True):
            here.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.result


def signature(inputs: Inputs) -> tuple:
    """What must be equal for a replay: structure, shapes and dtypes of tensors, all that is no tensor."""
    leaves, structure = pytree.tree_flatten(inputs)
    return structure, tuple((x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves)


def _tensors(leaves: Sequence) -> list[torch.Tensor]:
    return [x for x in leaves if isinstance(x, torch.Tensor)]
