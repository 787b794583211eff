"""Several GPUs train as one does, in BF16: FSDP2, context parallelism, a process killed and a run that goes on with fewer.

torchrun starts this file for what needs a process on each GPU.
"""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from modeling_moe_lc.kernels.router import route
from modeling_moe_lc.router import Router
from modeling_moe_lc.training import context_parallel_kda
from modeling_moe_lc.training.batches import Batches
from modeling_moe_lc.training.bench_train import RandomText
from modeling_moe_lc.training.context_parallel import context_parallel
from modeling_moe_lc.training.processes import Processes, processes
from modeling_moe_lc.training.recipe import Recipe
from modeling_moe_lc.training.recipe_file import build
from modeling_moe_lc.training.run_log import LOG, STEP, read_log, records_of
from modeling_moe_lc.training.start import build_model, fill_model, low_precision, model_config


GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs several GPUs")]
STEPS, KILLED_AFTER = 50, 24
PACKAGES = (
    "asyncio",
    "concurrent",
    "ctypes",
    "email",
    "http",
    "importlib",
    "multiprocessing",
    "unittest",
    "urllib",
    "xml",
)
LENGTH = int(os.environ.get("MOE_LC_CONTEXT", "262144"))  # of the sequence that the GPUs share
PRESETS = ("200m-a90m", "1b-a200m")
# The rate rises, as at the start of a long run: at the full one, each step amplifies the roundings of those before it.
RECIPE = """
model: {{base: {base}, activation_checkpointing: true}}
data: {{folders: {{python: {data}}}, validation_tokens: 131072}}
tokens_per_step: 131072
stages: [{{name: 8k, sequence_length: 8192, tokens: {tokens}, micro_batch: 8}}]
optimizer: {{learning_rate: 2e-4, warmup_share: 0.2}}
logging: {{every_steps: 1}}
checkpoints: {{every_minutes: null, every_steps: 10, keep: 9}}
"""
ADAPTER = """
model: {{base: {base}, start: continue}}
adapter: {{targets: [attention, experts]}}
data: {{folders: {{python: {data}}}, validation_tokens: 131072}}
tokens_per_step: 131072
stages: [{{name: adapter, sequence_length: 8192, tokens: 1310720, micro_batch: 8}}]
optimizer: {{kind: adamw, learning_rate: 1e-3}}
logging: {{every_steps: 1}}
"""
CONTEXT = {
    "output_dir": "unused",
    "model": {"base": "200m-a90m", "activation_checkpointing": True},
    "data": {"folders": {"random": "unused"}},
    "tokens_per_step": LENGTH,
    "optimizer": {"learning_rate": 1e-3},
    "stages": [{"name": "long", "sequence_length": LENGTH, "tokens": LENGTH}],
}
LAUNCHED = ("--model.cuda_graphs", "false")
TRAIN = (sys.executable, "-m", "modeling_moe_lc.training.cli", "train")


def launched(*command, gpus=GPUS, first=0):
    """The command, under torchrun where it is for several GPUs, the one of number `first` and those that follow."""
    several = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus))
    command = command if gpus == 1 else (*several, *command[1:])
    seen = ",".join(map(str, range(first, first + gpus)))
    return subprocess.Popen(list(map(str, command)), env=os.environ | {"CUDA_VISIBLE_DEVICES": seen})


