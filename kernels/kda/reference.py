"""Kimi Delta Attention in plain torch: the recurrence (the definition) and the chunked form (the algorithm).

Symbols as in README.md. Everything is computed in FP32, or in FP64 when the inputs are FP64; decays are powers of two.
"""

import itertools
import math

import torch
import torch.nn.functional as F

from ..dispatch import compute_dtype, without_autocast


CHUNK = 64
TILE = 16
# The chunks whose intermediate tensors are alive together; without gradients this bounds the memory.
SEGMENT = 8
LOG2_E = math.log2(math.e)
# A diagonal tile spans 15 gates, and e^(15 * 5.8) is the last that fits FP32 (e^88.7).
FACTORED_LOWER_BOUND = -5.8
# A decay under 2^-92, beneath the rounding error of FP64, becomes 0: CPUs are many times slower on the subnormal FP32
# numbers that products with it would be.
FORGOTTEN = -92.0


def activate(q, k, g, beta, A_log, dt_bias, lower_bound):
    """Raw q, k, g [..., H, K], beta [..., H] to unit q (times K^-1/2) and k, log2 of the decay, beta in (0, 1)."""
    dtype = compute_dtype(q)
    q, k, g, beta, A_log, dt_bias = (x.to(dtype) for x in (q, k, g, beta, A_log, dt_bias))
    q = q * (_inverse_norm(q) * q.shape[-1] ** -0.5)
    k = k * (_inverse_norm(k))
    rate = A_log.clamp(max=80.0).exp()[:, None]
    if lower_bound is None:
        # exp(-limit) is 0, and so is its gradient; without the limit an infinite product would make it 0 * inf.
        limit = -math.log(torch.finfo(dtype).tiny)
        g = F.softplus(g + dt_bias).mul_(rate).clamp_(max=limit) * -LOG2_E
    else:
        g = (g + dt_bias).mul_(rate).sigmoid_() * (lower_bound * LOG2_E)
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
    return q.new_zeros(1, q.shape[2], q.shape[3], v.shape[3], dtype=compute_dtype(q)).expand(documents, -1, -1, -1)


