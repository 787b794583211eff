"""Mixed precision on one device: a model computes with narrow copies of its parameters, which themselves stay wide.

Where several processes share a model, FSDP2 does the same (`processes.shard`), to the bit. Here nothing is gathered or
copied twice, and all is done by plain operations on tensors that stay where they are: a CUDA graph can hold them.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from ..norm import FullPrecision


class _Place(NamedTuple):
    module: nn.Module
    name: str
    wide: nn.Parameter
    narrow: nn.Parameter


class LowPrecision:
    """Copies in `dtype` of all parameters of `model` that are wider, but those that are always in full precision.

    They hold the parameters' values after `refresh`. Inside `computing` the model has them in place of its parameters;
    `collect` adds the gradients of a backward pass to those of the parameters.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        copies: dict[nn.Parameter, nn.Parameter] = {}
        self.places: list[_Place] = []
        for module in model.modules():
            if isinstance(module, FullPrecision):
                continue
            for name, wide in module.named_parameters(recurse=False):
                is_there = isinstance(wide, nn.Parameter)  # packed experts show PEFT projections that are not
                if is_there and wide.dtype.itemsize > dtype.itemsize:
                    if wide not in copies:
                        copies[wide] = nn.Parameter(torch.empty_like(wide, dtype=dtype), wide.requires_grad)
                    self.places.append(_Place(module, name, wide, copies[wide]))
        self.wide, self.narrow = list(copies), list(copies.values())

    @torch.no_grad()
    def refresh(self) -> None:
        """After the parameters have changed."""
        if self.wide:
            torch._foreach_copy_(self.narrow, self.wide)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Backward passes belong inside as well: under activation checkpointing they run the forward again."""
        for module, name, _, narrow in self.places:
            setattr(module, name, narrow)
        try:
            yield
        finally:
            for module, name, wide, _ in self.places:
                setattr(module, name, wide)

    @torch.no_grad()
    def collect(self, *, replace: bool = False) -> None:
        """Moves the gradients of the copies onto those of the parameters, in the precision of these: adds them, or, with
        `replace`, puts them in place of what is there."""
        moved: list[tuple[torch.Tensor, torch.Tensor]] = []
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            if narrow.grad is None:
                if replace and wide.grad is not None:
                    wide.grad.zero_()
            elif wide.grad is None:
                wide.grad = narrow.grad.to(wide.dtype)
            elif replace:
                moved.append((wide.grad, narrow.grad))
            else:
                wide.grad.add_(narrow.grad)
            narrow.grad = None
        if moved:
            torch._foreach_copy_(*map(list, zip(*moved, strict=True)))
