"""The definition of the expert MLPs, in torch."""

import itertools

import torch
import torch.nn.functional as F

from ..dispatch import compute_dtype, without_autocast
from ..situ_glu.reference import situ_glu_reference


@without_autocast
def expert_mlp_reference(
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    *,
    beta: float | None,
    linear_beta: float | None,
) -> torch.Tensor:
    """The routed sum for `x` [N, D]; see `expert_mlp`."""
    (N, k), E = indices.shape, gate_up_proj.shape[0]
    expert_of, order = indices.flatten().sort(stable=True)  # [N * k]: assignments by expert, sentinels last
    bounds = torch.searchsorted(expert_of, torch.arange(E + 1, device=x.device)).tolist()
    height = tile_height(N * k, E)

    # split and unbind have one backward for all experts, and give zeros to those that were not used; indexing would
    # allocate a whole gradient per expert.
    segments = x.index_select(0, order // k).split([hi - lo for lo, hi in itertools.pairwise([*bounds, N * k])])
    gate_up, down = gate_up_proj.unbind(), down_proj.unbind()
    # Without any assignment one expert still runs, on no rows, so that every parameter has a gradient: zeros.
    hit = [e for e in range(E) if len(segments[e])] or [0]
    outputs = []
    for e in hit:
        w1, w2 = gate_up[e].to(x.dtype), down[e].to(x.dtype)  # [2I, D], [D, I]
        for tile in segments[e].split(height):
            padded = F.pad(tile, (0, 0, 0, height - len(tile)))
            outputs.append(F.linear(situ_glu_reference(F.linear(padded, w1), beta, linear_beta), w2)[: len(tile)])
    outputs.append(torch.zeros_like(segments[E]))  # the sentinels

    # order.argsort() undoes the sort; the sum over k then runs in a fixed order, whatever the loads were.
    expert_out = torch.cat(outputs).index_select(0, order.argsort()).view(N, k, x.shape[1])  # [N, k, D]
    dtype = compute_dtype(x)
    p = weights.to(dtype).masked_fill(indices == E, 0.0)  # [N, k]
    total = torch.zeros_like(x, dtype=dtype)
    for j in range(k):
        total = total + expert_out[:, j] * p[:, j, None]
    return total.to(x.dtype)


def tile_height(assignments: int, num_experts: int) -> int:
    """Rows of one matrix product: half the mean load of an expert, at most 256.

    BLAS chooses its summation order by the number of rows. A height that depends on shapes alone makes the result of a
    token independent, to the bit, of where the other tokens go. Lower tiles would pad less but cost more calls.
    """
    return min(256, max(1, -(-assignments // (2 * num_experts))))
