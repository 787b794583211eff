"""`moe-lc bench train`: whole training steps as `moe-lc train` makes them: tokens a second, MFU, memory, where time goes.

On this GPU, or under torchrun on all of them. The tokens are random, one document a sequence, since speed does not hang on
them; model, optimiser, micro-batches, loss, clipping and balancing are those of the loop.
"""

import argparse
import gc
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from ..conversion.count import count
from .batches import Batches, OneShape
from .bench import installed_version
from .bench_layer import PROFILED_CALLS, Device
from .context_parallel import context_parallel
from .flops import training_flops
from .packing import Pack
from .processes import Processes, processes
from .recipe import Recipe
from .recipe_file import build
from .start import build_model, fill_model, low_precision, model_config, start_optimizer
from .step import Step


RECORDED_ON, RECORDED_MATMUL = "H200", 789e12
WARM_UP, STEPS = 3, 10
LEARNING_RATE = 1e-4
NOTES = """
tokens/s: of all GPUs together, from steps that follow one another without waiting. vs public: over the tokens/s of the best
public composition, measured before on one H200, not in this run, both divided by the rate of a large matrix product
({matmul:.0f} TFLOP/s now, 789 then). MFU: of useful FLOPs, what checkpointing computes again not among them. optimiser: share of the step
that clipping, Muon and balancing take. kernels: sum of the kernels' times over the time of the step."""


@dataclass(frozen=True)
class Case:
    """Steps of `micro_steps` x `batch` sequences a group of GPUs; `public`: tokens/s and peak GB of the best other."""

    preset: str
    length: int
    batch: int
    checkpointing: bool = False
    public: tuple[float, float] | None = None

    def recipe(self, args: argparse.Namespace, groups: int) -> Recipe:
        step_tokens = self.length * self.batch * args.micro_steps * groups
        stage = {"name": "bench", "sequence_length": self.length, "tokens": 100 * step_tokens}
        stage |= {"micro_batch": self.batch, "context_parallel": args.context_parallel}
        model = {"base": self.preset, "activation_checkpointing": self.checkpointing, "compile": args.compile}
        return build(
            Recipe,
            {
                "output_dir": "unused",
                "model": model,
                "data": {"folders": {"random": "unused"}},
                "tokens_per_step": step_tokens,
                "stages": [stage],
                "optimizer": {"kind": args.optimizer, "learning_rate": LEARNING_RATE},
            },
        )


CASES = {
    "200m-8k": Case("200m-a90m", 8192, 8, public=(270_600, 49.8)),
    "1b-8k": Case("1b-a200m", 8192, 4, public=(114_600, 51.0)),
    "1b-8k-x8": Case("1b-a200m", 8192, 8),
    "200m-64k": Case("200m-a90m", 65_536, 1, checkpointing=True, public=(126_200, 9.5)),
    "200m-256k": Case("200m-a90m", 262_144, 1, checkpointing=True),
    "200m-1m": Case("200m-a90m", 1_048_576, 1, checkpointing=True),
}


@dataclass(frozen=True)
class Measured:
    """Of one case: seconds a step, and the shares that NOTES names."""

    case: str
    gpus: int
    tokens: int
    seconds: float
    mfu: float
    peak_bytes: int
    loss: float
    optimizer_share: float
    kernel_seconds: float
    kernels: dict[str, float]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class RandomText:
    """In place of the data of a stage: in each sequence of a step one document of tokens that come as often as words do."""

    length: int
    sequences_per_step: int
    vocabulary: int

    def slice(self, step: int, rank: int, world: int) -> list[Pack]:
        random = torch.Generator().manual_seed(step * world + rank)
        shape = self.sequences_per_step // world, self.length
        tokens = (self.vocabulary ** torch.rand(shape, generator=random)).long() - 1  # the nth as often as 1 / n
        return [Pack(ids, [0, self.length]) for ids in tokens.clamp(max=self.vocabulary - 1).tolist()]


class Gpu(Device):
    """The current one, with marks between kernels."""

    has_graphs = True

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """From one to another, when both have passed."""
        return begin.elapsed_time(end) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def start_memory(self) -> None:
        gc.collect()  # the model of the case before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak_memory(self) -> int:
        """Bytes, since `start_memory`."""
        return torch.cuda.max_memory_allocated()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--cases",
        nargs="+",
        default=["200m-8k", "1b-8k", "200m-64k"],
        metavar="CASE",
        help=f"some of {', '.join(CASES)} (default: %(default)s)",
    )
    add(
        "--warm-up",
        type=int,
        default=WARM_UP,
        metavar="STEPS",
        help="before those that are timed (default: %(default)s)",
    )
    add("--steps", type=int, default=STEPS, help="steps that are timed (default: %(default)s)")
    add(
        "--micro-steps",
        type=int,
        default=1,
        help="gradients of so many forwards are accumulated (default: %(default)s)",
    )
    add(
        "--context-parallel",
        type=int,
        default=1,
        metavar="N",
        help="GPUs that share a sequence (default: %(default)s)",
    )
    add("--optimizer", choices=("muon", "adamw"), default="muon", help="(default: %(default)s)")
    add("--compile", action="store_true", help="layers go through torch.compile; no CUDA graphs")
    add("--eager", action="store_true", help="no CUDA graphs")
    add(
        "--top",
        type=int,
        default=12,
        metavar="N",
        help="print so many kernels; 0: measure none (default: %(default)s)",
    )
    add("--output", type=Path, help="file to which one JSON line is appended for each case")


