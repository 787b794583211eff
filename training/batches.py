"""What a process computes in a step: its micro-batches, on its device, each the part that its context group leaves it."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..segments import Segments
from .context_shard import ContextShard, shard_sequence
from .packing import IGNORED, Pack, collate, learned_labels
from .processes import Processes


class Slices(Protocol):
    """What steps read their packs from, for example `StageData`."""

    def slice(self, step: int, rank: int, world: int) -> list[Pack]: ...


Collate = Callable[[Sequence[Pack]], dict[str, Any]]
FEWEST_DOCUMENTS = 64  # that `OneShape` has room for: few shapes, few graphs


@dataclass(frozen=True)
class Batch:
    """A micro-batch, as far as this process computes it.

    `inputs`: of the model; its loss is this batch's nats over all predictions of the step, those of every process, so the
    losses of a step add up to its mean. `predictions`, `tokens`: of this process. `lengths`: of the documents that the
    `ranks` processes of its context group compute together. `grids`: of its pictures, on the CPU.
    """

    inputs: dict[str, Any]
    predictions: int
    tokens: int
    lengths: list[int]
    ranks: int
    grids: torch.Tensor | None = None

    def nats(self, loss: torch.Tensor) -> torch.Tensor:
        """The sum over this process's predictions that the model's `loss` was made from."""
        return loss.detach().double() * self.inputs["num_items_in_batch"]


class Batches:
    """Micro-batches of `size` packs, for processes that share sequences within `mesh["context"]`. `collate` makes a
    model's inputs of packs; None: `model_inputs`."""

    def __init__(self, mesh: DeviceMesh, size: int, processes: Processes, collate: Collate | None = None):
        self.size, self.processes, self.context = size, processes, mesh["context"]
        self.collate = model_inputs if collate is None else collate
        self.group, self.groups = mesh["data"].get_local_rank(), mesh["data"].size()

    def steps(self, data: Slices, first: int, end: int) -> Iterator[Iterator[Batch]]:
        """Those of the steps `first` ... `end` - 1; documents are read one step ahead, in the background."""
        with ThreadPoolExecutor(1) as reader:
            coming: Future | None = None
            for step in range(first, end):
                packs = coming.result() if coming else self._read(data, step)
                coming = reader.submit(self._read, data, step + 1) if step + 1 < end else None
                yield self._batches(packs)

    def _read(self, data: Slices, step: int) -> list[Pack]:
        return data.slice(step, self.group, self.groups)

    def _batches(self, packs: Sequence[Pack]) -> Iterator[Batch]:
        # The ranks of a context group have the same packs: one of them counts.
        mine = 0 if self.context.get_local_rank() else sum(pack.predictions for pack in packs)
        predictions = torch.full((), mine, dtype=torch.int64, device=self.processes.device)
        self.processes.sum(predictions)
        predictions.clamp_(min=1)  # a step of pieces of one token predicts nothing, and learns nothing
        for start in range(0, len(packs), self.size):
            yield self._batch(packs[start : start + self.size], predictions)

    def _batch(self, packs: Sequence[Pack], predictions: torch.Tensor) -> Batch:
        inputs, own = self.collate(packs), sum(pack.predictions for pack in packs)
        ranks = self.context.size()
        if ranks > 1:
            inputs = shard_sequence(inputs, self.context)
            own = int((inputs["shift_labels"] != IGNORED).sum())
        grids = inputs.get("grid_thws")
        inputs = {name: _moved(value, self.processes.device) for name, value in inputs.items()}
        inputs |= {"num_items_in_batch": predictions, "use_cache": False}
        lengths = [end - begin for pack in packs for begin, end in itertools.pairwise(pack.cu_seqlens)]
        tokens = inputs["input_ids"].numel() if ranks > 1 else sum(lengths)
        return Batch(inputs, own, tokens, lengths, ranks, grids)


def model_inputs(packs: Sequence[Pack]) -> dict[str, torch.Tensor]:
    """As `collate`; documents of one length that fill a pack each are the rows of an ordinary batch, which need no
    borders: attention then takes kernels that know none and are faster."""
    length = len(packs[0].input_ids)
    if any(pack.cu_seqlens != [0, length] for pack in packs):
        return collate(packs)
    rows = torch.tensor([pack.input_ids for pack in packs])  # [B, T]
    if all(pack.learned is None for pack in packs):
        return {"input_ids": rows, "labels": rows}
    return {"input_ids": rows, "labels": torch.stack([learned_labels(pack) for pack in packs])}


class OneShape:
    """Model inputs of one shape for any packs of at most `length` tokens each: what a CUDA graph can be replayed for.

    Documents that fill a pack each are rows, as in `model_inputs`. Others stand behind one another, `size` x `length` tokens
    in all: what is missing is taken from their beginning once more, is not predicted, and counts in no statistics; and as
    many empty documents follow as make their number a power of two. `largest`: of a number over all processes that share
    the model, whose micro-batches must be of one shape.
    """

    def __init__(self, size: int, length: int, largest: Callable[[int], int] = int):
        self.size, self.length, self.largest = size, length, largest

    def __call__(self, packs: Sequence[Pack]) -> dict[str, Any]:
        room = self.largest(self._room(packs))
        if not room:
            # Nothing is masked: said at once, transformers need not find out.
            return model_inputs(packs) | {"attention_mask": {"full_attention": None, "linear_attention": None}}
        inputs = collate(packs)
        ids, labels, borders = inputs["input_ids"], inputs["labels"], inputs["cu_seq_lens_q"]
        known, total = ids.shape[1], self.size * self.length
        again = torch.arange(known, total).remainder(known)
        ends = torch.arange(known, total, self.length, dtype=borders.dtype)[1:]
        ends = torch.cat([borders, ends, borders.new_full((room,), total)])[: room + 1]
        counted = torch.arange(total) < known
        segments = Segments(ends, longest=self.length, counted=counted)
        unpredicted = labels.new_full((1, len(again)), IGNORED)
        return {
            "input_ids": torch.cat([ids, ids[:, again]], dim=1),
            "labels": torch.cat([labels, unpredicted], dim=1),
            "segments": segments,
        }

    def _room(self, packs: Sequence[Pack]) -> int:
        """For how many documents, the empty ones with them; 0: each fills a pack."""
        if all(pack.cu_seqlens == [0, self.length] for pack in packs):
            return 0
        known = sum(len(pack.input_ids) for pack in packs)
        borders = 1 + sum(len(pack.cu_seqlens) - 1 for pack in packs)
        again = (self.size * self.length - known) // self.length
        return max(FEWEST_DOCUMENTS, 1 << (borders + again).bit_length())


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Segments):
        return Segments(*(_moved(part, device) for part in value))
    if isinstance(value, ContextShard):
        return dataclasses.replace(value, cu_seqlens=value.cu_seqlens.to(device))
    if not isinstance(value, torch.Tensor):
        return value
    # From memory that may be paged out, a copy would wait for all that the device has still to do.
    return (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)
