from .api import sigmoid_gate


__all__ = ["sigmoid_gate"]
