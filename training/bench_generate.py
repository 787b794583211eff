"""`moe-lc bench generate`: prefilling a long prompt in chunks, and decoding behind it at several batch sizes, on this GPU.

A model of a preset's size with random weights, built on the device: nothing is read, and experts in MXFP4 never exist in any
other form. Before anything is timed, decoding a short prompt token by token must give the logits of prefilling all of it at
once, with the same choice of experts; where it does not, or where a number is not finite, there is no speed.
"""

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from transformers import DynamicCache

from ..configuration.presets import preset_names
from ..decoding import fixed_size
from ..modeling_moe_lc import MoeLcForCausalLM
from ..router import Router
from .bench import installed_version, relative_error
from .bench_train import Gpu
from .random_model import PACKED, PLAIN, build, first_layers, random_tokens


LAUNCHED, GRAPH = "launched", "graph"
CHECKED_PROMPT, CHECKED_CHUNK, CHECKED_NEW = 60, 30, 6  # chunks longer than what MLA reads absorbed
LIMIT = (
    1e-1  # BF16 over dozens of layers: 0.034 in 28 narrow ones; one lost convolution state in one of them makes 0.39
)
NOTES = """
prefill: one sequence in chunks of {chunk:,} tokens. decode: greedy, every sequence behind the whole prompt, in a cache of fixed
size; launched: kernel by kernel, graph: one CUDA graph a token. weights, cache, peak: GB on the device; peak of that row alone,
weights included. Random weights spread tokens over all experts: a batch reads more of them than text would."""


@dataclass(frozen=True)
class Row:
    """A line of the table. `skipped` stands in place of a speed."""

    what: str
    batch: int
    context: int
    tokens: int = 0  # that were timed, of all sequences together
    seconds: float | None = None
    cache_bytes: int = 0
    peak_bytes: int = 0
    skipped: str | None = None


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
    add("--experts", default=PLAIN, choices=(PLAIN, PACKED), help="in which the experts stay (default: %(default)s)")
    add("--prompt", type=int, default=131_072, metavar="TOKENS", help="that are prefilled (default: %(default)s)")
    add("--chunk", type=int, default=16_384, metavar="TOKENS", help="of one forward (default: %(default)s)")
    add("--batches", type=int, nargs="+", default=[1, 32], help="sequences decoded together (default: %(default)s)")
    add("--new", type=int, default=64, metavar="TOKENS", help="decoded by each sequence (default: %(default)s)")
    add("--eager", action="store_true", help="no CUDA graphs")
    add("--backend", default="moe_lc_triton", help="attn_implementation of the model (default: %(default)s)")
    add("--output", type=Path, help="file to which one JSON line is appended for each row")


def check_arguments(args: argparse.Namespace) -> None:
    for name in ("prompt", "chunk", "new"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name}: expected a number of at least 1, got {getattr(args, name)}")
    if min(args.batches) < 1:
        raise ValueError(f"batches: expected numbers of at least 1, got {args.batches}")
    if args.output is not None and not args.output.resolve().parent.is_dir():
        raise ValueError(f"output: expected a file in a folder that exists, got {args.output}")


def run(args: argparse.Namespace) -> int:
    check_arguments(args)
    config = first_layers(args.preset, args.layers)
    config._attn_implementation = args.backend
    machine = Gpu()
    return bench(args, machine, build(config, args.experts, machine.device))


@torch.no_grad()
def bench(args: argparse.Namespace, machine, model: MoeLcForCausalLM) -> int:
    """Checks, then measures and prints; returns the exit status, 1 where the check failed."""
    captured = (False, True) if machine.has_graphs and not args.eager else (False,)
    weights = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    tqdm.write(
        f"{args.preset}, {model.config.num_hidden_layers} layers, experts in {args.experts}: {weights / 1e9:.2f} GB"
    )
    for batch in args.batches:
        for as_graph in captured:
            error = check_short(machine, model, batch, as_graph)
            how = GRAPH if as_graph else LAUNCHED
            tqdm.write(
                f"batch {batch}, {how}: decoding differs from a longer prefill by {error:.1e}, at most {LIMIT:.0e}"
            )
            if not error <= LIMIT:
                tqdm.write("wrong: no speed is measured")
                return 1
    tqdm.write(f"{'':17}{'batch':>6}{'context':>10}{'tokens/s':>12}{'ms/token':>11}{'cache GB':>10}{'peak GB':>9}")
    tokens = random_tokens(model, args.prompt, seed=1)
    row, cache, last = measure_prefill(machine, model, tokens, args.chunk)
    _report(row, args, machine, weights)
    if cache is None:
        return int(row.skipped == NOT_FINITE)
    for batch in args.batches:
        for as_graph in captured:
            _report(measure_decode(machine, model, cache, last, batch, args.new, as_graph), args, machine, weights)
    tqdm.write(NOTES.format(chunk=args.chunk))
    return 0


