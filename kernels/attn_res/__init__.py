"""Block attention residuals: a softmax over depth."""

from .api import attn_res, attn_res_norm, attn_res_norm_through


__all__ = ["attn_res", "attn_res_norm", "attn_res_norm_through"]
