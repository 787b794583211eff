"""The sigmoid gate in plain torch."""

import torch

from ..dispatch import compute_dtype


def sigmoid_gate_reference(o, gate):
    """Arguments and results as in `api.sigmoid_gate`; FP32 inside, FP64 for FP64 inputs."""
    wide = compute_dtype(o)
    return (o.to(wide) * torch.sigmoid(gate.to(wide))).to(o.dtype)
