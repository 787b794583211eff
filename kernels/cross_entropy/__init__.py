from .api import cross_entropy_with_gradient


__all__ = ["cross_entropy_with_gradient"]
