from .api import short_conv


__all__ = ["short_conv"]
