"""The processes of a run, and how they share a model: FSDP2 with a unit for each layer.

One process, torchrun and `accelerate launch` are the same to what uses this.
"""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from accelerate import PartialState
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from ..compat import FSDP2_SPLITS_BYTES
from ..norm import FullPrecision


# A layer hands finished blocks through to the next one, which FSDP2 takes for views; nothing here works in place.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")


@dataclass(frozen=True)
class Processes:
    """This process, number `rank` of `count`, and where it computes. What a method returns or leaves is the same on all
    of them, so all must call it. `host`: a group of all for the CPU, where there are several."""

    rank: int
    count: int
    device: torch.device
    host: dist.ProcessGroup | None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> None:
        """Over all processes, in place; `tensor` is on the device."""
        if self.count > 1:
            dist.all_reduce(tensor)

    def maximum(self, tensor: torch.Tensor) -> None:
        """Over all processes, in place; `tensor` is on the device."""
        if self.count > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def total(self, number: int) -> int:
        """The sum over all processes. Between CPUs: nobody waits for a device."""
        if self.host is None:
            return number
        summed = torch.tensor(number)
        dist.all_reduce(summed, group=self.host)
        return int(summed)

    def told(self, fact: bool) -> bool:
        """What the main process says."""
        return self.total(int(fact and self.is_main)) > 0

    def largest(self, number: int) -> int:
        """Over all processes. Between CPUs, as `total`."""
        if self.host is None:
            return number
        found = torch.tensor(int(number))
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.host)
        return int(found)

    def mesh(self, context_parallel: int) -> DeviceMesh:
        """[data, context]: neighbours share a sequence."""
        shape = self.count // context_parallel, context_parallel
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("data", "context"))


@contextlib.contextmanager
def processes() -> Iterator[Processes]:
    """Joins the processes that a launcher started, or stands alone; a process group is there in both cases, and gone
    afterwards unless it was there before."""
    found = dist.is_initialized()
    device = PartialState().device
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rank, count = dist.get_rank(), dist.get_world_size()
    try:
        yield Processes(rank, count, device, dist.new_group(backend="gloo") if count > 1 else None)
    except BaseException:
        # Others may wait for this process in a collective, and the end of a group would wait with them.
        if count == 1 and not found:
            dist.destroy_process_group()
        raise
    if not found:
        dist.destroy_process_group()


def shard(model: PreTrainedModel, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Splits `model` over all ranks of a mesh of one dimension; forward and backward compute in `dtype`.

    Parameters stay what they are, and gradients are summed up in their dtype. What is always in full precision is a unit
    of its own in each layer: FSDP2 casts a whole unit. In a KDA layer that unit is held from its first module to its
    last, since some hand out their parameters. Bytes of packed experts are never cast; a torch whose FSDP2 cannot split
    them leaves all of them to every rank.
    """
    whole = set() if FSDP2_SPLITS_BYTES else {one for one in model.parameters() if not one.is_floating_point()}
    stored = max((parameter.dtype for parameter in model.parameters()), key=lambda dtype: dtype.itemsize)
    low = MixedPrecisionPolicy() if dtype == stored else MixedPrecisionPolicy(dtype, stored, cast_forward_inputs=False)
    full = MixedPrecisionPolicy(cast_forward_inputs=False)
    units = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    for layer in units:
        if exact := [module for module in layer.modules() if isinstance(module, FullPrecision)]:
            fully_shard(exact, mesh=mesh, mp_policy=full)
        fully_shard(layer, mesh=mesh, mp_policy=low, ignored_params=whole)
    fully_shard(model, mesh=mesh, mp_policy=low, ignored_params=whole)


@contextlib.contextmanager
def captured_whole(model: nn.Module) -> Iterator[None]:
    """For a CUDA graph of a pass of `model`, which FSDP2 may share: the streams on which it gathers and reduces begin and end
    with the graph, and no pass waits for an event that another left behind, which no graph can."""
    context = next((m._get_fsdp_state()._comm_ctx for m in model.modules() if isinstance(m, FSDPModule)), None)
    if context is None:
        yield
        return
    current = torch.cuda.current_stream()
    of_gathering = context.all_gather_copy_in_stream, context.all_gather_stream
    streams = *of_gathering, context.reduce_scatter_stream, context.all_reduce_stream
    context.all_gather_state = None
    for stream in streams:
        stream.wait_stream(current)
    yield
    context.all_gather_state = None
    for stream in streams:
        current.wait_stream(stream)
