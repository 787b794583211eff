"""A run as one tree of frozen dataclasses: read from YAML and a command line, checked before any work is done.

Everything that a loop asks about a step is a function of its number: its stage, its learning rate, its share of a rank.
"""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from .mixture import LongDocuments, StageData
from .optim import EMBEDDING_RATE, SCHEDULES, warmup_steps
from .recipe_checks import contradictions
from .recipe_file import build, override, parse_yaml, to_yaml


FOLDER = Path(__file__).parent / "recipes"
MOMENTUM, DECAY_SHARE = 0.95, 0.2  # where Muon and wsd leave them open


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """Which model is trained and how it computes.

    `base`: a preset, a folder or a name on the Hub. `start`: "scratch" takes its configuration, "continue" its weights
    as well, which a preset does not have. `config`: fields of the configuration that replace those of `base`. `dtype`: of
    the computation; the parameters are FP32 at least. `dequantize`: experts in MXFP4 become plain weights; false: they stay
    packed and frozen beside an adapter. `loss_chunk_size`: in tokens; null: all logits at once. `vision`:
    fields of the vision tower's configuration that replace those of `base`; {}: none; null: the text model alone.
    `cuda_graphs`: each part of a step is launched as a whole; null: where GPUs train in bfloat16 on text,
    each on sequences of its own, and neither `compile` nor dropout is asked for.
    """

    base: str
    start: Literal["scratch", "continue"] = "scratch"
    config: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] | None = None
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    dequantize: bool = True
    attn_implementation: str | None = None
    experts_implementation: str | None = None
    loss_chunk_size: int | None = 4096
    compile: bool = False
    cuda_graphs: bool | None = None
    activation_checkpointing: bool = True


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """`folders`: name -> folder that `moe-lc prepare` or `prepare-images` wrote. `validation_tokens`: how many of `validation_split` an
    evaluation reads of each folder, at most."""

    folders: dict[str, str]
    validation_split: str = "validation"
    validation_tokens: int = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ChatRecipe:
    """Conversations that `moe-lc finetune` prepares before it trains; only what the assistant says in them is learned.

    `sources`: name in `data.folders` -> file or folder of JSON lines, URL, or hf:NAME[:CONFIG][:SPLIT], whose rows have
    `messages`. `tokenizer`: null: that of `model.base`. `template`: a Jinja file; null: the tokenizer's. `variables`: of the
    template. `too_long`: for the shortest stage that reads them: "refuse", "drop" them, or "truncate" their ends.
    `validation_share`: held out, by name.
    """

    sources: dict[str, str] = field(default_factory=dict)
    tokenizer: str | None = None
    template: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    too_long: Literal["refuse", "drop", "truncate"] = "refuse"
    validation_share: float = 0.05


@dataclass(frozen=True, kw_only=True)
class AdapterRecipe:
    """LoRA: W + alpha / r B A in place of W, where A and B alone are trained. `dropout`: share of the inputs of A that a
    training step leaves out; not on experts and router. `targets`: groups of `lora_targets`."""

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ("attention", "experts")


@dataclass(frozen=True, kw_only=True)
class Factors:
    """The learning rate at the start and the end of a stage, in parts of `optimizer.learning_rate`."""

    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stretch of the run with one length of sequences.

    `tokens`: as many whole steps as fit are done; packs are counted as if they were full. `mixture`: name of a folder ->
    its share of the tokens, in any unit; null: all folders alike. `micro_batch`: sequences of one forward, on one device
    or, with context parallelism, on `context_parallel` devices together. `tokens_per_step`: null: the recipe's.
    `learning_rate_factor`: null: the schedule of the run.
    """

    name: str
    sequence_length: int
    tokens: int
    mixture: dict[str, float] | None = None
    long_documents: LongDocuments | None = None
    tokens_per_step: int | None = None
    micro_batch: int = 1
    context_parallel: int = 1
    learning_rate_factor: Factors | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerRecipe:
    """`learning_rate` is the peak; under `muon`, AdamW takes what is no matrix, with `betas`.

    `momentum` and `router_on_muon` belong to Muon; null: 0.95. `embedding_rate`: times the learning rate; null: 20 with
    the initialisation of a start from scratch, else 1. `clip_norm`: null: gradients stay as they are. `schedule`: from
    the peak to `end_factor` of it; `decay_share` is how much of its steps "wsd" falls, null: 0.2. `warmup_share`: of all
    steps of the run.
    """

    kind: Literal["muon", "adamw"] = "muon"
    learning_rate: float
    momentum: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    router_on_muon: bool = False
    embedding_rate: float | None = None
    schedule: Literal["cosine", "wsd"] = "cosine"
    end_factor: float = 0.1
    decay_share: float | None = None
    warmup_share: float = 0.01


@dataclass(frozen=True, kw_only=True)
class RouterBalance:
    """`router_balance` of the configuration: see `MoeLcTextConfig`."""

    method: Literal["quantile", "load_quantile", "sign", "none"] = "quantile"
    ema: float | Literal["auto"] = "auto"
    bins: int = 1000
    eta: float = 1e-3
    high: float = 0.9
    low: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Beside the end of each stage and of the run, which always save. `folder`: a path or URL; null: in `output_dir`.
    `every_minutes`, `every_steps`: whichever comes first; null: not. `keep`: how many of these."""

    folder: str | None = None
    every_minutes: float | None = 15.0
    every_steps: int | None = None
    keep: int = 3


