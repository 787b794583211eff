"""LoRA adapters with PEFT: which parts there are, the defaults of our model types, and checks before any work is done.

`get_peft_model(model, LoraConfig(r=16))` adapts the attention projections. Other parts have names:

    model = add_lora(model, LoraConfig(r=16, **lora_targets("attention", "experts")))
    model = load_lora(model, "a folder that save_pretrained wrote")

`add_lora` and `load_lora` are `get_peft_model` and `PeftModel.from_pretrained` (on a `PeftModel`: `add_adapter`,
`load_adapter`) with refusals that name what is wrong; the result is PEFT's, and so are the files. PEFT is imported where it
is used.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .adapter_names import fused_adapter, is_released, multimodal_names
from .expert_lora import PROJECTIONS, is_packed
from .packed_experts import PackedExperts


if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

KDA = ("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_proj", "g_a_proj", "g_b_proj", "o_proj")
MLA = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj", "o_proj")
# What a group adapts: ends of names of linear layers, or of parameters. Not every model has all of a group.
MODULES = {
    "attention": tuple(dict.fromkeys(KDA + MLA)),
    "kda": KDA,
    "mla": MLA,
    "latent": ("routed_expert_down_proj", "routed_expert_up_proj"),
    "shared_experts": ("shared_experts.gate_up_proj", "shared_experts.down_proj"),
    "head": ("lm_head",),
    "vision": ("wqkv", "wo", "fc0", "fc1"),
    "projector": ("mm_projector.proj.0", "mm_projector.proj.2"),
}
PARAMETERS = {
    "experts": tuple(f"block_sparse_moe.experts.{name}" for name in PROJECTIONS),
    "router": ("block_sparse_moe.gate.weight",),
}
GROUPS = (*MODULES, *PARAMETERS)
LAYER_TYPES = {"kda": "linear_attention", "mla": "full_attention"}
NOT_ON_PARAMETERS = ("lora_dropout", "use_dora", "lora_bias", "fan_in_fan_out")


def register_lora_defaults(model_types: Iterable[str]) -> None:
    """What PEFT adapts in a model of these types when a `LoraConfig` names nothing. Nothing to do without PEFT."""
    try:
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as defaults
    except ImportError:
        return
    defaults.update({model_type: list(MODULES["attention"]) for model_type in model_types})


def lora_targets(*groups: str, config=None) -> dict[str, Any]:
    """`target_modules` and `target_parameters` of a `LoraConfig` for parts of the model.

    Args:
        groups: of "attention" (all of "kda" and "mla"), "kda", "mla", "latent", "shared_experts", "head", "experts"
            (routed), "router", "vision", "projector".
        config: that of the model; only "kda" without "mla", or the reverse, needs it: they share names, not layers.

    Returns:
        Two keyword arguments: `LoraConfig(r=16, **lora_targets("attention", "experts"))`. Ends of names, or with `config`
        where it is needed, one expression for whole names.

    Raises:
        ValueError: no group or an unknown one; "kda" or "mla" alone without `config`, or in a model that has no such layer.
    """
    unknown = [group for group in groups if group not in GROUPS]
    if unknown or not groups:
        raise ValueError(
            f"groups: expected some of {', '.join(GROUPS)}, got {', '.join(map(repr, unknown)) or 'none'}"
        )
    chosen = set(groups)
    if {"kda", "mla"} <= chosen:
        chosen.add("attention")
    if "attention" in chosen:
        chosen -= {"kda", "mla"}
    parameters = [name for group in PARAMETERS if group in chosen for name in PARAMETERS[group]]
    alone = chosen & {"kda", "mla"}
    modules: list[str] | str = [name for group in MODULES if group in chosen - alone for name in MODULES[group]]
    if alone:
        modules = "|".join([*(rf"(?:.*\.)?{re.escape(name)}" for name in modules), of_layers(alone.pop(), config)])
    return {"target_modules": modules, "target_parameters": parameters or None}


def of_layers(group: str, config) -> str:
    """An expression for the attention projections of the layers that are of this kind."""
    if config is None:
        raise ValueError(
            f"config: expected that of the model for {group!r} alone (layers differ, names do not), got None"
        )
    kinds = config.get_text_config().layer_types
    layers = [str(i) for i, kind in enumerate(kinds) if kind == LAYER_TYPES[group]]
    if not layers:
        raise ValueError(f"groups: expected parts of this model, got {group!r}: all layers are {sorted(set(kinds))}")
    return rf"(?:.*\.)?layers\.(?:{'|'.join(layers)})\.self_attn\.(?:{'|'.join(MODULES[group])})"


def add_lora(model: nn.Module, config: LoraConfig, adapter_name: str = "default") -> PeftModel:
    """`get_peft_model`, or on a `PeftModel` one more adapter, which becomes the active one.

    Works on experts that stay in MXFP4 (`PackedExperts`) as well.

    Raises:
        ValueError: before anything is changed: a target that the model does not have; dropout, DoRA, a bias on experts or
            router; an adapter name in use; with other adapters that are on other parameters (a limit of PEFT).
    """
    from peft import PeftModel, get_peft_model

    check_lora(model, config)
    prepare_packed_experts(model)
    if not isinstance(model, PeftModel):
        return get_peft_model(model, config, adapter_name=adapter_name)
    if adapter_name in model.peft_config:
        raise ValueError(f"adapter_name: expected a new one, got {adapter_name!r}, which the model has")
    model.add_adapter(adapter_name, config)
    model.set_adapter(adapter_name)
    return model


def load_lora(
    model: nn.Module, folder: str, adapter_name: str = "default", *, is_trainable: bool = False, **kwargs
) -> PeftModel:
    """An adapter that `save_pretrained` of any PEFT wrote, put on the model and made the active one.

    Args:
        folder: or a repository of the Hub, in PEFT's layout or with released names (expert by expert); one of
            a text model fits a multimodal one; `kwargs` (`revision`, `subfolder`, ...) go to PEFT.
        is_trainable: whether its parameters want gradients.

    Where the files hold the embedding or the head of a base, as PEFT saves them beside a resized vocabulary, those of the model
    are overwritten.

    Raises:
        ValueError: the adapter is for another architecture: all names and shapes that do not fit are listed, and the model
            is left as it was. As `add_lora`.
    """
    from peft import LoraConfig, PeftModel, set_peft_model_state_dict
    from peft.utils import load_peft_weights

    config = LoraConfig.from_pretrained(folder, **kwargs)
    state = load_peft_weights(folder, device="cpu", **kwargs)
    if is_released(state, config):
        state, config = fused_adapter(state, config)
    if any(plain_name(name).startswith("model.language_model") for name, _ in model.named_modules()):
        state = multimodal_names(state)
    refuse_strangers(folder, [f"{name} {list(tensor.shape)}" for name, tensor in strangers(model, state)])
    config.inference_mode = not is_trainable
    known, wanted = isinstance(model, PeftModel), [(p, p.requires_grad) for p in model.parameters()]
    adapted = add_lora(model, config, adapter_name)
    differences = adapter_differences(adapted, state, adapter_name)
    if differences:
        adapted.delete_adapter(adapter_name) if known else adapted.unload()
        for parameter, it_is in wanted:
            parameter.requires_grad_(it_is)
        refuse_strangers(folder, differences)
    set_peft_model_state_dict(adapted, state, adapter_name)
    return adapted if is_trainable else adapted.eval()


def refuse_strangers(folder: str, lines: list[str]) -> None:
    if lines:
        listed = "\n  ".join(lines)
        raise ValueError(f"{folder}: expected an adapter for this architecture, got one with other parts:\n  {listed}")


def strangers(model: nn.Module, state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """What in `state` belongs to no module of the model."""
    paths = {plain_name(name) for name, _ in model.named_modules()}
    of = {name: re.sub(r"(\.lora_[^.]*)?(\.weight|\.bias)?$", "", plain_name(name)) for name in state}
    return [(name, state[name]) for name in sorted(state) if of[name] not in paths]


def adapter_differences(model: PeftModel, state: dict[str, torch.Tensor], adapter_name: str = "default") -> list[str]:
    """A line for each tensor of `state` that the adapter lacks, lacks itself, or has in another shape."""
    from peft import get_peft_model_state_dict

    own = get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)
    own |= {name: tensor for name, tensor in base_embeddings(model).items() if name in state}
    lines = [f"{name} {list(state[name].shape)}: not in this model" for name in sorted(state.keys() - own.keys())]
    lines += [f"{name} {list(own[name].shape)}: not in the adapter" for name in sorted(own.keys() - state.keys())]
    return lines + [
        f"{name}: {list(own[name].shape)} in this model, {list(state[name].shape)} in the adapter"
        for name in sorted(own.keys() & state.keys())
        if own[name].shape != state[name].shape
    ]


def base_embeddings(model: PeftModel) -> dict[str, torch.Tensor]:
    """Embedding and head of the base, under the names by which PEFT saves them beside an adapter of the head, or of a model
    whose vocabulary was resized."""
    ends = ("embed_tokens.weight", "lm_head.weight", "lm_head.base_layer.weight")
    named = model.named_parameters(remove_duplicate=False)  # a tied head is saved under both names
    return {name: parameter for name, parameter in named if name.endswith(ends)}


def check_lora(model: nn.Module, config: LoraConfig) -> None:
    """ValueError where PEFT would leave out a target without a word, or stop half-way."""
    modules = [plain_name(name) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    modules += [plain_name(name) for name, module in model.named_modules() if hasattr(module, "base_layer")]
    if isinstance(config.target_modules, str):
        if config.target_modules != "all-linear" and not any(re.fullmatch(config.target_modules, m) for m in modules):
            raise ValueError(f"target_modules: expected names of linear layers, got {config.target_modules!r}")
    else:
        refuse_unmatched("target_modules", config.target_modules or (), modules, MODULES)
        tied = (
            getattr(model.config.get_text_config(), "tie_word_embeddings", False)
            if hasattr(model, "config")
            else False
        )
        if tied and set(config.target_modules or ()) & set(MODULES["head"]):
            raise ValueError("target_modules: expected no head that is the embedding as well, got lm_head")
    parameters = config.target_parameters or ()
    refuse_unmatched("target_parameters", parameters, parameter_names(model), {})
    unsupported = [name for name in NOT_ON_PARAMETERS if getattr(config, name, None)]
    if parameters and unsupported:
        raise ValueError(
            f"{', '.join(unsupported)}: expected none on experts and router ({', '.join(sorted(parameters))}), "
            f"got {', '.join(str(getattr(config, name)) for name in unsupported)}"
        )


def refuse_unmatched(field: str, targets: Collection[str], names: Collection[str], groups: dict) -> None:
    """A group of `lora_targets` may hold names that a model lacks, as long as it has one of them."""
    found = {target for target in targets if any(f".{name}".endswith(f".{target}") for name in names)}
    excused = {name for group in groups.values() if found & set(group) for name in group}
    missing = sorted(set(targets) - found - excused)
    if missing:
        raise ValueError(
            f"{field}: expected names of this model, got {', '.join(missing)}, which match nothing "
            "(routed experts and router are parameters: see lora_targets)"
        )


def parameter_names(model: nn.Module) -> list[str]:
    packed = [
        f"{name}.{projection}"
        for name, module in model.named_modules()
        if is_packed(module)
        for projection in PROJECTIONS
    ]
    return [plain_name(name) for name in (*(name for name, _ in model.named_parameters()), *packed)]


def plain_name(name: str) -> str:
    """Without what PEFT puts between."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def prepare_packed_experts(model: nn.Module) -> None:
    """Lets PEFT find the projections of experts that stay in MXFP4. `add_lora` and `load_lora` do so by themselves."""
    for module in model.modules():
        if type(module) is PackedExperts:
            module.__class__ = AdaptablePackedExperts


