"""How the experts are stored: the released `quantization_config`, which is ours to read and nobody else's."""

from copy import deepcopy
from typing import Any

from .checks import expect


BLOCK = 32  # values that share a scale
QUANT_METHOD = "moe_lc_mxfp4"  # our quantiser, under which transformers looks for it
RELEASED = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
WEIGHTS = {"num_bits": 4, "type": "float", "group_size": BLOCK, "strategy": "group", "symmetric": True}


def mxfp4_quantization() -> dict[str, Any]:
    """What K3 has as `quantization_config`: a value for `expert_quantization`."""
    more = {"dynamic": False, "scale_dtype": "torch.uint8", "observer": "minmax", "observer_kwargs": {}}
    empty = {"actorder": None, "block_structure": None, "zp_dtype": None}
    group = {
        "format": RELEASED["format"],
        "targets": ["Linear"],
        "input_activations": None,
        "output_activations": None,
        "weights": {**WEIGHTS, **more, **empty},
    }
    names = (
        "self_attn",
        "shared_experts",
        r"mlp\.(gate|up|gate_up|down)_proj",
        "lm_head",
        "vision_tower",
        "mm_projector",
    )
    return {
        **RELEASED,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {"group_0": group},
        "ignore": [f"re:.*{name}.*" for name in names],
    }


def is_released_mxfp4(value: Any) -> bool:
    return isinstance(value, dict) and all(value.get(key) == only for key, only in RELEASED.items())


def check_expert_quantization(config, extra: dict[str, Any]) -> dict[str, Any] | None:
    """`expert_quantization`, taken from a released `quantization_config` among the `extra` fields where there is one."""
    found = config.expert_quantization
    if is_released_mxfp4(extra.get("quantization_config")):
        released = extra.pop("quantization_config")
        expect(found in (None, released), "expert_quantization", "the same as quantization_config, or only one", found)
        found = released
    if found is None:
        return None
    expect(is_released_mxfp4(found), "expert_quantization", f"None, or a dict with {RELEASED}", found)
    for name, group in found.get("config_groups", {}).items():
        field, weights = f"expert_quantization.config_groups.{name}", group.get("weights") or {}
        for key, only in WEIGHTS.items():
            expect(weights.get(key) == only, f"{field}.weights.{key}", repr(only), weights.get(key))
        expect(
            not group.get("input_activations"), f"{field}.input_activations", "None", group.get("input_activations")
        )
    for field in ("moe_intermediate_size", "expert_hidden_size"):
        size = getattr(config, field)
        expect(size % BLOCK == 0, field, f"a multiple of {BLOCK} with expert_quantization", size)
    return found


def moved_into(text: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """The fields of a text model with the released `quantization_config` that stood among the `extra` fields around them."""
    found = is_released_mxfp4(extra.get("quantization_config"))
    return {"quantization_config": extra.pop("quantization_config"), **text} if found else text


class ReleasedQuantization:
    """A config that is written with the released name of `expert_quantization`, and without what is only in memory."""

    def to_dict(self) -> dict[str, Any]:
        return self._as_released(super().to_dict())

    def to_diff_dict(self) -> dict[str, Any]:
        return self._as_released(super().to_diff_dict())

    def _as_released(self, output: dict[str, Any]) -> dict[str, Any]:
        output.pop("expert_quantization", None)
        in_memory = output.get("quantization_config")
        if isinstance(in_memory, dict) and in_memory.get("quant_method") == QUANT_METHOD:
            del output["quantization_config"]
        quantization = getattr(self, "expert_quantization", None)
        if quantization is not None:
            output["quantization_config"] = deepcopy(quantization)
        return output
