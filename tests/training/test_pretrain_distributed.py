"""Two processes train as one does: FSDP2, context parallelism, both optimisers, through two stages of the whole loop.

torchrun starts this file, which runs all recipes one after the other (gloo, CPU).
"""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from modeling_moe_lc.router import Router
from modeling_moe_lc.training.checkpoint_files import latest, step_folders
from modeling_moe_lc.training.cli import main
from modeling_moe_lc.training.run_log import STAGE, STEP, VALIDATION, read_log, records_of


RECIPE = """
model: {base: tiny, dtype: float64, activation_checkpointing: false, loss_chunk_size: 100, config: {tie_word_embeddings: TIED}}
data: {folders: {python: DATA}, validation_tokens: 1024}
tokens_per_step: 512
stages:
  - {name: short, sequence_length: 64, tokens: 1536, micro_batch: 2}
  - {name: long, sequence_length: 256, tokens: 1024, micro_batch: 1}
optimizer: {learning_rate: 1e-2}
logging: {every_steps: 1}
checkpoints: {every_minutes: null, every_steps: 2, keep: 9}
"""
CONTEXT = ("--stages.1.context_parallel", "2")
# name: (what it says on one process too, what it says on two)
RUNS = {
    "muon": (("--model.activation_checkpointing", "true", "--model.config.tie_word_embeddings", "true"), ()),
    "adamw": (("--optimizer.kind", "adamw"), CONTEXT),
    "single": (("--model.dtype", "float32", "--optimizer.learning_rate", "1e-3"), CONTEXT),
    # One micro-batch for each of two processes, or both for one: the same sums in the same order.
    "identical": (("--model.dtype", "bfloat16", "--stages.0.micro_batch", "4"), ()),
}
EXACT = ("muon", "adamw")


def train(folder: Path, name: str, out: str, *overrides: str) -> int:
    path = folder / "recipe.yaml"
    return main(["train", str(path), "--output_dir", str(folder / out / name), *RUNS[name][0], *overrides])


