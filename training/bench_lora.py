"""`moe-lc bench lora`: steps that train an adapter on a frozen model, ours beside stock PEFT's, on this GPU.

A model of a preset's size with random weights, built on the device; the adapter, its optimiser, loss and step are those of
`moe-lc finetune`. Stock is PEFT's own forward of the experts, which builds W + B A through a parametrisation, over the
`grouped_mm` that transformers gives such experts; all else is the same. Before anything is timed, both must give the adapter the
same gradients on a few tokens.
"""

import argparse
import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from .. import latent_moe
from ..adapters import check_lora, lora_targets
from ..configuration.configuration_moe_lc import MoeLcTextConfig
from ..configuration.presets import preset_names
from ..modeling_moe_lc import MoeLcForCausalLM
from .batches import OneShape
from .bench import OURS, installed_version
from .bench_train import Gpu
from .checkpointing import checkpoint_activations
from .low_precision import LowPrecision
from .optim import adamw
from .packing import Pack
from .processes import Processes
from .random_model import PACKED, PLAIN, build, first_layers, packed_experts, random_tokens
from .step import Step


LAUNCHED, STOCK = "launched", "stock PEFT"
EXPERTS = {OURS: "eager", LAUNCHED: "eager", STOCK: "grouped_mm"}  # experts_implementation: "eager" is our own module
DTYPE = torch.bfloat16  # of the frozen weights and of the computation
TARGETS = ("attention", "latent", "shared_experts", "experts", "router", "head")
LOSS_CHUNK, CLIP_NORM, LEARNING_RATE = 4096, 1.0, 2e-4  # those of a recipe
CHECKED_TOKENS, CHECKED_EXPERTS = 1024, 256  # stock builds a second copy of all experts, which must fit for the check
LIMIT = 2e-2  # of BF16: stock rounds W + B A, ours W x and B A x
NEGLIGIBLE = 1e-3  # of the largest norm of a gradient
OUT_OF_MEMORY, NOT_FINITE = "out of memory", "wrong: not finite"
NOTES = """
A step: forward, backward and AdamW of the adapter on one document of {tokens:,} tokens, layers {checkpointed}. ours: as `moe-lc
finetune` does it, forward and backward one CUDA graph; launched: ours, kernel by kernel, as stock PEFT is. weights: GB of the
model, adapter included. state: GB of the adapter's gradients, moments and BF16 copies. above: GB of the peak above the weights,
state included. stock PEFT: W + B A of a layer is built, experts run by transformers' grouped_mm; always on BF16 experts, since it
cannot adapt packed ones. Random weights spread tokens over all experts."""


@dataclass(frozen=True)
class Row:
    """A line of the table: `steps` of `tokens` each, in `seconds` a step. `skipped` stands in place of a speed."""

    what: str
    layers: int
    experts: str
    tokens: int
    steps: int
    seconds: float | None = None
    loss: float | None = None
    weight_bytes: int = 0
    state_bytes: int = 0
    peak_bytes: int = 0
    skipped: str | None = None

    @property
    def above_bytes(self) -> int:
        """Of the peak, those above the weights."""
        return self.peak_bytes - self.weight_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--preset",
        default="kimi-linear-48b-a3b",
        choices=preset_names(),
        metavar="NAME",
        help="(default: %(default)s)",
    )
    add("--layers", type=int, metavar="N", help="the first N layers of the preset (default: all)")
    add("--experts", default=PLAIN, choices=(PLAIN, PACKED), help="in which ours stay (default: %(default)s)")
    add(
        "--targets",
        nargs="+",
        default=["attention", "experts"],
        choices=TARGETS,
        metavar="GROUP",
        help=f"what is adapted, some of {', '.join(TARGETS)} (default: attention experts)",
    )
    add("--rank", type=int, default=16, help="of the adapter (default: %(default)s)")
    add("--tokens", type=int, default=8192, help="of the document of a step (default: %(default)s)")
    add("--steps", type=int, default=5, help="steps that are timed (default: %(default)s)")
    add("--warm-up", type=int, default=2, metavar="STEPS", help="before them (default: %(default)s)")
    add("--stock", action="store_true", help="measure stock PEFT's formulation, too")
    add(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="layers compute again what they need in the backward pass (default)",
    )
    add("--backend", default="moe_lc_triton", help="attn_implementation of the model (default: %(default)s)")
    add("--output", type=Path, help="file to which one JSON line is appended for each row")


