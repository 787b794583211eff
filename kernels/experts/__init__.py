"""Grouped expert MLPs with a weighted, deterministic sum."""

from .api import expert_mlp


__all__ = ["expert_mlp"]
