"""What is loaded is what was saved, on any number of processes.

One test starts this file twice, as rank 0 and rank 1 (gloo, CPU).
"""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from modeling_moe_lc import MoeLcForCausalLM, update_router_bias
from modeling_moe_lc.configuration.presets import load_preset
from modeling_moe_lc.training.checkpoint import Checkpointer, finish_replacing, read_state, replace_folder, save_model
from modeling_moe_lc.training.checkpoint_files import CheckpointWriter, latest
from modeling_moe_lc.training.random_state import seed_all
from modeling_moe_lc.training.snapshot import take


STATE = {"step": 2, "tokens": 12_345, "stage": "8k", "loss": [2.5, 1 / 3, float("inf")]}


class Momentum(torch.optim.Optimizer):
    """An optimiser whose state is not in the dtype of its parameters, and not tensors only."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.0, "betas": (0.9, 0.95)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("momentum", torch.zeros_like(parameter, dtype=torch.bfloat16))
                    state["steps"] = state.get("steps", 0) + 1
                    state["momentum"].mul_(0.9).add_(parameter.grad)
                    parameter.add_(state["momentum"], alpha=-group["lr"])


class Small(nn.Module):
    """Enough for what does not depend on the model; `idle` never gets a gradient."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.used, self.idle = nn.Linear(width, 3), nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros(3))

    def forward(self):
        self.count += 1
        return (self.used(torch.randn(5, self.used.in_features)) - torch.rand(1) * random.random()).square().mean()


def small(width: int = 8):
    model = Small(width)
    return model, torch.optim.AdamW(model.parameters())


def small_step(model, optimizer):
    model().backward()
    optimizer.step()
    optimizer.zero_grad()


def tiny(sharded: bool = False, **overrides):
    """The real model in FP64 with both kinds of optimiser."""
    model = MoeLcForCausalLM(load_preset("tiny", **overrides)).double().train()
    if sharded:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return model, [Momentum(matrices), torch.optim.AdamW(others, weight_decay=0.1)]


def tiny_step(model, optimizers, rate=1e-2):
    ids = torch.randint(3, 500, (1, 24))
    model(ids, labels=ids).loss.backward()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    update_router_bias(model, dist.all_reduce if dist.is_initialized() else None)


def whole(model, optimizers) -> dict:
    """A copy of all that a checkpoint holds but for random states, whole; collective."""
    snapshot = take(model, optimizers, 0)
    del snapshot["random.0"]
    full = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in snapshot.items()}
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in full.items()}


def differing(one: dict, two: dict) -> list[str]:
    """The names whose values or dtypes differ."""
    same = {
        name: one[name].dtype == two[name].dtype and torch.equal(one[name], two[name])
        if isinstance(one[name], torch.Tensor)
        else one[name] == two[name]
        for name in one.keys() & two.keys()
    }
    return sorted({name for name, equal in same.items() if not equal} | (one.keys() ^ two.keys()))


def next_numbers() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    yield str(tmp_path / "run") if request.param == "local" else "memory://bucket/run"
    if request.param == "memory":
        fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_all_comes_back_to_the_bit_and_goes_on_alike(folder):
    model, optimizers = tiny()
    for _ in range(2):
        tiny_step(model, optimizers)
    with Checkpointer(folder) as checkpointer:
        path = checkpointer.save(2, model, optimizers, STATE)
        saved, numbers = whole(model, optimizers), next_numbers()
        tiny_step(model, optimizers)
        later = whole(model, optimizers)

        torch.manual_seed(1)
        model, optimizers = tiny()
        assert checkpointer.latest() == path
        assert checkpointer.load(path, model, optimizers) == STATE == read_state(path)
    assert differing(saved, whole(model, optimizers)) == []
    assert any(name.endswith("e_score_correction_bias") and value.any() for name, value in saved.items())
    assert next_numbers() == numbers
    tiny_step(model, optimizers)
    assert differing(later, whole(model, optimizers)) == []


def test_every_seed_step_and_rank_has_random_numbers_of_its_own():
    numbers = []
    for three in itertools.permutations((0, 1, 2)):
        seed_all(*three)
        numbers.append(next_numbers())
    assert len({value for row in numbers for value in row}) == 6 * 3


def test_weights_alone_can_be_loaded(tmp_path):
    model, optimizer = small()
    small_step(model, optimizer)
    with Checkpointer(tmp_path) as checkpointer:
        path = checkpointer.save(1, model, optimizer, {}, wait=True)
        other, _ = small()
        checkpointer.load(path, other)
    assert differing(model.state_dict(), other.state_dict()) == []


