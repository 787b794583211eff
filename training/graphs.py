"""CUDA graphs of the parts of a training step: what takes a thousand launches is launched once.

Small layers are bound by the Python and the driver that launch them, not by their kernels.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree


Inputs = dict[str, Any]


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    tensors: list[torch.Tensor]  # where the graph reads its inputs
    result: torch.Tensor | None


class Graphs:
    """`call(inputs)`, replayed: inputs of one shape are computed as they are the first time, which compiles and allocates,
    captured as a graph the second time, and replayed from then on.

    `call` must wait for nothing, must find its gradients in the same tensors each time (not set to None), and returns a
    tensor or None. What else it writes, it must write in place. Graphs of one `pool` share their memory, which holds
    nothing from one replay to the next: results are copied.
    """

    def __init__(self, call: Callable[[Inputs], torch.Tensor | None], pool: Any):
        self.call, self.pool = call, pool
        self.seen: set[tuple] = set()
        self.captured: dict[tuple, _Captured] = {}

    def __call__(self, inputs: Inputs) -> torch.Tensor | None:
        leaves, structure = pytree.tree_flatten(inputs)
        shapes = tuple((x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves)
        key = structure, shapes
        if key not in self.seen:
            self.seen.add(key)
            return self.call(inputs)
        if key not in self.captured:
            self.captured[key] = self._capture(leaves, structure)
        graph, tensors, result = self.captured[key]
        for here, given in zip(tensors, _tensors(leaves), strict=True):
            here.copy_(given, non_blocking=True)
        graph.replay()
        return None if result is None else result.clone()

    def _capture(self, leaves: list, structure: pytree.TreeSpec) -> _Captured:
        own = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]
        torch.cuda.empty_cache()  # what passes before left would stand beside the graph's own memory
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            result = self.call(pytree.tree_unflatten(own, structure))
        return _Captured(graph, _tensors(own), result)


def _tensors(leaves: list) -> list[torch.Tensor]:
    return [x for x in leaves if isinstance(x, torch.Tensor)]
