"""How a model's parameters are optimised: who takes which, a start that learns at once, learning rates, clipping."""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from ..gated_mla import GatedMLA
from ..kda import KimiDeltaAttention
from ..latent_moe import LatentMoE, MoeLcExperts
from ..router import Router
from ..situ_glu import SiTUGLU
from ..vision import VisionBlock
from .muon import Muon


EMBEDDING_RATE = 20.0  # times the learning rate: most rows of the table are met only now and then

# Which rows of a matrix Muon orthogonalises together: (module, parameter, sizes of consecutive blocks, repeated to the
# end). A head is a map of its own; so are its keys and its values, and gate and up, which only share a matrix. Every
# matrix that is not named here is one block.
_Cut = tuple[type[nn.Module], str, Callable[[Any, Tensor], tuple[int, ...] | None]]
CUTS: tuple[_Cut, ...] = (
    (KimiDeltaAttention, "q_proj.weight", lambda kda, _: (kda.head_dim,)),
    (KimiDeltaAttention, "k_proj.weight", lambda kda, _: (kda.head_dim,)),
    (KimiDeltaAttention, "v_proj.weight", lambda kda, _: (kda.head_dim,)),
    (KimiDeltaAttention, "f_b_proj.weight", lambda kda, _: (kda.head_dim,)),  # of the decay gate
    (KimiDeltaAttention, "g_proj.weight", lambda kda, _: (kda.head_dim,)),  # the output gate
    (KimiDeltaAttention, "g_b_proj.weight", lambda kda, _: (kda.head_dim,)),
    (GatedMLA, "q_proj.weight", lambda mla, _: (mla.nope_dim + mla.rope_dim,)),
    (GatedMLA, "q_b_proj.weight", lambda mla, _: (mla.nope_dim + mla.rope_dim,)),
    (GatedMLA, "kv_b_proj.weight", lambda mla, _: (mla.nope_dim, mla.v_dim)),
    (GatedMLA, "g_proj.weight", lambda mla, _: (mla.v_dim,)),
    (SiTUGLU, "gate_up_proj.weight", lambda _, gate_up: (gate_up.shape[-2] // 2,)),
    (VisionBlock, "wqkv.weight", lambda block, _: (block.head_dim,)),
    (MoeLcExperts, "gate_up_proj", lambda _, gate_up: (gate_up.shape[-2] // 2,)),
    (MoeLcExperts, "down_proj", lambda *_: None),
)


class Treatment(NamedTuple):
    """What an optimiser does with a parameter."""

    use_muon: bool  # else AdamW
    rows: tuple[int, ...] | None  # how Muon cuts each matrix; None: not at all
    decays: bool
    rate: float  # times the learning rate


def treatments(model: nn.Module, *, router_on_muon: bool = False, embedding_rate: float = 1.0) -> dict[str, Treatment]:
    """The treatment of every trainable parameter, by name.

    Muon takes matrices and stacks of experts, except embeddings, the head and, unless `router_on_muon`, the router;
    AdamW takes these and all that is no matrix: norms, biases, short convolutions [C, 1, W], pseudo-queries [1, D].
    Only matrices decay. `embedding_rate` is of the input embedding.
    """
    cuts = {
        id(parameter): rows(module, parameter)
        for module in model.modules()
        for kind, name, rows in CUTS
        if isinstance(module, kind) and (parameter := dict(module.named_parameters()).get(name)) is not None
    }
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    kept = (nn.Embedding,) if router_on_muon else (nn.Embedding, Router)
    not_muon = {id(module.weight) for module in model.modules() if isinstance(module, kept) or module is head}

    def treatment(parameter: nn.Parameter) -> Treatment:
        if id(parameter) in cuts:
            return Treatment(True, cuts[id(parameter)], decays=True, rate=1.0)
        if parameter.ndim == 2 and is_matrix(parameter) and id(parameter) not in not_muon:
            return Treatment(True, None, decays=True, rate=1.0)
        rate = embedding_rate if parameter is embedding.weight else 1.0
        return Treatment(False, None, decays=is_matrix(parameter), rate=rate)

    return {name: treatment(parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}


def is_matrix(parameter: Tensor) -> bool:
    """Whether the last two dimensions are both larger than 1: a matrix, or a stack of them."""
    return parameter.ndim >= 2 and 1 not in parameter.shape[-2:]


def muon(
    model: nn.Module,
    *,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    router_on_muon: bool = False,
    embedding_rate: float = 1.0,
) -> Muon:
    """`Muon` with one group for each kind of `treatments`; `set_learning_rate` before every step.

    Call it after the model was sharded. `embedding_rate` goes with `initialise`: `EMBEDDING_RATE` there, else 1.
    """
    groups: dict[Treatment, list[nn.Parameter]] = defaultdict(list)
    parameters = dict(model.named_parameters())
    for name, treatment in treatments(model, router_on_muon=router_on_muon, embedding_rate=embedding_rate).items():
        groups[treatment].append(parameters[name])
    options = [
        {
            "params": members,
            "use_muon": treatment.use_muon,
            "rows": treatment.rows,
            "weight_decay": weight_decay if treatment.decays else 0.0,
            "rate": treatment.rate,
        }
        for treatment, members in groups.items()
    ]
    return Muon(options, momentum=momentum, betas=betas)


def initialise(model: nn.Module) -> None:
    """Changes a freshly built model so that it starts as its embedding followed by its head.

    Embeddings get a standard deviation of 1, and every projection that writes to the residual stream is zero. Otherwise
    the tokens' own vectors, as small as all weights at first, drown in the output of untrained layers, and hundreds of
    steps go by before the loss falls below that of token frequencies.
    """
    nn.init.normal_(model.get_input_embeddings().weight, std=1.0)
    for module in model.modules():
        if isinstance(module, (KimiDeltaAttention, GatedMLA)):
            nn.init.zeros_(module.o_proj.weight)
        elif isinstance(module, SiTUGLU):
            nn.init.zeros_(module.down_proj.weight)
        elif isinstance(module, LatentMoE):
            nn.init.zeros_(module.routed_expert_up_proj.weight if module.has_latent else module.experts.down_proj)


def adamw(
    model: nn.Module,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    embedding_rate: float = EMBEDDING_RATE,
) -> torch.optim.AdamW:
    """AdamW of what is trainable, with decay on matrices only; `set_learning_rate` before every step.

    The embedding is a matrix, with a learning rate of its own: `embedding_rate` times that of the others.
    """
    embedding = model.get_input_embeddings().weight
    embeddings, matrices, others = [], [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            kind = embeddings if parameter is embedding else matrices if is_matrix(parameter) else others
            kind.append(parameter)
    groups = [
        {"params": embeddings, "weight_decay": weight_decay, "rate": embedding_rate},
        {"params": matrices, "weight_decay": weight_decay, "rate": 1.0},
        {"params": others, "weight_decay": 0.0, "rate": 1.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, betas=betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float | Tensor) -> None:
    """Sets every group's learning rate to `rate` times the group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate"]


@contextlib.contextmanager
def rate_on_device(optimizer: torch.optim.Optimizer, rate: Tensor) -> Iterator[None]:
    """Inside, the groups have their parts of `rate` [] as tensors in place of numbers: the same for a CUDA graph that will
    be replayed with other rates."""
    numbers = [group["lr"] for group in optimizer.param_groups]
    set_learning_rate(optimizer, rate)
    try:
        yield
    finally:
        for group, number in zip(optimizer.param_groups, numbers, strict=True):
            group["lr"] = number


def cosine(step: int, steps: int, start: float = 1.0, end: float = 0.1, warmup: int = 0) -> float:
    """Learning rate of step 0 <= `step` < `steps`: linear from `start` / `warmup` up to `start` in `warmup` steps, then
    a cosine to `end` at the last step. `start` and `end` are those of a stage, or factors of a peak."""
    if step < warmup:
        return start * (step + 1) / warmup
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * _progress(step, steps, warmup)))


def wsd(step: int, steps: int, start: float = 1.0, end: float = 0.0, warmup: int = 0, decay: float = 0.2) -> float:
    """Warm-up as in `cosine`, then stable at `start`; over the last `decay` (a share, at least one step) of the steps it falls as
    1 - sqrt(progress) to `end` at the last step."""
    if step < warmup:
        return start * (step + 1) / warmup
    begin = max(warmup, steps - max(1, round(decay * steps)))
    progress = _progress(step, steps, begin) if step >= begin else 0.0
    return end + (start - end) * (1.0 - math.sqrt(progress))


SCHEDULES: dict[str, Callable[..., float]] = {"cosine": cosine, "wsd": wsd}


def warmup_steps(steps: int, share: float = 0.01) -> int:
    """How many of `steps` the learning rate rises: `share` of them, at least one."""
    return max(1, round(share * steps))


def _progress(step: int, steps: int, begin: int) -> float:
    """Of the steps from `begin` to the last, the share that is over after `step`: 1 at the last one."""
    return (step - begin + 1) / max(1, steps - begin)


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales all gradients so that their total norm is at most `max_norm`; returns the norm before, a scalar.

    Plain tensors and DTensors of any meshes may be mixed (torch's own function refuses that): what is sharded counts once
    over all ranks, what is replicated counts once. Every rank must call it; nothing waits for the device. With no
    gradient at all the norm is 0. The squares are summed in FP64, so that the norm in FP32, and with it the bits of a whole run,
    practically never depends on how the gradients are shared out.
    """
    alike: dict[tuple, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if (gradient := parameter.grad) is None:
            continue
        if not isinstance(gradient, DTensor):
            alike[None, (), gradient.dtype].append(gradient)
            continue
        if any(place.is_partial() for place in gradient.placements):
            whole = [Replicate() if place.is_partial() else place for place in gradient.placements]
            gradient = parameter.grad = gradient.redistribute(placements=whole)
        cut = tuple(dim for dim, place in enumerate(gradient.placements) if not place.is_replicate())
        alike[gradient.device_mesh, cut, gradient.dtype].append(gradient.to_local())
    if not alike:
        return torch.zeros(())

    squares = []
    for (mesh, cut, _), gradients in alike.items():
        square = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).square().sum()
        for dim in cut:
            dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    widest = max((dtype for *_, dtype in alike), key=lambda dtype: dtype.itemsize)
    total = torch.stack([square.to(squares[0].device) for square in squares]).sum()
    norm = total.sqrt().to(torch.promote_types(widest, torch.float32))
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradients in alike.values():
        torch._foreach_mul_(gradients, scale.to(gradients[0].device))
    return norm