def test_a_file_url_is_its_path(tmp_path):
    with Checkpointer(f"file://{tmp_path}/") as checkpointer:
        path = checkpointer.save(1, *small(), {}, wait=True)
        assert path == checkpointer.latest() == str(tmp_path / "step-000001")


def test_saving_before_the_first_step_changes_no_optimizer(tmp_path):
    model, optimizer = small()
    with Checkpointer(tmp_path) as checkpointer:
        path = checkpointer.save(0, model, optimizer, {}, wait=True)
        assert not optimizer.state
        small_step(model, optimizer)
        checkpointer.load(path, model, optimizer)
    assert not optimizer.state


def test_a_parameter_without_state_stays_without(tmp_path):
    model, optimizer = small()
    small_step(model, optimizer)
    with Checkpointer(tmp_path) as checkpointer:
        path = checkpointer.save(1, model, optimizer, {}, wait=True)
        saved = whole(model, optimizer)
        model, optimizer = small()
        checkpointer.load(path, model, optimizer)
    assert model.idle.weight not in optimizer.state and model.used.weight in optimizer.state
    assert differing(saved, whole(model, optimizer)) == []


def test_a_save_runs_beside_the_loop_and_does_not_see_it(folder, monkeypatch):
    model, optimizer = small()
    small_step(model, optimizer)
    saved, free = whole(model, optimizer), threading.Event()
    history = {"loss": [1.0]}

    def write_data(self, *args, real=CheckpointWriter.write_data):
        assert free.wait(30)
        return real(self, *args)

    monkeypatch.setattr(CheckpointWriter, "write_data", write_data)
    with Checkpointer(folder) as checkpointer:
        path = checkpointer.save(1, model, optimizer, history)
        assert latest(folder) is None
        for _ in range(3):
            small_step(model, optimizer)
        history["loss"].append(2.0)
        free.set()
        checkpointer.wait()
        assert checkpointer.load(path, model, optimizer) == {"loss": [1.0]}
    assert differing(saved, whole(model, optimizer)) == []


def test_what_does_not_fit_the_model_is_refused_by_name(tmp_path):
    model, optimizer = small()
    small_step(model, optimizer)
    with Checkpointer(tmp_path) as checkpointer:
        path = checkpointer.save(1, model, optimizer, {}, wait=True)
        wide = small(width=9)
        before = wide[0].used.weight.clone()
        with pytest.raises(ValueError, match=r"model.used.weight: expected .*\(3, 9\).*got \(\(3, 8\)"):
            checkpointer.load(path, *wide)
        assert torch.equal(wide[0].used.weight, before)
        with pytest.raises(ValueError, match=r"model\.\w+.\w+: expected .*float64.*got .*float32"):
            checkpointer.load(path, model.double())
        with pytest.raises(ValueError, match=r"missing: model\.0\.weight"):
            checkpointer.load(path, nn.Sequential(nn.Linear(2, 2, bias=False), model.double()))
        fresh, _ = small()
        with pytest.raises(ValueError, match="optimizer.*missing: .*momentum"):
            checkpointer.load(path, fresh, Momentum(fresh.parameters()))
        grouped = torch.optim.AdamW([{"params": [parameter]} for parameter in fresh.parameters()])
        with pytest.raises(ValueError, match=r"param_groups: .*groups of \[1, 1, 1, 1\], got \[4\]"):
            checkpointer.load(path, fresh, grouped)
    with pytest.raises(ValueError, match="keep: expected at least 1"):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(ValueError, match="no readable COMPLETE"):
        Checkpointer(tmp_path).load(tmp_path / "step-000009", model)


