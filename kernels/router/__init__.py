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


__all__ = [
    "auto_ema",
    "load_quantile_bias",
    "max_violation",
    "quantile_bias",
    "route",
    "sampling_floor",
    "sign_bias",
]
