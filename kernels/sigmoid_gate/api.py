"""The sigmoid gate on the output of MLA: the public function."""

import torch

from ..checks import check_floating
from ..dispatch import choose, traceable
from .reference import sigmoid_gate_reference


def sigmoid_gate(o: torch.Tensor, gate: torch.Tensor, *, impl: str = "auto") -> torch.Tensor:
    """o * sigmoid(gate), elementwise (Kimi K3 technical report, Gated MLA).

    Args:
        o: [...] any floating dtype.
        gate: [...] the shape of `o`, before the sigmoid.
        impl: "auto", "triton" or "reference".

    Returns:
        [...] in the dtype of `o`, computed in FP32 (FP64 when `o` is FP64) and rounded once.

    Raises:
        ValueError: a shape or dtype that does not fit, or an implementation that cannot run here.
    """
    for name, tensor in (("o", o), ("gate", gate)):
        check_floating(name, tensor)
    if gate.shape != o.shape:
        raise ValueError(f"gate: expected the shape of o, {list(o.shape)}, got {list(gate.shape)}")
    run = _fused(o, gate, impl) if choose(impl, o, triton=True) == "triton" else sigmoid_gate_reference
    return run(o, gate)


def _fused(o, gate, impl):
    """The Triton implementation; for "auto" the reference where the kernels cannot take the inputs."""
    from .fused import sigmoid_gate_fused, supports

    refused = supports(o, gate)
    if refused and impl == "triton":
        raise ValueError(f"impl: 'triton' was asked for, but {refused}")
    return sigmoid_gate_reference if refused else traceable("sigmoid_gate", sigmoid_gate_fused)
