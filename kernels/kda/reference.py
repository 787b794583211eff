"""Kimi Delta Attention in plain torch: the recurrence (the definition) and the chunked form (the algorithm).

Symbols as in README.md. Everything is computed in FP32, or in FP64 when the inputs are FP64.
"""

import math

import torch
import torch.nn.functional as F

from ..dispatch import compute_dtype, without_autocast


CHUNK = 64
TILE = 16
LOG2_E = math.log2(math.e)
SEGMENT = (
    4  # chunks whose intermediate tensors are alive together: this bounds the memory of a forward without gradients
)
# A diagonal tile spans 15 gates, and e^(15 * 5.8) is the last that fits FP32 (e^88.7).
FACTORED_LOWER_BOUND = -5.8
# Decays are powers of two. One under 2^-92, beneath the rounding error of FP64, becomes 0: CPUs are many times slower on
# the subnormal FP32 numbers that its products would be.
FORGOTTEN = -92.0


def activate(q, k, g, beta, A_log, dt_bias, lower_bound):
    """Raw q, k, g [..., H, K] and beta [..., H] to unit q (times K^-1/2) and k, log2 of the decay, beta in (0, 1)."""
    dtype = compute_dtype(q)
    q, k, g, beta, A_log, dt_bias = (x.to(dtype) for x in (q, k, g, beta, A_log, dt_bias))
    q = q * (_inverse_norm(q) * q.shape[-1] ** -0.5)
    k = k * _inverse_norm(k)
    rate = A_log.clamp(max=80.0).exp()[:, None]
    # Beyond this limit sigmoid and exp have nothing left to lose, and an infinite product would make 0 * inf in backward.
    limit = -math.log(torch.finfo(dtype).tiny)
    if lower_bound is None:
        g = F.softplus(g + dt_bias).mul_(rate).clamp_(max=limit) * -LOG2_E
    else:
        g = (g + dt_bias).mul_(rate).clamp_(-limit, limit).sigmoid_() * (lower_bound * LOG2_E)
    return q, k, g, beta.sigmoid()


def _inverse_norm(x):
    return (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() + 1e-6).rsqrt()


def _token(S, q, k, v, g, beta):
    """One turn of the recurrence: S [..., K, V], q, k, g [..., K], v [..., V], beta [...] to (o [..., V], S)."""
    S = g.exp2()[..., None] * S
    r = beta[..., None] * (v - (k[..., None, :] @ S).squeeze(-2))
    S = S + k[..., None] * r[..., None, :]
    return (q[..., None, :] @ S).squeeze(-2), S


def _initial_states(q, v, initial_state, cu_seqlens):
    if initial_state is not None:
        return initial_state
    documents = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    return q.new_zeros(documents, q.shape[2], q.shape[3], v.shape[3], dtype=compute_dtype(q))


