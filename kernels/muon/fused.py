"""Muon's elements on a GPU: one launch before the matrix products and one after them, both bound by memory."""

import torch
import triton
import triton.language as tl

from ..dispatch import on_device_of
from ..launch import launched


BLOCK = 2048


@triton.jit
def place_of(inner, BLOCK: tl.constexpr):
    """The matrix of this program, and its elements of it."""
    blocks = tl.cdiv(inner, BLOCK)
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    return (tl.program_id(0) // blocks).to(tl.int64), i, i < inner


@launched
@triton.jit(do_not_specialize=("inner",))
def muon_kernel_direction(
    gradient, momentum, out,  # [N, inner], rows `..._stride` apart
    inner, gradient_stride, momentum_stride, out_stride,
    BETA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    matrix, i, there = place_of(inner, BLOCK)
    g = tl.load(gradient + matrix * gradient_stride + i, mask=there, other=0.0)
    place = momentum + matrix * momentum_stride + i
    m = tl.load(place, mask=there, other=0.0)
    m += (g - m) * (1.0 - BETA)
    tl.store(place, m, mask=there)
    direction = g + m * (BETA / (1.0 - BETA))
    tl.store(out + matrix * out_stride + i, direction.to(out.dtype.element_ty), mask=there)


@launched
@triton.jit(do_not_specialize=("inner",))
def muon_kernel_descend(
    parameter, update,  # [N, inner]
    lr,  # a number, or where one is (ON_DEVICE)
    inner, parameter_stride, update_stride, weight_decay,
    ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    matrix, i, there = place_of(inner, BLOCK)
    if ON_DEVICE:
        rate = tl.load(lr)
    else:
        rate = lr
    place = parameter + matrix * parameter_stride + i
    p = tl.load(place, mask=there, other=0.0)
    u = tl.load(update + matrix * update_stride + i, mask=there, other=0.0).to(tl.float32)
    tl.store(place, p * (1.0 - rate * weight_decay) - rate * u, mask=there)


def _launch(kernel, tensors: tuple[torch.Tensor, ...], *rest, **constants) -> None:
    """[N, R, C] as N rows, which stay where they are."""
    count, inner = len(tensors[0]), tensors[0][0].numel() if len(tensors[0]) else 0
    if inner:
        scalars, after = rest
        strides = (tensor.stride(0) for tensor in tensors)
        grid = (count * triton.cdiv(inner, BLOCK),)
        with on_device_of(tensors[0]):
            kernel[grid](*tensors, *scalars, inner, *strides, *after, **constants, BLOCK=BLOCK, num_warps=4)


def muon_direction_fused(gradient, momentum, out, *, beta):
    """Arguments as in `api.muon_direction`."""
    _launch(muon_kernel_direction, (gradient, momentum, out), (), (), BETA=beta)


def muon_descend_fused(parameter, update, *, lr, weight_decay):
    """Arguments as in `api.muon_descend`."""
    on_device = isinstance(lr, torch.Tensor)
    _launch(muon_kernel_descend, (parameter, update), (lr,), (float(weight_decay),), ON_DEVICE=on_device)
