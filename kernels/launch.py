"""Launches without Triton's own lookup, which takes longer than many a kernel."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch


TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))


class Launched:
    """A Triton kernel that finds its compiled form by a key of its own: `kernel[grid](*args, **constants)`.

    A key holds all that Triton compiles for: dtypes and alignment of tensors, what it looks for in whole numbers (being 1,
    a multiple of 16, within 32 bits), and the constants. The first launch of a key goes the ordinary way. Later ones hand
    over addresses: of a tensor Triton would ask the driver whose memory it is.
    Named arguments must be constants or options of the compiler: they are told apart by value.
    """

    def __init__(self, kernel):
        self.kernel = kernel
        self.compiled: dict[tuple, tuple[Any, list[str]]] = {}
        self.is_constant = [parameter.is_constexpr for parameter in kernel.params]

    def __getitem__(self, grid: Sequence[int]) -> Callable:
        # A traced graph holds Triton's own launch.
        return self.kernel[grid] if torch.compiler.is_compiling() else functools.partial(self._launch, grid)

    def _launch(self, grid, *args, **constants) -> None:
        key: list[object] = [torch.cuda.current_device()]
        given = []
        for x, fixed in zip(args, self.is_constant, strict=False):
            if type(x) in TENSORS and x.is_cuda:
                address = x.data_ptr()
                key += x.dtype, address % 16 == 0
                given.append(address)
            else:
                key.append(x if fixed else kind(x))
                given.append(x)
        form = (*key, *constants.items())
        found = self.compiled.get(form)
        if found is None:
            compiled = self.kernel[grid](*args, **constants)
            self.compiled[form] = compiled, self.kernel.arg_names[len(args) :]
            return
        compiled, names = found
        compiled[(*grid, 1, 1)[:3]](*given, *[constants[name] for name in names])


def kind(x) -> object:
    """What a compiled kernel depends on in an argument that is no constant."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, bool) or x is None:
        return x
    if isinstance(x, int):
        return x == 1, x % 16 == 0, -(1 << 31) <= x < 1 << 31, x < 1 << 63
    if isinstance(x, float):
        return float
    if isinstance(x, tuple):
        return tuple(map(kind, x))
    return x.base.dtype, *x.block_shape  # a tensor descriptor


def launched(kernel):
    """Decorates a kernel; under Triton's interpreter there is nothing to look up."""
    return Launched(kernel) if hasattr(kernel, "device_caches") else kernel
