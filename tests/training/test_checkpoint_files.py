"""A checkpoint is complete or ignored, on a local file system and on object storage.

One test starts this file as a process of its own, and kills it in the middle of a save.
"""

import itertools
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import fsspec
import pytest
import torch
from torch import distributed as dist
from torch import nn

from modeling_moe_lc.training import checkpoint_files
from modeling_moe_lc.training.checkpoint import Checkpointer, read_state
from modeling_moe_lc.training.checkpoint_files import step_folders


def small():
    model = nn.Linear(8, 3)
    return model, torch.optim.AdamW(model.parameters())


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    yield str(tmp_path / "run") if request.param == "local" else "memory://bucket/run"
    if request.param == "memory":
        fsspec.filesystem("memory").rm("/bucket", recursive=True)


def names(folder) -> list[str]:
    return [Path(path).name for path in step_folders(folder).values()]


def test_what_goes_wrong_in_a_save_is_raised_by_the_next_one(folder, monkeypatch):
    model, optimizer = small()
    checkpointer = Checkpointer(folder)
    first = checkpointer.save(1, model, optimizer, {}, wait=True)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files._Summed, "write", lambda self, data: os.open("/nowhere", os.O_RDONLY))
        checkpointer.save(2, model, optimizer, {})
        with pytest.raises(dist.checkpoint.CheckpointException, match="nowhere"):
            checkpointer.save(3, model, optimizer, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert checkpointer.latest() == first
    assert checkpointer.save(3, model, optimizer, {}, wait=True) == checkpointer.latest()
    checkpointer.close()
    assert names(folder) == ["step-000001", "step-000003"]


def test_the_newest_and_the_permanent_ones_stay(folder):
    model, optimizer = small()
    with Checkpointer(folder, keep=2) as checkpointer:
        for step in range(1, 7):
            checkpointer.save(step, model, optimizer, {}, permanent=step == 2)
        checkpointer.save(2, model, optimizer, {"again": True})
    assert names(folder) == ["step-000002", "step-000005", "step-000006"]
    assert read_state(next(iter(step_folders(folder).values()))) == {"again": True}
    with Checkpointer(folder, keep=1) as checkpointer:
        checkpointer.save(4, model, optimizer, {})
        checkpointer.save(7, model, optimizer, {})
    assert names(folder) == ["step-000002", "step-000007"]


def truncate(file: Path):
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def zero(file: Path):
    file.write_bytes(bytes(file.stat().st_size))


DAMAGES = [
    *itertools.product((truncate, Path.unlink), ("__0_0.distcp", ".metadata", "state.json", "COMPLETE")),
    *itertools.product((flip,), ("__0_0.distcp", ".metadata", "state.json")),
    *itertools.product((zero,), ("state.json", "COMPLETE")),
]


@pytest.mark.parametrize(("harm", "name"), DAMAGES, ids=[f"{harm.__name__}-{name}" for harm, name in DAMAGES])
def test_damage_is_named_and_the_checkpoint_before_is_used(tmp_path, harm, name):
    model, optimizer = small()
    with Checkpointer(tmp_path) as checkpointer:
        paths = [checkpointer.save(step, model, optimizer, {}, wait=True) for step in (1, 2)]
        harm(Path(paths[1]) / name)
        before = model.weight.clone()
        with pytest.raises(ValueError, match=f"step-000002: .*{name}"):
            checkpointer.load(paths[1], model, optimizer)
        assert torch.equal(before, model.weight)
        if harm is not flip or name == "state.json":
            with pytest.warns(UserWarning, match=f"step-000002: .*{name}"):
                assert checkpointer.latest() == paths[0]
        checkpointer.load(paths[0], model, optimizer)


def test_a_kill_in_the_middle_of_a_save_loses_nothing(tmp_path):
    process = subprocess.Popen([sys.executable, __file__, str(tmp_path)], stderr=subprocess.PIPE)
    half = tmp_path / ".step-000002.partial" / "__0_0.distcp"
    deadline = time.monotonic() + 300
    while not (half.exists() and half.stat().st_size) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, process.stderr.read()
    assert half.stat().st_size > 0

    model, optimizer = small()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load(checkpointer.latest(), model, optimizer) == {"saved": 1}
        checkpointer.save(2, model, optimizer, {"saved": 2})
        assert checkpointer.load(checkpointer.latest(), model, optimizer) == {"saved": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def killed(folder: Path) -> None:
    model, optimizer = small()
    checkpointer = Checkpointer(folder)
    checkpointer.save(1, model, optimizer, {"saved": 1}, wait=True)

    def write(self, data):
        self.stream.write(data)
        self.stream.flush()
        time.sleep(1000)

    checkpoint_files._Summed.write = write
    checkpointer.save(2, model, optimizer, {"saved": 2}, wait=True)


if __name__ == "__main__":
    killed(Path(sys.argv[1]))
