"""Kimi Delta Attention as it is called in a benchmark: ours and FLA's."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from ..kernels.kda import kda, kda_step
from .bench import OURS, installed_version


LOWER_BOUND = -5.0
FORWARD, BACKWARD, GRAPH, EAGER = "forward", "forward+backward", "step, CUDA graph", "step, eager"

Inputs = dict[str, torch.Tensor]
# (inputs, state or None) to o and the new state
Operator = Callable[[Inputs, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Implementation:
    """A `sequence` begins with the state given, or with zeros; a `step` is one token of it and may work in place."""

    name: str
    sequence: Operator
    step: Operator | None = None
    directions: tuple[str, ...] = (FORWARD, BACKWARD)
    is_fla: bool = False


def implementations(lower_bound: float | None = LOWER_BOUND) -> list[Implementation]:
    """Ours last, and FLA first when it can be imported, so that ratios are known at once; without a bound no steps."""
    bound: dict[str, Any] = {"lower_bound": lower_bound}
    steps = lower_bound is not None
    ours = [
        Implementation(f"{OURS}, all kept", partial(_ours_kept, **bound), directions=(BACKWARD,)),
        Implementation(OURS, partial(_ours, **bound), partial(_our_step, **bound) if steps else None),
    ]
    try:
        from fla.ops.kda import chunk_kda, fused_recurrent_kda
    except ImportError as error:
        print(f"FLA: cannot be imported, so it is left out ({error})")
        return ours
    name = f"FLA {installed_version('fla-core') or ''}".strip()
    options: dict[str, Any] = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "lower_bound": lower_bound,
        "output_final_state": True,
    }

    def call(function, more, x, state):
        flat = {**x, "dt_bias": x["dt_bias"].flatten()}
        return function(**flat, initial_state=state, **options, **more)

    safe = {"safe_gate": steps}  # FLA's name for a bound
    kept, step = safe | {"disable_recompute": True}, partial(call, fused_recurrent_kda, {}) if steps else None
    return [
        Implementation(f"{name}, all kept", partial(call, chunk_kda, kept), directions=(BACKWARD,), is_fla=True),
        Implementation(name, partial(call, chunk_kda, safe), step, is_fla=True),
        *ours,
    ]


def _ours(x: Inputs, state: torch.Tensor | None, lower_bound: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    return kda(**x, lower_bound=lower_bound, initial_state=state, impl="triton")


def _ours_kept(x: Inputs, state: torch.Tensor | None, lower_bound: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Whatever memory it takes: by itself it computes again what would take much."""
    from ..kernels.kda import fused

    with patch.object(fused, "KEEP_BYTES", 1 << 60):
        return _ours(x, state, lower_bound)


def _our_step(x: Inputs, state: torch.Tensor, lower_bound: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    one = {name: t[:, 0] if t.ndim > 2 else t for name, t in x.items()}  # [B, H, ...], as the layer does
    return kda_step(**one, lower_bound=lower_bound, state=state, impl="triton"), state
