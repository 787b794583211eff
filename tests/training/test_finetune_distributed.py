"""Two processes (gloo, CPU) train an adapter on attention, experts and router as one does: FSDP2, context parallelism.

torchrun starts this file, which runs all recipes one after the other.
"""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor

from modeling_moe_lc.training import processes as sharing
from modeling_moe_lc.training.checkpoint_files import latest, step_folders
from modeling_moe_lc.training.cli import main
from modeling_moe_lc.training.recipe import load_recipe
from modeling_moe_lc.training.run_log import STEP, VALIDATION, read_log, records_of
from modeling_moe_lc.training.start import build_model, model_config


PACKED = ("--model.base=FOLDER/mxfp4", "--model.dequantize=false")
# name: (what it says on one process too, what it says on two)
RUNS = {
    "adapter": (
        ("--model.activation_checkpointing=true", "--checkpoints.every_steps=2", "--stages.0.tokens=1536"),
        (),
    ),
    "context": (("--stages.0.tokens=1024",), ("--stages.0.context_parallel=2",)),
    "bf16": ((*PACKED, "--model.dtype=bfloat16", "--stages.0.tokens=1024"), ()),
    "packed": ((*PACKED, "--stages.0.tokens=1024"), ()),
    "unsplit": ((*PACKED, "--stages.0.tokens=512"), ()),  # as with a torch whose FSDP2 cannot split bytes
}
SPLITS_BYTES = sharing.FSDP2_SPLITS_BYTES
EXACT = ("adapter", "context", "packed", "unsplit")


def of_one(folder, name):
    return [word.replace("FOLDER", str(folder)) for word in RUNS[name][0]]


def train(folder, name, out, *overrides):
    path = folder / "recipe.yaml"
    return main(["finetune", str(path), "--output_dir", str(folder / out / name), *of_one(folder, name), *overrides])


def shares(folder, name):
    """How much of all bytes of packed experts this process holds."""
    recipe = load_recipe(folder / "recipe.yaml", of_one(folder, name))
    with sharing.processes() as ours:
        held = build_model(recipe, model_config(recipe), ours).parameters()
    held = [one for one in held if one.dtype == torch.uint8]
    return [(one.to_local() if isinstance(one, DTensor) else one).numel() / one.numel() for one in held]


def rank_main(folder: Path) -> None:
    dist.init_process_group("gloo")
    for name, (_, of_two) in RUNS.items():
        sharing.FSDP2_SPLITS_BYTES = SPLITS_BYTES and name != "unsplit"
        assert train(folder, name, "two", *of_two) == 0
        torch.save(shares(folder, name), folder / f"{name}-{dist.get_rank()}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the run of every recipe on one process and on two."""
    folder = tmp_path_factory.mktemp("runs")
    chats = runpy.run_path(str(Path(__file__).with_name("chat_documents.py")))
    chats["make"](folder, routed_expert_hidden_size=64)
    assert main(["convert", str(folder / "base"), str(folder / "mxfp4"), "--dtype", "mxfp4"]) == 0
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = subprocess.run(launch, check=False, env=environment, capture_output=True, text=True, timeout=300)
    assert job.returncode == 0, job.stderr[-5000:]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in RUNS:
        assert train(folder, name, "one") == 0
    torch.set_num_threads(threads)
    return folder


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """Those of the last checkpoint, whole."""
    dcp_to_torch_save(latest(run / "checkpoints"), run / "contents.pt")
    contents = torch.load(run / "contents.pt", weights_only=False)
    return {name: value for name, value in contents.items() if isinstance(value, torch.Tensor)}


def worst(got: dict, expected: dict) -> float:
    assert got.keys() == expected.keys()
    differences = [
        (got[name] - x).double().norm() / x.double().norm().clamp_min(1e-12) for name, x in expected.items()
    ]
    return max(differences).item()


def losses(run):
    log = read_log(run)
    return [record["loss"] for kind in (STEP, VALIDATION) for record in records_of(log, kind)]


@pytest.mark.parametrize("name", EXACT)
def test_two_processes_fine_tune_as_one(runs, name):
    two, one = runs / "two" / name, runs / "one" / name
    assert losses(two) == pytest.approx(losses(one), rel=1e-9)
    assert worst(tensors(two), tensors(one)) < 1e-9


def test_the_saved_adapters_are_whole_and_equal(runs):
    for place in ("adapter", "models/sft"):
        two, one = (
            load_file(runs / which / "adapter" / place / "adapter_model.safetensors") for which in ("two", "one")
        )
        assert worst(two, one) < 1e-9 and any(".experts." in name for name in two)
        assert all(tensor.any() for tensor in two.values())


def test_packed_experts_are_shared_by_the_processes(runs):
    part = 0.5 if SPLITS_BYTES else 1.0
    for name, share in (("packed", part), ("bf16", part), ("unsplit", 1.0)):
        for rank in range(2):
            assert torch.load(runs / f"{name}-{rank}.pt") == [share] * 16


def test_narrow_copies_of_a_frozen_base_compute_alike(runs):
    """BF16 rounds sums over other shapes differently: close, not equal."""
    two, one = losses(runs / "two" / "bf16"), losses(runs / "one" / "bf16")
    assert two == pytest.approx(one, rel=1e-2)


def test_one_process_goes_on_with_what_two_began(runs):
    begun = runs / "resumed" / "adapter"
    shutil.copytree(runs / "two" / "adapter", begun)
    for step, path in step_folders(begun / "checkpoints").items():
        if step > 2:
            shutil.rmtree(path)
    assert train(runs, "adapter", "resumed") == 0
    assert worst(tensors(begun), tensors(runs / "one" / "adapter")) < 1e-9


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
