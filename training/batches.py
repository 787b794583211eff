"""What a process computes in a step: its micro-batches, on its device, each the part that its context group leaves it."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from .context_shard import ContextShard, shard_sequence
from .mixture import StageData
from .packing import IGNORED, Pack, collate
from .processes import Processes


@dataclass(frozen=True)
class Batch:
    """A micro-batch, as far as this process computes it.

    `inputs`: of the model; its loss is this batch's nats over all predictions of the step, those of every process, so the
    losses of a step add up to its mean. `predictions`, `tokens`: of this process. `lengths`: of the documents that the
    `ranks` processes of its context group compute together.
    """

    inputs: dict[str, Any]
    predictions: int
    tokens: int
    lengths: list[int]
    ranks: int

    def nats(self, loss: torch.Tensor) -> torch.Tensor:
        """The sum over this process's predictions that the model's `loss` was made from."""
        return loss.detach().double() * self.inputs["num_items_in_batch"]


class Batches:
    """Micro-batches of `size` packs, for processes that share sequences within `mesh["context"]`."""

    def __init__(self, mesh: DeviceMesh, size: int, processes: Processes):
        self.size, self.processes, self.context = size, processes, mesh["context"]
        self.group, self.groups = mesh["data"].get_local_rank(), mesh["data"].size()

    def steps(self, data: StageData, first: int, end: int) -> Iterator[Iterator[Batch]]:
        """Those of the steps `first` ... `end` - 1; documents are read one step ahead, in the background."""
        with ThreadPoolExecutor(1) as reader:
            coming: Future | None = None
            for step in range(first, end):
                packs = coming.result() if coming else self._read(data, step)
                coming = reader.submit(self._read, data, step + 1) if step + 1 < end else None
                yield self._batches(packs)

    def _read(self, data: StageData, step: int) -> list[Pack]:
        return data.slice(step, self.group, self.groups)

    def _batches(self, packs: Sequence[Pack]) -> Iterator[Batch]:
        # The ranks of a context group have the same packs: one of them counts.
        mine = 0 if self.context.get_local_rank() else sum(map(count_predictions, packs))
        predictions = torch.tensor(mine, device=self.processes.device)
        self.processes.sum(predictions)
        for start in range(0, len(packs), self.size):
            yield self._batch(packs[start : start + self.size], predictions)

    def _batch(self, packs: Sequence[Pack], predictions: torch.Tensor) -> Batch:
        inputs, own = model_inputs(packs), sum(map(count_predictions, packs))
        ranks = self.context.size()
        if ranks > 1:
            inputs = shard_sequence(inputs, self.context)
            own = int((inputs["shift_labels"] != IGNORED).sum())
        inputs = {name: _moved(value, self.processes.device) for name, value in inputs.items()}
        inputs |= {"num_items_in_batch": predictions, "use_cache": False}
        lengths = [end - begin for pack in packs for begin, end in itertools.pairwise(pack.cu_seqlens)]
        return Batch(inputs, own, inputs["input_ids"].numel(), lengths, ranks)


def model_inputs(packs: Sequence[Pack]) -> dict[str, torch.Tensor]:
    """As `collate`; documents of one length that fill a pack each are the rows of an ordinary batch, which need no
    borders: attention then takes kernels that know none and are faster."""
    length = len(packs[0].input_ids)
    if any(pack.cu_seqlens != [0, length] for pack in packs):
        return collate(packs)
    rows = torch.tensor([pack.input_ids for pack in packs])  # [B, T]
    return {"input_ids": rows, "labels": rows}


def count_predictions(pack: Pack) -> int:
    """The first token of a document is none."""
    return len(pack.input_ids) - (len(pack.cu_seqlens) - 1)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, ContextShard):
        return dataclasses.replace(value, cu_seqlens=value.cu_seqlens.to(device))
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