def test_two_processes_and_one_read_what_the_other_wrote(tmp_path):
    model, optimizers = tiny()
    tiny_step(model, optimizers)
    torch.save(whole(model, optimizers), tmp_path / "one.pt")
    with Checkpointer(tmp_path / "one") as checkpointer:
        checkpointer.save(1, model, optimizers, {"by": "one"})
    logs = [(tmp_path / f"{rank}.log").open("w") for rank in range(2)]
    command = [sys.executable, __file__, str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=logs[rank], stderr=logs[rank]) for rank in range(2)]
    try:
        failed = [rank for rank, process in enumerate(ranks) if process.wait(timeout=300)]
    finally:
        for process, log in zip(ranks, logs, strict=True):
            process.kill()
            log.close()
    assert not failed, "\n".join((tmp_path / f"{rank}.log").read_text()[-3000:] for rank in failed)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [one.pop("read from one") for one in found] == [{"by": "one"}] * 2
    assert all(one["shares"] < 0.7 for one in found)
    assert all(one["differing"] == [] and one["numbers"][0] == one["numbers"][1] for one in found)
    assert found[0]["numbers"] != found[1]["numbers"]
    refused = "optimizer.lm_head.weight.momentum: expected a DTensor like its parameter, got a tensor [4, 4]"
    assert all(one["refused"] == refused for one in found)

    model, optimizers = tiny()
    with Checkpointer(tmp_path / "two", seed=7) as checkpointer:
        path = checkpointer.latest()
        assert len(list(Path(path).glob("*.distcp"))) == 2
        numbers = []
        for _ in range(2):
            assert checkpointer.load(path, model, optimizers) == {"by": "two"}
            numbers.append(next_numbers())
        expected = torch.load(tmp_path / "two.pt")
        assert differing(expected, whole(model, optimizers)) == []
    assert numbers[0] == numbers[1]  # seeded anew, alike

    torch.manual_seed(5)
    for name, unsharded in {"untied": model, "tied": tiny(tie_word_embeddings=True)[0]}.items():
        unsharded.save_pretrained(tmp_path / f"{name} whole")
        folders = [tmp_path / f"{name} {kind}" for kind in ("whole", "sharded")]
        one, other = ({file.name: file.read_bytes() for file in path.iterdir()} for path in folders)
        assert one == other
        one, other = (MoeLcForCausalLM.from_pretrained(path).state_dict() for path in folders)
        assert differing(one, other) == []


def two(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(100 + rank)
    random.seed(rank)
    model, optimizers = tiny(sharded=True)
    found: dict = {}
    with Checkpointer(folder / "one") as checkpointer:
        found["read from one"] = checkpointer.load(checkpointer.latest(), model, optimizers)
    found["differing"] = differing(torch.load(folder / "one.pt"), whole(model, optimizers))
    local = sum(parameter.to_local().nbytes for parameter in model.parameters())
    found["shares"] = local / sum(parameter.nbytes for parameter in model.parameters())

    tiny_step(model, optimizers)
    with Checkpointer(folder / "two", keep=1) as checkpointer:
        checkpointer.save(1, model, optimizers, {})
        path = checkpointer.save(2, model, optimizers, {"by": "two"})
        expected, numbers = whole(model, optimizers), next_numbers()
        tiny_step(model, optimizers)
        checkpointer.wait()
        checkpointer.load(path, model, optimizers)
    found["numbers"] = [numbers, next_numbers()]
    found["differing"] += differing(expected, whole(model, optimizers))
    save_model(model, folder / "untied sharded")
    torch.manual_seed(5)
    save_model(tiny(sharded=True, tie_word_embeddings=True)[0], folder / "tied sharded")
    optimizers[0].state[model.lm_head.weight]["momentum"] = torch.zeros(4, 4)
    try:
        take(model, optimizers, rank)
    except ValueError as error:
        found["refused"] = str(error)
    if rank == 0:
        torch.save(expected, folder / "two.pt")
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", (False, True))
def test_a_saved_model_is_what_save_pretrained_writes(tmp_path, tied):
    model, _ = tiny(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "expected")
    for _ in range(2):  # the second replaces the first
        save_model(model, tmp_path / "runs" / "model")
    written = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("expected", "runs/model")]
    assert written[0] == written[1]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["model"]
    save_model(model, "memory://bucket/model")
    assert fsspec.filesystem("memory").cat_file("/bucket/model/model.safetensors") == written[0]


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="folder: expected a new one or one to replace, with config.json"):
        save_model(tiny()[0], tmp_path)
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize("moment", ["written", "renamed", "replaced"])
def test_a_kill_while_a_folder_is_replaced(tmp_path, monkeypatch, moment):
    """After the new one is written, between the two renames, and before the old one is deleted: one of them is there, whole."""
    folder = tmp_path / "model"

    def replace(text):
        def write_to(path):
            path.mkdir()
            (path / "config.json").write_text(text)

        replace_folder(folder, write_to, "config.json")

    replace("old")
    child = os.fork()
    if not child:
        left, rename = {"written": 0, "renamed": 1, "replaced": 2}[moment], Path.rename
        calls = iter(range(9))
        monkeypatch.setattr(Path, "rename", lambda *a: rename(*a) if next(calls) < left else os._exit(9))
        monkeypatch.setattr(
            shutil, "rmtree", lambda *_, **__: os._exit(9) if (tmp_path / ".model.old").exists() else None
        )
        replace("new")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    finish_replacing(folder)
    assert (folder / "config.json").read_text() == ("old" if moment == "written" else "new")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_link_is_replaced_where_it_leads(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "disk")
    for _ in range(3):
        save_model(tiny()[0], tmp_path / "model")
    assert (tmp_path / "model").is_symlink() and (tmp_path / "disk" / "config.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "model"]


if __name__ == "__main__":
    two(Path(sys.argv[1]), int(sys.argv[2]))
