"""`moe-lc train`: pretraining through stages of growing context, on one process or many, from a recipe.

Interrupted, by hand, by a limit or by a crash, the same command goes on from the last checkpoint as if nothing had been:
what a step does is a function of its number, and what is due after a step is done by whoever finds it undone.
"""

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils.logging import disable_progress_bar

from ..configuration.configuration_moe_lc import MoeLcConfig
from ..conversion.count import count
from .batches import Batch, Batches, Collate, OneShape
from .checkpoint import Checkpointer, finish_replacing, read_state, save_model
from .claim import claim
from .collate_images import CollatePacks
from .context_parallel import context_parallel
from .evaluate import loss_by_position
from .flops import adapter_flops, measure_peak, training_flops, vision_flops
from .interrupt import Interruptible
from .metrics import SpikeDetector, StepMeter
from .mixture import StageData
from .observation import observe
from .prepare import TOKENIZER
from .processes import Processes, processes
from .recipe import Recipe, load_recipe, recipe_text
from .recipe_file import build
from .recipe_resume import forbidden_changes
from .run_log import LOG, STAGE, STEP, VALIDATION, RunLog, read_log, records_of
from .shards import write_atomically
from .start import (
    Config,
    build_model,
    fill_model,
    is_partly_frozen,
    low_precision,
    model_config,
    start_optimizer,
    use_graphs,
)
from .step import Step
from .validation import held_out, long_texts, validation_losses


RECIPE, MODELS, ADAPTER = "recipe.yaml", "models", "adapter"  # in the folder of a run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, or the name of a recipe that ships with the package")
    parser.add_argument(
        "overrides", nargs=argparse.REMAINDER, help="--optimizer.learning_rate 3e-4 --stages.0.tokens=1e9 ..."
    )


def run(args: argparse.Namespace) -> None:
    disable_progress_bar()  # of transformers' loading and saving: ours is the one to watch
    recipe = load_recipe(args.recipe, args.overrides)
    with processes() as ours:
        pretrain(recipe, ours)


def pretrain(recipe: Recipe, ours: Processes) -> bool:
    """Trains to the end of a recipe, from where its folder stands; False: it was stopped before, and saved.

    Raises:
        ValueError: what does not fit these processes, the data, or the run that the folder holds; nothing is done then.
    """
    run = Run(recipe, ours)
    finished = run.train()
    run.parts.forget()
    if ours.is_main:
        run.claimed.close()
        then = "the run is complete" if finished else "stopped; the same command goes on from there"
        print(f"\n{recipe.output_dir}: {run.step} of {recipe.ends[-1]} steps: {then}", flush=True)
    return finished


