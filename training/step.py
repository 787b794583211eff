"""What an optimiser step is made of: forward and backward of micro-batches, the update, the balancing of the routers."""

import contextlib
import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..router import update_router_bias
from .graphs import Graphs, Pool
from .low_precision import LowPrecision
from .muon import Muon
from .optim import clip_grad_norm, rate_on_device, set_learning_rate
from .processes import Processes, captured_whole


class Step:
    """The parts of a step of `model`, in this order: `backward` for each micro-batch, `update`, `balance`.

    With `graphs` each becomes a CUDA graph; `forget` them when the shape of the batches changes for good. `precision` has
    been refreshed, and is again after each update.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        processes: Processes,
        precision: LowPrecision,
        *,
        clip_norm: float | None,
        graphs: bool,
    ):
        self.model, self.optimizer, self.processes, self.precision = model, optimizer, processes, precision
        self.clip_norm, self.graphs = float("inf") if clip_norm is None else clip_norm, graphs
        self._replayed: dict[str, Callable[[dict[str, Any]], Any]] = {}
        narrowed = set(precision.wide)
        self.exact = [parameter for parameter in model.parameters() if parameter not in narrowed]
        self.is_first = True  # of the micro-batches of a step
        self.forget()

    def forget(self) -> None:
        """Makes room for the graphs of other shapes, and lets the group of the processes end: NCCL waits for graphs."""
        self._replayed = {}
        gc.collect()  # graphs refer to their step
        self._replayed = {
            "backward": self._backward,
            "update": self._update,
            "balance": self._balance,
        }
        if not self.graphs:
            return
        pool, within = Pool(self.processes.largest), functools.partial(captured_whole, self.model)
        for name, part in self._replayed.items():
            if name != "update" or isinstance(self.optimizer, Muon):  # torch's own want to know before they are made
                self._replayed[name] = Graphs(part, pool, within)

    def backward(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Adds the gradients of a micro-batch; returns its loss."""
        loss = self._replayed["backward"]({"is_first": self.is_first, **inputs})
        self.is_first = False
        return loss

    def update(self, rate: float) -> torch.Tensor:
        """Of all parameters, by their gradients, which are gone afterwards; returns the norm of these."""
        set_learning_rate(self.optimizer, rate)
        self.is_first = True
        # Filled on the device: a copy of a number would wait for all that the device has still to do.
        return self._replayed["update"]({"rate": torch.full((), rate, device=self.processes.device)})

    def balance(self) -> None:
        """Moves the routers' biases, by the pooled statistics of the step, which are gone afterwards."""
        self._replayed["balance"]({})

    def _backward(self, inputs: dict[str, Any]) -> torch.Tensor:
        inputs = dict(inputs)
        # Where gradients stay in their place, those of the step before are still there.
        replace = inputs.pop("is_first") and self.graphs
        with self.precision.computing():
            loss = self.model(**inputs).loss
            # The losses of the processes are parts of a sum, and FSDP2 takes the mean of their gradients.
            (loss * self.processes.count).backward()
        self.precision.collect(replace=replace)
        return loss.detach()

    def _update(self, inputs: dict[str, Any]) -> torch.Tensor:
        norm = clip_grad_norm(self.model.parameters(), self.clip_norm)
        replayable = self.graphs and isinstance(self.optimizer, Muon)
        with rate_on_device(self.optimizer, inputs["rate"]) if replayable else contextlib.nullcontext():
            self.optimizer.step()
        if self.graphs:
            if exact := [parameter.grad for parameter in self.exact if parameter.grad is not None]:
                torch._foreach_zero_(exact)
        else:
            self.optimizer.zero_grad()
        self.precision.refresh()
        return norm

    def _balance(self, inputs: dict[str, Any]) -> None:
        update_router_bias(self.model, self.processes.sum)
