from .api import kda, kda_step


__all__ = ["kda", "kda_step"]