@without_autocast
def kda_recurrent(q, k, v, g, beta, *, A_log, dt_bias, lower_bound=-5.0, initial_state=None, cu_seqlens=None):
    """The definition, one token per loop turn. Arguments and results as in `api.kda`."""
    S = _initial_states(q, v, initial_state, cu_seqlens)
    tokens = (*activate(q, k, g, beta, A_log, dt_bias, lower_bound), v.to(S.dtype))
    lengths = [q.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    states = [S] if cu_seqlens is None else list(S.split(1))
    outputs = []
    for document, pieces in enumerate(zip(*(x.split(lengths, dim=1) for x in tokens))):
        for q_t, k_t, g_t, beta_t, v_t in zip(*(x.unbind(1) for x in pieces)):
            o_t, states[document] = _token(states[document], q_t, k_t, v_t, g_t, beta_t)
            outputs.append(o_t.to(v.dtype))
    return torch.stack(outputs, dim=1) if outputs else v, torch.cat(states)


@without_autocast
def kda_chunk(q, k, v, g, beta, *, A_log, dt_bias, lower_bound=-5.0, initial_state=None, cu_seqlens=None):
    """The same function in chunks of 64 tokens and matrix products. Arguments and results as in `api.kda`.

    A row of a batch and a document of a packed row are the same thing here: a run of the flattened tokens with a state
    of its own.
    """
    B, T, H = q.shape[:3]
    sizes, documents = [], []  # of each chunk its tokens, of each document its chunk numbers
    for length in [T] * B if cu_seqlens is None else cu_seqlens.diff().tolist():
        cuts = [min(CHUNK, length - first) for first in range(0, length, CHUNK)]
        documents.append(range(len(sizes), len(sizes) + len(cuts)))
        sizes += cuts
    # One split of each input, not slices: the backward of a slice fills a gradient of the whole input.
    chunks = list(zip(*(x.flatten(0, 1).split(sizes) for x in (q, k, v, g, beta))))
    outputs = [None] * len(chunks)
    states = list(_initial_states(q, v, initial_state, cu_seqlens).unbind())
    for group, segments in _schedule(documents):
        S = torch.cat([states[document] for document in group])  # [documents * H, K, V]
        for turns in segments:
            members = list(itertools.chain(*turns))
            terms = _within_chunks([chunks[chunk] for chunk in members], A_log, dt_bias, lower_bound)
            o, S = _across_chunks(S, terms, [H * len(turn) for turn in turns])
            for chunk, o_chunk in zip(members, itertools.chain(*(o_turn.split(H) for o_turn in o))):
                outputs[chunk] = o_chunk.transpose(0, 1)[: sizes[chunk]].to(v.dtype)
        for document, state in zip(group, S.split(H)):
            states[document] = state
    return torch.cat(outputs).view(v.shape) if outputs else v, torch.stack(states)


def _schedule(documents):
    """Yield groups of documents that advance together, longest first, each with the segments of its turns.

    A turn holds the c-th chunk of each document that has one, a segment as many turns as make up to `SEGMENT` chunks.
    """
    longest_first = sorted(range(len(documents)), key=lambda document: -len(documents[document]))
    for first in range(0, len(documents), SEGMENT):
        group = longest_first[first : first + SEGMENT]
        turns = itertools.zip_longest(*(documents[document] for document in group))
        turns = [[chunk for chunk in turn if chunk is not None] for turn in turns]
        step = SEGMENT // len(group)
        yield group, [turns[start : start + step] for start in range(0, len(turns), step)]


def _within_chunks(chunks, A_log, dt_bias, lower_bound):
    """All that needs no state, for n chunks of raw (q, k, v, g, beta): Qh, Kh, Kt, gam, P, A, v, beta [n * H, ...]."""
    q, k, v, g, beta = (_stack(pieces) for pieces in zip(*chunks))
    q, k, g, beta = activate(q, k, g, beta, A_log, dt_bias, lower_bound)
    sizes = [len(chunk[0]) for chunk in chunks]
    if min(sizes) < max(sizes):
        padding = torch.arange(max(sizes)) >= torch.tensor(sizes)[:, None]
        g = g.masked_fill(padding[..., None, None].to(g.device), 0.0)
    q, k, v, g, beta = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v.to(q.dtype), g, beta[..., None]))
    L = g.cumsum_(1)
    start, end = torch.zeros_like(L[:, :1]), L[:, -1:]
    P, A = _scores(q, k, L, exact=lower_bound is None or lower_bound < FACTORED_LOWER_BOUND)
    Qh, Kh, Kt = _decayed(q, L, start), _decayed(k, L, start), _decayed(k, end, L)
    return Qh, Kh, Kt, _power(end, start).mT, P.tril_(), A.tril_(-1).mul_(beta), v, beta


def _stack(pieces):
    """Pieces [t, H, ...] of up to 64 tokens to one [n, C, H, ...], zeros behind the short ones.

    In memory the heads come before the tokens, so that no matrix product has to copy its operands.
    """
    C = max(len(piece) for piece in pieces)
    full = [F.pad(x, (0, 0) * (x.ndim - 1) + (0, C - len(x))) if len(x) < C else x for x in pieces]
    return torch.stack([x.transpose(0, 1) for x in full]).transpose(1, 2)


def _scores(q, k, L, exact):
    """P and A without beta, [n * H, C, C]: sum_d x_id k_jd 2^(L_id - L_jd) for x = q and x = k.

    Row tiles of 16, factored at the tile's first row, which no later token can move: left of the diagonal tile both
    exponents are <= 0, inside it the key's is at most 15 |lower_bound|. `exact` does not factor the diagonal tile.
    Above the diagonal stand meaningless finite numbers.
    """
    C = L.shape[1]
    P, A = [], []
    for a in range(0, C, TILE):
        b = min(a + TILE, C)
        anchor, end = L[:, a : a + 1], a if exact else b
        keys = _decayed(k[:, :end], anchor, L[:, :end]).mT
        decay = (L[:, a:b] - anchor).exp2_()
        tiles = _diagonal_tiles(q[:, a:b], k[:, a:b], L[:, a:b]) if exact else q.new_empty(2, len(q), b - a, 0)
        for x, rows, tile in zip((q, k), (P, A), tiles):
            row = torch.cat([(x[:, a:b] * decay) @ keys, tile], -1)
            rows.append(F.pad(row, (0, C - b)))
    return torch.cat(P, 1), torch.cat(A, 1)


