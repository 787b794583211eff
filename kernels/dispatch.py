"""Which implementation of an operator runs, and in which precision."""

import functools
import importlib.util
import os
from collections.abc import Callable

import torch


IMPLEMENTATIONS = ("auto", "triton", "reference")
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
# What stands for a fused implementation while torch traces a graph, by the name of the operator. Empty until
# `custom_ops.register_operators`, which exported remote code does without: its names hold for the whole process.
TRACED: dict[str, Callable] = {}


def choose(impl: str, tensor: torch.Tensor, *, triton: bool) -> str:
    """Return "triton" or "reference" for the caller's `impl`.

    "auto" takes Triton when the operator has it (`triton=True`), it is installed, and `tensor` is on CUDA. An explicit
    "triton" never falls back: ValueError says why it cannot run. On a CPU it runs under Triton's interpreter
    (TRITON_INTERPRET=1).
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: expected one of {IMPLEMENTATIONS}, got {impl!r}")
    if impl == "auto":
        return "triton" if triton and tensor.is_cuda and TRITON_INSTALLED else "reference"
    if impl == "triton" and not triton:
        raise ValueError("impl: 'triton' was asked for, but this operator has no Triton kernel yet")
    if impl == "triton" and not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"impl: 'triton' needs a CUDA tensor, or TRITON_INTERPRET=1 in the environment; got one on {tensor.device}"
        )
    return impl


def traceable(name: str, fused: Callable) -> Callable:
    """`fused`, or under `torch.compile` and `torch.export` the operator `name` if there is one: a single node of the graph.

    Not in eager mode, where an operator costs 20 us a call.
    """
    return TRACED.get(name, fused) if torch.compiler.is_compiling() else fused


def on_device_of(tensor: torch.Tensor) -> torch.cuda.device:
    """The context in which Triton launches where `tensor` is: it takes the current device, whatever its arguments are on."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)


def for_descriptors(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, with the strides of its shape also where a side is 1, and at an address that the copy engine takes."""
    tensor = tensor.contiguous().flatten().view(tensor.shape)
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The precision a reference computes in: float64 for float64 inputs, float32 for all others."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def without_autocast(fn: Callable) -> Callable:
    """Run `fn` with autocast off on the device of its first argument, a tensor or a list of tensors.

    Under autocast a matmul of two float32 tensors runs in bfloat16: a reference that computes "in FP32" would not.
    """

    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        first = args[0] if args else next(iter(kwargs.values()))
        tensor = first[0] if isinstance(first, (list, tuple)) else first
        with torch.autocast(tensor.device.type, enabled=False):
            return fn(*args, **kwargs)

    return wrapped