OUT_OF_MEMORY, NOT_FINITE = "out of memory", "wrong: not finite"


def measure_prefill(machine, model, tokens: torch.Tensor, chunk: int) -> tuple[Row, DynamicCache | None, torch.Tensor]:
    """Of `tokens` `[1, P]`, after two chunks that only warm up; also the cache, and the token `[1, 1]` that comes next."""
    row = Row("prefill", 1, tokens.shape[1])
    try:
        for _ in prefill(model, tokens[:, : 2 * chunk], chunk, DynamicCache(config=model.config)):
            pass
        machine.start_memory()
        machine.synchronize()
        begun, cache, finite = time.perf_counter(), DynamicCache(config=model.config), True
        for hidden in tqdm(prefill(model, tokens, chunk, cache), total=-(-tokens.shape[1] // chunk), unit="chunk"):
            logits = model.lm_head(hidden[:, -1])  # [1, vocabulary]
            finite = finite & hidden.isfinite().all() & logits.isfinite().all()
        machine.synchronize()
        seconds = time.perf_counter() - begun
    except torch.OutOfMemoryError:
        return _without_speed(row, OUT_OF_MEMORY), None, tokens
    if not finite:
        return _without_speed(row, NOT_FINITE), None, tokens
    held = {"cache_bytes": cache_bytes(cache), "peak_bytes": machine.peak_memory()}
    row = Row("prefill", 1, tokens.shape[1], tokens.shape[1], seconds, **held)
    return row, cache, logits.argmax(-1, keepdim=True)


def prefill(model: MoeLcForCausalLM, tokens: torch.Tensor, chunk: int, cache: DynamicCache) -> Iterator[torch.Tensor]:
    """Fills `cache` with `tokens` `[1, P]`, and yields the last hidden states `[1, T, D]` of each chunk."""
    for part in tokens.split(chunk, dim=1):
        yield model.model(part, past_key_values=cache, use_cache=True).last_hidden_state


class Decoder:
    """`batch` sequences that all go on behind the one in `cache`, each with `next_token` `[1, 1]`, for `room` tokens."""

    def __init__(self, model, cache: DynamicCache, next_token: torch.Tensor, batch: int, room: int):
        self.model, seen = model, cache.get_seq_length()
        self.cache = fixed_size(cache, model.config, room, batch)
        self.ids = next_token.repeat(batch, 1)  # [B, 1]
        self.position = torch.full((1,), seen, device=self.ids.device)
        self.slots = torch.arange(seen + room, device=self.ids.device)
        self.logits = torch.empty(0)  # of the last step

    def step(self) -> None:
        """The logits `[B, vocabulary]` of the token in `ids`, and in its place the most likely next one.

        Launches kernels and waits for none, so that a CUDA graph can hold it.
        """
        visible = (self.slots <= self.position).expand(len(self.ids), 1, 1, -1)  # [B, 1, 1, S]
        mask = {"full_attention": visible, "linear_attention": None}
        output = self.model(self.ids, attention_mask=mask, past_key_values=self.cache, use_cache=True)
        self.logits = output.logits[:, -1]
        self.ids.copy_(self.logits.argmax(-1, keepdim=True))
        self.position += 1


def measure_decode(machine, model, cache, last: torch.Tensor, batch: int, new: int, as_graph: bool) -> Row:
    """`new` tokens of each sequence, after a step that warms up (and one more where a graph is captured)."""
    what = f"decode, {GRAPH if as_graph else LAUNCHED}"
    row = Row(what, batch, cache.get_seq_length())
    try:
        machine.start_memory()
        decoder = Decoder(model, cache, last, batch, new + 2)
        decoder.step()
        step = machine.graph([decoder.step]) if as_graph else decoder.step
        machine.synchronize()
        begun = time.perf_counter()
        for _ in range(new):
            step()
        machine.synchronize()
        seconds = time.perf_counter() - begun
    except torch.OutOfMemoryError:
        return _without_speed(row, OUT_OF_MEMORY)
    if not decoder.logits.isfinite().all():
        return _without_speed(row, NOT_FINITE)
    held = {"cache_bytes": cache_bytes(decoder.cache), "peak_bytes": machine.peak_memory()}
    return Row(what, batch, row.context, batch * new, seconds, **held)


@torch.no_grad()
def check_short(machine, model: MoeLcForCausalLM, batch: int, as_graph: bool) -> float:
    """The largest relative error of one token's logits: prefilled in chunks and decoded, against prefilled at once.

    Each token takes the experts that it took at once: where two are nearly as good, rounding would choose among them.
    """
    tokens = random_tokens(model, CHECKED_PROMPT + CHECKED_NEW, seed=2)
    with fixed_choice(model) as choice:
        expected = model(tokens, use_cache=False).logits[0, CHECKED_PROMPT - 1 :]
        cache = DynamicCache(config=model.config)
        choice.positions = torch.arange(CHECKED_CHUNK, device=tokens.device)
        for hidden in prefill(model, tokens[:, :CHECKED_PROMPT], CHECKED_CHUNK, cache):
            choice.positions = choice.positions + CHECKED_CHUNK
        errors = [relative_error(model.lm_head(hidden[0, -1]), expected[0])]

        decoder = Decoder(model, cache, tokens[:, CHECKED_PROMPT, None], batch, CHECKED_NEW)
        choice.positions = decoder.position
        step: Callable[[], object] = decoder.step
        first = 1
        if as_graph:  # capturing it makes the step of the first token
            step, first = machine.graph([decoder.step]), 2
        for given, wanted in zip(tokens[0, CHECKED_PROMPT + first - 1 :], expected[first:], strict=True):
            decoder.ids.fill_(given)
            step()
            errors += [relative_error(logits, wanted) for logits in decoder.logits]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


class Choice:
    """The experts `[T, k]` that the tokens of one sequence took in each router, and which `positions` `[T]` come next."""

    def __init__(self) -> None:
        self.taken: dict[Router, torch.Tensor] = {}
        self.positions: torch.Tensor | None = None

    def __call__(self, router: Router, inputs, found):
        """Hook of a router: keeps what it finds first, and afterwards puts that in the place of what it finds."""
        logits, _, indices = found
        if router not in self.taken:
            self.taken[router] = indices
            return found
        indices = self.taken[router].index_select(0, self.positions)  # [T, k]
        indices = indices if len(indices) == len(logits) else indices.expand(len(logits), -1)  # one token of a batch
        weights = logits.sigmoid().gather(-1, indices)
        if router.config.moe_renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * router.config.routed_scaling_factor, indices


@contextlib.contextmanager
def fixed_choice(model: nn.Module) -> Iterator[Choice]:
    choice = Choice()
    handles = [module.register_forward_hook(choice) for module in model.modules() if isinstance(module, Router)]
    try:
        yield choice
    finally:
        for handle in handles:
            handle.remove()


def cache_bytes(cache) -> int:
    tensors = []
    for layer in cache.layers:
        of_attention = (getattr(layer, "keys", None), getattr(layer, "values", None))
        of_kda = (*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values())
        tensors += [t for t in (*of_attention, *of_kda) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors)


def _without_speed(row: Row, why: str) -> Row:
    return Row(row.what, row.batch, row.context, skipped=why)


def _report(row: Row, args: argparse.Namespace, machine, weights: int) -> None:
    line = f"{row.what:17}{row.batch:6}{row.context:10,}"
    if row.seconds is None:
        tqdm.write(f"{line}  {row.skipped}")
    else:
        rate, ms = row.tokens / row.seconds, 1e3 * row.seconds / row.tokens * row.batch
        memory = f"{row.cache_bytes / 1e9:10.3f}{row.peak_bytes / 1e9:9.2f}"
        tqdm.write(f"{line}{rate:12,.1f}{ms:11.4f}{memory}")
    if args.output is not None:
        origin = {"device": machine.name, **{name: installed_version(name) for name in ("torch", "triton")}}
        made = {"preset": args.preset, "layers": args.layers, "experts": args.experts, "weight_bytes": weights}
        with args.output.open("a") as file:
            file.write(
                json.dumps(asdict(row) | made | {"chunk": args.chunk} | origin | {"command": args.command}) + "\n"
            )
