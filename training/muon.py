"""Muon for matrices and AdamW for the rest, in one optimiser, right for whole and for sharded parameters.

Muon replaces the momentum of a matrix by the nearest matrix whose singular values are all about 1: five steps of a
polynomial in X X^T (Newton-Schulz), matrix products only. Times 0.2 sqrt(max(rows, columns)) the update has the root
mean square of AdamW's, so that both share a learning rate and a weight decay.

**What is orthogonalised.** A parameter `[..., R, C]` is a stack of matrices, and `rows` says how the rows of each are
cut: the sizes of consecutive blocks, repeated until R is used up (`(128,)`: heads of 128 rows; `(128, 64)`: the key and
the value rows of each head; `None`: the matrix is one block). All blocks of one shape go through the polynomial in one
batch, whatever parameters they come from, in workspaces of at most `WORKSPACE` bytes. Tall blocks iterate on X^T X, so
that nothing is transposed and the square matrices have the smaller side. FP32 is iterated in BF16 on CUDA, else in its
own precision; momentum and parameters are never narrower than FP32.

**Where.** Every block is seen whole by whoever orthogonalises it:

- Plain and replicated tensors, and shards along dimension 0 whose borders are borders of blocks (stacks of experts;
  heads, where their number divides): where they are. No communication.
- Other matrices sharded along dimension 0, as FSDP2 does: dealt out to the ranks of the shard's process group in turn,
  the most expensive first. One all-to-all brings the shards of each matrix to its owner, one takes the shards of the
  result back; a rank sends (and gets) in each direction about 1/ranks of all these matrices, in BF16 on CUDA. Replicas
  of a shard group (HSDP) do the same work beside each other.
- Any other layout (tensor parallelism along columns, packed gate and up): every rank gathers and computes all of it.

**Cost** for `1b-a200m` on one GPU, by count: 878 M parameters in matrices, 5,760 of the blocks [256, 512] or [512, 256].
A step of the polynomial on m x n (m <= n) takes 4 m^2 n + 2 m^3 FLOPs: 6.1 TFLOP for all blocks and five steps, 4.8 of
them for the experts. Symmetric products compute half of their tiles (`kernels/muon`): 15.6 ms on an H200, bound by
memory, where cuBLAS takes 18.6. Momentum and workspace read and write 14 bytes per parameter, the norm 6, decay and
update 10 more: 30 bytes, or 7 ms at 4 TB/s.
Nothing waits for the device.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.adamw import adamw

from ..kernels.muon import muon_descend, muon_direction, newton_schulz_step


COEFFICIENTS = (
    3.4445,
    -4.7750,
    2.0315,
)  # of X, (X X^T) X and (X X^T)^2 X: steep at zero, between 0.68 and 1.21 near 1
STEPS = 5
EPS = 1e-7  # a block of a smaller norm moves less: the momentum of an expert that gets no tokens fades out
ADAMW_RMS = 0.2
WORKSPACE = 2**30  # bytes


def orthogonalise(blocks: Tensor) -> Tensor:
    """`[N, R, C]` -> for each block its orthogonal factor, approximately, times 0.2 sqrt(max(R, C)); overwrites `blocks`."""
    wide = torch.promote_types(blocks.dtype, torch.float32)
    rows, columns = blocks.shape[1:]
    x = blocks.div_(torch.linalg.vector_norm(blocks, dim=(1, 2), keepdim=True, dtype=wide).clamp_min_(EPS))
    for step in range(STEPS):
        scale = ADAMW_RMS * math.sqrt(max(rows, columns)) if step == STEPS - 1 else 1.0
        a, b, c = (scale * coefficient for coefficient in COEFFICIENTS)
        x = newton_schulz_step(x, a, b, c)
    return x


class Muon(torch.optim.Optimizer):
    """Groups with `use_muon=True` (the default) are matrices for Muon, those with `use_muon=False` are AdamW's.

    Args:
        params: parameters or groups, in FP32 or FP64, plain tensors or DTensors. Options of a group beside those below:
            `rows` (how its matrices are cut, see the module), `use_muon`.
        lr, weight_decay: of both; decay is decoupled, and a group that must not decay says 0.
        momentum: Nesterov's, of Muon.
        betas, eps: of AdamW, which is torch's fused one.

    The `lr` of a group may be a tensor [] on the parameters' device, so that a CUDA graph of a step can be replayed with
    another one.

    The state is `momentum_buffer` for a Muon parameter, `exp_avg`, `exp_avg_sq` and `step` for one of AdamW, laid out as
    the parameter is; `torch.distributed.checkpoint` saves and reshards it without special cases. At a step all ranks must
    have gradients of the same parameters.

    Raises:
        ValueError: a narrower dtype; a Muon parameter of fewer than two dimensions; `rows` that do not divide it.
    """

    def __init__(
        self,
        params,
        lr: float = 0.0,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ):
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum: expected at least 0 and less than 1, got {momentum}")
        options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        super().__init__(params, {**options, "use_muon": True, "rows": None, "fused": True})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            if parameter.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"params: expected FP32 or FP64 masters, got {parameter.dtype}")
            if group["use_muon"]:
                if not _local(parameter).is_contiguous():
                    raise ValueError(f"params: expected contiguous matrices, got strides {list(parameter.stride())}")
                _check_cut(tuple(parameter.shape), group["rows"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices: list[_Matrix] = []
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters and group["use_muon"]:
                matrices += self._matrices(parameters, group)
            elif parameters:
                self._adamw(parameters, group)
        _update(matrices)
        return loss

    def _matrices(self, parameters: list[Tensor], group: dict[str, Any]) -> "list[_Matrix]":
        """What there is to do, with a momentum for each parameter."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return [
            _Matrix(
                parameter=_local(parameter),
                gradient=_local_gradient(parameter).contiguous(),
                momentum=_local(self.state[parameter]["momentum_buffer"]),
                whole=parameter,
                rows=tuple(group["rows"] or parameter.shape[-2:-1]),
                beta=group["momentum"],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
            )
            for parameter in parameters
        ]

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            [_local(parameter) for parameter in parameters],
            [_local_gradient(parameter) for parameter in parameters],
            [_local(state["exp_avg"]) for state in states],
            [_local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


@dataclass(slots=True)
class _Matrix:
    """A Muon parameter as this process holds it: `[..., R, C]`, whole or a shard, with the layout of all of it."""

    parameter: Tensor
    gradient: Tensor
    momentum: Tensor
    whole: Tensor
    rows: tuple[int, ...]
    beta: float
    lr: float | Tensor
    weight_decay: float

    @property
    def working_dtype(self) -> torch.dtype:
        dtype = self.parameter.dtype
        return torch.bfloat16 if self.parameter.is_cuda and dtype == torch.float32 else dtype

    def direction(self, out: Tensor) -> None:
        """Moves the momentum and writes what is to be orthogonalised."""
        gradient, momentum = (_stack(tensor) for tensor in (self.gradient, self.momentum))
        muon_direction(gradient, momentum, out.view_as(gradient), beta=self.beta)

    def move(self, update: Tensor) -> None:
        parameter = _stack(self.parameter)
        muon_descend(parameter, update.view_as(parameter), lr=self.lr, weight_decay=self.weight_decay)

    def blocks(self) -> "Iterator[_Owned]":
        """The blocks of a parameter that holds all rows of each."""
        tensors = (_cut(tensor, self.rows) for tensor in (self.gradient, self.momentum, self.parameter))
        for gradient, momentum, parameter in zip(*tensors, strict=True):
            yield _Owned(gradient, momentum, parameter, self)


@dataclass(slots=True)
class _Owned:
    """Equal blocks `[N, R, C]` of a parameter that stay where they are; `source` is the gradient."""

    source: Tensor
    momentum: Tensor
    parameter: Tensor
    matrix: _Matrix

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.working_dtype

    def load(self, part: slice, out: Tensor) -> None:
        muon_direction(self.source[part], self.momentum[part], out, beta=self.matrix.beta)

    def store(self, part: slice, update: Tensor) -> None:
        matrix = self.matrix
        muon_descend(self.parameter[part], update, lr=matrix.lr, weight_decay=matrix.weight_decay)


@dataclass(slots=True)
class _Gathered:
    """Equal blocks `[N, R, C]` of directions that other ranks sent, to be overwritten by their update."""

    source: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def load(self, part: slice, out: Tensor) -> None:
        out.copy_(self.source[part])

    def store(self, part: slice, update: Tensor) -> None:
        self.source[part] = update


def _update(matrices: list[_Matrix]) -> None:
    here: list[_Owned] = []
    dealt: dict[tuple[dist.ProcessGroup, torch.dtype], list[_Matrix]] = defaultdict(list)
    for matrix in matrices:
        if not isinstance(matrix.whole, DTensor) or all(place.is_replicate() for place in matrix.whole.placements):
            here += matrix.blocks()
        elif (group := _row_shards(matrix.whole)) is None:
            _update_everywhere(matrix)
        elif _holds_whole_blocks(matrix, dist.get_world_size(group)):
            here += matrix.blocks()
        else:
            dealt[group, matrix.working_dtype].append(matrix)
    _orthogonalise_all(here)
    for (group, _), sharded in dealt.items():
        for turn in _turns(sharded, dist.get_world_size(group)):
            _update_dealt(turn, group)


def _orthogonalise_all(blocks: Iterable[_Owned | _Gathered]) -> None:
    """Loads, orthogonalises and stores all blocks, those of one shape together as far as the workspace allows."""
    alike: dict[tuple, list[_Owned | _Gathered]] = defaultdict(list)
    for block in blocks:
        alike[(*block.source.shape[1:], block.dtype, block.source.device)].append(block)
    for (rows, columns, dtype, device), some in alike.items():
        small = min(rows, columns)
        most = max(1, WORKSPACE // ((3 * rows * columns + 2 * small * small) * dtype.itemsize))
        for parts in _packed([len(block.source) for block in some], most):
            sizes = [part.stop - part.start for _, part in parts]
            work = torch.empty(sum(sizes), rows, columns, dtype=dtype, device=device)
            for (index, part), out in zip(parts, work.split(sizes), strict=True):
                some[index].load(part, out)
            for (index, part), update in zip(parts, orthogonalise(work).split(sizes), strict=True):
                some[index].store(part, update)


def _packed(sizes: list[int], most: int) -> Iterator[list[tuple[int, slice]]]:
    """Cuts lists of the given sizes into batches of `most` elements: (which list, which part of it)."""
    batch, room = [], most
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            batch.append((index, slice(start, stop)))
            room -= stop - start
            start = stop
            if not room:
                yield batch
                batch, room = [], most
    if batch:
        yield batch


def _update_everywhere(matrix: _Matrix) -> None:
    """For a DTensor of any layout: every rank gathers all of the direction and keeps its own part of the update."""
    layout = matrix.whole
    shard = torch.empty_like(matrix.gradient, dtype=matrix.working_dtype)
    matrix.direction(shard)
    whole = DTensor.from_local(
        shard, layout.device_mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride()
    ).full_tensor()  # [..., R, C]
    _orthogonalise_all(map(_Gathered, _cut(whole, matrix.rows)))
    matrix.move(distribute_tensor(whole, layout.device_mesh, layout.placements, src_data_rank=None).to_local())


def _update_dealt(turn: list[list[_Matrix]], group: dist.ProcessGroup) -> None:
    """`turn[rank]`: the matrices that the rank owns, of which every rank holds some rows."""
    ranks, own = len(turn), turn[dist.get_rank(group)]
    matrices = [matrix for owned in turn for matrix in owned]
    sizes = [matrix.parameter.numel() for matrix in matrices]
    to_owners = [sum(matrix.parameter.numel() for matrix in owned) for owned in turn]
    shards = [[rows * matrix.whole.shape[1] for rows in _shard_rows(matrix.whole, ranks)] for matrix in own]
    from_ranks = [sum(counts[rank] for counts in shards) for rank in range(ranks)]

    sent = torch.empty(sum(sizes), dtype=matrices[0].working_dtype, device=matrices[0].parameter.device)
    for matrix, part in zip(matrices, sent.split(sizes), strict=True):
        matrix.direction(part)
    received = sent.new_empty(sum(from_ranks))
    dist.all_to_all_single(received, sent, from_ranks, to_owners, group=group)

    pieces = received.split([counts[rank] for rank in range(ranks) for counts in shards])  # by rank, then by matrix
    wholes = [torch.cat(pieces[i :: len(own)]).view(matrix.whole.shape) for i, matrix in enumerate(own)]  # [R, C]
    blocks = (_cut(whole, matrix.rows) for matrix, whole in zip(own, wholes, strict=True))
    _orthogonalise_all(map(_Gathered, itertools.chain.from_iterable(blocks)))
    cut = [whole.flatten().split(counts) for whole, counts in zip(wholes, shards, strict=True)]
    if own:
        torch.cat([parts[rank] for rank in range(ranks) for parts in cut], out=received)
    dist.all_to_all_single(sent, received, to_owners, from_ranks, group=group)
    for matrix, part in zip(matrices, sent.split(sizes), strict=True):
        matrix.move(part)


def _turns(matrices: list[_Matrix], ranks: int) -> Iterator[list[list[_Matrix]]]:
    """Deals the matrices out, the most expensive first, in as many turns as keep what a rank owns in the workspace.

    Every rank computes the same turns, from global shapes alone.
    """

    def cost(matrix: _Matrix) -> int:
        rows, columns = matrix.whole.shape
        return sum(size * columns * min(size, columns) for size in matrix.rows) * (rows // sum(matrix.rows))

    ordered = sorted(matrices, key=cost, reverse=True)  # stable: the order of the groups breaks ties
    turn: list[list[_Matrix]] = [[] for _ in range(ranks)]
    used = 0
    for start in range(0, len(ordered), ranks):
        stripe = ordered[start : start + ranks]
        size = max(matrix.whole.numel() * matrix.working_dtype.itemsize for matrix in stripe)
        if used and used + size > WORKSPACE:
            yield turn
            turn, used = [[] for _ in range(ranks)], 0
        used += size
        for owned, matrix in zip(turn, stripe):
            owned.append(matrix)
    if used:
        yield turn


def _stack(tensor: Tensor) -> Tensor:
    """`[..., R, C]` -> `[N, R, C]`."""
    return tensor.reshape(-1, *tensor.shape[-2:])


def _cut(tensor: Tensor, rows: tuple[int, ...]) -> tuple[Tensor, ...]:
    """`[..., R, C]` -> for each of `rows` a view `[N, rows, C]` of all blocks at that place."""
    return tensor.view(-1, sum(rows), tensor.shape[-1]).split(rows, dim=1)


def _check_cut(shape: tuple[int, ...], rows: tuple[int, ...] | None) -> None:
    if len(shape) < 2:
        raise ValueError(f"params: expected [..., R, C] where use_muon is set, got shape {shape}")
    if rows is not None and (min(rows, default=0) < 1 or shape[-2] % sum(rows)):
        raise ValueError(f"rows: expected sizes whose sum divides {shape[-2]} rows, got {tuple(rows)}")


def _row_shards(tensor: DTensor) -> dist.ProcessGroup | None:
    """The group over which dimension 0 is cut into contiguous shards; None where the layout is another one."""
    cut = [dim for dim, place in enumerate(tensor.placements) if not place.is_replicate()]
    if len(cut) != 1 or type(place := tensor.placements[cut[0]]) is not Shard or place.dim != 0:
        return None  # not `!= Shard(0)`: a strided shard may call itself equal to that
    return tensor.device_mesh.get_group(cut[0])


def _shard_rows(tensor: Tensor, ranks: int) -> list[int]:
    """How many of the entries of dimension 0 each rank holds."""
    total, most = tensor.shape[0], -(-tensor.shape[0] // ranks)
    return [min(most, max(0, total - rank * most)) for rank in range(ranks)]


def _holds_whole_blocks(matrix: _Matrix, ranks: int) -> bool:
    return matrix.whole.ndim > 2 or all(n % sum(matrix.rows) == 0 for n in _shard_rows(matrix.whole, ranks))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return _local(gradient)