def rank_main(folder: Path) -> None:
    dist.init_process_group("gloo")
    for name, (_, of_two) in RUNS.items():
        assert train(folder, name, "two", *of_two) == 0
    refused = main(["train", str(folder / "recipe.yaml"), "--output_dir", str(folder), "--stages.0.micro_batch", "8"])
    assert refused == 2
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the run of every recipe on one process and on two."""
    folder = tmp_path_factory.mktemp("runs")
    lines = Path(textwrap.__file__).read_text().splitlines(keepends=True)
    (folder / "source").mkdir()
    for part in range(24):
        begin, length = part * 17, 1 + 7 * part % 50
        (folder / "source" / f"part_{part}.py").write_text("".join(lines[begin : begin + length]) or "pass\n")
    arguments = ["--train-tokenizer", "300", "--validation-share", "0.3", "--workers", "1", "--suffixes", ".py"]
    assert main(["prepare", str(folder / "source"), "--out", str(folder / "data"), *arguments]) == 0
    recipe = RECIPE.replace("DATA", str(folder / "data")).replace("TIED", "false")
    (folder / "recipe.yaml").write_text(recipe)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        __file__,
        folder,
    ]
    job = subprocess.run(
        command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert job.returncode == 0, job.stderr[-5000:]
    assert "stages.0.micro_batch: expected the 8 sequences of a step" in job.stderr
    return folder


@pytest.fixture(scope="module")
def one_process(runs):
    """Name of a recipe -> the smallest routing gap of its run on one process."""
    return {name: gap_of_run_on_one(runs, name) for name in RUNS}


def gap_of_run_on_one(runs, name) -> float:
    """Trains; between the scores of the last expert chosen and the next one, over all tokens and steps."""
    gaps = []

    def forward(router, *args, real=Router.forward):
        output = real(router, *args)
        scores = (output[0].detach().sigmoid() + router.e_score_correction_bias).sort(descending=True).values  # [N, E]
        k = router.config.num_experts_per_token
        gaps.append((scores[:, k - 1] - scores[:, k]).min().item())
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "forward", forward)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        assert train(runs, name, "one") == 0
        torch.set_num_threads(threads)
    return min(gaps)


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """Those of the last checkpoint, whole."""
    dcp_to_torch_save(latest(run / "checkpoints"), run / "contents.pt")
    return {
        name: value
        for name, value in torch.load(run / "contents.pt", weights_only=False).items()
        if isinstance(value, torch.Tensor)
    }


def differences(got: Path, expected: Path) -> dict[str, float]:
    """Relative, of every parameter, router bias and moment after the last step."""
    one, two = tensors(got), tensors(expected)
    assert one.keys() == two.keys()
    return {
        name: ((one[name] - two[name]).double().norm() / two[name].double().norm().clamp_min(1e-12)).item()
        for name in two
    }


def assert_same_records(got: Path, expected: Path, tolerance: float) -> None:
    logs = read_log(got), read_log(expected)
    for kind, names in ((STEP, ("loss", "gradient_norm", "max_violation", "bias_range")), (VALIDATION, ("loss",))):
        one, two = (records_of(log, kind) for log in logs)
        assert [record["step"] for record in one] == [record["step"] for record in two]
        assert [record["tokens"] for record in one] == [record["tokens"] for record in two]
        for a, b in zip(one, two, strict=True):
            for name in names:
                assert a[name] == pytest.approx(b[name], rel=tolerance, abs=tolerance), (kind, a["step"], name)
    for a, b in zip(*(records_of(log, STAGE) for log in logs), strict=True):
        assert a["by_position"]["one_document"] == pytest.approx(b["by_position"]["one_document"], rel=tolerance)


@pytest.mark.parametrize("name", EXACT)
def test_two_processes_train_as_one(runs, one_process, name):
    two, one = runs / "two" / name, runs / "one" / name
    assert list(step_folders(one / "checkpoints")) == list(step_folders(two / "checkpoints")) == [2, 3, 4, 5]
    assert one_process[name] > 1e-9  # no near-tie: rounding, 1e-15, cannot flip a choice
    assert_same_records(two, one, 1e-9)
    assert max(differences(two, one).values()) < 1e-9  # measured: 1e-13


def test_two_processes_train_as_one_in_single_precision(runs, one_process):
    two, one = runs / "two" / "single", runs / "one" / "single"
    assert_same_records(two, one, 1e-4)
    parts = [tensors(run) for run in (two, one)]
    names = sorted(name for name in parts[0] if name.startswith("model."))
    got, expected = (torch.cat([part[name].flatten() for name in names]) for part in parts)
    assert (got - expected).norm() < 1e-4 * expected.norm()


def test_two_processes_train_as_one_to_the_bit(runs, one_process):
    """But for second moments of a few numbers: torch's AdamW for CPUs rounds the ends of a tensor in another way."""
    two, one = tensors(runs / "two" / "identical"), tensors(runs / "one" / "identical")
    different = {key for key, tensor in one.items() if not torch.equal(tensor, two[key])}
    assert one.keys() == two.keys() and all(key.endswith("layernorm.weight.exp_avg_sq") for key in different)
    for key in different:
        torch.testing.assert_close(two[key], one[key], rtol=1e-6, atol=0.0)
    logs = (read_log(runs / which / "identical") for which in ("one", "two"))
    of_one, of_two = ([(record["loss"], record["gradient_norm"]) for record in records_of(log, STEP)] for log in logs)
    assert of_one == of_two


def test_one_process_goes_on_with_what_two_began(runs, one_process):
    begun = runs / "resumed" / "muon"
    shutil.copytree(runs / "two" / "muon", begun)
    for step, path in step_folders(begun / "checkpoints").items():
        if step > 2:
            shutil.rmtree(path)
    assert train(runs, "muon", "resumed") == 0
    assert [record["step"] for record in records_of(read_log(begun), STEP)] == [1, 2, 3, 4, 5]
    assert_same_records(begun, runs / "one" / "muon", 1e-9)
    assert max(differences(begun, runs / "one" / "muon").values()) < 1e-9


def test_tied_embeddings_stay_tied(runs):
    contents = tensors(runs / "two" / "muon")
    assert torch.equal(contents["model.lm_head.weight"], contents["model.model.embed_tokens.weight"])


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
