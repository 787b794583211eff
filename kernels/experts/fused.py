"""The expert MLPs on a GPU: launches of the Triton kernels and their `autograd.Function`.

Pairs of token and slot are sorted by expert on the device (`fused_sort.py`); products run over tiles of rows of one expert
(`fused_rows.py`, `fused_tall.py`); a few tokens that need no gradients take another path (`fused_decode.py`).

Channels of the inner width are worked on in chunks, so that the workspace stays a part of what they hold together. The
gradients of the projections are complete after a chunk; that of x is a sum over the chunks. Beside its inputs and where the
pairs are, a forward pass saves the pre-activations, if KEEP_BYTES hold them; otherwise the backward pass computes them
again, chunk by chunk.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ..dispatch import for_descriptors, on_device_of
from .fused_decode import TOKENS, launch_decode
from .fused_rows import (
    experts_bwd_kernel_glu,
    experts_bwd_kernel_inner,
    experts_bwd_kernel_inputs,
    experts_bwd_kernel_router,
    experts_fwd_kernel_gate_up,
    experts_fwd_kernel_glu,
    experts_fwd_kernel_outputs,
    experts_kernel_combine,
)
from .fused_sort import Routing, launch_sort
from .fused_tall import (
    LEAST,
    UPPER,
    experts_bwd_kernel_inner_tall,
    experts_bwd_kernel_inputs_tall,
    experts_fwd_kernel_gate_up_tall,
    experts_fwd_kernel_outputs_tall,
)
from .fused_tiles import Tile, row_tile, rows_per_tile, tall_rows, tall_tile, weight_tile
from .fused_weights import launch_weights


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_EXPERTS, MOST_SLOTS, MOST_PAIRS = 1024, 32, 1 << 30
# Pre-activations that a forward pass keeps at most. 0 keeps none: a fifth more products in the backward pass.
KEEP_BYTES = 2 << 30
# Rows of outputs wait for the sum over slots in blocks of columns: at most this much, or a quarter of the inner activations.
ROWS_BYTES = 64 << 20
# Inner activations that the backward pass has at a time, where a quarter of them is not more.
CHUNK_BYTES = 96 << 20
# Without gradients: inner activations, and rows of outputs, at most.
INFERENCE_BYTES = 2 << 30


class Plan(NamedTuple):
    """What is kept and what is done at a time, a function of the sizes."""

    keep: bool  # the pre-activations
    bounds: list[int]  # of the chunks of channels
    columns: int  # columns of D at a time, between rows of pairs and the sum over slots
    parts: int  # parts of the tokens that have their inner activations one after the other


def plan(T: int, k: int, D: int, I: int, itemsize: int, keep_bytes: int) -> Plan:
    per_channel = max(1, T * k) * itemsize
    inner = per_channel * I
    keep = 2 * inner <= keep_bytes
    columns = min(D, max(256, max(ROWS_BYTES, inner // 4) // per_channel // 256 * 256))
    if keep:
        chunks, parts = (min(4, triton.cdiv(inner, most)) for most in (CHUNK_BYTES, ROWS_BYTES))
        chunk = triton.cdiv(triton.cdiv(I, chunks), 128) * 128
    else:
        chunk = max(256, triton.cdiv(I, 512) * 128)
        parts = 1 if inner < 2 * ROWS_BYTES else max(2, triton.cdiv(inner, 8 * ROWS_BYTES))
        columns = min(columns, max(256, triton.cdiv(D, 512) * 256))
    return Plan(keep, sorted({*range(0, I, chunk), I}), columns, min(parts, T))


def plan_without_gradients(T: int, k: int, D: int, I: int, itemsize: int) -> Plan:
    """As few parts as can be: each reads the weights of all experts, which many experts of few rows do little else than."""
    parts = max(1, triton.cdiv(T * k * max(I, D) * itemsize, INFERENCE_BYTES))
    return Plan(False, [0, I], D, min(parts, T))


def supports(x: torch.Tensor, indices: torch.Tensor, gate_up_proj: torch.Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None when they can."""
    if x.dtype not in DTYPES:
        return f"x: expected bfloat16, float16 or float32, got {x.dtype}"
    if not 0 < gate_up_proj.shape[0] <= MOST_EXPERTS:
        return f"gate_up_proj: expected 1 to {MOST_EXPERTS} experts, got {gate_up_proj.shape[0]}"
    if not 0 < indices.shape[1] <= MOST_SLOTS:
        return f"indices: expected 1 to {MOST_SLOTS} experts per token, got {indices.shape[1]}"
    align = 16 // x.element_size()
    for name, width in (("D", x.shape[1]), ("I", gate_up_proj.shape[1] // 2)):
        if width % align:
            return f"{name}: expected a multiple of {align} for {x.dtype}, got {width}"
    if indices.numel() > MOST_PAIRS:
        return f"indices: expected at most {MOST_PAIRS} of them, got {indices.numel()}"
    return None


class Call:
    """The inputs, contiguous and in the dtype of x, and their sizes.

    The products ask for descriptors of tiles of weights and of their scales, which plain weights have none of: a class of
    weights in another format is a subclass.
    """

    def __init__(self, x, indices, weights, *projections_and_caps):
        *projections, beta, linear_beta = projections_and_caps
        self.x, self.indices, self.weights = x.contiguous(), indices.contiguous(), weights.contiguous()
        self.caps = {"BETA": beta, "LINEAR_BETA": linear_beta}
        self.T, self.D = x.shape
        self.projections = self.prepare(*projections)
        self.k, self.pairs, self.empty = indices.shape[1], indices.numel(), 0 in (self.T, self.D, self.I)
        self.BM, self.tall = rows_per_tile(self.pairs, self.E, x.dtype), False

    def prepare(self, *projections: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What a call for a part of the tokens is given; sets E and I."""
        self.gate_up_proj, self.down_proj = (for_descriptors(t.to(self.x.dtype)) for t in projections)
        self.E, _, self.I = self.down_proj.shape
        return self.gate_up_proj, self.down_proj

    def share(self) -> None:
        """Tall tiles where they pay: for `_forward` and `_backward`, all of whose products know them."""
        BM = tall_rows(self.pairs, self.E, self.D, self.x.dtype)
        if BM and not self.tall:
            self.BM, self.tall = BM, True

    def paired_tiles(self, rows: int, columns: int) -> tuple[TensorDescriptor, TensorDescriptor | None]:
        """Tiles of gate_up_proj, the gate and the up row of a channel side by side."""
        paired = self.gate_up_proj.view(self.E, 2, self.I, self.D).transpose(1, 2)  # [E, I, 2, D]
        return TensorDescriptor.from_tensor(paired, [1, rows // 2, 2, columns]), None

    def down_tiles(self, rows: int, columns: int) -> tuple[TensorDescriptor, TensorDescriptor | None]:
        return TensorDescriptor.from_tensor(self.down_proj, [1, rows, columns]), None

    def plan(self, keep_bytes: int) -> Plan:
        return plan(self.T, self.k, self.D, self.I, self.x.element_size(), keep_bytes)

    def plan_without_gradients(self) -> Plan:
        return plan_without_gradients(self.T, self.k, self.D, self.I, self.x.element_size())

    def sort(self) -> Routing:
        return launch_sort(self.indices, self.E, self.BM)

    def parts(self, count: int):
        """The tokens of each part, and a call for it, with the same tiles: the bits of a row do not change."""
        size = triton.cdiv(self.T, count)
        for first in range(0, self.T, size):
            tokens = slice(first, first + size)
            inputs = self.x[tokens], self.indices[tokens], self.weights[tokens]
            part = type(self)(*inputs, *self.projections, *self.caps.values())
            part.BM, part.tall = self.BM, self.tall
            yield tokens, part

    def launch(self, kernel, routing: Routing, tile: Tile, columns: int, *args, **constants) -> None:
        """One program for each tile of rows and each block of columns."""
        grid = (routing.tiles * triton.cdiv(columns, tile.BN),)
        kernel[grid](*args, **constants, PRECISION=precision(self.x.dtype), **tile._asdict())

    def tile(self, depth: int, columns: int, **longest: int) -> Tile:
        if self.tall:
            return tall_tile(self.BM, depth, columns)
        return row_tile(self.BM, depth, columns, self.x.dtype, **longest)

    def row_tiles(self, rows: torch.Tensor, tile: Tile) -> list[TensorDescriptor]:
        """Tiles of rows in their order: of each height that the kernel asks for."""
        heights = (UPPER.value, LEAST.value) if self.tall else (tile.BM,)
        return [TensorDescriptor.from_tensor(rows, [height, tile.BK]) for height in heights]

    def gate_up(self, routing: Routing, h: torch.Tensor | None, kept: torch.Tensor | None, begin: int) -> None:
        """`kept`: the pre-activations of as many channels from `begin` on as it has. h: the activations of all channels."""
        last = self.I if kept is None else begin + kept.shape[1] // 2
        columns = 2 * (last - begin)
        tile = self.tile(self.D, columns)
        self.launch(
            experts_fwd_kernel_gate_up_tall if self.tall else experts_fwd_kernel_gate_up, routing, tile, columns,
            self.x, *self.paired_tiles(tile.BN, tile.BK), routing.order, routing.table, h, kept, routing.tiles, self.D, self.I, begin, last,
            K=self.k, KEEP=kept is not None, WRITE=h is not None, EVEN_K=self.D % tile.BK == 0, **self.caps,
        )  # fmt: skip

    def outputs(self, routing: Routing, h: torch.Tensor, out: torch.Tensor, column: int) -> None:
        """out [pairs, width]: columns of h W_down^T."""
        width = out.shape[1]
        tile = self.tile(self.I, width, longest=8192)
        self.launch(
            experts_fwd_kernel_outputs_tall if self.tall else experts_fwd_kernel_outputs, routing, tile, width,
            *self.row_tiles(h, tile), *self.down_tiles(tile.BN, tile.BK), routing.table, out, routing.tiles, self.I, column, width,
        )  # fmt: skip

    def inner(self, routing: Routing, dy: torch.Tensor, out: torch.Tensor, begin: int) -> None:
        """out [pairs, width]: channels of dy W_down."""
        width = out.shape[1]
        tile = self.tile(self.D, width)
        self.launch(
            experts_bwd_kernel_inner_tall if self.tall else experts_bwd_kernel_inner, routing, tile, width,
            dy, *self.down_tiles(tile.BK, tile.BN), routing.order, routing.table, out, routing.tiles, self.D, begin, width,
            K=self.k, EVEN_K=self.D % tile.BK == 0,
        )  # fmt: skip

    def inputs(self, routing: Routing, paired: torch.Tensor, out: torch.Tensor, begin: int, column: int) -> None:
        """out [pairs, width]: columns of the paired gradients of channels from `begin` on, times W_gate_up."""
        depth, width = paired.shape[1], out.shape[1]
        tile = self.tile(depth, width, longest=1536)
        self.launch(
            experts_bwd_kernel_inputs_tall if self.tall else experts_bwd_kernel_inputs, routing, tile, width,
            *self.row_tiles(paired, tile), *self.paired_tiles(tile.BK, tile.BN), routing.table, out, routing.tiles, depth, begin, column, width,
        )  # fmt: skip

    def combine(self, routing, products, out, columns, *, weighted: bool, add: bool) -> None:
        """out [T, D] (+)= the sum over a token's slots of the rows that `products(rows, column)` computes."""
        memory = out.new_empty(self.pairs * min(columns, self.D))
        for column in range(0, self.D, columns):
            width = min(columns, self.D - column)
            rows = memory[: self.pairs * width].view(self.pairs, width)
            products(rows, column)
            BC = min(1024, triton.next_power_of_2(width))
            BT = 1024 // BC
            experts_kernel_combine[(triton.cdiv(self.T, BT), triton.cdiv(width, BC))](
                rows, routing.inverse, self.weights, out, self.T, self.D, column, width,
                K=self.k, WEIGHTED=weighted, ADD=add, BT=BT, BC=BC, num_warps=4,
            )  # fmt: skip

    def sum_outputs(self, routing, h, y, columns) -> None:
        self.combine(routing, partial(self.outputs, routing, h), y, columns, weighted=True, add=False)

    def sum_inputs(self, routing, paired, dx, columns, begin) -> None:
        """Of the channels from `begin` on; after the first ones they are added to those before."""

        def products(rows, column):
            self.inputs(routing, paired, rows, begin, column)

        self.combine(routing, products, dx, columns, weighted=False, add=begin > 0)

    def activations(self, routing, dy, paired, begin, d_weights) -> torch.Tensor:
        """Turns `paired`, the pre-activations of channels from `begin` on, into their gradients; returns p h."""
        channels = paired.shape[1] // 2
        h = self.x.new_empty(self.pairs, channels)
        self.inner(routing, dy, h, begin)
        experts_bwd_kernel_glu[(triton.cdiv(self.pairs, 4),)](
            paired, h, self.weights, routing.order, routing.offsets, d_weights, self.E, channels,
            **self.caps, BM=4, BC=128, num_warps=4,
        )  # fmt: skip
        return h

    def projection_gradient(self, routing, a, b, out, begin, *, gather_a) -> None:
        width = (b if gather_a else a).shape[1]
        tile = weight_tile(self.pairs, self.E, width, self.x.dtype, gather_a=gather_a)
        launch_weights(
            a, b, routing.order, routing.offsets, out, begin, tile, precision(self.x.dtype), k=self.k, gather_a=gather_a
        )  # fmt: skip


def keeps(nbytes: int) -> bool:
    """Whether so much is kept for the backward pass."""
    return nbytes <= KEEP_BYTES


def precision(dtype: torch.dtype) -> str:
    """FP32 in three TF32 terms."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def _forward(call: Call, todo: Plan) -> tuple[torch.Tensor, Routing | None, list[torch.Tensor]]:
    """The output [T, D]; where the pairs are, and pre-activations [pairs, 2 channels] of the chunks, unless none are kept."""
    if call.empty:
        return torch.zeros_like(call.x), None, []
    call.share()
    y = torch.empty_like(call.x)
    chunks = list(itertools.pairwise(todo.bounds))
    if not todo.keep:
        for tokens, part in call.parts(todo.parts):
            routing, h = part.sort(), part.x.new_empty(part.pairs, call.I)
            part.gate_up(routing, h, None, 0)
            part.sum_outputs(routing, h, y[tokens], todo.columns)
            del h  # before that of the next part
        return y, None, []
    routing = call.sort()
    kept = [call.x.new_empty(call.pairs, 2 * (end - begin)) for begin, end in chunks]
    if todo.parts == 1:
        h = call.x.new_empty(call.pairs, call.I)
        call.gate_up(routing, h, kept[0], 0)
        call.sum_outputs(routing, h, y, todo.columns)
        return y, routing, kept
    for (begin, _), paired in zip(chunks, kept, strict=True):
        call.gate_up(routing, None, paired, begin)
    for tokens, part in call.parts(todo.parts):
        own, h = part.sort(), part.x.new_empty(part.pairs, call.I)
        for (begin, end), paired in zip(chunks, kept, strict=True):
            experts_fwd_kernel_glu[(triton.cdiv(part.pairs, 4),)](
                paired, routing.inverse, own.order, own.offsets, h, tokens.start * call.k, call.E, end - begin, call.I, begin,
                **call.caps, BM=4, BC=128, num_warps=4,
            )  # fmt: skip
        part.sum_outputs(own, h, y[tokens], todo.columns)
        del h
    return y, routing, kept


def _backward(call: Call, routing: Routing | None, kept: list[torch.Tensor], dy: torch.Tensor, wanted=4 * (True,)):
    """Gradients of x, weights, gate_up_proj and down_proj, those that are wanted. `kept` is overwritten."""
    inputs = call.x, call.weights, call.gate_up_proj, call.down_proj
    gradients = [torch.empty_like(tensor) if it_is else None for tensor, it_is in zip(inputs, wanted, strict=True)]
    if call.empty:
        return [d if d is None else d.zero_() for d in gradients]
    dx, d_weights, d_gate_up, d_down = gradients
    call.share()
    routing, todo = routing or call.sort(), call.plan(sum(paired.nbytes for paired in kept))
    products = call.x.new_empty(len(todo.bounds) - 1, call.pairs, dtype=torch.float32)
    for number, (begin, end) in enumerate(itertools.pairwise(todo.bounds)):
        if kept:
            paired = kept[number]
        else:
            paired = call.x.new_empty(call.pairs, 2 * (end - begin))
            call.gate_up(routing, None, paired, begin)
        h = call.activations(routing, dy, paired, begin, products[number])
        if d_down is not None:
            call.projection_gradient(routing, dy, h, d_down, begin, gather_a=True)
        del h  # before the rows that follow
        if d_gate_up is not None:
            call.projection_gradient(routing, paired, call.x, d_gate_up, begin, gather_a=False)
        if dx is not None:
            call.sum_inputs(routing, paired, dx, todo.columns, begin)
        del paired
    if d_weights is not None:
        experts_bwd_kernel_router[(triton.cdiv(call.pairs, 256),)](
            products, routing.inverse, d_weights, call.pairs, products.shape[0], BLOCK=256, num_warps=4
        )  # fmt: skip
    return gradients


class _ExpertMLP(torch.autograd.Function):
    """`kind` is Call or a subclass; what it is given beside x, indices and weights is its projections."""

    @staticmethod
    def forward(ctx, kind, beta, linear_beta, x, indices, weights, *projections):
        call = kind(x, indices, weights, *projections, beta, linear_beta)
        y, routing, kept = _forward(call, call.plan(KEEP_BYTES))
        memory = None if routing is None else routing.memory
        ctx.save_for_backward(x, indices, weights, memory, *projections, *kept)
        ctx.kind, ctx.caps, ctx.projections, ctx.overwritten = kind, (beta, linear_beta), len(projections), False
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, indices, weights, memory, *others = ctx.saved_tensors
        projections, kept = others[: ctx.projections], others[ctx.projections :]
        call = ctx.kind(x, indices, weights, *projections, *ctx.caps)
        if ctx.overwritten:  # by an earlier backward pass through a retained graph
            kept = []
        ctx.overwritten = True
        call.share()
        routing = None if memory is None else Routing(memory, call.indices, call.E, call.BM)
        _, _, _, wants_x, _, *wanted = ctx.needs_input_grad
        gradients = _backward(call, routing, kept, dy.contiguous(), (wants_x, *wanted[:3]))
        like = x, weights, *projections[:2]
        dx, *rest = (None if d is None else d.to(t.dtype) for d, t in zip(gradients, like, strict=True))
        return None, None, None, dx, None, *rest, *(None,) * (ctx.projections - 2)


def expert_mlp_fused(x, indices, weights, gate_up_proj, down_proj, *, beta, linear_beta):
    """Arguments and results as in `api.expert_mlp`."""
    return run(Call, launch_decode, (x, indices, weights, gate_up_proj, down_proj), beta, linear_beta)


def run(kind: type[Call], decode: Callable, tensors: Sequence[torch.Tensor], beta, linear_beta) -> torch.Tensor:
    """`tensors`: x, indices, weights and projections for `kind`, and for `decode`: a few tokens that need no gradients."""
    x, caps = tensors[0], (beta, linear_beta)
    with on_device_of(x):
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return _ExpertMLP.apply(kind, *caps, *tensors)
        if 0 < len(x) <= TOKENS and x.shape[1]:
            return decode([tensor.contiguous() for tensor in tensors], *caps, precision(x.dtype))
        call = kind(*tensors, *caps)
        return _forward(call, call.plan_without_gradients())[0]
