"""What a process computes in a step: its micro-batches, on its device, each the part that its context group leaves it."""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from .context_shard import shard_sequence
from .mixture import StageData
from .packing import IGNORED, Pack, collate
from .processes import Processes


@dataclass(frozen=True)
class Batch:
    """`inputs`: of the model, whose loss is a part of the sum that the loss of the step is. `predictions`, `tokens`: of
    this process. `lengths`: of the documents that its context group computes together."""

    inputs: dict
    predictions: int
    tokens: int
    lengths: list[int]

    @property
    def nats(self) -> torch.Tensor:
        """What turns the model's loss into the sum of nats of this process."""
        return self.inputs["num_items_in_batch"]


class Batches:
    """Micro-batches of `size` packs, for processes that share sequences within `mesh["context"]`."""

    def __init__(self, mesh: DeviceMesh, size: int, processes: Processes):
        self.mesh, self.size, self.processes = mesh, size, processes
        self.group, self.groups = mesh["data"].get_local_rank(), mesh["data"].size()

    def steps(self, data: StageData, first: int, last: int) -> Iterator[Iterator[Batch]]:
        """Those of the steps `first` ... `last` - 1; documents are read one step ahead, in the background."""
        with ThreadPoolExecutor(1) as reader:
            coming: Future | None = None
            for step in range(first, last):
                packs = coming.result() if coming else self._read(data, step)
                coming = reader.submit(self._read, data, step + 1) if step + 1 < last else None
                yield self._batches(packs)

    def _read(self, data: StageData, step: int) -> list[Pack]:
        return data.slice(step, self.group, self.groups)

    def _batches(self, packs: Sequence[Pack]) -> Iterator[Batch]:
        """Every loss is divided by the predictions of all processes in the whole step: no mean of means."""
        mine = 0 if self.mesh["context"].get_local_rank() else sum(map(count_predictions, packs))
        items = torch.tensor(mine, device=self.processes.device)
        self.processes.sum(items)
        for start in range(0, len(packs), self.size):
            yield self._batch(packs[start : start + self.size], items)

    def _batch(self, packs: Sequence[Pack], items: torch.Tensor) -> Batch:
        device = self.processes.device
        inputs = {name: x.to(device, non_blocking=True) for name, x in model_inputs(packs).items()}
        inputs |= {"num_items_in_batch": items}
        predictions = sum(map(count_predictions, packs))
        if self.mesh["context"].size() > 1:
            inputs = shard_sequence(inputs, self.mesh["context"])
            predictions = int((inputs["shift_labels"] != IGNORED).sum())
        lengths = [end - begin for pack in packs for begin, end in itertools.pairwise(pack.cu_seqlens)]
        return Batch({**inputs, "use_cache": False}, predictions, inputs["input_ids"].numel(), lengths)


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
