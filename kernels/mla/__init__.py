"""Multi-head latent attention over the latent cache."""

from .api import mla_decode


__all__ = ["mla_decode"]
