"""Block attention residuals: a softmax over depth."""

from .api import attn_res


__all__ = ["attn_res"]
