"""`moe-lc bench layer`: forward and backward of one decoder layer: launched, its kernels alone, and as a CUDA graph.

BF16, one sequence, four finished blocks beside the running sum; layers as released widths have them. Only a layer whose
output and input gradients agree with the same layer in FP64 on a few tokens is timed.
"""

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from tqdm import tqdm

from ..configuration.configuration_moe_lc import MoeLcTextConfig
from ..configuration.presets import load_preset
from ..modeling_moe_lc import MoeLcDecoderLayer, MoeLcPreTrainedModel
from .bench import OURS, Cuda, Measurement, Report, finish, measure, relative_error
from .bench_kda_implementations import BACKWARD


BACKENDS = {OURS: "moe_lc_triton", "reference": "moe_lc_reference"}
WALL, KERNELS, GRAPH = "eager", "kernels", "graph"
ATTENTIONS = {"KDA": 1, "MLA": 3}  # the index of such a layer in every preset; none of them starts a block
BLOCKS, TOKENS, CHECKED_TOKENS = 4, 8192, 256
PROFILED_CALLS = 4
LIMITS = {"o": 2e-2, "choice": 0.1, "not finite": 0.0, "running sum": 2e-2}
LIMITS |= {f"block {i}": 2e-2 for i in range(BLOCKS)}
RECORDED_ON, PUBLIC = "H200", "public parts"
NOTES = """
eager: median time of a call between two synchronisations. kernels: sum of the times of its kernels. graph: the call captured
as one CUDA graph and replayed. of floor: the sum of the kernels over the time taken. vs public: time of the best public
composition, measured before on one H200 and not in this run, over this one's; its 1b-a200m layer with MLA took 8 to 11 ms.
extra GB: peak memory of a call without the gradients. The layer in FP64 is given the choice of experts of the one compared;
where it would itself have chosen more than a tenth of them otherwise, that is wrong, too."""


@dataclass(frozen=True)
class Layer:
    """A preset, what differs from it, and the best public composition: attention to ms (wall, kernels) and extra GB."""

    preset: str
    changes: dict = field(default_factory=dict)
    lower_bound: float = -5.0  # of KDA's gate
    with_reference: bool = True
    recorded: dict[str, tuple[float, float, float]] = field(default_factory=dict)

    def config(self, backend: str) -> MoeLcTextConfig:
        linear = load_preset(self.preset).linear_attn_config
        config = load_preset(
            self.preset, **self.changes, linear_attn_config={**linear, "gate_lower_bound": self.lower_bound}
        )
        config._attn_implementation, config._experts_implementation = backend, "eager"
        return config


