"""The short convolution in plain torch: shifted copies, one per tap."""

import torch
import torch.nn.functional as F

from ..dispatch import compute_dtype, without_autocast


@without_autocast
def short_convs(xs, weights, *, states=None, cu_seqlens=None):
    """Arguments and results as in `api.short_convs`; FP32 inside, FP64 for FP64 inputs."""
    befores = [None] * len(xs) if states is None else states.split([x.shape[-1] for x in xs], dim=1)
    results = (_short_conv(*one, cu_seqlens) for one in zip(xs, weights, befores, strict=True))
    ys, new_states = zip(*results, strict=True)
    # A copy also of one: a view would keep all the rows alive for as long as the caller keeps the state.
    return ys, torch.cat(new_states, dim=1)


def _short_conv(x, weight, state, cu_seqlens):
    """Every document is preceded by its W - 1 state rows. Then a window never needs a condition: the last W - 1 rows of a
    document with its state are its new state, however short it is.
    """
    B, T, C = x.shape
    history = weight.shape[-1] - 1
    if state is None:
        state = x.new_zeros(B if cu_seqlens is None else len(cu_seqlens) - 1, C, history)
    if cu_seqlens is None:
        rows = torch.cat([state.mT, x], dim=1)
        y = _windows(rows, weight)
        new_state = rows[:, T:]
    else:
        documents = torch.arange(len(cu_seqlens) - 1, device=x.device)
        starts = cu_seqlens[:-1] + history * documents
        ends = cu_seqlens[1:] + history * (documents + 1)
        offsets = torch.arange(history, device=x.device)
        # Where the window of each token begins; the token itself stands `history` rows further.
        windows = torch.arange(T, device=x.device) + history * documents.repeat_interleave(
            cu_seqlens.diff(), output_size=T
        )
        rows = x.new_zeros(T + history * len(documents), C)
        rows[starts[:, None] + offsets] = state.mT
        rows[windows + history] = x[0]
        y = _windows(rows[None], weight)[:, windows]
        new_state = rows[ends[:, None] - history + offsets]
    return y.to(x.dtype), new_state.mT


def _windows(rows, weight):
    """SiLU of the weighted sum of W rows, for each window of rows [B, L, C]: [B, L - W + 1, C]."""
    dtype = compute_dtype(rows)
    taps = weight[:, 0].to(dtype).unbind(-1)
    length = rows.shape[1] - len(taps) + 1
    return F.silu(sum(tap * rows[:, shift : shift + length].to(dtype) for shift, tap in enumerate(taps)))