def freeze_packed_experts(model: nn.Module) -> None:
    """For training, when all adapters are on: the bytes of packed experts become frozen parameters, which FSDP2 splits and
    a checkpoint of what is trained leaves out. PEFT finds no projections any more: to FSDP2 they would be parameters too."""
    for module in model.modules():
        if isinstance(module, PackedExperts):
            module.__class__ = PackedExperts
            for name, stored in list(module.named_buffers(recurse=False)):
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(stored, requires_grad=False))


class Placeholder(torch.Tensor):
    """Shape and device of a packed projection, in no memory: what PEFT asks a parameter for."""

    @property
    def data(self):
        raise ValueError(
            "experts in MXFP4: expected an adapter beside them, they hold no sum; merge into plain experts"
        )


class AdaptablePackedExperts(PackedExperts):
    """Packed experts that show PEFT, which looks for parameters by name, two that are not there."""

    is_transposed = False

    @property
    def gate_up_proj(self) -> Placeholder:
        return self.placeholder(2 * self.intermediate_dim, self.hidden_dim)

    @property
    def down_proj(self) -> Placeholder:
        return self.placeholder(self.hidden_dim, self.intermediate_dim)

    def placeholder(self, rows: int, inputs: int) -> Placeholder:
        nothing = torch.zeros((), dtype=torch.float32, device=self.gate_up_proj_packed.device)
        return nothing.expand(self.num_experts, rows, inputs).as_subclass(Placeholder)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True):
        """The list of a whole model does not come through here: nothing is counted, trained or saved."""
        yield from super().named_parameters(prefix, recurse, remove_duplicate)
        yield from ((f"{prefix}.{name}" if prefix else name, getattr(self, name)) for name in PROJECTIONS)