def check_arguments(args: argparse.Namespace) -> None:
    if unknown := [name for name in args.cases if name not in CASES]:
        raise ValueError(f"cases: expected some of {', '.join(CASES)}, got {', '.join(unknown)}")
    for name, least in (("warm_up", 0), ("steps", 1), ("micro_steps", 1), ("context_parallel", 1), ("top", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"{name}: expected a number of at least {least}, got {getattr(args, name)}")
    if args.output is not None and not args.output.resolve().parent.is_dir():
        raise ValueError(f"output: expected a file in a folder that exists, got {args.output}")


def run(args: argparse.Namespace) -> int:
    check_arguments(args)
    with processes() as ours:
        bench(args, Gpu(), ours)
    return 0


def bench(args: argparse.Namespace, machine, ours: Processes) -> list[Measured]:
    say = tqdm.write if ours.is_main else lambda line: None
    matmul, results = machine.matmul_rate, []
    say(
        f"{'case':12}{'GPUs':>5}{'ms':>9}{'tokens/s':>11}{'vs public':>11}{'MFU':>7}{'peak GB':>9}{'optimiser':>11}{'kernels':>9}"
    )
    for name in tqdm(args.cases, unit="case", disable=not ours.is_main):
        measured = measure(name, CASES[name], args, machine, ours, matmul)
        results.append(measured)
        say(_line(measured, CASES[name], machine.name, matmul))
        for kernel, seconds in list(measured.kernels.items())[: args.top]:
            say(f"    {1e3 * seconds:9.3f} ms {seconds / measured.kernel_seconds:5.1%}  {kernel[:90]}")
        if args.output is not None and ours.is_main:
            origin = {"device": machine.name, **{name: installed_version(name) for name in ("torch", "triton")}}
            with args.output.open("a") as file:
                file.write(json.dumps(asdict(measured) | origin | {"matmul": matmul, "command": args.command}) + "\n")
    say(NOTES.format(matmul=matmul / 1e12))
    return results


def measure(name: str, case: Case, args, machine, ours: Processes, matmul: float) -> Measured:
    """Trains a new model for a few steps. Raises ValueError where the loss is no number: then no speed counts."""
    recipe = case.recipe(args, ours.count // args.context_parallel)
    config = model_config(recipe)
    machine.start_memory()
    model = build_model(recipe, config, ours)
    fill_model(model, recipe, ours)
    optimizer, mesh = start_optimizer(recipe, model), ours.mesh(args.context_parallel)
    precision = low_precision(recipe, model, ours)
    precision.refresh()
    data = RandomText(case.length, recipe.sequences_per_step(0), config.vocab_size)
    marks: list[torch.cuda.Event] = []

    graphs = machine.has_graphs and args.context_parallel == 1 and not (args.compile or args.eager)
    parts = Step(model, optimizer, ours, precision, clip_norm=1.0, graphs=graphs)

    def step() -> torch.Tensor:
        loss = torch.zeros((), device=ours.device)
        for batch in next(steps):
            loss += parts.backward(batch.inputs)
        marks.append(machine.mark())
        parts.update(LEARNING_RATE)
        parts.balance()
        marks.append(machine.mark())
        return loss

    with context_parallel(model, mesh["context"]):
        profiled = 1 + PROFILED_CALLS if args.top else 0
        collate = OneShape(case.batch, case.length, ours.largest) if graphs else None
        steps = Batches(mesh, case.batch, ours, collate).steps(data, 0, args.warm_up + args.steps + profiled)
        for _ in range(args.warm_up):
            step()
        machine.synchronize()
        begun = time.perf_counter()
        marks.clear()
        for _ in range(args.steps):
            loss = step()
        machine.synchronize()
        seconds = (time.perf_counter() - begun) / args.steps
        in_optimizer = statistics.median(map(machine.seconds, marks[::2], marks[1::2]))
        peak = machine.peak_memory()
        kernels = machine.kernels(step) if args.top else {}
    parts.forget()
    if not loss.isfinite():
        raise ValueError(f"{name}: expected a finite loss after {args.warm_up + args.steps} steps, got {loss.item()}")
    flops = training_flops(count(config), [case.length] * recipe.sequences_per_step(0))
    return Measured(
        case=name,
        gpus=ours.count,
        tokens=recipe.step_tokens(0),
        seconds=seconds,
        mfu=flops / (seconds * matmul * ours.count),
        peak_bytes=peak,
        loss=loss.item(),
        optimizer_share=in_optimizer / seconds,
        kernel_seconds=sum(kernels.values()) / 1e3,
        kernels={name: ms / 1e3 for name, ms in kernels.items()},
    )


def _line(measured: Measured, case: Case, device: str, matmul: float) -> str:
    public = "-"
    if case.public is not None and RECORDED_ON in device:
        rate = case.public[0] * matmul / RECORDED_MATMUL
        public = f"{measured.rate / rate / measured.gpus:.2f}x"
    return (
        f"{measured.case:12}{measured.gpus:5}{1e3 * measured.seconds:9.1f}{measured.rate:11,.0f}{public:>11}"
        f"{measured.mfu:7.1%}{measured.peak_bytes / 1e9:9.2f}{measured.optimizer_share:11.1%}"
        f"{f'{measured.kernel_seconds / measured.seconds:.1%}' if measured.kernels else '-':>9}"
    )