class Run:
    """All that a run needs, made or loaded; `train` goes to its end."""

    def __init__(self, recipe: Recipe, ours: Processes):
        self.recipe, self.ours, self.clock = recipe, ours, Clock(recipe, ours)
        stages = range(len(recipe.stages))
        for stage in stages:
            recipe.micro_steps(stage, ours.count)
        self.data = [recipe.stage_data(stage) for stage in stages]
        self.held_out = [held_out(recipe, stage) for stage in stages]
        config = model_config(recipe)
        _check_vocabulary(config.get_text_config().vocab_size, self.data[0].tokenizer["vocab_size"])
        self.counted, self.collate, self.reader = count(config), _collate(config, self.data), _reader(self.data)
        self.graphs = use_graphs(recipe, ours, pictures=self.collate is not None)
        self._flops = training_flops if recipe.adapter is None else adapter_flops
        self.folder = Path(recipe.output_dir)
        self.claimed = claim(self.folder) if ours.is_main and self.folder.exists() else None
        if self.claimed:
            for name in (ADAPTER, *(f"{MODELS}/{stage.name}" for stage in recipe.stages)):
                finish_replacing(self.folder / name)
        self.checkpointer = Checkpointer(recipe.checkpoint_folder, keep=recipe.checkpoints.keep, seed=recipe.seed)
        latest = self.checkpointer.latest()
        if latest is None and any((self.folder / MODELS / stage.name).exists() for stage in recipe.stages):
            raise ValueError(
                f"checkpoints.folder: expected the checkpoints of the run in {self.folder}, which has finished a stage, "
                f"got none in {recipe.checkpoint_folder} (another --output_dir begins a new run)"
            )
        past = {"step": 0, "tokens": 0} if latest is None else self._checked_past(latest)
        self.step = past["step"]

        self.model = build_model(recipe, config, ours)
        self.optimizer = start_optimizer(recipe, self.model)
        if ours.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)  # what cannot be made is known before weights are loaded
            self.claimed = self.claimed or claim(self.folder)
            if not self._has_all_steps:
                print(recipe_text(recipe), flush=True)
        if latest is None or is_partly_frozen(self.model):
            fill_model(self.model, recipe, ours)
        if latest is not None:
            self.checkpointer.load(latest, self.model, self.optimizer)
        self.precision = low_precision(recipe, self.model, ours)
        self.precision.refresh()
        clip_norm = recipe.optimizer.clip_norm
        self.parts = Step(self.model, self.optimizer, ours, self.precision, clip_norm=clip_norm, graphs=self.graphs)
        self.seen = past["tokens"] if ours.is_main else 0  # by this process, in tokens; the past is the main one's
        self._open_folder(past["tokens"])

    def _checked_past(self, checkpoint: str) -> dict:
        """What the loop saved, if this recipe and its data may go on from there."""
        past = read_state(checkpoint)
        if changes := forbidden_changes(build(Recipe, past["recipe"]), self.recipe, past["step"]):
            raise ValueError("\n".join(changes))
        for stage, (data, begun_with) in enumerate(zip(self.data, past["data"], strict=False)):
            if data.fingerprint != begun_with:
                folders = ", ".join(data.folders)
                raise ValueError(f"stages.{stage}: expected the data that the run began with, got other in {folders}")
        if self.ours.is_main:
            print(f"going on from {checkpoint}", flush=True)
        return past

    @property
    def _has_all_steps(self) -> bool:
        return self.step == self.recipe.ends[-1]

    def _open_folder(self, tokens: int) -> None:
        """Of a run that has all its steps, the recipe stays what they were done by."""
        recipe, ours = self.recipe, self.ours
        self.log = RunLog(
            self.folder,
            total_tokens=sum(steps * recipe.step_tokens(stage) for stage, steps in enumerate(recipe.steps)),
            step=self.step,
            tokens=tokens,
            trackers=() if self._is_over() else recipe.logging.trackers,
            settings={"recipe": recipe_text(recipe)},
            is_main=ours.is_main,
        )
        if ours.is_main and not (self._has_all_steps and (self.folder / RECIPE).exists()):
            write_atomically(self.folder / RECIPE, recipe_text(recipe).encode())
        known = records_of(read_log(self.folder), STEP) if ours.is_main else []
        self.spikes = SpikeDetector(record["loss"] for record in known)
        peak = measure_peak(ours.device) if ours.device.type == "cuda" else None
        self.meter = StepMeter(self.model, peak_flops=peak, all_reduce=ours.sum, all_reduce_max=ours.maximum)

    def train(self) -> bool:
        """Whether the run has come to its end, and not to a stop before."""
        with self.log, Interruptible() as interrupt, contextlib.closing(self.checkpointer):
            for stage, end in enumerate(self.recipe.ends):
                if self.step <= end and not self._stage(stage, interrupt):
                    return False
            return not interrupt.requested()

    def _is_over(self) -> bool:
        """Whether nothing is left to do or to log; known to the main process."""
        records = read_log(self.folder) if (self.folder / LOG).exists() else []
        return self._has_all_steps and any(one["step"] == self.step for one in records_of(records, STAGE))

    def _stage(self, stage: int, interrupt: Interruptible) -> bool:
        """Goes on to the end of a stage; False: to a stop before."""
        recipe, settings, end = self.recipe, self.recipe.stages[stage], self.recipe.ends[stage]
        begin = end - recipe.steps[stage]
        mesh = self.ours.mesh(settings.context_parallel)
        shape = settings.micro_batch, settings.sequence_length
        collate = OneShape(*shape, self.ours.largest) if self.graphs else self.collate
        batches = Batches(mesh, settings.micro_batch, self.ours, collate)
        with context_parallel(self.model, mesh["context"]):
            if self.step > begin and not self._is_logged(VALIDATION):
                self._validate_if_due(stage, batches)  # a run that stopped right after this step has not
            for step_batches in batches.steps(self.data[stage], self.step - begin, recipe.steps[stage]):
                rate = recipe.learning_rate(self.step)
                norm, last = self._step(step_batches, rate)
                self.step += 1
                over = self.step == end
                if over or _every(recipe.logging.every_steps, self.step):
                    self._log_step(stage, rate, norm, last, over)
                self.parts.balance()
                stop = interrupt.requested() or self.clock.is_over()
                if over or stop or self.clock.is_due(self.step):
                    self._save(stage, permanent=over, wait=stop)
                if stop:
                    return False
                self._validate_if_due(stage, batches)
        self.parts.forget()  # other shapes follow
        if interrupt.requested():  # during the validation, which takes minutes
            return False
        self._end_stage(stage)
        return True

    def _step(self, batches: Iterator[Batch], rate: float) -> tuple[torch.Tensor, Batch]:
        """One optimiser step; returns the norm of its gradients and its last batch."""
        self.meter.start_step()
        for batch in batches:
            loss = self.parts.backward(batch.inputs)
            flops = self._flops(self.counted, batch.lengths) / batch.ranks + self._vision_flops(batch)
            self.meter.add(batch.nats(loss), batch.predictions, batch.tokens, flops)
            self.seen += batch.tokens
        return self.parts.update(rate), batch

    def _vision_flops(self, batch: Batch) -> float:
        return 0.0 if batch.grids is None else 3 * vision_flops(self.model.config.vision_config, batch.grids)

    def _log_step(self, stage: int, rate: float, norm: torch.Tensor, last: Batch, over: bool) -> None:
        with self.meter.paused(), self.precision.computing():
            observation = observe(self.model, last.inputs) if over else None
        numbers = self.meter.read(norm, observation)
        numbers |= {"learning_rate": rate, "spike": self.spikes.is_spike(numbers["loss"])}
        self._log(STEP, stage, numbers)

    def _log(self, kind: str, stage: int, numbers: dict) -> None:
        name = self.recipe.stages[stage].name
        self.log.write(kind, self.step, self.ours.total(self.seen), {"stage": name, **numbers})

    def _is_logged(self, kind: str) -> bool:
        """Whether the run has a record of a kind after this step."""
        records = records_of(read_log(self.folder), kind) if self.ours.is_main else []
        return self.ours.told(any(record["step"] == self.step for record in records))

    def _validate_if_due(self, stage: int, batches: Batches) -> None:
        due = self.step == self.recipe.ends[stage] or _every(self.recipe.logging.evaluate_every_steps, self.step)
        if due:
            with self.meter.paused(), self.precision.computing(), self.log.busy("validating"):
                data = self.held_out[stage]
                losses = validation_losses(self.model, self.recipe, stage, data, batches, self.ours)
            self._log(VALIDATION, stage, losses)

    def _save(self, stage: int, *, permanent: bool, wait: bool) -> None:
        state = {
            "step": self.step,
            "tokens": self.ours.total(self.seen),
            "recipe": dataclasses.asdict(self.recipe),
            "data": [data.fingerprint for data in self.data[: stage + 1]],
        }
        with self.meter.paused():
            self.checkpointer.save(self.step, self.model, self.optimizer, state, permanent=permanent, wait=wait)
            if self.recipe.adapter is not None:
                self._save_model(self.folder / ADAPTER)
        self.clock.restart()

    def _end_stage(self, stage: int) -> None:
        """The model as anyone loads it, and how its loss falls along a long text."""
        if self._is_logged(STAGE):
            return
        settings, texts = self.recipe.stages[stage], long_texts(self.recipe, stage)
        self.checkpointer.wait()  # where the model of a stage is, there is a checkpoint to go on from
        with self.meter.paused(), torch.compiler.set_stance("force_eager"):
            self._save_model(self.folder / MODELS / settings.name)
            with self.precision.computing(), self.log.busy("validating long texts"):
                by_position = loss_by_position(self.model, texts, settings.sequence_length) if texts else None
        self._log(STAGE, stage, {"by_position": by_position})

    def _save_model(self, folder: Path) -> None:
        """The model as anyone loads it, or what is trained in its place."""
        if self.recipe.adapter is None:
            return save_model(self.model, folder, self.reader)
        from .sharded_adapters import save_adapter  # needs PEFT

        save_adapter(self.model, folder, reader=self.reader)


