"""Which implementation runs: one key, `attn_implementation`, chooses for MLA, for KDA and for the operators beside them."""

from collections.abc import Callable
from functools import partial

from transformers.utils.generic import GeneralInterface

from .kernels.kda import kda


class KDAInterface(GeneralInterface):
    """Registry of KDA backends: functions with the signature of `kernels.kda.kda` without `impl`.

    `KDAInterface.register("name", fn)` and `config.kda_implementation = "name"` bring in a further one.
    """

    _global_mapping = {impl: partial(kda, impl=impl) for impl in ("auto", "triton", "reference")}


def operator_impl(config, *, triton: bool = True) -> str:
    """`impl` of an operator under the current `attn_implementation`: "triton", "reference" or "auto".

    `triton`: whether the operator has a Triton kernel for this config. Under "moe_lc_triton" those that have one run it or raise.
    """
    attention = config._attn_implementation
    if attention == "moe_lc_triton":
        return "triton" if triton else "auto"
    return "reference" if attention in ("moe_lc_reference", "eager") else "auto"


def kda_backend(config) -> Callable:
    """The KDA function that `config.kda_implementation` names, or else the one that follows `attn_implementation`."""
    key = config.kda_implementation or operator_impl(config)
    registry = KDAInterface()
    if key not in registry:
        raise ValueError(f"kda_implementation: expected one of {sorted(registry.valid_keys())}, got {key!r}")
    return registry[key]