def check_arguments(args: argparse.Namespace) -> None:
    for name, least in (("rank", 1), ("tokens", 2), ("steps", 1), ("warm_up", 2)):
        if getattr(args, name) < least:
            raise ValueError(f"{name}: expected a number of at least {least}, got {getattr(args, name)}")
    if args.output is not None and not args.output.resolve().parent.is_dir():
        raise ValueError(f"output: expected a file in a folder that exists, got {args.output}")
    first_layers(args.preset, args.layers)
    config = configuration(args, OURS, checked_slice(args)[0])
    with torch.device("meta"):
        check_lora(MoeLcForCausalLM(config), adapter(args, config))


def run(args: argparse.Namespace) -> int:
    check_arguments(args)
    return bench(args, Gpu())


def bench(args: argparse.Namespace, machine) -> int:
    """Checks, then measures and prints; returns the exit status, 1 where something was wrong."""
    difference = check(args, machine)
    layers, tokens, experts = checked_slice(args)
    tqdm.write(
        f"{layers} layers, {experts} experts, {tokens} tokens: the adapter's gradients differ from those of stock PEFT by "
        f"{difference:.1e}, at most {LIMIT:.0e}"
    )
    if not difference <= LIMIT:
        tqdm.write("wrong: no speed is measured")
        return 1
    header = f"{'':11}{'layers':>7}  {'experts':9}{'tokens/s':>10}{'ms':>9}"
    tqdm.write(f"{header}{'weights GB':>12}{'state GB':>10}{'peak GB':>9}{'above GB':>10}")
    rows = []
    graphs = machine.has_graphs and args.backend not in ("eager", "moe_lc_reference")  # which wait for the device
    for what in ((OURS,) if graphs else ()) + ((LAUNCHED, STOCK) if args.stock else (LAUNCHED,)):
        rows.append(measure(args, machine, what))
        tqdm.write(_line(rows[-1]))
        _append(asdict(rows[-1]) | {"difference": difference}, args, machine)
    for row in rows if args.stock else ():
        _compare(row, rows[-1], args, machine)
    checkpointed = "checkpointed" if args.checkpointing else "not checkpointed"
    tqdm.write(NOTES.format(tokens=args.tokens, checkpointed=checkpointed))
    return int(any(row.skipped == NOT_FINITE for row in rows))


def _compare(row: Row, stock: Row, args: argparse.Namespace, machine) -> None:
    if row is stock or row.seconds is None or stock.seconds is None:
        return
    ratio = {"rate": stock.seconds / row.seconds, "above": row.above_bytes / stock.above_bytes}
    name = f"{row.what} / {stock.what}"
    tqdm.write(f"{name}: {ratio['rate']:.2f} of its tokens/s, {ratio['above']:.0%} of its memory above the weights")
    _append({"what": name, "layers": row.layers, **ratio}, args, machine)


def configuration(args: argparse.Namespace, what: str, layers: int | None, **overrides) -> MoeLcTextConfig:
    """With the loss in chunks, and routers whose biases stay as they are."""
    fixed = {"router_balance": {"method": "none"}, "loss_chunk_size": LOSS_CHUNK}
    config = first_layers(args.preset, layers, **fixed, **overrides)
    config._attn_implementation, config._experts_implementation = args.backend, EXPERTS[what]
    return config


