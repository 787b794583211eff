"""Multi-head latent attention over the latent cache, and of the last tokens of a sequence."""

from .api import mla_decode
from .lower_right import lower_right_attention


__all__ = ["lower_right_attention", "mla_decode"]
