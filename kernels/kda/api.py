"""Kimi Delta Attention (KDA): the public functions."""

import math

import torch

from ..checks import check_cu_seqlens, check_floating, check_shape
from ..dispatch import choose, compute_dtype, traceable
from .reference import kda_chunk
from .reference import kda_step as kda_step_reference


def kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None = -5.0,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Kimi Delta Attention over whole sequences (Kimi Linear and Kimi K3 technical reports; the formulas: README.md).

    Inputs are raw: the L2 norm of q and k, the scale K^-1/2, the gate and sigmoid(beta) are applied inside, in FP32
    (FP64 when `q` is FP64), under autocast too.

    Args:
        q, k, g: [B, T, H, K] queries, keys and gates before activation.
        v: [B, T, H, V] values.
        beta: [B, T, H] write strengths before the sigmoid.
        A_log: [H] log of the gate's rate; above 80 it counts as 80 and gets no gradient.
        dt_bias: [H, K] bias of the gate.
        lower_bound: lower end, in nats, of a token's log-decay, lower_bound * sigmoid(exp(A_log) * (g + dt_bias));
            None for the unbounded -exp(A_log) * softplus(g + dt_bias).
        initial_state: [B, H, K, V], or [N, H, K, V] with `cu_seqlens`; FP32 (FP64 when `q` is FP64); zeros when None.
        cu_seqlens: [N + 1] int32 or int64, bounds of N documents packed in one row (B = 1), from 0 to T. A document
            may be empty: its state passes through.
        impl: "auto", "triton" or "reference".

    Returns:
        o [B, T, H, V] in the dtype of `v`, and the state after the last token, shape and dtype of `initial_state`.
        Both are differentiable in every floating point input.

    Raises:
        ValueError: a shape, dtype or bound that does not fit, or an implementation that cannot run here.
    """
    dims: dict[str, int] = {}
    _check_tokens("B T", dims, q, k, v, g, beta)
    _check_gate(dims, A_log, dt_bias)
    _check_lower_bound(lower_bound)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, dims["B"], dims["T"])
        dims["N"] = len(cu_seqlens) - 1
    if initial_state is not None:
        _check_state("initial_state", "B H K V" if cu_seqlens is None else "N H K V", dims, initial_state, q)
    run = _fused(q, v, lower_bound, impl) if choose(impl, q, triton=True) == "triton" else kda_chunk
    return run(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )


def _fused(q, v, lower_bound, impl):
    """The Triton implementation; for "auto" the reference where the kernels cannot take the inputs."""
    from .fused import kda_fused, supports

    refused = supports(q, v, lower_bound)
    if refused and impl == "triton":
        raise ValueError(f"impl: 'triton' was asked for, but {refused}")
    return kda_chunk if refused else traceable("kda", kda_fused)


def kda_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None = -5.0,
    state: torch.Tensor,
    impl: str = "auto",
) -> torch.Tensor:
    """One token of `kda` for every row of a batch; `state` [B, H, K, V] is updated in place, without gradients.

    Args:
        q, k, g: [B, H, K]; v: [B, H, V]; beta: [B, H]; raw, as in `kda`.
        A_log, dt_bias, lower_bound, impl: as in `kda`.
        state: [B, H, K, V] FP32 (FP64 when `q` is FP64), must not require gradients.

    Returns:
        o [B, H, V] in the dtype of `v`.

    Raises:
        ValueError: as in `kda`.
    """
    if not _step_fits(q, k, v, g, beta, A_log, dt_bias, state):
        dims: dict[str, int] = {}
        _check_tokens("B", dims, q, k, v, g, beta)
        _check_gate(dims, A_log, dt_bias)
        _check_state("state", "B H K V", dims, state, q)
    _check_lower_bound(lower_bound)
    if state.requires_grad:
        raise ValueError(
            "state: expected a tensor without gradients, because it is updated in place; got requires_grad=True"
        )
    run = (
        _fused_step(q, k, v, g, beta, state, impl) if choose(impl, q, triton=True) == "triton" else kda_step_reference
    )
    return run(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, state=state)


def _fused_step(q, k, v, g, beta, state, impl):
    from .fused_step import kda_step_fused, supports

    refused = supports(q, k, v, g, beta, state)
    if refused and impl == "triton":
        raise ValueError(f"impl: 'triton' was asked for, but {refused}")
    return kda_step_reference if refused else traceable("kda_step", kda_step_fused)


def _step_fits(q, k, v, g, beta, A_log, dt_bias, state):
    """Whether shapes and dtypes are right. This runs for every layer and token; the checks by name take five times as long."""
    rows, V = q.shape, v.shape[-1:]
    return (
        len(rows) == 3
        and rows == k.shape == g.shape
        and (*rows, *V) == state.shape
        and rows[:2] == beta.shape == v.shape[:-1]
        and rows[1:2] == A_log.shape
        and rows[1:] == dt_bias.shape
        and all(map(torch.is_floating_point, (q, k, v, g, beta, A_log, dt_bias)))
        and state.dtype == compute_dtype(q)
    )


def _check_tokens(rows, dims, q, k, v, g, beta):
    for name, tensor, spec in (
        ("q", q, "H K"),
        ("k", k, "H K"),
        ("v", v, "H V"),
        ("g", g, "H K"),
        ("beta", beta, "H"),
    ):
        check_shape(name, tensor, f"{rows} {spec}", dims)
        check_floating(name, tensor)


def _check_gate(dims, A_log, dt_bias):
    for name, tensor, spec in (("A_log", A_log, "H"), ("dt_bias", dt_bias, "H K")):
        check_shape(name, tensor, spec, dims)
        check_floating(name, tensor)


def _check_lower_bound(lower_bound):
    if lower_bound is not None and not -math.inf < lower_bound < 0:
        raise ValueError(f"lower_bound: expected a negative number or None, got {lower_bound}")


def _check_state(name, spec, dims, state, q):
    check_shape(name, state, spec, dims)
    if state.dtype != compute_dtype(q):
        raise ValueError(f"{name}: expected {compute_dtype(q)} for inputs of {q.dtype}, got {state.dtype}")