SITU = {"hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
LAYERS = {
    "1b-a200m": Layer("1b-a200m", recorded={"KDA": (15.0, 4.05, 0.79), "MLA": (8.0, 3.95, 0.62)}),
    "kimi-linear": Layer(
        "kimi-linear-48b-a3b",
        SITU | {"attn_res_block_size": 4},
        recorded={"KDA": (19.4, 19.1, 2.65), "MLA": (19.8, 19.1, 1.32)},
    ),
    "k3-112-experts": Layer(
        "kimi-k3",
        {"num_experts": 112},
        with_reference=False,
        recorded={"KDA": (118.9, 113.0, 7.94), "MLA": (105.0, 109.0, 4.57)},
    ),
}


@dataclass(frozen=True)
class LayerMeasurement(Measurement):
    """`kind` is what was timed; `kernels`, where they were: their ms a call by name, the longest first."""

    kernels: dict[str, float] = field(default_factory=dict)


class Device(Cuda):
    """Takes time as a user does: from a call to its end on the device, launches included."""

    def _times(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        times = []
        for call in calls:
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        return times

    def kernels(self, call: Callable[[], object]) -> dict[str, float]:
        """ms of each kernel in a call, by name, the longest first."""
        call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(PROFILED_CALLS):
                call()
            torch.cuda.synchronize()
        # Calls of the driver are among them, which take no time on the device.
        events = [event for event in profile.key_averages() if event.device_time_total > 0]
        times = {event.key: event.device_time_total / 1e3 / PROFILED_CALLS for event in events}
        return dict(sorted(times.items(), key=lambda item: -item[1]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--layers", nargs="+", default=list(LAYERS), metavar="LAYER", help="(default: %(default)s)")
    add("--attentions", nargs="+", default=list(ATTENTIONS), metavar="KIND", help="(default: %(default)s)")
    add("--tokens", type=int, default=TOKENS, help="of the one sequence (default: %(default)s)")
    add("--top", type=int, default=10, metavar="N", help="print so many of our kernels (default: %(default)s)")
    add("--quick", action="store_true", help="the first of the layers alone")
    add("--output", type=Path, help="file to which one JSON line is appended for each measurement")


def check_arguments(args: argparse.Namespace) -> None:
    for name, known in (("layers", LAYERS), ("attentions", ATTENTIONS)):
        if unknown := [value for value in getattr(args, name) if value not in known]:
            raise ValueError(f"{name}: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    for name, least in (("tokens", 1), ("top", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"{name}: expected a number of at least {least}, got {getattr(args, name)}")
    if args.quick:
        args.layers = args.layers[:1]


def run(args: argparse.Namespace) -> int:
    check_arguments(args)
    return bench(args, Device())


def bench(args: argparse.Namespace, machine) -> int:
    """Measures every layer; returns the exit status, 1 where one was wrong."""
    plan = [
        (LAYERS[name], attention, backend)
        for name in args.layers
        for attention in args.attentions
        for backend in BACKENDS
        if backend == OURS or LAYERS[name].with_reference
    ]
    total = sum(len(_kinds(backend)) for _, _, backend in plan)
    with Report(machine.name, args.command, args.output, total, rival="public") as report:
        for layer, attention, backend in plan:
            public = _recorded(layer, attention, args.tokens, machine.name)
            if backend == OURS:
                for row in public.values():
                    finish([row], layer.recorded[attention][1], report)
            rows = measure_layer(machine, layer, attention, backend, args.tokens)
            for row in rows:
                # A replay stands in place of launched calls: they are what it is compared with.
                rival = public.get(WALL if row.kind == GRAPH else row.kind)
                finish([row] if rival is None else [rival, row], sum(rows[1].kernels.values()), report)
            if backend == OURS:
                _write_kernels(rows[1].kernels, args.top)
        tqdm.write(NOTES)
    return int(report.wrong > 0)


def _kinds(backend: str) -> tuple[str, ...]:
    """The reference cannot be captured: its experts wait for the device."""
    return (WALL, KERNELS, GRAPH) if backend == OURS else (WALL, KERNELS)


def _row(layer: Layer, attention: str, tokens: int, kind: str, implementation: str, **values) -> LayerMeasurement:
    config = layer.config(BACKENDS[OURS])
    case = {"D": config.hidden_size, "H": config.num_attention_heads, "E": config.num_experts}
    case |= {"k": config.num_experts_per_token, "T": tokens}
    return LayerMeasurement(f"layer {attention}", case, kind, BACKWARD, implementation, **values)


def _recorded(layer: Layer, attention: str, tokens: int, device: str) -> dict[str, LayerMeasurement]:
    if RECORDED_ON not in device or attention not in layer.recorded or tokens != TOKENS:
        return {}
    wall, kernels, gigabytes = layer.recorded[attention]
    row = _row(layer, attention, tokens, WALL, PUBLIC, recorded=True, is_rival=True)
    return {
        WALL: replace(row, ms=wall, extra_bytes=round(1e9 * gigabytes)),
        KERNELS: replace(row, kind=KERNELS, ms=kernels),
    }


def measure_layer(machine, layer: Layer, attention: str, backend: str, tokens: int) -> list[LayerMeasurement]:
    """One measurement for each of `_kinds`; where one is wrong or out of memory, all say so."""
    config = layer.config(BACKENDS[backend])
    row = _row(layer, attention, tokens, WALL, backend)
    try:
        built = build(config, attention, machine.device, torch.bfloat16)
        sources, cotangent = make_inputs(config, tokens, machine.device)
        call = partial(gradients, built, sources, cotangent)
        check = partial(check_short, built, attention, machine.device)
        measured = measure(row, machine, check, LIMITS, [call])
        assert isinstance(measured, LayerMeasurement)  # `measure` only fills it in
        row = measured
        if row.ms is None or row.extra_bytes is None:
            return [replace(row, kind=kind) for kind in _kinds(backend)]
        kept = sum(x.numel() * x.element_size() for x in (*sources, *built.parameters()))
        kernels = machine.kernels(call)
        other = replace(row, extra_bytes=None)
        rows = [
            replace(row, extra_bytes=max(0, row.extra_bytes - kept)),
            replace(other, kind=KERNELS, ms=sum(kernels.values()), kernels=kernels),
        ]
        if GRAPH in _kinds(backend):
            rows.append(replace(other, kind=GRAPH, ms=machine.median_ms([machine.graph([call])])))
        return rows
    except torch.OutOfMemoryError:
        return [replace(row, kind=kind, ms=None, skipped="out of memory") for kind in _kinds(backend)]


def build(config: MoeLcTextConfig, attention: str, device: torch.device, dtype: torch.dtype) -> MoeLcDecoderLayer:
    """A layer in training mode, initialised as the model does; but queries that are not zero, as they are once trained."""
    torch.manual_seed(0)
    with torch.device(device):
        layer = MoeLcDecoderLayer(config, ATTENTIONS[attention])
        layer.apply(partial(MoeLcPreTrainedModel._init_weights, SimpleNamespace(config=config)))
        for site in (layer.self_attention_res, layer.mlp_res):
            torch.nn.init.normal_(site.query, std=config.initializer_range)
    return layer.to(dtype).train()


def make_inputs(config: MoeLcTextConfig, tokens: int, device: torch.device):
    """The finished blocks, then the running sum, all with gradients; and the cotangent of the layer's output."""
    generator = torch.Generator(device).manual_seed(1)
    shape = BLOCKS + 2, 1, tokens, config.hidden_size
    *sources, cotangent = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).unbind()
    return [x.clone().requires_grad_() for x in sources], cotangent.clone()


def gradients(layer: MoeLcDecoderLayer, sources, cotangent) -> tuple[torch.Tensor, ...]:
    """Those of all sources and parameters."""
    *blocks, running = sources
    output = layer(running, *blocks)[0]
    return torch.autograd.grad(output, [*sources, *layer.parameters()], cotangent)


def check_short(layer: MoeLcDecoderLayer, attention: str, device: torch.device) -> dict[str, float]:
    """Relative errors of output and input gradients against the same layer in FP64, which chooses the same experts.

    Left to itself it would choose others wherever two are nearly as good, and differ in whole experts.
    """
    config = copy.deepcopy(layer.self_attn.config)
    config._attn_implementation = "moe_lc_reference"
    reference = build(config, attention, device, torch.float64).requires_grad_(False)
    reference.load_state_dict(layer.state_dict())

    sources, cotangent = make_inputs(config, CHECKED_TOKENS, device)
    chosen: list[torch.Tensor] = []
    handle = layer.block_sparse_moe.gate.register_forward_hook(lambda gate, x, found: chosen.append(found[2]))
    found = _output_and_gradients(layer, sources, cotangent)
    handle.remove()
    [indices] = chosen
    reference.block_sparse_moe.gate.register_forward_hook(partial(_choose, indices, chosen))
    expected = _output_and_gradients(reference, [x.detach().double() for x in sources], cotangent.double())
    errors = {name: relative_error(found[name], x) for name, x in expected.items()}
    same = (indices[:, :, None] == chosen[-1][:, None, :]).any(-1)  # [N, k]
    differ = 1 - same.double().mean().item()
    if differ > LIMITS["choice"]:  # a share of experts, which would hide relative errors among which it were named
        errors["choice"] = differ
    return errors


def _choose(indices: torch.Tensor, own: list[torch.Tensor], gate, inputs, found):
    """In place of a router's own choice, which `own` receives, the experts `indices` [N, k] with its scores."""
    logits, _, chosen = found
    own.append(chosen)
    weights = logits.sigmoid().gather(-1, indices)
    if gate.config.moe_renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return logits, weights * gate.config.routed_scaling_factor, indices


def _output_and_gradients(layer: MoeLcDecoderLayer, sources, cotangent) -> dict[str, torch.Tensor]:
    *blocks, running = sources = [x.detach().requires_grad_() for x in sources]
    output = layer(running, *blocks)[0]
    found = torch.autograd.grad(output, sources, cotangent)
    names = *(f"block {i}" for i in range(BLOCKS)), "running sum"
    return {"o": output.detach(), **dict(zip(names, found, strict=True))}


def _write_kernels(kernels: dict[str, float], top: int) -> None:
    for name, ms in list(kernels.items())[:top]:
        tqdm.write(f"    {ms:8.4f} ms  {ms / sum(kernels.values()):4.0%}  {name[:90]}")
