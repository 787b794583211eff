"""CUDA graphs of the parts of a training step.

Small layers are bound by the Python and the driver that launch them, not by their kernels.
"""

import contextlib
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from ..cuda_graph import Captured, Inputs, signature


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
        self.captured: dict[tuple, Captured] = {}
        pool.members.append(self)

    def __call__(self, inputs: Inputs) -> torch.Tensor | None:
        key = signature(inputs)
        if key not in self.seen:
            self.seen.add(key)
            self.pool.make_room()
            return self.call(inputs)
        if key not in self.captured:
            self.captured[key] = self._capture(inputs)
        result = self.captured[key].replay(inputs)
        return None if result is None else result.clone()

    def _capture(self, inputs: Inputs) -> Captured:
        torch.cuda.empty_cache()  # what passes before left would stand beside the graph's own memory
        before = torch.cuda.memory_reserved()
        captured = Captured(self.call, inputs, self.pool.handle, self.within)
        self.pool.bytes += torch.cuda.memory_reserved() - before
        return captured
