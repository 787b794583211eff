"""CUDA graphs of the parts of a training step: what takes a thousand launches is launched once.

Small layers are bound by the Python and the driver that launch them, not by their kernels.
"""

import contextlib
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree


Inputs = dict[str, Any]


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    tensors: list[torch.Tensor]  # where the graph reads its inputs
    result: torch.Tensor | None


class Pool:
    """The memory that some graphs share. `largest`: of a number over all processes that share the model; they must call the
    same graphs with the same shapes, and capture them together, since NCCL exchanges addresses then."""

    def __init__(self, largest: Callable[[int], int] = int) -> None:
        self.largest, self.members = largest, list[Graphs]()
        self._start()

    def _start(self) -> None:
        self.handle, self.bytes = torch.cuda.graph_pool_handle(), 0

    def make_room(self) -> None:
        """Before a pass that is no graph, and may need as much memory as the graphs hold: if there is too little, they are
        dropped, and captured again when they are wanted."""
        free, _ = torch.cuda.mem_get_info()
        idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - self.bytes
        if not self.largest(free + max(0, idle) <= self.bytes):
            return
        for member in self.members:
            member.captured.clear()
        gc.collect()
        torch.cuda.empty_cache()
        self._start()


class Graphs:
    """`call(inputs)`, replayed: inputs of one shape are computed as they are the first time, which compiles and allocates,
    captured as a graph the second time, and replayed from then on.

    `call` must wait for nothing, must find its gradients in the same tensors each time (not set to None), and returns a
    tensor or None. What else it writes, it must write in place. Graphs of one `pool` share their memory, which holds
    nothing from one replay to the next: results are copied. A capture is inside of a `within()`.
    """

    def __init__(
        self,
        call: Callable[[Inputs], torch.Tensor | None],
        pool: Pool,
        within: Callable[[], AbstractContextManager] = contextlib.nullcontext,
    ):
        self.call, self.pool, self.within = call, pool, within
        self.seen: set[tuple] = set()
        self.captured: dict[tuple, _Captured] = {}
        pool.members.append(self)

    def __call__(self, inputs: Inputs) -> torch.Tensor | None:
        leaves, structure = pytree.tree_flatten(inputs)
        shapes = tuple((x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves)
        key = structure, shapes
        if key not in self.seen:
            self.seen.add(key)
            self.pool.make_room()
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
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved()
        with torch.cuda.graph(graph, pool=self.pool.handle, capture_error_mode="thread_local"), self.within():
            result = self.call(pytree.tree_unflatten(own, structure))
        self.pool.bytes += torch.cuda.memory_reserved() - before
        return _Captured(graph, _tensors(own), result)


def _tensors(leaves: list) -> list[torch.Tensor]:
    return [x for x in leaves if isinstance(x, torch.Tensor)]
