"""SiTU-GLU: a SwiGLU whose two branches are bounded."""

from .api import situ_glu


__all__ = ["situ_glu"]
