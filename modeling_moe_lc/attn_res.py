"""Block Attention Residuals: every sublayer reads a learned softmax mix over depth instead of a residual stream."""

from dataclasses import dataclass

import torch
from torch import nn

from .backends import operator_impl
from .kernels.attn_res import attn_res, attn_res_norm_through
from .norm import RMSNorm


Blocks = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Borrowed:
    """A norm that a site runs for the sublayer which reads it.

    Not the bare module: hooks that move the arguments of a site to its device would move an offloaded norm, which has no
    data outside its own forward.
    """

    norm: nn.Module


class AttnRes(nn.Module):
    """One site: mixes the finished blocks and the running sum of the current one, per token, and norms the mix.

    The pseudo-query starts at zero, so that a site starts as the plain mean of its sources.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.query = nn.Parameter(torch.zeros(1, config.hidden_size))
        self.key_norm = nn.Parameter(torch.ones(config.hidden_size))

    def forward(
        self, blocks: Blocks, partial: torch.Tensor, reader: Borrowed
    ) -> tuple[torch.Tensor, Blocks, torch.Tensor]:
        """`reader`: the norm of the sublayer which reads this site; mix and norm are one launch. `blocks` and `partial` come
        back for what reads them later."""
        norm = reader.norm
        # At the first site the embedding is the only source and passes through, but every parameter has a gradient.
        sources, rest = (blocks, partial) if blocks else ((partial,), None)
        keys = self.query[0], self.key_norm, self.config.rms_norm_eps
        impl = operator_impl(self.config)
        # An adapter stands in its place, or it is offloaded: only its own forward has its weight here.
        if type(norm) is not RMSNorm or norm.weight.device != partial.device:
            return norm(attn_res(sources, rest, *keys, impl=impl)), blocks, partial
        y, sources, rest = attn_res_norm_through(sources, rest, *keys, norm.weight, norm.eps, impl=impl)  # [B, T, D]
        return (y, tuple(sources), rest) if blocks else (y, (), sources[0])


class OrdinaryResidual(nn.Module):
    """The site of a model without attention residuals: the residual stream itself."""

    def forward(
        self, blocks: Blocks, partial: torch.Tensor, reader: Borrowed
    ) -> tuple[torch.Tensor, Blocks, torch.Tensor]:
        return reader.norm(partial), blocks, partial
