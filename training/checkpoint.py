"""Checkpoints of a run: written whole or not at all, by any number of processes, and read back by any other number."""

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from .checkpoint_files import (
    CheckpointWriter,
    address,
    corruption,
    damage,
    latest,
    open_folder,
    read_marker,
    read_state,
)
from .random_state import seed_all, set_random_state
from .snapshot import GROUPS, Optimizers, group_names, put_back, random_key, take, template


Result = TypeVar("Result")

# Each save and load of a single process would say so.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class Checkpointer:
    """Saves and loads sharded checkpoints of a run, in the background and through torch.distributed.checkpoint.

    Every process of the run makes one, after `init_process_group` where there is more than one process, and calls the
    same methods in the same order. The bytes go straight to where they stay, a local folder or object storage, from all
    processes at once: a detour over local disks would need room there and write everything twice.

    A checkpoint holds parameters and persistent buffers, the state of the optimisers, the random states of every process
    and the loop's own state. Loading executes pickled code: load only what you trust.
    """

    def __init__(self, folder: str | os.PathLike, keep: int = 3, seed: int = 0):
        """
        Args:
            folder: a path or any URL that fsspec opens; seen by all processes.
            keep: how many of the newest checkpoints stay, beside permanent ones.
            seed: of the random numbers after a resume on another number of processes.

        Raises:
            ValueError: `keep` is less than 1.
        """
        if keep < 1:
            raise ValueError(f"keep: expected at least 1 checkpoint, got {keep}")
        self.folder, self.keep, self.seed = address(folder), keep, seed
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        # A group of its own: the thread that saves must not take part in the collectives of training.
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._pending: Future | None = None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizers,
        state: dict,
        *,
        permanent: bool = False,
        wait: bool = False,
    ) -> str:
        """Begins to save as `folder`/step-NNNNNN, and returns once everything is copied to CPU memory.

        Waits first for the save before this one, and raises what went wrong in it. Saving a step again replaces it.

        Args:
            optimizer: one, or several in the same order as when loading.
            state: JSON (names are strings; tuples come back as lists): step, tokens, stage, history, ...
            permanent: it is never pruned: the end of a stage.
            wait: return only when the checkpoint is complete.

        Returns:
            Path or URL of the checkpoint, complete only after `wait()`.
        """
        if step < 0:
            raise ValueError(f"step: expected at least 0, got {step}")
        text = json.dumps(state)
        self.wait()
        writer = CheckpointWriter(self.folder, step, text, ranks=self.ranks, permanent=permanent, keep=self.keep)
        stager = DefaultStager(
            StagingOptions(False, False, False, False)
        )  # a copy in plain memory, made before it returns
        self._pending = dcp.async_save(
            take(model, optimizer, self.rank),
            storage_writer=writer,
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=self.group,
            async_stager=stager,
        )
        stager.close()  # it would keep the copy alive; torch 2.11 cannot use it twice in any case
        if wait:
            self.wait()
        return writer.target

    def wait(self) -> None:
        """Returns when the last save is complete; raises what went wrong in it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def latest(self) -> str | None:
        """The newest complete checkpoint, the same on every process; None: there is none. Warns of those it skips."""
        self.wait()
        return on_first_rank(lambda: latest(self.folder), self.group)

    def load(self, path: str | os.PathLike, model: nn.Module, optimizer: Optimizers | None = None) -> dict:
        """Reads a checkpoint into `model`, `optimizer` (None: not wanted) and the random generators.

        Everything is bit-equal to what was saved, in whatever sharding the model and its optimisers have here. Random
        states are put back where as many processes read as wrote; otherwise every process is seeded anew from (seed,
        step, rank), so that a resumed run is reproducible, but not the continuation of the same random numbers.

        Returns:
            The `state` of `save`.

        Raises:
            ValueError: a file is missing, truncated or holds other bytes than were written (it is named); or names,
                shapes or dtypes are not those of the model and the optimisers. The weights have not been touched then.
        """
        path = address(path)
        marker = self._verified(path)
        reader = FsspecReader(path)
        saved = reader.read_metadata().state_dict_metadata
        read = template(model, optimizer, saved)
        names = group_names(read) if GROUPS in read else None
        same_ranks = marker["ranks"] == self.ranks
        if same_ranks:
            read[random_key(self.rank)] = None
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.load(read, storage_reader=reader, planner=planner, process_group=self.group)
        if names is not None:
            put_back(optimizer, names, read)
        if same_ranks:
            set_random_state(read[random_key(self.rank)])
        else:
            seed_all(self.seed, marker["step"], self.rank)
        return read_state(path)

    def close(self) -> None:
        """Waits for the last save; call it before `destroy_process_group`."""
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _verified(self, path: str) -> dict:
        """The marker of `path`, once the ranks have read all files, each its share, and found them as written."""
        problem = on_first_rank(lambda: damage(path), self.group)
        marker = read_marker(path)
        if problem is None:
            problem = corruption(path, dict(list(marker["files"].items())[self.rank :: self.ranks]))
            if self.group is not None:
                problems: list[Any] = [None] * self.ranks
                dist.all_gather_object(problems, problem, group=self.group)
                problem = next(filter(None, problems), None)
        if problem is not None:
            raise ValueError(f"checkpoint {path}: {problem}")
        return marker


def save_model(model: nn.Module, folder: str | os.PathLike, tokenizer: Any = None) -> None:
    """`save_pretrained` of a model, sharded or not, in the released layout; every process calls it.

    Sharded tensors are gathered one by one and collected in the CPU memory of rank 0, which writes. `folder`, a path or
    URL, replaces a saved model of that name; a local one appears when it is complete.

    Raises:
        ValueError: `folder` holds something that is not a saved model.
    """
    tensors = _whole_tensors(model)

    def write_to(path: Path) -> None:
        model.save_pretrained(path, state_dict=tensors)
        if tokenizer is not None:
            tokenizer.save_pretrained(path)

    on_first_rank(lambda: replace_folder(folder, write_to, "config.json"), group=None)


def replace_folder(folder: str | os.PathLike, write_to: Callable[[Path], None], sign: str) -> None:
    """Puts what `write_to` writes in the place of a path or URL, which is a new one or holds a file `sign`, else ValueError.

    A local one is there as a whole or not at all, but for a kill between two renames, which `finish_replacing` mends.
    """
    fs, target = open_folder(folder)
    local = address(folder) == target
    if local:
        finish_replacing(target)
    if fs.exists(target) and fs.ls(target) and not fs.exists(f"{target}/{sign}"):
        raise ValueError(f"folder: expected a new one or one to replace, with {sign}, got {folder} without it")
    if not local:
        with tempfile.TemporaryDirectory() as parent:
            write_to(Path(parent) / "model")
            if fs.exists(target):
                fs.rm(target, recursive=True)
            return fs.put(f"{parent}/model/", target, recursive=True)
    place, partial, old = _places(target)
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_to(partial)
        if place.exists():
            place.rename(old)
        partial.rename(place)
    finally:
        finish_replacing(target)


def finish_replacing(folder: str | os.PathLike) -> None:
    """Ends what `replace_folder` was killed in, and clears up behind it."""
    place, partial, old = _places(folder)
    if partial.exists() and old.exists() and not place.exists():  # between the renames, when the new one is whole
        partial.rename(place)
    for left in (partial, old):
        shutil.rmtree(left, ignore_errors=True)


def _places(folder: str | os.PathLike) -> tuple[Path, Path, Path]:
    """Where a folder is, and beside it where its successor is written and where it waits to be deleted."""
    place = Path(folder).resolve()
    return place, place.with_name(f".{place.name}.partial"), place.with_name(f".{place.name}.old")


def _whole_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The full tensors of a model on the CPU of rank 0, tied ones once in memory; empty on other ranks."""
    whole: dict[str, torch.Tensor] = {}
    originals = _tied_names(model)
    for name, tensor in get_model_state_dict(model).items():
        original = originals.get(name, name)
        if original in whole:
            whole[name] = whole[original]
            continue
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        whole[name] = full.cpu() if _rank() == 0 else full.new_empty(0)
    return whole if _rank() == 0 else {}


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter -> the first name of the same parameter."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def on_first_rank(function: Callable[[], Result], group: Any) -> Result:
    """What `function` returns on rank 0, on every rank; its error ends all of them."""
    if not dist.is_initialized():
        return function()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except BaseException as error:
            outcome[1] = repr(error)
            dist.broadcast_object_list(outcome, src=0, group=group)
            raise
    dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise RuntimeError(f"rank 0 failed: {outcome[1]}")
    return outcome[0]
