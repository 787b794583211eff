"""Adapters of experts under two names: PEFT's, all experts of a layer in two matrices, and released ones, expert by expert.

Serving engines (vLLM, SGLang) read `experts.3.w1.lora_A.weight`; older trainers wrote it. Both directions lose nothing: an
update is the same matrix for every expert. `gate_up_proj` stands for two released projections that then share A; the
fused matrices of dense and shared MLPs likewise. States are what `get_peft_model_state_dict` returns and adapter files hold.
"""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import pad

from .released_experts import PROJECTIONS


if TYPE_CHECKING:
    from peft import LoraConfig

State = dict[str, torch.Tensor]
TREE = "base_model.model."
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123])")
HALVES = ("gate_proj", "up_proj")
ROUTER = ".block_sparse_moe.gate"
HALF = re.compile(r"(.*\.(?:mlp|shared_experts))\.(?:gate_proj|up_proj)")
# (ours, released) beginnings of names in a multimodal model; those of a text model are the same
MULTIMODAL = (
    ("model.language_model.", "language_model.model."),
    ("model.vision_tower.", "vision_tower."),
    ("model.mm_projector.", "mm_projector."),
    ("lm_head", "language_model.lm_head"),
)


class Update(NamedTuple):
    a: torch.Tensor  # [..., r, in]
    b: torch.Tensor  # [..., out, r]


def per_expert_adapter(state: State, config: LoraConfig, num_experts: int) -> tuple[State, dict[str, Any]]:
    """PEFT's layout -> released names, and the `adapter_config.json` that belongs to them.

    Returns:
        A [r, in] and B [out, r] for each of w1, w2, w3 of each expert, for `gate_proj` and `up_proj` of other MLPs, and for
        everything else as it was. Engines know one rank and one scale: smaller ranks are padded with zeros, other scales
        go into B.

    Raises:
        ValueError: tensors that are not LoRA's A and B, which released names have no place for.
    """
    updates = read_updates(state)
    fused = {}
    for path, update in updates.items():
        projection = expert_projection(path, config)
        if projection is None:
            fused[path] = split_rows(path, update, {"gate_up_proj": HALVES})
        else:
            experts = path.removesuffix(".base_layer")
            a = update.a.unflatten(0, (num_experts, -1))  # [E, r, in]
            b = update.b.unflatten(1, (-1, num_experts)).permute(2, 0, 1)  # [E, out, r]
            fused[path] = {
                name: part
                for e in range(num_experts)
                for name, part in split_rows(f"{experts}.{e}.{projection}", Update(a[e], b[e]), PROJECTIONS).items()
            }
    rank = max(part.a.shape[0] for parts in fused.values() for part in parts.values())
    scale = scaling(config, config.lora_alpha, rank)
    multimodal = any(path.startswith("model.language_model.") for path in updates)
    written, leaves = {}, set()
    for path, parts in fused.items():
        factor = own_scaling(path, next(iter(parts.values())).a.shape[0], config) / scale
        for name, (a, b) in parts.items():
            leaves.add(name.rpartition(".")[2])
            name, padding = TREE + (released_name(name) if multimodal else name), rank - a.shape[0]
            written[f"{name}.lora_A.weight"] = pad(a, (0, 0, 0, padding)).contiguous()
            b = pad(b, (0, padding))
            written[f"{name}.lora_B.weight"] = (b if factor == 1 else b * factor).contiguous()
    changed = {
        "r": rank, "target_modules": sorted(leaves), "target_parameters": None, "rank_pattern": {}, "alpha_pattern": {},
        "inference_mode": True,
    }  # fmt: skip
    return written, config.to_dict() | changed


def is_released(state: State, config: LoraConfig) -> bool:
    """Also where nothing but the router, a parameter in PEFT's layout, tells."""
    if not config.target_parameters and any(f"{ROUTER}.lora_" in name for name in state):
        return True
    return any(EXPERT.search(name) or HALF.search(name) for name in state)


