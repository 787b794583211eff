"""The layer of Kimi Delta Attention without its GEMMs: what stands around the delta rule, ours, FLA's and in plain torch.

Three short convolutions with SiLU, the delta rule, the gated RMSNorm of its output. The inputs are what the projections of
a layer give: q, k, v, g, beta and the output gate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..kernels.gated_norm import gated_rms_norm
from ..kernels.gated_norm.reference import gated_rms_norm as gated_rms_norm_reference
from ..kernels.short_conv import short_convs
from ..kernels.short_conv.reference import short_convs as short_convs_reference
from .bench_kda_implementations import Implementation, Inputs, Operator


TAPS = 4
EPS = 1e-5
CONVOLVED = ("q", "k", "v")

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Parts:
    """`convolve(xs, taps)`: a few [B, T, C] and as many [C, 1, W] to a few [B, T, C]. `normalize(o, gate, weight)`."""

    convolve: Callable[[Tensors, Tensors], Tensors]
    normalize: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

    def around(self, delta_rule: Operator) -> Operator:
        """The layer with this delta rule, called as the delta rule alone is."""

        def layer(x: Inputs, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            x = dict(x)
            gate, weight = x.pop("output_gate"), x.pop("norm_weight")
            taps = tuple(x.pop(f"{name}_taps") for name in CONVOLVED)
            ys = self.convolve(tuple(x[name].flatten(-2) for name in CONVOLVED), taps)
            convolved = {name: y.view(x[name].shape) for name, y in zip(CONVOLVED, ys, strict=True)}
            o, state = delta_rule(x | convolved, state)
            return self.normalize(o, gate, weight), state

        return layer


OURS = Parts(
    lambda xs, taps: short_convs(xs, taps, impl="triton")[0],
    lambda o, gate, weight: gated_rms_norm(o, gate, weight, EPS, impl="triton"),
)
REFERENCE = Parts(
    lambda xs, taps: short_convs_reference(xs, taps)[0],
    lambda o, gate, weight: gated_rms_norm_reference(o, gate, weight, EPS),
)


def implementations(delta_rules: Sequence[Implementation]) -> list[Implementation]:
    """The layer with each of the delta rules; with FLA's once for each of its convolutions."""
    fla = fla_parts() if any(one.is_fla for one in delta_rules) else {}
    return [
        replace(one, name=one.name + suffix, sequence=parts.around(one.sequence), step=None)
        for one in delta_rules
        for suffix, parts in (fla if one.is_fla else {"": OURS}).items()
    ]


def fla_parts() -> dict[str, Parts]:
    """FLA's, by what to add to its name: the convolutions in Triton, which it takes by itself, and in Gluon."""
    try:
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
    except ImportError as error:
        print(f"FLA's convolution and norm: cannot be imported, so they are left out ({error})")
        return {}

    def each(convolution):
        # squeeze: the backward pass of a view needs no kernel, that of weight[:, 0] would
        return lambda xs, taps: tuple(convolution(x, tap.squeeze(1)) for x, tap in zip(xs, taps, strict=True))

    def normalize(o, gate, weight):
        return rms_norm_gated(o, gate, weight, None, activation="sigmoid", eps=EPS)

    parts = {"": Parts(each(lambda x, weight: causal_conv1d(x, weight, activation="silu")[0]), normalize)}
    gluon = _gluon_convolution()
    return parts if gluon is None else parts | {", Gluon": Parts(each(gluon), normalize)}


def _gluon_convolution() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """FLA's kernels in Gluon. Only a variable of the environment makes FLA choose them, and that for a whole process."""
    try:
        from fla.modules.causal_conv1d.backends.gluon import causal_conv1d_bwd_gluon, causal_conv1d_fwd_gluon
    except ImportError as error:
        print(f"FLA's convolution in Gluon: cannot be imported, so it is left out ({error})")
        return None

    class Convolution(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return causal_conv1d_fwd_gluon(x, weight, activation="silu")[0]

        @staticmethod
        def backward(ctx, dy):
            x, weight = ctx.saved_tensors
            return causal_conv1d_bwd_gluon(x, dy, None, weight, activation="silu")[:2]

    return Convolution.apply


def add_inputs(x: Inputs, seed: int) -> Inputs:
    """The inputs of a delta rule and those of the parts around it; weights in FP32, taps as the model initialises them."""
    shape, device = x["v"].shape, x["v"].device
    generator = torch.Generator(device).manual_seed(seed + 1_000)
    gate = torch.randn(shape, generator=generator, device=device).bfloat16()
    weight = 1 + 0.1 * torch.randn(shape[-1], generator=generator, device=device)
    bound = TAPS**-0.5
    taps = {
        f"{name}_taps": torch.empty(shape[-2] * shape[-1], 1, TAPS, device=device).uniform_(
            -bound, bound, generator=generator
        )
        for name in CONVOLVED
    }
    return {**x, "output_gate": gate, "norm_weight": weight, **taps}


def bytes_around(dim: int) -> tuple[int, int]:
    """BF16 bytes per token and head of the parts around the delta rule, each fused perfectly: forward, and backward.

    Forward, the convolutions read 3 tensors and write 3, the norm reads o and the gate and writes y: 9 tensors. Backward,
    the convolutions read 3 inputs and 3 cotangents and write 3 gradients, the norm reads o, the gate and one cotangent and
    writes 2 gradients: 14. Weights, their gradients and what a pass saves for the other are not counted.
    """
    return 2 * 9 * dim, 2 * 14 * dim
