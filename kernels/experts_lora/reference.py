"""The definition of the expert MLPs with low-rank updates, in torch."""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..dispatch import compute_dtype, without_autocast
from ..experts.reference import tile_height
from ..mxfp4.experts import FrozenLinear
from ..situ_glu.reference import situ_glu_reference


Tiles = list[torch.Tensor]
Product = Callable[[int, Tiles], Tiles]  # of an expert's matrix and tiles of its rows


@without_autocast
def expert_mlp_lora_reference(
    x, indices, weights, E: int, gate_up: Product, down: Product, gate_up_lora, down_lora, beta, linear_beta
) -> torch.Tensor:
    """The routed sum for `x` [N, D], on the schedule of `expert_mlp_reference` and in its order; see `expert_mlp_lora`."""
    N, k = indices.shape
    expert_of, order = indices.flatten().sort(stable=True)  # [N * k]: assignments by expert, sentinels last
    bounds = torch.searchsorted(expert_of, torch.arange(E + 1, device=x.device)).tolist()
    height = tile_height(N * k, E)
    gate_up, down = updated(gate_up, gate_up_lora), updated(down, down_lora)

    segments = x.index_select(0, order // k).split([hi - lo for lo, hi in itertools.pairwise([*bounds, N * k])])
    # Without any assignment one expert still runs, on no rows, so that every factor has a gradient: zeros.
    hit = [e for e in range(E) if len(segments[e])] or [0]
    outputs = []
    for e in hit:
        tiles = [F.pad(tile, (0, 0, 0, height - len(tile))) for tile in segments[e].split(height)]
        activated = [situ_glu_reference(tile, beta, linear_beta) for tile in gate_up(e, tiles)]  # [height, I] each
        outputs.append(torch.cat(down(e, activated))[: len(segments[e])])  # [rows, D]
    outputs.append(torch.zeros_like(segments[E]))  # the sentinels

    expert_out = torch.cat(outputs).index_select(0, order.argsort()).view(N, k, x.shape[1])  # [N, k, D]
    dtype = compute_dtype(x)
    p = weights.to(dtype).masked_fill(indices == E, 0.0)  # [N, k]
    total = torch.zeros_like(x, dtype=dtype)
    for j in range(k):
        total = total + expert_out[:, j] * p[:, j, None]
    return total.to(x.dtype)


def plain(projection: torch.Tensor) -> Product:
    """The products with `projection` [E, out, in]."""
    matrices = projection.unbind()  # one backward for all experts, with zeros for those that were not used

    def product(e: int, tiles: Tiles) -> Tiles:
        matrix = matrices[e].to(tiles[0].dtype)
        return [F.linear(tile, matrix) for tile in tiles]

    return product


def frozen_mxfp4(packed: torch.Tensor, scales: torch.Tensor) -> Product:
    """Those with MXFP4 codes [E, out, in / 2] and scales [E, in / 32, out]."""
    return lambda e, tiles: list(FrozenLinear.apply(packed[e], scales[e], *tiles))


def updated(base: Product, lora) -> Product:
    """`base` and, where there is one, the low-rank update."""
    if lora is None:
        return base
    a_of, b_of = lora.a.unbind(), lora.b.unbind()

    def product(e: int, tiles: Tiles) -> Tiles:
        a, b = a_of[e].to(tiles[0].dtype), b_of[e].to(tiles[0].dtype)  # [r, in], [out, r]
        pairs = zip(base(e, tiles), tiles, strict=True)
        return [y + F.linear(F.linear(tile, a), b) for y, tile in pairs]

    return product
