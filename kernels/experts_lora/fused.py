"""The expert MLPs with low-rank updates on a GPU: the kernels of `experts`, and low-rank products over the same rows.

Pairs of token and slot are sorted once; every product, base or low-rank, runs over the same tiles of rows. Pre-activations
[pairs, 2I] are kept for the backward pass where KEEP_BYTES hold them. Projections in MXFP4 are dequantised tile by tile in
registers, as in `mxfp4`. One letter more than in `experts`: r, the rank, padded to a multiple of 16.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ..dispatch import for_descriptors, on_device_of
from ..experts.fused import Call, keeps, precision
from ..experts.fused_rows import (
    experts_bwd_kernel_glu,
    experts_bwd_kernel_inner,
    experts_bwd_kernel_router,
    experts_fwd_kernel_glu,
    experts_fwd_kernel_outputs,
)
from ..experts.fused_sort import Routing
from ..experts.fused_tiles import Tile
from ..experts.fused_weights import launch_weights
from ..mxfp4.fused_experts import PackedCall
from .fused_add import experts_lora_kernel_add


RANKS = 16  # ranks are padded to a multiple of it: rows of 16 bytes, steps of a product


class Factors(NamedTuple):
    """One projection's update, padded, contiguous and in the dtype of x. `paired`: rows g_0 u_0 g_1 u_1 ... of b."""

    a: torch.Tensor  # [E, r, in]
    b: torch.Tensor  # [E, out, r]

    @classmethod
    def of(cls, a, b, dtype: torch.dtype, *, paired: bool) -> "Factors":
        padding = -a.shape[1] % RANKS
        a, b = F.pad(a.to(dtype), (0, 0, 0, padding)), F.pad(b.to(dtype), (0, padding))
        return cls(for_descriptors(a), for_descriptors(pair(b) if paired else b))

    @property
    def a_transposed(self) -> torch.Tensor:
        return for_descriptors(self.a.mT)

    @property
    def b_transposed(self) -> torch.Tensor:
        return for_descriptors(self.b.mT)


def pair(b: torch.Tensor) -> torch.Tensor:
    """[E, 2I, r], gate rows first -> the gate and the up row of a channel are neighbours."""
    return b.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def unpair(b: torch.Tensor) -> torch.Tensor:
    return b.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