class Clock:
    """When a checkpoint is due and when the run must end: by the time of the main process, which all follow."""

    def __init__(self, recipe: Recipe, ours: Processes):
        self.limit, self.checkpoints, self.ours = recipe.limits.max_minutes, recipe.checkpoints, ours
        self.begun = self.saved = time.monotonic()

    def restart(self) -> None:
        """A checkpoint has been made."""
        self.saved = time.monotonic()

    def is_over(self) -> bool:
        return self._are_over(self.limit, self.begun)

    def is_due(self, step: int) -> bool:
        return _every(self.checkpoints.every_steps, step) or self._are_over(self.checkpoints.every_minutes, self.saved)

    def _are_over(self, minutes: float | None, since: float) -> bool:
        return minutes is not None and self.ours.told(time.monotonic() - since >= 60 * minutes)


def _every(steps: int | None, step: int) -> bool:
    return steps is not None and step % steps == 0


def _reader(stages: Sequence[StageData]) -> PreTrainedTokenizerBase | ProcessorMixin:
    """The tokenizer of the data, which all folders share; with pictures, the processor of the first that have some."""
    pictured = next((folder for data in stages for folder in data.pictures), None)
    if pictured is not None:
        return AutoProcessor.from_pretrained(Path(pictured) / TOKENIZER)
    return AutoTokenizer.from_pretrained(Path(next(iter(stages[0].folders))) / TOKENIZER)