def adapter(args: argparse.Namespace, config: MoeLcTextConfig):
    """The `LoraConfig`."""
    from peft import LoraConfig

    targets = lora_targets(*args.targets, config=config)
    return LoraConfig(r=args.rank, lora_alpha=2 * args.rank, task_type="CAUSAL_LM", **targets)


@contextlib.contextmanager
def as_called(what: str) -> Iterator[None]:
    """Inside, experts with an adapter are called as PEFT wrapped them, if `what` is stock: W + B A is built."""
    ours = latent_moe.run_experts
    try:
        if what == STOCK:
            latent_moe.run_experts = lambda experts, *inputs: experts(*inputs)
        yield
    finally:
        latent_moe.run_experts = ours


class Training:
    """An adapter in training: its model, built on `device`, and the one document of `tokens` that every step reads."""

    def __init__(self, args, device: torch.device, what: str, layers: int | None, tokens: int, **overrides):
        config = configuration(args, what, layers, **overrides)
        self.experts = PLAIN if what == STOCK else args.experts
        self.model = build(config, self.experts, device, DTYPE, adapter(args, config)).train()
        if args.checkpointing:
            checkpoint_activations(self.model)
        self.optimizer = adamw(self.model, weight_decay=0.0)
        self.precision = LowPrecision(self.model, DTYPE)
        self.precision.refresh()
        alone = Processes(0, 1, device, None)
        self.parts = Step(self.model, self.optimizer, alone, self.precision, clip_norm=CLIP_NORM, graphs=what == OURS)
        ids = random_tokens(self.model, tokens, seed=1)[0].tolist()
        inputs = OneShape(1, tokens)([Pack(ids, [0, tokens])])  # of one whole document: nothing has to be found out
        self.inputs = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in inputs.items()}
        self.inputs |= {"use_cache": False, "num_items_in_batch": torch.full((), tokens - 1, device=device)}

    def backward(self) -> torch.Tensor:
        """The loss; the gradients are those of `trained` afterwards."""
        return self.parts.backward(self.inputs)

    def step(self) -> torch.Tensor:
        """The loss before the update. Nothing waits for the device."""
        loss = self.backward()
        self.parts.update(LEARNING_RATE)
        return loss

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of every factor of the adapter, after one backward pass; one of zeros where there is none."""
        self.backward()
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.trained.items()}

    def weight_bytes(self) -> int:
        return _bytes([*self.model.parameters(), *self.model.buffers()])

    def state_bytes(self) -> int:
        """Of the adapter beside its parameters: gradients, copies in BF16, the optimiser's moments."""
        moments = [t for state in self.optimizer.state.values() for t in state.values() if t.ndim]
        return _bytes([*self.trained.values(), *self.precision.narrow, *moments])


def checked_slice(args: argparse.Namespace) -> tuple[int, int, int]:
    """Layers, tokens and experts of the check. Of the layers with experts it has one: before that nothing differs, so all
    tokens take the same experts in both."""
    config = first_layers(args.preset, args.layers)
    sparse = [i for i in range(config.num_hidden_layers) if config.is_sparse_layer(i)]
    layers = min(sparse, default=config.num_hidden_layers - 1) + 1
    return layers, min(args.tokens, CHECKED_TOKENS), min(config.num_experts, CHECKED_EXPERTS)


def check(args: argparse.Namespace, machine) -> float:
    """By how much the adapter's gradients differ from those of stock PEFT: see `worst_difference`."""
    layers, tokens, experts = checked_slice(args)
    machine.start_memory()
    ours = Training(args, machine.device, LAUNCHED, layers, tokens, num_experts=experts)
    stock = Training(args, machine.device, STOCK, layers, tokens, num_experts=experts)
    if ours.experts == PACKED:
        copy_weights(ours.model, stock.model)
        stock.precision.refresh()
    found = ours.gradients()
    with as_called(STOCK):
        return worst_difference(found, stock.gradients())


