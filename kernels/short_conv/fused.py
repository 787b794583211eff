"""The short convolution on a GPU: one launch forward, one backward, for one to three tensors (q, k and v of KDA).

A program is one warp. It walks along the tokens of a piece with 16 bytes of channels in every lane and keeps the last
inputs in registers, so that each input is read once and each output written once: the operator is bound by memory.
Loads run two tokens ahead of their use. A piece lies in one document, and the order of the sums for a token does not
depend on where pieces begin: no cut of a sequence, and no neighbour, changes a bit.
"""

import torch
import triton
import triton.language as tl

from ..dispatch import on_device_of
from ..launch import launched


TAPS = 4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_TENSORS = 3
# Rows of partial weight gradients: they bound the memory of the sum whatever the length and the number of documents.
MOST_PARTS = 512
# Without a bound the compiler takes 220 registers for the backward pass, and too few loads are under way at a time.
BACKWARD_REGISTERS = 168
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def pick(which, first, second, third):
    chosen = first
    if which == 1:
        chosen = second
    elif which == 2:
        chosen = third
    return chosen


@triton.jit
def piece_of(piece, cu_seqlens, N, T, R, PACKED: tl.constexpr):
    """Sequence of a piece of at most R tokens, where that starts and ends, and the first token of the piece.

    The pieces of document n are numbered from cu_seqlens[n] // R + n on: enough for its tokens, at least one, and found
    without a table. Those left over begin at or beyond the end of a document, but not at its start.
    """
    if PACKED:
        sequence, beyond = 0, N
        while beyond - sequence > 1:
            middle = (sequence + beyond) // 2
            if tl.load(cu_seqlens + middle) // R + middle <= piece:
                sequence = middle
            else:
                beyond = middle
        start = tl.load(cu_seqlens + sequence).to(tl.int64)
        end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
        return tl.cast(sequence, tl.int64), start, end, start + (piece - sequence - start // R) * R
    per_row = tl.maximum(tl.cdiv(T, R), 1)
    sequence = (piece // per_row).to(tl.int64)
    start = sequence * T
    return sequence, start, start + T, start + (piece % per_row) * R


@triton.jit
def channels(c, C, present):
    """The mask of a row that is there, or of none; a block & a scalar has no boolean type in the interpreter."""
    return c < tl.where(present, C, 0)


@triton.jit
def load_taps(weight, c, inside):
    """The columns of weight [C, 4], the tap on the current token last."""
    w = weight + 4 * c
    w0, w1 = tl.load(w, mask=inside, other=0.0), tl.load(w + 1, mask=inside, other=0.0)
    w2, w3 = tl.load(w + 2, mask=inside, other=0.0), tl.load(w + 3, mask=inside, other=0.0)
    return w0, w1, w2, w3


@triton.jit
def load_before(x, c, C, state, used, at_start, HAS_STATE: tl.constexpr):
    """The three inputs before the row x of a piece, latest first: earlier rows; at a document's start its state, or 0."""
    if HAS_STATE:
        inside = channels(c, C, used)
    else:
        inside = channels(c, C, used & (at_start == 0))
    x1 = tl.load(tl.where(at_start, state + 2, x - C), mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(tl.where(at_start, state + 1, x - 2 * C), mask=inside, other=0.0).to(tl.float32)
    x3 = tl.load(tl.where(at_start, state, x - 3 * C), mask=inside, other=0.0).to(tl.float32)
    return x1, x2, x3


@triton.jit
def weighted_sum(w0, w1, w2, w3, x3, x2, x1, x0):
    """Explicit FMAs: were the fusing left to the compiler, copies of the loop body could round differently."""
    return tl.fma(w3, x0, tl.fma(w2, x1, tl.fma(w1, x2, w0 * x3)))


@triton.jit
def sigmoid(z):
    """The square of an inverse root: a division costs three more instructions, where issue is nearly the limit."""
    root = tl.rsqrt(1.0 + tl.exp2(-z * LOG2E))
    return root * root


# Compiled once, not once for each kind of length: no address depends on these in a way that would help the compiler.
@launched
@triton.jit(do_not_specialize=("N", "T"))
def short_conv_fwd_kernel(
    x_0, x_1, x_2, y_0, y_1, y_2,  # [tokens, C]
    weight_0, weight_1, weight_2,  # [C, 1, 4] FP32
    states, new_states,  # [N, n C, 3]
    cu_seqlens,  # [N + 1] (PACKED)
    N, T, C, R,
    BC: tl.constexpr, PACKED: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    which, blocks = tl.program_id(1), tl.cdiv(C, BC)
    piece, c = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    inside = c < C
    sequence, start, end, first = piece_of(piece, cu_seqlens, N, T, R, PACKED)
    at_start, used = first == start, (first == start) | (first < end)
    length = tl.minimum(tl.maximum(end - first, 0), R).to(tl.int32)
    w0, w1, w2, w3 = load_taps(pick(which, weight_0, weight_1, weight_2), c, inside)
    x = pick(which, x_0, x_1, x_2) + (first * C + c)
    y = pick(which, y_0, y_1, y_2) + (first * C + c)
    slot = ((sequence * tl.num_programs(1) + which) * C + c) * 3
    x1, x2, x3 = load_before(x, c, C, states + slot, used, at_start, HAS_STATE)
    near = tl.load(x, mask=channels(c, C, length > 0), other=0.0)
    far = tl.load(x + C, mask=channels(c, C, length > 1), other=0.0)
    for t in tl.range(0, length, loop_unroll_factor=4):
        x0, near = near.to(tl.float32), far
        far = tl.load(x + (t + 2) * C, mask=channels(c, C, t + 2 < length), other=0.0)
        z = weighted_sum(w0, w1, w2, w3, x3, x2, x1, x0)
        tl.store(y + t * C, (z * sigmoid(z)).to(y.dtype.element_ty), mask=inside)
        x3, x2, x1 = x2, x1, x0
    last = channels(c, C, used & (first + R >= end))
    new_states += slot
    tl.store(new_states, x3.to(new_states.dtype.element_ty), mask=last)
    tl.store(new_states + 1, x2.to(new_states.dtype.element_ty), mask=last)
    tl.store(new_states + 2, x1.to(new_states.dtype.element_ty), mask=last)


@launched
@triton.jit(do_not_specialize=("N", "T", "pieces", "per_part"))
def short_conv_bwd_kernel(
    x_0, x_1, x_2, dy_0, dy_1, dy_2, dx_0, dx_1, dx_2,  # [tokens, C]
    weight_0, weight_1, weight_2,  # [C, 1, 4] FP32
    dweight,  # [parts, n, 4, C] FP32
    states, d_states, d_new_states,  # [N, n C, 3]
    cu_seqlens,  # [N + 1] (PACKED)
    N, T, C, R, pieces, per_part,
    BC: tl.constexpr, PACKED: tl.constexpr, HAS_STATE: tl.constexpr, HAS_NEW: tl.constexpr,
):  # fmt: skip
    which, blocks = tl.program_id(1), tl.cdiv(C, BC)
    part, c = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    inside = c < C
    w0, w1, w2, w3 = load_taps(pick(which, weight_0, weight_1, weight_2), c, inside)
    dw0, dw1 = tl.zeros((BC,), dtype=tl.float32), tl.zeros((BC,), dtype=tl.float32)
    dw2, dw3 = tl.zeros((BC,), dtype=tl.float32), tl.zeros((BC,), dtype=tl.float32)
    for piece in tl.range(part * per_part, tl.minimum(part * per_part + per_part, pieces)):
        sequence, start, end, first = piece_of(piece, cu_seqlens, N, T, R, PACKED)
        at_start, used = first == start, (first == start) | (first < end)
        left = tl.maximum(end - first, 0).to(tl.int32)
        x = pick(which, x_0, x_1, x_2) + (first * C + c)
        dy = pick(which, dy_0, dy_1, dy_2) + (first * C + c)
        dx = pick(which, dx_0, dx_1, dx_2) + (first * C + c)
        slot = ((sequence * tl.num_programs(1) + which) * C + c) * 3
        x1, x2, x3 = load_before(x, c, C, states + slot, used, at_start, HAS_STATE)
        # One call for each: two names of one tensor are not carried through the loop (Triton 3.6).
        dz1, dz2 = tl.zeros((BC,), dtype=tl.float32), tl.zeros((BC,), dtype=tl.float32)
        dz3 = tl.zeros((BC,), dtype=tl.float32)
        one, two = channels(c, C, left > 0), channels(c, C, left > 1)
        x_near, dy_near = tl.load(x, mask=one, other=0.0), tl.load(dy, mask=one, other=0.0)
        x_far, dy_far = tl.load(x + C, mask=two, other=0.0), tl.load(dy + C, mask=two, other=0.0)
        # Row t gets its gradient from the pre-activations of t ... t + 3; the first three rows stand before the piece.
        for t in tl.range(-3, tl.where(used, tl.minimum(left, R), -3), loop_unroll_factor=4):
            x0, dy0, x_near, dy_near = x_near.to(tl.float32), dy_near.to(tl.float32), x_far, dy_far
            ahead = channels(c, C, t + 5 < left)
            x_far = tl.load(x + (t + 5) * C, mask=ahead, other=0.0)
            dy_far = tl.load(dy + (t + 5) * C, mask=ahead, other=0.0)
            z = weighted_sum(w0, w1, w2, w3, x3, x2, x1, x0)
            s = sigmoid(z)
            dz0 = dy0 * s * tl.fma(z, 1.0 - s, 1.0)
            own = tl.where(at_start | (t >= 0), x3, 0.0)
            dw0, dw1 = tl.fma(dz0, own, dw0), tl.fma(dz1, own, dw1)
            dw2, dw3 = tl.fma(dz2, own, dw2), tl.fma(dz3, own, dw3)
            grad = weighted_sum(w0, w1, w2, w3, dz0, dz1, dz2, dz3)
            if HAS_NEW:
                tail = t + 3 - left  # the place of row t in the new state
                grad += tl.load(d_new_states + slot + tail, mask=channels(c, C, tail >= 0), other=0.0).to(tl.float32)
            if HAS_STATE:
                before = channels(c, C, at_start & (t < 0))
                tl.store(d_states + slot + (t + 3), grad.to(d_states.dtype.element_ty), mask=before)
            tl.store(dx + t * C, grad.to(dx.dtype.element_ty), mask=channels(c, C, t >= 0))
            x3, x2, x1, dz3, dz2, dz1 = x2, x1, x0, dz2, dz1, dz0
    dweight += (part.to(tl.int64) * tl.num_programs(1) + which) * 4 * C + c
    tl.store(dweight, dw0, mask=inside)
    tl.store(dweight + C, dw1, mask=inside)
    tl.store(dweight + 2 * C, dw2, mask=inside)
    tl.store(dweight + 3 * C, dw3, mask=inside)


def supports(xs: tuple[torch.Tensor, ...], weights: tuple[torch.Tensor, ...], names: tuple[str, ...]) -> str | None:
    """Why the kernels cannot take these inputs, called `names`, or None when they can."""
    x_name, weight_name, _ = names
    if xs[0].dtype not in DTYPES:
        return f"{x_name}: expected bfloat16, float16 or float32, got {xs[0].dtype}"
    if weights[0].shape[-1] != TAPS:
        return f"{weight_name}: expected {TAPS} taps, got {weights[0].shape[-1]}"
    widths = [x.shape[-1] for x in xs]
    if len(set(widths)) > 1:
        return f"{x_name}: expected one number of channels, got {widths}"
    return None


def _rows_of_piece(warps_per_token: int, tokens: int) -> int:
    """Long pieces repeat fewer loads at their ends; the GPU wants about 2,000 warps, more than it can hold at a time."""
    return min(128, max(16, triton.next_power_of_2(max(1, warps_per_token * tokens // 2048))))


class Call:
    """What both launches share: contiguous inputs, blocks of channels, the pieces of every sequence."""

    def __init__(self, xs, weights, states, cu_seqlens):
        self.xs = [x.contiguous() for x in xs]
        self.weights = [weight.float().contiguous() for weight in weights]
        self.states = None if states is None else states.contiguous()
        self.cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
        self.B, self.T, self.C = xs[0].shape
        self.sequences = self.B if cu_seqlens is None else len(cu_seqlens) - 1

    def tiles(self, lane_bytes: int) -> tuple[int, int, int, int]:
        """Channels of a warp, blocks of channels, tokens of a piece, pieces (with those that documents leave over)."""
        BC = 32 * lane_bytes // self.xs[0].element_size()
        blocks = triton.cdiv(self.C, BC)
        rows = _rows_of_piece(len(self.xs) * blocks, self.B * self.T)
        if self.cu_seqlens is None:
            return BC, blocks, rows, self.B * max(1, triton.cdiv(self.T, rows))
        return BC, blocks, rows, self.T // rows + self.sequences


def _three(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The pointers of a kernel that picks among three; those beyond the tensors that there are, it never picks."""
    return [*tensors, *(MOST_TENSORS - len(tensors)) * tensors[:1]]


def launch_forward(call: Call) -> tuple[list[torch.Tensor], torch.Tensor]:
    n = len(call.xs)
    ys = [torch.empty_like(x) for x in call.xs]
    new_states = call.xs[0].new_empty(call.sequences, n * call.C, TAPS - 1)
    BC, blocks, rows, pieces = call.tiles(lane_bytes=16)
    short_conv_fwd_kernel[(pieces * blocks, n)](
        *_three(call.xs), *_three(ys), *_three(call.weights),
        new_states if call.states is None else call.states, new_states,
        new_states if call.cu_seqlens is None else call.cu_seqlens,
        call.sequences, call.T, call.C, rows,
        BC=BC, PACKED=call.cu_seqlens is not None, HAS_STATE=call.states is not None, num_warps=1,
    )  # fmt: skip
    return ys, new_states


def launch_backward(call: Call, dys: list[torch.Tensor], d_new_states: torch.Tensor | None):
    n, has_state, has_new = len(call.xs), call.states is not None, d_new_states is not None
    # The gradients of states need registers that 16 bytes of channels leave no room for.
    BC, blocks, rows, pieces = call.tiles(lane_bytes=8 if has_state or has_new else 16)
    per_part = max(1, triton.cdiv(pieces, MOST_PARTS))
    parts = triton.cdiv(pieces, per_part)
    dxs = [torch.empty_like(x) for x in call.xs]
    dweight = call.xs[0].new_empty(parts, n, TAPS, call.C, dtype=torch.float32)
    d_states = torch.empty_like(call.states) if has_state else None
    short_conv_bwd_kernel[(parts * blocks, n)](
        *_three(call.xs), *_three(dys), *_three(dxs), *_three(call.weights), dweight,
        call.states if has_state else dxs[0], d_states if has_state else dxs[0], d_new_states if has_new else dxs[0],
        dweight if call.cu_seqlens is None else call.cu_seqlens,
        call.sequences, call.T, call.C, rows, pieces, per_part,
        BC=BC, PACKED=call.cu_seqlens is not None, HAS_STATE=has_state, HAS_NEW=has_new,
        num_warps=1, maxnreg=BACKWARD_REGISTERS,
    )  # fmt: skip
    return dxs, dweight.sum(0).mT.contiguous(), d_states  # [n, C, 4]


class _ShortConvs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, cu_seqlens, *tensors):
        xs, weights = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        call = Call(xs, weights, states, cu_seqlens)
        ys, new_states = launch_forward(call)
        ctx.save_for_backward(call.states, cu_seqlens, *call.xs, *weights)
        ctx.set_materialize_grads(False)
        return *ys, new_states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *cotangents):
        states, cu_seqlens, *tensors = ctx.saved_tensors
        xs, weights = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        *dys, d_new_states = (None if cotangent is None else cotangent.contiguous() for cotangent in cotangents)
        dys = [torch.zeros_like(x) if dy is None else dy for dy, x in zip(dys, xs, strict=True)]
        dxs, dweights, d_states = launch_backward(Call(xs, weights, states, cu_seqlens), dys, d_new_states)
        dweights = [dw[:, None].to(weight.dtype) for dw, weight in zip(dweights, weights, strict=True)]  # [C, 1, 4]
        return d_states, None, *dxs, *dweights


def short_convs_fused(xs, weights, *, states=None, cu_seqlens=None):
    """Arguments and results as in `api.short_convs`."""
    if states is not None and torch.is_grad_enabled():
        # They may be those of a cache, which the layer overwrites before the backward pass.
        states = states.clone()
    with on_device_of(xs[0]):
        *ys, new_states = _ShortConvs.apply(states, cu_seqlens, *xs, *weights)
    return tuple(ys), new_states
