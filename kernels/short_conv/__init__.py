from .api import short_conv, short_convs


__all__ = ["short_conv", "short_convs"]