def fused_adapter(state: State, config: LoraConfig) -> tuple[State, LoraConfig]:
    """Released names of a text model -> PEFT's layout, and its config; the reverse of `per_expert_adapter`.

    Where the gate and the up projection have the same A throughout, the fused one keeps the rank. Otherwise it gets both,
    its B in two blocks, and its rank and alpha double, in `rank_pattern` and `alpha_pattern`.

    Raises:
        ValueError: experts that are missing, listed; ranks that differ within a projection.
    """
    updates = read_updates(state)
    config = copy.deepcopy(config)
    written = {
        path: update for path, update in updates.items() if not (EXPERT.fullmatch(path) or HALF.fullmatch(path))
    }
    written |= fuse_experts(updates, config) | fuse_mlps(updates, config)
    # Whole names: the end of one, `down_proj`, may be that of a layer that has no update, too.
    config.target_modules = {end_of(path) for path in written if not is_parameter(path)}
    if any(path.endswith(ROUTER) for path in written):
        config.target_parameters = [*(config.target_parameters or ()), f"{ROUTER.removeprefix('.')}.weight"]
    named = (
        (path, part, tensor) for path, update in written.items() for part, tensor in zip("AB", update, strict=True)
    )
    return {f"{TREE}{path}.lora_{part}.weight": tensor.contiguous() for path, part, tensor in named}, config


def is_parameter(path: str) -> bool:
    """Whether PEFT adapts what is at `path` as a parameter: routed experts and router."""
    return path.removesuffix(".base_layer").endswith((".experts", ROUTER))


def end_of(path: str) -> str:
    """The part of a name that a text model and a multimodal one share."""
    return re.sub(r"^(?:language_model\.)?(?:model\.)?(?:language_model\.)?", "", path)


def fuse_experts(updates: dict[str, Update], config: LoraConfig) -> dict[str, Update]:
    """Those of the routed experts, which `config` then targets."""
    by_layer: dict[str, dict[str, dict[int, Update]]] = {}
    for path, update in updates.items():
        if found := EXPERT.fullmatch(path):
            by_layer.setdefault(found[1], {}).setdefault(found[3], {})[int(found[2])] = update
    layers = {
        experts: {name: stack(experts, name, of) for name, of in parts.items()} for experts, parts in by_layer.items()
    }
    gates = {experts: [parts.get(name) for name in ("w1", "w3")] for experts, parts in layers.items()}
    fused = fuse_halves(gates, r".*\.experts\.gate_up_proj", config)
    downs = {experts: parts["w2"] for experts, parts in layers.items() if "w2" in parts}
    present = [name for name, of in zip(PROJECTIONS, (fused, downs), strict=True) if of]
    config.target_parameters = [f"block_sparse_moe.experts.{name}" for name in present] or None
    inner = ".base_layer" if len(present) == 2 else ""
    written = {f"{experts}{inner}": flat(update) for experts, update in fused.items()}
    return written | {experts: flat(update) for experts, update in downs.items()}


def fuse_mlps(updates: dict[str, Update], config: LoraConfig) -> dict[str, Update]:
    """Those of dense and shared MLPs."""
    parents = sorted({found[1] for path in updates if (found := HALF.fullmatch(path))})
    halves = {f"{mlp}.gate_up_proj": [updates.get(f"{mlp}.{name}") for name in HALVES] for mlp in parents}
    return fuse_halves(halves, r".*\.(mlp|shared_experts)\.gate_up_proj", config)


def fuse_halves(halves: dict[str, list[Update | None]], pattern: str, config: LoraConfig) -> dict[str, Update]:
    """Gate and up as one; one that is missing changes nothing."""
    halves = {path: both for path, both in halves.items() if any(both)}
    shared = all(None in both or torch.equal(both[0].a, both[1].a) for both in halves.values())
    if not shared:
        config.rank_pattern = {**config.rank_pattern, pattern: 2 * config.r}
        config.alpha_pattern = {**config.alpha_pattern, pattern: 2 * config.lora_alpha}
    fused = {}
    for path, both in halves.items():
        some = both[0] or both[1]
        gate, up = (half or Update(some.a, torch.zeros_like(some.b)) for half in both)
        if shared:
            fused[path] = Update(some.a, torch.cat([gate.b, up.b], dim=-2))
        else:
            rows = pad(gate.b, (0, up.b.shape[-1])), pad(up.b, (gate.b.shape[-1], 0))
            fused[path] = Update(torch.cat([gate.a, up.a], dim=-2), torch.cat(rows, dim=-2))
    return fused


