"""Ctrl-C and SIGTERM end a run between two steps, on all processes in the same one."""

import signal
from types import FrameType
from typing import Any, Self

import torch
from torch import distributed as dist


class Interruptible:
    """Inside the `with`, the first Ctrl-C and every SIGTERM only set a flag, which the loop polls at the end of a step.

        with Interruptible() as interrupt:
            for step in ...:
                ...
                if interrupt.requested():
                    checkpointer.save(..., wait=True)
                    break

    The second Ctrl-C raises KeyboardInterrupt at once. Entered by every process, in its main thread, after
    `init_process_group` where there is one. Under torchrun there are 30 seconds from the signal to SIGKILL: long steps
    need checkpoints in between all the more.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {}
        self._group: dist.ProcessGroup | None = None

    def __enter__(self) -> Self:
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")  # on the CPU: polling must not wait for the GPU
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self) -> bool:
        """Whether any process was asked to stop; the same answer on all, so all must ask, in the same step."""
        if self._group is None:
            return self.received is not None
        flag = torch.tensor(int(self.received is not None))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt
