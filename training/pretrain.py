"""`moe-lc train`: pretraining through stages of growing context, on one process or many, from a recipe.

Interrupted, by hand, by a limit or by a crash, the same command goes on from the last checkpoint as if nothing had been.
"""

import argparse
import contextlib
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from ..conversion.count import count
from ..modeling_moe_lc import MoeLcForCausalLM
from ..router import update_router_bias
from .batches import Batches
from .checkpoint import Checkpointer, save_model
from .context_parallel import context_parallel
from .evaluate import loss_by_position
from .flops import measure_peak, training_flops
from .interrupt import Interruptible
from .metrics import SpikeDetector, StepMeter
from .mixture import StageData
from .observation import observe
from .optim import clip_grad_norm, set_learning_rate
from .prepare import TOKENIZER
from .processes import Processes, processes
from .recipe import Recipe, load_recipe, recipe_text
from .recipe_resume import forbidden_changes
from .run_log import STAGE, STEP, VALIDATION, RunLog, read_log, records_of
from .shards import write_atomically
from .start import start_model, start_optimizer
from .validation import long_text, validation_losses


RECIPE = "recipe.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, or the name of a recipe that ships with the package")
    parser.add_argument(
        "overrides", nargs=argparse.REMAINDER, help="--optimizer.learning_rate 3e-4 --stages.0.tokens=1e9 ..."
    )


def run(args: argparse.Namespace) -> None:
    disable_progress_bar()  # of transformers' loading and saving: ours is the one to watch
    recipe = load_recipe(args.recipe, args.overrides)
    with processes() as ours:
        Run(recipe, ours).train()


class Run:
    """All that a run needs, made or loaded; `train` goes to its end."""

    def __init__(self, recipe: Recipe, processes: Processes):
        self.recipe, self.processes = recipe, processes
        self.folder = Path(recipe.output_dir)
        self.data = [recipe.stage_data(stage) for stage in range(len(recipe.stages))]
        for stage in range(len(recipe.stages)):
            recipe.micro_steps(stage, processes.count)
        self.tokenizer = _tokenizer(recipe)
        self.model = start_model(recipe, processes)
        _check_vocabulary(self.model, self.data)
        self.optimizer = start_optimizer(recipe, self.model)
        self.checkpointer = Checkpointer(recipe.checkpoint_folder, keep=recipe.checkpoints.keep, seed=recipe.seed)
        self.counted = count(self.model.config)
        self.step, self.tokens = self._resume()
        if processes.is_main:
            print(recipe_text(recipe), flush=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / RECIPE, recipe_text(recipe).encode())

    def _resume(self) -> tuple[int, int]:
        """Step and tokens to go on from."""
        latest = self.checkpointer.latest()
        if latest is None:
            return 0, 0
        if self.processes.is_main:
            print(f"going on from {latest}", flush=True)
        before = load_recipe(self.folder / RECIPE)
        state = self.checkpointer.load(latest, self.model, self.optimizer)
        if changes := forbidden_changes(before, self.recipe, state["step"]):
            raise ValueError("\n".join(changes))
        for stage, (data, saved) in enumerate(zip(self.data, state["data"], strict=False)):
            begun = state["step"] > sum(self.recipe.steps[:stage])
            if begun and data.fingerprint != saved:
                raise ValueError(f"data of stage {stage}: expected the documents that the run began with, got others")
        return state["step"], state["tokens"]

    def train(self) -> None:
        recipe, ours = self.recipe, self.processes
        peak = measure_peak(ours.device) if ours.device.type == "cuda" else None
        meter = StepMeter(self.model, peak_flops=peak, all_reduce=ours.sum, all_reduce_max=ours.maximum)
        total = sum(steps * recipe.step_tokens(stage) for stage, steps in enumerate(recipe.steps))
        log = RunLog(
            self.folder, total_tokens=total, step=self.step, tokens=self.tokens, trackers=recipe.logging.trackers,
            settings={"recipe": recipe_text(recipe)}, is_main=ours.is_main,
        )  # fmt: skip
        known = records_of(read_log(self.folder), STEP) if ours.is_main else []
        spikes = SpikeDetector(record["loss"] for record in known if record["loss"] is not None)
        clock = Clock(recipe)
        with log, Interruptible() as interrupt, contextlib.closing(self.checkpointer):
            for stage, end in enumerate(recipe.ends):
                if self.step < end and not self._stage(stage, end, meter, log, spikes, clock, interrupt):
                    return

    def _stage(self, stage: int, end: int, meter, log, spikes, clock, interrupt) -> bool:
        """Trains to the end of a stage; False if the run is to stop before it."""
        recipe, model, ours = self.recipe, self.model, self.processes
        settings, data = recipe.stages[stage], self.data[stage]
        mesh = ours.mesh(settings.context_parallel)
        batches = Batches(mesh, settings.micro_batch, ours)
        begin = end - recipe.steps[stage]
        with context_parallel(model, mesh["context"]):
            for step_batches in batches.steps(data, self.step - begin, recipe.steps[stage]):
                set_learning_rate(self.optimizer, rate := recipe.learning_rate(self.step))
                norm, last = self._step(step_batches, mesh["context"].size(), meter)
                self.step += 1
                over, stop = self.step == end, interrupt.requested() or clock.is_over(ours)
                save = clock.is_due(self.step, ours) or over or stop
                if save or _every(recipe.logging.every_steps, self.step):
                    numbers = meter.read(norm, observe(model, last.inputs) if over else None)
                    numbers |= {"learning_rate": rate, "spike": spikes.is_spike(numbers["loss"])}
                    self.tokens += numbers["step_tokens"]
                    log.write(STEP, self.step, self.tokens, {"stage": settings.name, **numbers})
                update_router_bias(model, ours.sum)
                with meter.paused():
                    if over or _every(recipe.logging.evaluate_every_steps, self.step):
                        losses = validation_losses(model, recipe, stage, batches, ours)
                        log.write(VALIDATION, self.step, self.tokens, {"stage": settings.name, **losses})
                    if save:
                        self._save(stage, permanent=over, wait=stop)
                if stop:
                    if ours.is_main:
                        print(f"\nstopped after step {self.step}; the same command goes on from there", flush=True)
                    return False
        self._end_of_stage(stage, log)
        return True

    def _step(self, batches, ranks_of_a_sequence: int, meter: StepMeter):
        """One optimiser step; returns the norm of its gradients and its last batch."""
        meter.start_step()
        for batch in batches:
            loss = self.model(**batch.inputs).loss
            (
                loss * self.processes.count
            ).backward()  # FSDP2 takes the mean over the processes, each has a part of the sum
            flops = training_flops(self.counted, batch.lengths) / ranks_of_a_sequence
            meter.add(loss.detach() * batch.nats, batch.predictions, batch.tokens, flops)
        norm = clip_grad_norm(self.model.parameters(), self.recipe.optimizer.clip_norm or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm, batch

    def _save(self, stage: int, *, permanent: bool, wait: bool) -> None:
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "stage": stage,
            "data": [data.fingerprint for data in self.data[: stage + 1]],
        }
        self.checkpointer.save(self.step, self.model, self.optimizer, state, permanent=permanent, wait=wait)

    def _end_of_stage(self, stage: int, log: RunLog) -> None:
        """The model as anyone loads it, and how its loss falls along a long text."""
        settings, text = self.recipe.stages[stage], long_text(self.recipe, stage)
        save_model(self.model, self.folder / "models" / settings.name, self.tokenizer)
        by_position = None if text is None else loss_by_position(self.model, text, settings.sequence_length)
        log.write(STAGE, self.step, self.tokens, {"stage": settings.name, "by_position": by_position})


class Clock:
    """When a checkpoint is due and when the run must end, by the time of the main process."""

    def __init__(self, recipe: Recipe):
        self.limit, self.checkpoints = recipe.limits.max_minutes, recipe.checkpoints
        self.begun = self.saved = time.monotonic()

    def is_over(self, processes: Processes) -> bool:
        if self.limit is None:
            return False
        return _agreed(time.monotonic() - self.begun > 60 * self.limit, processes)

    def is_due(self, step: int, processes: Processes) -> bool:
        minutes = self.checkpoints.every_minutes
        late = minutes is not None and _agreed(time.monotonic() - self.saved > 60 * minutes, processes)
        if late or _every(self.checkpoints.every_steps, step):
            self.saved = time.monotonic()
            return True
        return False


def _agreed(flag: bool, processes: Processes) -> bool:
    """Whether the main process says so."""
    if processes.count == 1:
        return flag
    said = torch.tensor(float(flag and processes.is_main), device=processes.device)
    processes.sum(said)
    return bool(said)


def _every(steps: int | None, step: int) -> bool:
    return steps is not None and step % steps == 0


def _tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """That of the data, which all folders share."""
    return AutoTokenizer.from_pretrained(Path(next(iter(recipe.data.folders.values()))) / TOKENIZER)


def _check_vocabulary(model: MoeLcForCausalLM, data: list[StageData]) -> None:
    wanted, got = model.config.vocab_size, data[0].tokenizer["vocab_size"]
    if got > wanted:
        raise ValueError(f"data.folders: expected token ids below the model's vocabulary of {wanted}, got {got}")
