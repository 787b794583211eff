"""Logits of the router: a matrix product in full precision, through tensor cores where that changes nothing."""

import torch
from torch.nn import functional as F


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [N, D] and `weight` [E, D] -> `x @ weight.T` [N, E], computed and given in FP32 at least.

    The product of two BF16 numbers is exact in FP32, and tensor cores sum in nearly FP32 (relative error of the logits on an
    H200 below 1e-6 for D 1,024, 8e-6 for 7,168): BF16 on CUDA need not be widened. In the backward pass the gradient of the logits goes in as two BF16 parts, which together hold 16 of its 24 bits; those
    of `x` and `weight` are rounded to 8.
    """
    with torch.autocast(x.device.type, enabled=False):
        if (
            x.is_cuda
            and x.dtype == weight.dtype == torch.bfloat16
            and type(weight) in (torch.Tensor, torch.nn.Parameter)
        ):
            return _WideProduct.apply(x, weight)
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(dtype), weight.to(dtype))


class _WideProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return wide_product(x, weight.mT)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_logits):
        x, weight = ctx.saved_tensors
        return gradients(d_logits, x, weight, ctx.needs_input_grad)


def gradients(d_logits, x, weight, wanted=(True, True), product=None):
    """Of `x` and `weight`, in their dtype, from that of the logits `[N, E]` in FP32."""
    product = wide_product if product is None else product
    high = d_logits.to(x.dtype)
    parts = torch.cat([high, (d_logits - high).to(x.dtype)], dim=1)  # [N, 2 E]
    dx = parts @ torch.cat([weight, weight]) if wanted[0] else None
    if not wanted[1]:
        return dx, None
    by_part = product(parts.mT, x).unflatten(0, (2, -1))  # [2, E, D]
    return dx, by_part.sum(0).to(weight.dtype)


def wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` of BF16 matrices on CUDA, not rounded from FP32."""
    return torch.mm(a, b, out_dtype=torch.float32)
