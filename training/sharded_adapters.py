"""Adapters of a model whose parameters are split over processes: written whole, and read into the shards.

The order is: adapter on the model (`add_lora`), then sharding, then `load_adapter`. An adapter that is added to a sharded
model would be a copy on each rank that nothing keeps equal.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import load_peft_weights
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..adapter_names import TREE
from ..adapters import adapter_differences, base_embeddings, refuse_strangers
from .checkpoint import on_first_rank, replace_folder


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def save_adapter(model: nn.Module, folder: str | Path, adapter_name: str = "default", *, reader: Any = None) -> None:
    """The files that `save_pretrained` of an unsharded `PeftModel` writes, all rows of all experts, and those of `reader`,
    a tokenizer or processor. Every rank must call it.

    Args:
        model: a `PeftModel`, or the model inside one.
        folder: a path or URL; what it holds is replaced if that is an adapter. It appears whole or not at all.

    Raises:
        ValueError: `folder` holds something else.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    own = {name: tensor for name, tensor in base.state_dict().items() if f".{adapter_name}." in f"{name}."}
    whole = {name: gathered(tensor) for name, tensor in own.items()}

    def write_to(path: Path) -> None:
        path.mkdir()
        state = get_peft_model_state_dict(base, whole, adapter_name, save_embedding_layers=False)
        tensors = {TREE + name: tensor.contiguous() for name, tensor in state.items()}
        save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
        config = copy.deepcopy(base.peft_config[adapter_name])
        config.inference_mode = True
        config.save_pretrained(path)
        if reader is not None:
            reader.save_pretrained(path)

    on_first_rank(lambda: replace_folder(folder, write_to, CONFIG), group=None)


def load_adapter(model: PeftModel, folder: str | Path, adapter_name: str = "default") -> None:
    """Reads the tensors of `folder` into an adapter that the model has already, sharded or not. Every rank must call it.

    Raises:
        ValueError: names or shapes that differ, all listed.
    """
    state = load_peft_weights(str(folder), device="cpu")
    refuse_strangers(str(folder), adapter_differences(model, state, adapter_name))
    own = get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)
    own |= {name: tensor for name, tensor in base_embeddings(model).items() if name in state}
    set_peft_model_state_dict(model, {name: split_like(state[name], own[name]) for name in own}, adapter_name)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.cpu()


def split_like(tensor: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """`tensor`, which every rank has read, as `own` is split."""
    if not isinstance(own, DTensor):
        return tensor
    tensor = tensor.to(device=own.device, dtype=own.dtype)
    return distribute_tensor(tensor, own.device_mesh, own.placements, src_data_rank=None)