@dataclass(frozen=True, kw_only=True)
class Logging:
    """`trackers`: names that Accelerate knows, beside the JSON lines. `evaluate_every_steps`: null: only at the end of
    each stage, where it is always done."""

    every_steps: int = 10
    trackers: tuple[str, ...] = ()
    evaluate_every_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`max_minutes`: then the run saves and ends, to be resumed; null: none."""

    max_minutes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run. `output_dir`: its folder. `adapter`: what is trained in place of the model; null: all weights are.
    `router_balance`: null: that of a pretraining; with an adapter or conversations none, and the biases stay what they are.

    Raises ValueError that lists every contradiction, one a line.
    """

    output_dir: str
    seed: int = 0
    model: ModelRecipe
    adapter: AdapterRecipe | None = None
    data: DataRecipe
    chat: ChatRecipe = ChatRecipe()
    tokens_per_step: int
    stages: tuple[Stage, ...]
    optimizer: OptimizerRecipe
    router_balance: RouterBalance | None = None
    checkpoints: Checkpoints = Checkpoints()
    logging: Logging = Logging()
    limits: Limits = Limits()

    def __post_init__(self):
        if problems := list(contradictions(self)):
            raise ValueError("\n".join(problems))

    @property
    def config_overrides(self) -> dict[str, Any]:
        """Fields of the configuration that replace those of `model.base`."""
        balance, chunk = asdict(self.balance), self.model.loss_chunk_size
        return {**self.model.config, "router_balance": balance, "loss_chunk_size": chunk}

    @property
    def finetunes(self) -> bool:
        """Whether it is one for `moe-lc finetune`."""
        return self.adapter is not None or bool(self.chat.sources)

    @property
    def balance(self) -> RouterBalance:
        """What `router_balance` says or leaves open."""
        if self.router_balance is not None:
            return self.router_balance
        return RouterBalance(method="none") if self.finetunes else RouterBalance()

    @property
    def embedding_rate(self) -> float:
        """Learning rate of the input embedding, in parts of the others'."""
        if self.optimizer.embedding_rate is not None:
            return self.optimizer.embedding_rate
        return EMBEDDING_RATE if self.model.start == "scratch" else 1.0

    @property
    def momentum(self) -> float:
        """Muon's."""
        return MOMENTUM if self.optimizer.momentum is None else self.optimizer.momentum

    @property
    def checkpoint_folder(self) -> str:
        """A path or URL."""
        return self.checkpoints.folder or str(Path(self.output_dir) / "checkpoints")

    def step_tokens(self, stage: int) -> int:
        """Tokens of a step of stage number `stage`, if all packs are full."""
        own = self.stages[stage].tokens_per_step
        return self.tokens_per_step if own is None else own

    def sequences_per_step(self, stage: int) -> int:
        return self.step_tokens(stage) // self.stages[stage].sequence_length

    @property
    def steps(self) -> tuple[int, ...]:
        """Optimiser steps of each stage."""
        return tuple(stage.tokens // self.step_tokens(number) for number, stage in enumerate(self.stages))

    @property
    def ends(self) -> tuple[int, ...]:
        """Steps of the run when each stage is over; the last is the number of all."""
        return tuple(itertools.accumulate(self.steps))

    def stage_of(self, step: int) -> tuple[int, int]:
        """The number of the stage that step 0 <= `step` < `ends[-1]` belongs to, and the step's number within it."""
        ends = self.ends
        if not 0 <= step < ends[-1]:
            raise ValueError(f"step: expected 0 to {ends[-1] - 1}, got {step}")
        stage = bisect.bisect_right(ends, step)
        return stage, step - (ends[stage - 1] if stage else 0)

    @property
    def warmup_steps(self) -> int:
        return warmup_steps(self.ends[-1], self.optimizer.warmup_share)

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step of the run.

        One schedule, from the peak to `end_factor`, runs over all stages without factors of their own, as if they followed
        one another; a stage with factors runs the same kind of schedule between them. The run begins with the warm-up.
        """
        number, within = self.stage_of(step)
        own, steps, together = self.stages[number].learning_rate_factor, self.steps, self.scheduled_with(number)
        return self.optimizer.learning_rate * SCHEDULES[self.optimizer.schedule](
            within + sum(steps[other] for other in together if other < number),
            sum(steps[other] for other in together),
            start=1.0 if own is None else own.start,
            end=self.optimizer.end_factor if own is None else own.end,
            warmup=self.warmup_steps if 0 in together else 0,
            **self._decay,
        )

    def scheduled_with(self, stage: int) -> list[int]:
        """The stages whose steps share one schedule with those of `stage`."""
        if self.stages[stage].learning_rate_factor is not None:
            return [stage]
        return [other for other, settings in enumerate(self.stages) if settings.learning_rate_factor is None]

    @property
    def _decay(self) -> dict[str, float]:
        if self.optimizer.schedule != "wsd":
            return {}
        share = self.optimizer.decay_share
        return {"decay": DECAY_SHARE if share is None else share}

    def micro_steps(self, stage: int, processes: int) -> int:
        """Forwards of each process in a step: over how many gradients are accumulated.

        Raises ValueError, naming the field, if the processes cannot have equally many sequences.
        """
        settings, name = self.stages[stage], f"stages.{stage}"
        if processes < 1 or processes % settings.context_parallel:
            raise ValueError(
                f"{name}.context_parallel: expected a divisor of the {processes} processes, got {settings.context_parallel}"
            )
        groups, sequences = processes // settings.context_parallel, self.sequences_per_step(stage)
        if sequences % (groups * settings.micro_batch):
            raise ValueError(
                f"{name}.micro_batch: expected the {sequences} sequences of a step to be a multiple of micro_batch x "
                f"{groups} groups of {settings.context_parallel} processes, got {settings.micro_batch} x {groups}"
            )
        return sequences // (groups * settings.micro_batch)

    def mixture(self, stage: int) -> dict[str, float]:
        """Folders of a stage -> their weights, in the order of their names: the order in the file does not matter."""
        weights = self.stages[stage].mixture or dict.fromkeys(self.data.folders, 1.0)
        return {self.data.folders[name]: weights[name] for name in sorted(weights)}

    def stage_data(self, stage: int) -> StageData:
        """What the steps of a stage read; each stage in an order of its own."""
        return StageData(
            self.mixture(stage),
            sequence_length=self.stages[stage].sequence_length,
            sequences_per_step=self.sequences_per_step(stage),
            seed=self.seed + stage,
            long_documents=self.stages[stage].long_documents,
        )


def recipe_names() -> list[str]:
    """The recipes that ship with the package, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file, or the one of that name that ships with the package, changed by `overrides`.

    Overrides are words of a command line: `["--optimizer.learning_rate", "3e-4", "--stages.0.tokens=1e9"]`; the parts of
    a name are fields, keys or positions. Values are YAML; several words are a list, none is true.

    Raises ValueError that lists, one a line, fields that are unknown, missing or of a wrong type, or, where there are
    none, contradictions: each with its dotted name, what was expected and what came.
    """
    file = Path(path)
    if str(path) in recipe_names():
        file = FOLDER / f"{path}.yaml"
    elif not file.is_file():
        raise ValueError(f"recipe: expected a file or one of {', '.join(recipe_names())}, got {str(path)!r}")
    tree = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    override(tree, overrides)
    return build(Recipe, tree)


def recipe_text(recipe: Recipe) -> str:
    """All of a recipe as YAML, with the balancing that it leaves open; `load_recipe` makes of it one that does the same."""
    return to_yaml(replace(recipe, router_balance=recipe.balance))