def _collate(config: Config, stages: Sequence[StageData]) -> Collate | None:
    """How packs become inputs of a model. Raises ValueError where it is not made for the pictures of a folder."""
    expected: dict[str, int | list[int]] = {}
    if isinstance(config, MoeLcConfig):
        vision = config.vision_config
        expected = {"patch_size": vision.patch_size, "merge_kernel_size": list(vision.merge_kernel_size)}
        expected["media_token_id"] = config.media_placeholder_token_id
    for folder, pictures in (item for data in stages for item in data.pictures.items()):
        found = {"patch_size": pictures.patch_size, "merge_kernel_size": [pictures.merge_kernel_size] * 2}
        found["media_token_id"] = pictures.media_token_id
        if not expected:
            raise ValueError(f"model.vision: expected a tower for the pictures in {folder}, got null")
        if found != expected:
            raise ValueError(f"data.folders: expected pictures of {expected}, as the model, got {found} in {folder}")
    if not isinstance(config, MoeLcConfig):
        return None
    return CollatePacks(config.media_placeholder_token_id, vision.patch_size, tuple(vision.merge_kernel_size))


def _check_vocabulary(of_model: int, of_data: int) -> None:
    if of_data > of_model:
        raise ValueError(f"data.folders: expected token ids below the model's vocabulary of {of_model}, got {of_data}")
