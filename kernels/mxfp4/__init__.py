"""MXFP4: blocks of 32 four-bit values that share one power of two."""

from .api import dequantize_mxfp4, quantize_mxfp4, requantize_mxfp4
from .experts import expert_mlp_mxfp4


__all__ = ["dequantize_mxfp4", "expert_mlp_mxfp4", "quantize_mxfp4", "requantize_mxfp4"]