@without_autocast
def kda_recurrent(q, k, v, g, beta, *, A_log, dt_bias, lower_bound=-5.0, initial_state=None, cu_seqlens=None):
    """The definition, one token per loop turn. Arguments and results as in `api.kda`."""
    S = _initial_states(q, v, initial_state, cu_seqlens)
    tokens = (*activate(q, k, g, beta, A_log, dt_bias, lower_bound), v.to(S.dtype))
    lengths = [q.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    states = [S] if cu_seqlens is None else list(S.split(1))
    outputs = [v.new_empty(v.shape[0], 0, *v.shape[2:])]
    for document, pieces in enumerate(zip(*(x.split(lengths, dim=1) for x in tokens))):
        for q_t, k_t, g_t, beta_t, v_t in zip(*(x.unbind(1) for x in pieces)):
            o_t, states[document] = _token(states[document], q_t, k_t, v_t, g_t, beta_t)
            outputs.append(o_t[:, None].to(v.dtype))
    return torch.cat(outputs, dim=1), torch.cat(states)


@without_autocast
def kda_chunk(q, k, v, g, beta, *, A_log, dt_bias, lower_bound=-5.0, initial_state=None, cu_seqlens=None):
    """The same function in chunks of 64 tokens and matrix products. Arguments and results as in `api.kda`.

    The rows of a batch and the documents of a packed row are the same thing here: runs of the flattened tokens with a
    state each. The c-th chunks of up to `SEGMENT` documents advance together.
    """
    B, T, H = q.shape[:3]
    lengths = [T] * B if cu_seqlens is None else cu_seqlens.diff().tolist()
    chunks, cuts = [], []  # of each document its chunk numbers; of each chunk its tokens
    for length in lengths:
        sizes = [min(CHUNK, length - first) for first in range(0, length, CHUNK)]
        chunks.append(range(len(cuts), len(cuts) + len(sizes)))
        cuts.extend(sizes)
    # One split of each input, not slices: the backward of a slice fills a gradient of the whole input.
    inputs = [x.flatten(0, 1).split(cuts) for x in (q, k, v, g, beta)]
    states = list(_initial_states(q, v, initial_state, cu_seqlens).unbind())
    outputs = [None] * len(cuts)
    longest_first = sorted(range(len(lengths)), key=lambda document: -lengths[document])
    for first in range(0, len(lengths), SEGMENT):
        documents = longest_first[first : first + SEGMENT]
        turns = [
            [chunks[d][turn] for d in documents if turn < len(chunks[d])] for turn in range(len(chunks[documents[0]]))
        ]
        S = torch.stack([states[d] for d in documents])
        step = SEGMENT // len(documents)
        for start in range(0, len(turns), step):
            segment = turns[start : start + step]
            members = [chunk for turn in segment for chunk in turn]
            q_c, k_c, v_c, g_c, beta_c = (_stack([pieces[chunk] for chunk in members]) for pieces in inputs)
            q_c, k_c, g_c, beta_c = activate(q_c, k_c, g_c, beta_c, A_log, dt_bias, lower_bound)
            sizes = [cuts[chunk] for chunk in members]
            if min(sizes) < g_c.shape[1]:
                rows = torch.arange(g_c.shape[1], device=q.device)
                padding = rows >= torch.tensor(sizes, device=q.device)[:, None]
                g_c = g_c.masked_fill(padding[..., None, None], 0.0)
            exact = lower_bound is None or lower_bound < FACTORED_LOWER_BOUND
            x = (t.transpose(1, 2).flatten(0, 1) for t in (q_c, k_c, v_c.to(q_c.dtype), g_c, beta_c[..., None]))
            terms = _within_chunks(*x, exact)
            o, S = _across_chunks(S.flatten(0,1), terms, [H * len(turn) for turn in segment])
            S = S.unflatten(0, (-1, H)); o = o.unflatten(0, (-1, H))
            for chunk, o_chunk in zip(members, o.to(v.dtype).unbind()):
                outputs[chunk] = o_chunk.transpose(0, 1)[: cuts[chunk]]
        for document, state in zip(documents, S.unbind()):
            states[document] = state
    o = torch.cat([v.new_empty(0, *v.shape[2:]), *outputs])
    return o.view(v.shape), torch.stack(states)


def _stack(pieces):
    """Pieces [t, H, ...] of up to 64 tokens to one [n, C, H, ...], zeros behind the short ones.

    In memory the heads come before the tokens, so that no matrix product has to copy its operands.
    """
    C = max(len(piece) for piece in pieces)
    full = [F.pad(x, (0, 0) * (x.ndim - 1) + (0, C - len(x))) if len(x) < C else x for x in pieces]
    return torch.stack([x.transpose(0, 1) for x in full]).transpose(1, 2)


def _within_chunks(q, k, v, g, beta, exact):
    """All that needs no state, for q, k, g [n, H, C, K], v [n, H, C, V], beta [n, H, C]: Qh, Kt, gam, P, W, U."""
    L = g.cumsum(-2)
    P, A = _scores(q, k, L, exact)
    from_start, L_C = _decay(L, 0.0), L[..., -1:, :]
    return q * from_start, k * from_start, k * _decay(L_C, L), from_start[..., -1:, :].mT, P.tril_(), A.mul_(beta), v, beta


def _decay(to, since):
    return F.threshold_(to - since, FORGOTTEN, -math.inf).exp2_()


def _scores(q, k, L, exact):
    """sum_d x_id k_jd 2^(L_id - L_jd) for x = q and x = k, [n, H, C, C]; meaningless finite numbers for j > i.

    Row tiles of 16, factored at the tile's first row, which no later token can move: left of the diagonal tile both
    exponents are <= 0, inside it the key's is at most 15 |lower_bound|. `exact` takes the diagonal tile unfactored.
    """
    C = L.shape[-2]
    P, A = [], []
    for a in range(0, C, TILE):
        b = min(a + TILE, C)
        anchor = L[..., a : a + 1, :]
        decay = (L[..., a:b, :] - anchor).exp2_()
        end = a if exact else b
        keys = (k[..., :end, :] * _decay(anchor, L[..., :end, :])).mT
        for x, rows in ((q, P), (k, A)):
            x = x[..., a:b, :]
            row = (x * decay) @ keys
            if exact:
                row = torch.cat([row, _diagonal_tile(x, k[..., a:b, :], L[..., a:b, :])], -1)
            rows.append(F.pad(row, (0, C - b)))
    return torch.cat(P, -2), torch.cat(A, -2)


def _diagonal_tile(x, k, L):
    """The scores of one tile, column by column: every exponent is <= 0, however fast the decay."""
    columns = []
    for j in range(L.shape[-2]):
        keys = k[..., j : j + 1, :] * _decay(L[..., j:, :], L[..., j : j + 1, :])
        columns.append(F.pad((x[..., j:, :] * keys).sum(-1), (j, 0)))
    return torch.stack(columns, -1)


def _across_chunks(S, terms, turns):
    """Carry the states S [N, H, K, V] through turns of n_1 >= n_2 >= ... chunks, of the first n_i documents each."""
    outputs = []
    for Qh, Kh, Kt, gam, P, A, v, beta in zip(*(x.split(turns) for x in terms)):
        active, finished = S.split([len(Qh), len(S) - len(Qh)])
        Y = torch.baddbmm(v, Kh, active, alpha=-1).mul_(beta)
        R = torch.linalg.solve_triangular(A.mT, Y.mT, upper=True, left=False, unitriangular=True).mT
        outputs.append((Qh @ active).baddbmm_(P, R))
        S = (gam * active).baddbmm_(Kt.mT, R)
        if len(finished):
            S = torch.cat([S, finished])
    return torch.cat(outputs), S


@torch.no_grad()
@without_autocast
def kda_step(q, k, v, g, beta, *, A_log, dt_bias, lower_bound=-5.0, state):
    """One token for each batch row; `state` is updated in place. Arguments and results as in `api.kda_step`."""
    q, k, g, beta = activate(q, k, g, beta, A_log, dt_bias, lower_bound)
    o, S = _token(state, q, k, v.to(state.dtype), g, beta)
    state.copy_(S)
    return o.to(v.dtype)
