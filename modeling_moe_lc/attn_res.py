"""Block Attention Residuals: every sublayer reads a learned softmax mix over depth instead of a residual stream."""

import torch
from torch import nn

from .backends import operator_impl
from .kernels.attn_res import attn_res, attn_res_norm_through
from .norm import RMSNorm


Blocks = tuple[torch.Tensor, ...]


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
        self, blocks: Blocks, partial: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor, Blocks, torch.Tensor]:
        """`norm`: that of the sublayer which reads this site; mix and norm are one launch. `blocks` and `partial` come back
        for what reads them later."""
        # At the first site the embedding is the only source and passes through, but every parameter has a gradient.
        sources, rest = (blocks, partial) if blocks else ((partial,), None)
        keys = self.query[0], self.key_norm, self.config.rms_norm_eps
        impl = operator_impl(self.config)
        if type(norm) is not RMSNorm:  # an adapter stands in its place
            return norm(attn_res(sources, rest, *keys, impl=impl)), blocks, partial
        y, sources, rest = attn_res_norm_through(sources, rest, *keys, norm.weight, norm.eps, impl=impl)  # [B, T, D]
        return (y, tuple(sources), rest) if blocks else (y, (), sources[0])


class OrdinaryResidual(nn.Module):
    """The site of a model without attention residuals: the residual stream itself."""

    def forward(
        self, blocks: Blocks, partial: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor, Blocks, torch.Tensor]:
        return norm(partial), blocks, partial
