"""The bounded decay gate nearest to a softplus gate on given inputs, in FP64.

    softplus   g = -exp(A_log) softplus(x + dt_bias)              any g < 0
    bounded    g = lower_bound sigmoid(exp(A_log) (x + dt_bias))  lower_bound < g < 0

Both see the same x, the low-rank projection of a layer's input. No bounded gate is a softplus gate.
"""

import math
from typing import NamedTuple

import torch
from torch.nn import functional as F


# Two decays are compared by the logarithm of what a token makes the state forget, 1 - exp(g), plus this much: memories of more
# than a hundred tokens by how much they lose, shorter ones by how long they last, and all that forgets at once is alike.
SHORTEST = 1e-2
STEPS, TOLERANCE = 60, 1e-9


class Gate(NamedTuple):
    """A gate: a rate per head [H] and a bias per channel [H, K]."""

    A_log: torch.Tensor
    dt_bias: torch.Tensor


def softplus_gate(x: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """The log decay [N, H, K] of a softplus gate, from x [N, H, K], A_log [H] and dt_bias [H, K]."""
    return -A_log.exp()[:, None] * F.softplus(x + dt_bias)


def fit_gate(x: torch.Tensor, log_decay: torch.Tensor, lower_bound: float, start: Gate) -> Gate:
    """The bounded gate whose decays are nearest to exp(`log_decay`), in least squares over the tokens and channels of a head.

    Args:
        x, log_decay: [N, H, K], FP64.
        lower_bound: < 0.
        start: of the search, FP64; `tail_match` knows one.

    Returns:
        FP64.
    """
    heads = [
        _fit_head(x[:, h], log_decay[:, h], lower_bound, start.A_log[h], start.dt_bias[h]) for h in range(x.shape[1])
    ]
    return Gate(torch.stack([A for A, _ in heads]), torch.stack([b for _, b in heads]))


def tail_match(A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float) -> Gate:
    """The bounded gate that equals the softplus gate where both forget little: both are then exponentials of x."""
    return Gate(torch.zeros_like(A_log), dt_bias + (A_log - math.log(-lower_bound))[:, None])


def _fit_head(x, log_decay, lower_bound: float, rate_log, bias):
    """Levenberg-Marquardt in the rate and, in place of the biases, the values c [K] of the sigmoid's argument at the mean of x:
    nearly independent of the rate, and so the normal equations are well conditioned. Each c meets the rate alone in them."""
    mean = x.mean(0)
    centred = x - mean  # [N, K]
    target = _compared(log_decay)
    c, damping = rate_log.exp() * (mean + bias), 1e-3
    residual, slope = _residual(centred, rate_log, c, lower_bound, target)
    cost = residual.square().sum()
    for _ in range(STEPS):
        by_rate = slope * rate_log.exp() * centred
        mixed, of_c = (by_rate * slope).sum(0), slope.square().sum(0) * (1 + damping) + 1e-12
        of_rate = by_rate.square().sum() * (1 + damping) + 1e-12
        down_rate, down_c = (by_rate * residual).sum(), (slope * residual).sum(0)
        step = -(down_rate - (mixed * down_c / of_c).sum()) / (of_rate - (mixed.square() / of_c).sum())
        steps = -(down_c + mixed * step) / of_c
        new_rate, new_c = rate_log + step.clamp(-1, 1), c + steps.clamp(-4, 4)
        new_residual, new_slope = _residual(centred, new_rate, new_c, lower_bound, target)
        gain = cost - new_residual.square().sum()
        if gain > 0:
            rate_log, c, residual, slope, cost = new_rate, new_c, new_residual, new_slope, cost - gain
            damping = max(damping / 5, 1e-12)
        else:
            damping *= 4
        if abs(gain) <= TOLERANCE * cost or damping > 1e8:
            break
    return rate_log, c * (-rate_log).exp() - mean


def _compared(log_decay: torch.Tensor) -> torch.Tensor:
    return torch.log(SHORTEST - torch.expm1(log_decay))


def _residual(centred, rate_log, c, lower_bound: float, target) -> tuple[torch.Tensor, torch.Tensor]:
    """Differences [N, K] to `target`, and their derivatives in c."""
    opened = (rate_log.exp() * centred + c).sigmoid()
    log_decay = lower_bound * opened
    slope = -log_decay * (1 - opened) * log_decay.exp() / (SHORTEST - torch.expm1(log_decay))
    return _compared(log_decay) - target, slope