@torch.no_grad()
def copy_weights(packed: MoeLcForCausalLM, plain: MoeLcForCausalLM) -> None:
    """All weights of `packed`, its experts dequantised."""
    targets = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    for name, tensor in (*packed.named_parameters(), *packed.named_buffers()):
        if name in targets:
            targets[name].copy_(tensor)
    for name, experts in packed_experts(packed).items():
        plain.get_submodule(name).load_state_dict(experts.unpack(DTYPE).state_dict())


def worst_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest of the norms of differences, each relative to the norm expected, or to `NEGLIGIBLE` of the largest one where
    that is more. NaN where anything is not finite."""
    norms = {name: tensor.double().norm().item() for name, tensor in expected.items()}
    least = NEGLIGIBLE * max(norms.values())
    differences = [
        (found[name].double() - tensor.double()).norm().item() / max(norms[name], least, 1e-300)
        for name, tensor in expected.items()
    ]
    return max(differences) if all(map(math.isfinite, differences)) else math.nan


def measure(args: argparse.Namespace, machine, what: str) -> Row:
    """Steps of a new model, after a first one whose gradients are looked at and those that only warm up."""
    machine.start_memory()
    experts = PLAIN if what == STOCK else args.experts
    row = Row(what, first_layers(args.preset, args.layers).num_hidden_layers, experts, args.tokens, args.steps)
    try:
        with as_called(what):
            return _measure(row, args, machine)
    except torch.OutOfMemoryError:
        return replace(row, skipped=OUT_OF_MEMORY)
    except Exception as error:
        # Other libraries may fail on this machine in ways of their own, for want of memory, too. Ours can still be told.
        if what != STOCK:
            raise
        return replace(row, skipped=f"failed: {type(error).__name__}: {error}".partition("\n")[0])


def _measure(row: Row, args: argparse.Namespace, machine) -> Row:
    training = Training(args, machine.device, row.what, args.layers, args.tokens)
    loss = training.backward()
    finite = loss.isfinite().item() and all(
        p.grad is not None and p.grad.isfinite().all().item() for p in training.trained.values()
    )
    if not finite:
        return replace(row, skipped=NOT_FINITE)
    training.parts.update(LEARNING_RATE)
    for _ in range(args.warm_up - 1):
        training.step()
    machine.synchronize()
    begun, losses = time.perf_counter(), []
    for _ in tqdm(range(args.steps), unit="step", leave=False):
        losses.append(training.step())
    machine.synchronize()
    seconds = (time.perf_counter() - begun) / args.steps
    training.parts.forget()
    # A gradient that is no number leaves none in any factor: clipping scales all of them by one norm.
    if not all(tensor.isfinite().all().item() for tensor in (*losses, *training.trained.values())):
        return replace(row, skipped=NOT_FINITE)
    return replace(
        row,
        seconds=seconds,
        loss=losses[-1].item(),
        weight_bytes=training.weight_bytes(),
        state_bytes=training.state_bytes(),
        peak_bytes=machine.peak_memory(),
    )


def _bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _line(row: Row) -> str:
    line = f"{row.what:11}{row.layers:7}  {row.experts:9}"
    if row.seconds is None:
        return f"{line}  {row.skipped}"
    memory = (row.weight_bytes, row.state_bytes, row.peak_bytes, row.above_bytes)
    numbers = "".join(f"{x / 1e9:{width}.2f}" for x, width in zip(memory, (12, 10, 9, 10), strict=True))
    return f"{line}{row.tokens / row.seconds:10,.0f}{1e3 * row.seconds:9.1f}{numbers}"


def _append(line: dict, args: argparse.Namespace, machine) -> None:
    if args.output is None:
        return
    origin = {"device": machine.name}
    origin |= {name: installed_version(name) for name in ("torch", "triton", "transformers", "peft")}
    made = {name: getattr(args, name) for name in ("preset", "targets", "rank", "checkpointing", "command")}
    with args.output.open("a") as file:
        file.write(json.dumps(line | made | origin) + "\n")