def finished(*command, gpus=GPUS):
    job = launched(*command, gpus=gpus)
    try:
        assert job.wait(400) == 0
    finally:
        job.terminate()  # torchrun ends what it started


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records_of(read_log(run), STEP)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With data, and a recipe for each preset."""
    folder = tmp_path_factory.mktemp("gpus")
    data = folder / "data"
    # Enough of it for 50 steps: what is learned by heart amplifies every rounding.
    library = Path(sysconfig.get_path("stdlib"))
    sources = [*sorted(library.glob("*.py")), *(library / name for name in PACKAGES)]
    splits = ("--suffixes", ".py", "--validation-share", 0.1, "--train-tokenizer", 4096, "--tokenizer-characters", 5e6)
    finished(*TRAIN[:-1], "prepare", *sources, "--out", data, *splits, gpus=1)
    for preset in PRESETS:
        recipe = RECIPE.format(base=preset, data=data, tokens=STEPS * 131_072)
        (folder / f"{preset}.yaml").write_text(recipe)
    return folder


@pytest.fixture(scope="module")
def losses_of(folder):
    """Those of a preset on "one" GPU, or on all, by "graphs" or "launched": a function, which trains when it is first asked."""

    @functools.cache
    def of(preset: str, how: str) -> list[float]:
        run = folder / f"{preset} {how}"
        options = LAUNCHED if how == "launched" else ()
        train = (*TRAIN, folder / f"{preset}.yaml", "--output_dir", run, *options)
        finished(*train, gpus=1 if how == "one" else GPUS)
        return losses(run)

    return of


@pytest.mark.parametrize(("preset", "how"), [(PRESETS[0], "graphs"), (PRESETS[0], "launched"), (PRESETS[1], "graphs")])
def test_fsdp_has_the_losses_of_one(losses_of, preset, how):
    one, several = losses_of(preset, "one"), losses_of(preset, how)
    assert len(one) == len(several) == STEPS
    differences = [abs(a / b - 1) for a, b in zip(several, one, strict=True)]
    print(
        f"\nFSDP2 on {GPUS} GPUs, {preset} {how}: losses of {STEPS} steps, {one[0]:.3f} to {one[-1]:.3f}, differ by",
        end=" ",
    )
    print(f"{max(differences):.1e} at most, {max(differences[:25]):.1e} in the first 25 steps")
    assert max(differences) < 1e-3


def test_an_adapter_has_the_losses_of_one(folder, losses_of):
    """By CUDA graphs on all, without on one."""
    losses_of(PRESETS[0], "one")  # leaves the base
    recipe, found = folder / "adapter.yaml", []
    recipe.write_text(ADAPTER.format(base=folder / f"{PRESETS[0]} one" / "models" / "8k", data=folder / "data"))
    for gpus, options in ((1, LAUNCHED), (GPUS, ())):
        run = folder / f"adapter-{gpus}"
        finished(*TRAIN[:-1], "finetune", recipe, "--output_dir", run, *options, gpus=gpus)
        found.append(losses(run))
    differences = [abs(a / b - 1) for a, b in zip(*found, strict=True)]
    print(f"\nan adapter on {GPUS} GPUs: losses of {len(found[0])} steps differ by {max(differences):.1e} at most")
    assert max(differences) < 1e-3


def test_after_a_kill_fewer_go_on(folder, losses_of):
    one, run = losses_of(PRESETS[0], "one"), folder / "killed"
    train = (*TRAIN, folder / f"{PRESETS[0]}.yaml", "--output_dir", run)
    job = launched(*train)
    try:
        until = time.monotonic() + 300
        while not (run / LOG).is_file() or len(losses(run)) < KILLED_AFTER:
            assert job.poll() is None and time.monotonic() < until
            time.sleep(0.2)
        _kill_a_rank(job.pid)
        assert job.wait(120) != 0
    finally:
        job.terminate()
    finished(*train, gpus=GPUS // 2)
    differences = [abs(a / b - 1) for a, b in zip(losses(run), one, strict=True)]
    print(
        f"\nkilled after {KILLED_AFTER} steps, then {GPUS // 2} GPUs: losses differ by {max(differences):.1e} at most"
    )
    assert max(differences) < 1e-3


def _kill_a_rank(launcher: int) -> None:
    """SIGKILL to the second of the processes that torchrun started."""
    children = subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, check=True).stdout.split()
    ranks = [int(pid) for pid in children if b"LOCAL_RANK=1" in Path(f"/proc/{int(pid)}/environ").read_bytes()]
    os.kill(ranks[0], signal.SIGKILL)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `main` finds on one GPU, and on all."""
    folder = tmp_path_factory.mktemp("context")
    for gpus in (1, GPUS):
        finished(sys.executable, __file__, folder / f"{gpus}.pt", gpus=gpus)
    return [torch.load(folder / f"{gpus}.pt") for gpus in (1, GPUS)]