class Rows:
    """Products with low-rank factors over the sorted rows of a call."""

    def __init__(self, call: Call, routing: Routing):
        self.call, self.routing = call, routing
        full = call.x.dtype == torch.float32
        self.narrow = Tile(call.BM, 64, 32, 4, 1) if full else Tile(call.BM, 64, 64, 4, 3)
        self.wide = Tile(call.BM, 64, 32, 4, 1) if full else Tile(call.BM, 128, 64, 4, 1)
        self.sums = Tile(64, 64, 32, 4, 1) if full else Tile(128, 64, 64, 4, 4)

    def gathered(self, tokens: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """tokens [T, W], matrix [E, W, r] -> [pairs, r]."""
        call, tile, width = self.call, self.narrow, matrix.shape[2]
        out = call.x.new_empty(call.pairs, width)
        weights = TensorDescriptor.from_tensor(matrix, [1, tile.BK, tile.BN])
        call.launch(
            experts_bwd_kernel_inner, self.routing, tile, width,
            tokens, weights, None, self.routing.order, self.routing.table, out, self.routing.tiles, tokens.shape[1], 0, width,
            K=call.k, EVEN_K=tokens.shape[1] % tile.BK == 0,
        )  # fmt: skip
        return out

    def ordered(self, rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """rows [pairs, W], matrix [E, r, W] -> [pairs, r]."""
        call, tile, width = self.call, self.narrow, matrix.shape[1]
        out = call.x.new_empty(call.pairs, width)
        left = TensorDescriptor.from_tensor(rows, [tile.BM, tile.BK])
        weights = TensorDescriptor.from_tensor(matrix, [1, tile.BN, tile.BK])
        call.launch(
            experts_fwd_kernel_outputs, self.routing, tile, width,
            left, weights, None, self.routing.table, out, self.routing.tiles, rows.shape[1], 0, width,
        )  # fmt: skip
        return out

    def add(self, out: torch.Tensor, z: torch.Tensor, matrix: torch.Tensor, column: int = 0) -> None:
        """out [pairs, width] += columns from `column` on of z [pairs, r] times matrix [E, columns, r]^T."""
        call, tile, width = self.call, self.wide, out.shape[1]
        left = TensorDescriptor.from_tensor(z, [tile.BM, tile.BK])
        weights = TensorDescriptor.from_tensor(matrix, [1, tile.BN, tile.BK])
        call.launch(
            experts_lora_kernel_add, self.routing, tile, width,
            left, weights, self.routing.table, out, self.routing.tiles, z.shape[1], column, width,
        )  # fmt: skip

    def sum_over_rows(self, a: torch.Tensor, z: torch.Tensor, *, tokens: bool) -> torch.Tensor:
        """a^T z over the rows of each expert, [E, W, r] in FP32; a is [pairs, W], or [T, W] (`tokens`)."""
        call, routing = self.call, self.routing
        out = a.new_empty(call.E, a.shape[1], z.shape[1], dtype=torch.float32)
        order = routing.order if tokens else torch.arange(call.pairs, dtype=torch.int32, device=a.device)
        launch_weights(
            a, z, order, routing.offsets, out, 0, self.sums, precision(call.x.dtype), k=call.k if tokens else 1, gather_a=True
        )  # fmt: skip
        return out


def pre_activations(call: Call, rows: Rows, update: Factors | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[pairs, 2I], paired, and a x [pairs, r]."""
    paired = call.x.new_empty(call.pairs, 2 * call.I)
    call.gate_up(rows.routing, None, paired, 0)
    if update is None:
        return paired, None
    z = rows.gathered(call.x, update.a_transposed)
    rows.add(paired, z, update.b)
    return paired, z


def forward(call: Call, routing: Routing, gate_up: Factors | None, down: Factors | None):
    """The output [T, D], the pre-activations and the low-rank part of the way to them."""
    rows = Rows(call, routing)
    paired, z_in = pre_activations(call, rows, gate_up)
    h = call.x.new_empty(call.pairs, call.I)
    experts_fwd_kernel_glu[(triton.cdiv(call.pairs, 4),)](
        paired, routing.inverse, routing.order, routing.offsets, h, 0, call.E, call.I, call.I, 0,
        **call.caps, BM=4, BC=128, num_warps=4,
    )  # fmt: skip
    z_out = None if down is None else rows.ordered(h, down.a)

    def products(out, column):
        call.outputs(routing, h, out, column)
        if down is not None:
            rows.add(out, z_out, down.b, column)

    y = torch.empty_like(call.x)
    call.combine(routing, products, y, call.plan(0).columns, weighted=True, add=False)
    return y, paired, z_in


def backward(call: Call, routing, paired, z_in, gate_up: Factors | None, down: Factors | None, dy, wanted):
    """Gradients of x, weights, the factors, gate_up_proj and down_proj, without the factors where `wanted`; overwrites `paired`."""
    rows, (by_x, by_weights, by_gate_up, by_down) = Rows(call, routing), wanted
    if paired is None:
        paired, z_in = pre_activations(call, rows, gate_up)
    h = call.x.new_empty(call.pairs, call.I)
    call.inner(routing, dy, h, 0)
    dz_out = None
    if down is not None:
        dz_out = rows.gathered(dy, down.b)
        rows.add(h, dz_out, down.a_transposed)
    products = call.x.new_empty(1, call.pairs, dtype=torch.float32)
    experts_bwd_kernel_glu[(triton.cdiv(call.pairs, 4),)](
        paired, h, call.weights, routing.order, routing.offsets, products, call.E, call.I,
        **call.caps, BM=4, BC=128, num_warps=4,
    )  # fmt: skip
    # From here on `paired` holds the gradients of the pre-activations, and h the activations times the router's weights:
    # they bring these weights into the sums below.
    d_down_a = d_down_b = d_gate_up_a = d_gate_up_b = dz_in = None
    if down is not None:
        d_down_a = rows.sum_over_rows(h, dz_out, tokens=False).mT  # [E, r, I]
        d_down_b = rows.sum_over_rows(dy, rows.ordered(h, down.a), tokens=True)  # [E, D, r]
    if gate_up is not None:
        dz_in = rows.ordered(paired, gate_up.b_transposed)
        d_gate_up_a = rows.sum_over_rows(call.x, dz_in, tokens=True).mT  # [E, r, D]
        d_gate_up_b = unpair(rows.sum_over_rows(paired, z_in, tokens=False))  # [E, 2I, r]
    d_gate_up_proj = torch.empty_like(call.gate_up_proj) if by_gate_up else None
    d_down_proj = torch.empty_like(call.down_proj) if by_down else None
    if by_down:
        call.projection_gradient(routing, dy, h, d_down_proj, 0, gather_a=True)
    if by_gate_up:
        call.projection_gradient(routing, paired, call.x, d_gate_up_proj, 0, gather_a=False)
    del h  # before the rows that follow
    dx = d_weights = None
    if by_x:
        dx = torch.empty_like(call.x)
        way_back = None if gate_up is None else gate_up.a_transposed

        def inputs(out, column):
            call.inputs(routing, paired, out, 0, column)
            if way_back is not None:
                rows.add(out, dz_in, way_back, column)

        call.combine(routing, inputs, dx, call.plan(0).columns, weighted=False, add=False)
    if by_weights:
        d_weights = torch.empty_like(call.weights)
        experts_bwd_kernel_router[(triton.cdiv(call.pairs, 256),)](
            products, routing.inverse, d_weights, call.pairs, 1, BLOCK=256, num_warps=4
        )  # fmt: skip
    return dx, d_weights, d_gate_up_a, d_gate_up_b, d_down_a, d_down_b, d_gate_up_proj, d_down_proj


def padded(factors, dtype: torch.dtype) -> tuple[Factors | None, Factors | None]:
    gate_up_a, gate_up_b, down_a, down_b = factors
    gate_up = None if gate_up_a is None else Factors.of(gate_up_a, gate_up_b, dtype, paired=True)
    return gate_up, None if down_a is None else Factors.of(down_a, down_b, dtype, paired=False)


class _ExpertMLPLora(torch.autograd.Function):
    """After the factors come the projections that `kind`, Call or a subclass, takes: two, or two with scales."""

    @staticmethod
    def forward(ctx, kind, beta, linear_beta, x, indices, weights, *tensors):
        factors, projections = tensors[:4], tensors[4:]
        ctx.kind, ctx.caps, ctx.overwritten = kind, (beta, linear_beta), False
        call = kind(x, indices, weights, *projections, *ctx.caps)
        memory = paired = z_in = None
        if call.empty:
            y = torch.zeros_like(x)
        else:
            routing = call.sort()
            y, paired, z_in = forward(call, routing, *padded(factors, x.dtype))
            memory = routing.memory
            if not keeps(paired.nbytes):
                paired = z_in = None
        ctx.save_for_backward(x, indices, weights, memory, paired, z_in, *tensors)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, indices, weights, memory, paired, z_in, *tensors = ctx.saved_tensors
        factors, projections = tensors[:4], tensors[4:]
        call = ctx.kind(x, indices, weights, *projections, *ctx.caps)
        _, _, _, wants_x, _, wants_weights, *wanted = ctx.needs_input_grad
        trained = projections if len(projections) == 2 else (None, None)
        inputs = x, weights, *factors, *trained
        if call.empty:
            gradients = [None if tensor is None else torch.zeros_like(tensor) for tensor in inputs]
        else:
            if ctx.overwritten:  # by an earlier backward pass through a retained graph
                paired = z_in = None
            ctx.overwritten = True
            routing = Routing(memory, call.indices, call.E, call.BM)
            updates, wanted = padded(factors, x.dtype), (wants_x, wants_weights, *wanted[4:6])
            found = backward(call, routing, paired, z_in, *updates, dy.contiguous(), wanted)
            gradients = [None if d is None else like(d, tensor) for d, tensor in zip(found, inputs, strict=True)]
        dx, d_weights, *others = gradients
        return None, None, None, dx, None, d_weights, *others, *(None,) * (len(projections) - 2)


def like(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Without the padding of the rank, in the dtype of `tensor`."""
    if gradient.ndim == 3:
        gradient = gradient[:, : tensor.shape[1], : tensor.shape[2]]
    return gradient.to(tensor.dtype)


@torch.compiler.disable
def expert_mlp_lora_fused(x, indices, weights, projections, gate_up_lora, down_lora, caps) -> torch.Tensor:
    """`projections`: two, or with their scales four; the others as in `api.expert_mlp_lora`."""
    kind = Call if len(projections) == 2 else PackedCall
    factors = [*(gate_up_lora or (None, None)), *(down_lora or (None, None))]
    with on_device_of(x):
        if torch.is_grad_enabled():
            return _ExpertMLPLora.apply(kind, *caps, x, indices, weights, *factors, *projections)
        call = kind(x, indices, weights, *projections, *caps)
        return torch.zeros_like(x) if call.empty else forward(call, call.sort(), *padded(factors, x.dtype))[0]