def read_updates(state: State) -> dict[str, Update]:
    """By the path of the module, without PEFT's beginning."""
    ends = (".lora_A.weight", ".lora_B.weight")
    strange = sorted(name for name in state if not name.endswith(ends))
    paths = sorted({name.removesuffix(ends[0]).removesuffix(ends[1]) for name in state if name not in strange})
    strange += [f"{path}{end}: missing" for path in paths for end in ends if f"{path}{end}" not in state]
    if strange or not paths:
        raise ValueError(
            f"state: expected names that end in .lora_A.weight and .lora_B.weight, got {strange or 'none'}"
        )
    return {path.removeprefix(TREE): Update(*(state[path + end] for end in ends)) for path in paths}


def expert_projection(path: str, config: LoraConfig) -> str | None:
    """The projection of routed experts whose update is at `path`: PEFT nests one wrapper in the other."""
    if not path.removesuffix(".base_layer").endswith(".experts"):
        return None
    adapted = [
        name for name in PROJECTIONS if any(t.endswith(f"experts.{name}") for t in config.target_parameters or ())
    ]
    return adapted[0] if path.endswith(".base_layer") else adapted[-1]


def split_rows(path: str, update: Update, parts: dict[str, tuple[str, ...]]) -> dict[str, Update]:
    """`path` as one update, or as those of the released projections whose rows are in it, with the same A."""
    parent, _, leaf = path.rpartition(".")
    names = parts.get(leaf)
    if names is None:
        return {path: update}
    rows = update.b.chunk(len(names))
    return {f"{parent}.{name}": Update(update.a, b) for name, b in zip(names, rows, strict=True)}


def stack(experts: str, name: str, of: dict[int, Update]) -> Update:
    """[E, r, in] and [E, out, r]."""
    missing = [e for e in range(max(of) + 1) if e not in of]
    shapes = {tuple(map(tuple, (update.a.shape, update.b.shape))) for update in of.values()}
    if missing or len(shapes) > 1:
        raise ValueError(
            f"{experts}.*.{name}: expected every expert, in one shape; missing {missing}, got {sorted(shapes)}"
        )
    ordered = [of[e] for e in sorted(of)]
    return Update(torch.stack([update.a for update in ordered]), torch.stack([update.b for update in ordered]))


def flat(update: Update) -> Update:
    """[E, r, in], [E, out, r] -> [E r, in], [out, r E], as PEFT keeps them."""
    return Update(update.a.flatten(0, 1), update.b.permute(1, 2, 0).flatten(1))


def scaling(config: LoraConfig, alpha: float, rank: int) -> float:
    return alpha / rank**0.5 if config.use_rslora else alpha / rank


def own_scaling(path: str, rank: int, config: LoraConfig) -> float:
    """That of the module at `path`, which may have its own alpha."""
    projection = expert_projection(path, config)
    key = f"{path.removesuffix('.base_layer')}.{projection}" if projection else path
    own = [a for pattern, a in config.alpha_pattern.items() if re.match(rf"(.*\.)?({pattern})$", key)]
    return scaling(config, own[0] if own else config.lora_alpha, rank)


def multimodal_names(state: State) -> State:
    """Names of a text model, or released ones, -> those in a multimodal model."""

    def renamed(name: str) -> str:
        name = name.removeprefix(TREE)
        if any(name.startswith(ours) for ours, _ in MULTIMODAL):
            return TREE + name
        for ours, released in MULTIMODAL:
            if name.startswith(released):
                return TREE + ours + name.removeprefix(released)
        return TREE + MULTIMODAL[0][0] + name.removeprefix("model.")

    return {renamed(name): tensor for name, tensor in state.items()}


def released_name(name: str) -> str:
    for ours, released in MULTIMODAL:
        if name.startswith(ours):
            return released + name.removeprefix(ours)
    return name
