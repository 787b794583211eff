"""RMS norm over the last dimension."""

from .api import rms_norm


__all__ = ["rms_norm"]
