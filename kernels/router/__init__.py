"""Sigmoid routing with a balanced, gradient-free bias."""

from .api import route
from .balance import (
    auto_ema,
    load_quantile_bias,
    max_violation,
    quantile_bias,
    sampling_floor,
    sign_bias,
)
from .logits import router_logits


__all__ = [
    "auto_ema",
    "load_quantile_bias",
    "max_violation",
    "quantile_bias",
    "route",
    "router_logits",
    "sampling_floor",
    "sign_bias",
]