def test_gpus_that_share_a_sequence_have_the_gradients_of_one(found):
    one, several = found
    loss = abs(several["loss"] / one["loss"] - 1)
    gradients = {name: relative(several["gradients"][name], value) for name, value in one["gradients"].items()}
    worst = sorted(gradients.items(), key=lambda item: -item[1])
    print(f"\n{LENGTH:,} tokens on {GPUS} GPUs: loss differs by {loss:.1e}, gradients by {dict(worst[:8])}")
    print(f"seconds and peak GB on one {one['seconds']:.3f} {one['peak']:.2f}, on all", end=" ")
    print(f"{several['seconds']:.3f} {several['peak']:.2f}")
    times = several["gathers"]
    print(
        f"{len(times)} all-gathers of KDA: {sum(times):.2f} ms, waiting for each other included, {min(times):.3f} the fastest"
    )
    assert loss < 2e-2
    assert worst[0][1] < 2e-2


def test_pooled_histograms_are_those_of_one(found):
    one, several = found
    assert torch.equal(several["same scores"], one["same scores"])
    moved = (several["histograms"] - one["histograms"]).abs().sum((1, 2)) / one["histograms"].sum((1, 2)) / 2
    print(f"\nhistograms of the layers: {moved.max():.2%} of the counts move at most")
    assert moved.max() < 0.01


def main(out: Path) -> None:
    """One sequence, forward and backward, by all ranks together."""
    with processes() as ours:
        recipe = build(Recipe, CONTEXT | {"stages": [CONTEXT["stages"][0] | {"context_parallel": ours.count}]})
        config, mesh = model_config(recipe), ours.mesh(ours.count)
        model = build_model(recipe, config, ours)
        fill_model(model, recipe, ours)
        precision = low_precision(recipe, model, ours)
        precision.refresh()
        batches = Batches(mesh, 1, ours).steps(RandomText(LENGTH, 1, config.vocab_size), 0, 2)
        gathers: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        with context_parallel(model, mesh["context"]), precision.computing(), gathers_timed(gathers):
            for [batch] in batches:  # the first one compiles
                model.zero_grad()
                gathers.clear()
                for router in routers(model):
                    router.statistics().zero_()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                begun = time.perf_counter()
                loss = model(**batch.inputs).loss
                (loss * ours.count).backward()
                torch.cuda.synchronize()
                seconds, peak = time.perf_counter() - begun, torch.cuda.max_memory_allocated() / 1e9
        precision.collect()
        loss, histograms = loss.detach(), torch.stack([router.histogram for router in routers(model)])  # [L, E, bins]
        ours.sum(loss)
        ours.sum(histograms)
        gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        result = {"loss": loss.item(), "gradients": gradients, "histograms": histograms.cpu().double()}
        result |= {"same scores": histogram_of_stored_scores(ours), "seconds": seconds, "peak": peak}
        result["gathers"] = [begun.elapsed_time(ended) for begun, ended in gathers]
        if ours.is_main:
            torch.save(result, out)
        if ours.count > 1:
            dist.barrier()


@contextlib.contextmanager
def gathers_timed(times):
    """Those of KDA in `times`, by events before and after each."""
    gather = context_parallel_kda.of_all_ranks

    def timed(maps, group):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        result = gather(maps, group)
        ended.record()
        times.append((begun, ended))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_parallel_kda, "of_all_ranks", timed)
        yield


def histogram_of_stored_scores(ours: Processes) -> torch.Tensor:
    """Each rank counts its part of the same tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1 << 17, 64, generator=generator).chunk(ours.count)[ours.rank].to(ours.device)  # [N, E]
    bias = torch.randn(64, generator=generator).mul(0.1).to(ours.device)
    histogram = torch.zeros(64, 1000, dtype=torch.int64, device=ours.device)
    route(logits, bias, 8, histogram=histogram)
    ours.sum(histogram)
    return histogram.cpu()


def routers(model) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).cpu()


def relative(x: torch.Tensor, reference: torch.Tensor) -> float:
    return ((x - reference).norm() / reference.norm().clamp_min(1e-30)).item()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
