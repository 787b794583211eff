"""What a checkpoint holds: a flat dictionary of tensors and small objects, taken from a model and put back into one.

    model.NAME              trainable parameters and persistent buffers, sharded or whole
    optimizer.NAME.STATE    the state of the parameter NAME
    param_groups            learning rates, ... and the names of each group's parameters
    random.RANK             random states of that process

The tensors are those of the model and the optimisers themselves, without a copy: torch.distributed.checkpoint reads into
them in place, each in its own sharding and dtype, whatever the number of processes that wrote.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.checkpoint import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from .random_state import random_state


GROUPS = "param_groups"
Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def take(model: nn.Module, optimizers: Optimizers, rank: int) -> dict[str, Any]:
    """All that is saved; optimisers that have not made a step yet add nothing.

    Raises:
        ValueError: the state of a sharded parameter is not a DTensor: the part of one rank would pass for the whole.
    """
    snapshot = {**_of_model(model), random_key(rank): random_state()}
    if any(optimizer.state for optimizer in _several(optimizers)):
        snapshot |= _of_optimizers(model, optimizers)
    for name, value in snapshot.items():
        if name.startswith("optimizer.") and isinstance(value, torch.Tensor) and value.ndim:
            parameter = snapshot[_parameter(name).replace("optimizer", "model", 1)]
            if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
                raise ValueError(f"{name}: expected a DTensor like its parameter, got a tensor {list(value.shape)}")
    return snapshot


def template(model: nn.Module, optimizers: Optimizers | None, saved: dict[str, Any]) -> dict[str, Any]:
    """What to read a checkpoint into, random states aside.

    Starts the optimisers anew: state and gradients of before are gone.

    Args:
        saved: `Metadata.state_dict_metadata` of the checkpoint.

    Raises:
        ValueError: names, shapes or dtypes in the checkpoint are not those of the model and the optimisers; nothing has
            been read then.
    """
    wanted = _of_model(model)
    _check(wanted, saved, "model")
    if optimizers is None:
        return wanted
    for optimizer in _several(optimizers):
        optimizer.state.clear()
        optimizer.zero_grad(set_to_none=True)  # torch makes an empty state only where there is no gradient
    if GROUPS not in saved:
        return wanted
    state = _of_optimizers(model, optimizers)
    known = {_parameter(name) for name in saved if name.startswith("optimizer.")}
    state = {name: value for name, value in state.items() if name == GROUPS or _parameter(name) in known}
    _check(state, saved, "optimizer")
    return wanted | state


def put_back(optimizers: Optimizers, names: list[list[str]], read: dict[str, Any]) -> None:
    """Gives the optimisers what the tensors, read in place, do not hold: groups, plain numbers, and where nothing is.

    Args:
        names: of the parameters of each group, from `group_names` of the template.

    Raises:
        ValueError: the groups of the checkpoint hold other parameters.
    """
    if (got := group_names(read)) != names:
        sizes = [[len(group) for group in groups] for groups in (names, got)]
        raise ValueError(f"param_groups: expected the same parameters in groups of {sizes[0]}, got {sizes[1]}")
    groups = [(optimizer, group) for optimizer in _several(optimizers) for group in optimizer.param_groups]
    for (optimizer, group), saved in zip(groups, read[GROUPS], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
        for parameter, name in zip(group["params"], saved["params"], strict=True):
            state = optimizer.state.get(parameter, {})
            present = {key: read[full] for key in state if (full := f"optimizer.{name}.{key}") in read}
            if present:
                state.update(present)
            else:
                optimizer.state.pop(parameter, None)


def group_names(snapshot: dict[str, Any]) -> list[list[str]]:
    return [list(group["params"]) for group in snapshot[GROUPS]]


def random_key(rank: int) -> str:
    return f"random.{rank}"


def _of_model(model: nn.Module) -> dict[str, Any]:
    """Frozen parameters are what the run begins with, every time it does."""
    frozen = {name for name, one in model.named_parameters(remove_duplicate=False) if not one.requires_grad}
    return {f"model.{name}": tensor for name, tensor in get_model_state_dict(model).items() if name not in frozen}


def _of_optimizers(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """With a step of learning rate zero where an optimiser has no state yet: so torch lets it make one."""
    both = get_optimizer_state_dict(model, optimizers)
    flat = {f"optimizer.{name}.{key}": value for name, state in both["state"].items() for key, value in state.items()}
    return flat | {GROUPS: both["param_groups"]}


def _several(optimizers: Optimizers) -> Sequence[torch.optim.Optimizer]:
    return (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else optimizers


def _parameter(name: str) -> str:
    """`optimizer.NAME.STATE` -> `optimizer.NAME`."""
    return name.rpartition(".")[0]


def _check(wanted: dict[str, Any], saved: dict[str, Any], kind: str) -> None:
    there = {name for name in saved if name.startswith(f"{kind}.")}
    for names, what in ((wanted.keys() - there - {GROUPS}, "missing"), (there - wanted.keys(), "unexpected")):
        if names:
            shown = ", ".join(sorted(names)[:3])
            raise ValueError(f"checkpoint: expected the names of this {kind}, got {len(names)} {what}: {shown}")
    for name in there:
        tensor, entry = wanted[name], saved[name]
        if isinstance(tensor, torch.Tensor) != isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{name}: expected {type(tensor).__name__}, got {type(entry).__name__}")
        if not isinstance(tensor, torch.Tensor):
            continue
        expected, got = (tuple(tensor.shape), tensor.dtype), (tuple(entry.size), entry.properties.dtype)
        if expected != got:
            raise ValueError(f"{name}: expected shape and dtype {expected}, got {got} in the checkpoint")