def _diagonal_tiles(q, k, L):
    """One tile of P and of A, column by column: every exponent is <= 0, however fast the decay."""
    rows, columns = torch.stack([q, k]), []
    for j in range(L.shape[1]):
        keys = _decayed(k[:, j : j + 1], L[:, j:], L[:, j : j + 1])
        columns.append(F.pad((rows[:, :, j:] * keys).sum(-1), (j, 0)))
    return torch.stack(columns, -1)


def _across_chunks(S, terms, turns):
    """Carry the states S [N * H, K, V] through turns; the c-th takes `turns[c]` terms, for the first states in S.

    Returns the outputs, [n * H, C, V] for each turn, and the new states.
    """
    outputs = []
    for Qh, Kh, Kt, gam, P, A, v, beta in zip(*(x.split(turns) for x in terms)):
        active, finished = S.split([len(Qh), len(S) - len(Qh)])
        Y = torch.baddbmm(v, Kh, active, alpha=-1).mul_(beta)
        # Transposed: the solver works in place on column-major matrices and would copy row-major ones.
        R = torch.linalg.solve_triangular(A.mT, Y.mT, upper=True, left=False, unitriangular=True).mT
        outputs.append((Qh @ active).baddbmm_(P, R))
        S = (gam * active).baddbmm_(Kt.mT, R)
        if len(finished):
            S = torch.cat([S, finished])
    return outputs, S


def _power(to, since):
    return torch.threshold_(to - since, FORGOTTEN, -math.inf).exp2_()


class _Decayed(torch.autograd.Function):
    """x * 2^(to - since). Backward computes the power again: kept for every use, they would be most of the memory."""

    @staticmethod
    def forward(ctx, x, to, since):
        ctx.save_for_backward(x, to, since)
        return _power(to, since).mul_(x)

    @staticmethod
    def backward(ctx, grad):
        x, to, since = ctx.saved_tensors
        dx = _power(to, since) * grad
        exponent = dx * x * math.log(2)
        return dx.sum_to_size(x.shape), exponent.sum_to_size(to.shape), -exponent.sum_to_size(since.shape)


_decayed = _Decayed.apply


@torch.no_grad()
@without_autocast
def kda_step(q, k, v, g, beta, *, A_log, dt_bias, lower_bound=-5.0, state):
    """One token for each batch row; `state` is updated in place. Arguments and results as in `api.kda_step`."""
    q, k, g, beta = activate(q, k, g, beta, A_log, dt_bias, lower_bound)
    o, S = _token(state, q, k, v.to(state.dtype), g, beta)
    state.copy_(S)
    return o.to(v.dtype)


def kda_state_map(k, v, g, beta, *, A_log, dt_bias, lower_bound=-5.0, cu_seqlens=None):
    """Arguments and results as in `state_map.kda_state_map`: the columns [I | 0] of a state with values [0 | v]."""
    B, _, H, K = k.shape
    sequences = B if cu_seqlens is None else len(cu_seqlens) - 1
    values = torch.cat([torch.zeros_like(k), v.to(k.dtype)], dim=-1)  # [B, T, H, K + V]
    state = values.new_zeros(sequences, H, K, values.shape[-1], dtype=compute_dtype(k))
    state[..., :K] = torch.eye(K, dtype=state.dtype, device=k.device)
    gate = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
    _, state = kda_chunk(k, k, values, g, beta, **gate, initial_state=state, cu_seqlens=cu_seqlens)
    return state[..., :K].contiguous(), state[..., K:].contiguous()
