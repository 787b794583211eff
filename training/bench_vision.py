"""`moe-lc bench vision`: images a second through the vision tower and its projector, beside the same tower with attention
image by image, and the share of the rate of a large matrix product.

BF16, square images packed into batches of so many patches. Features are compared with FP64 on a few small images, and
between the two towers at full size: where they differ, neither gets a speed.
"""

import argparse
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from ..configuration.configuration_moe_lc import MoeLcVisionConfig
from ..configuration.presets import load_multimodal_preset, multimodal_preset_names
from ..modeling_moe_lc_vl import MoeLcVisionModel
from ..vision import MAX_SIDE, PositionGrid, Projector
from .bench import OURS, Cuda, Measurement, Report, finish, measure, relative_error
from .bench_kda_implementations import BACKWARD, FORWARD
from .flops import vision_flops


PLAIN = "SDPA, image by image"
PARTS = {"forward": FORWARD, "backward": BACKWARD}
SIDES, MIXED, PATCHES = (448, 896, 1344, 1792), "mixed", 65536
SHARPNESS = 2.0  # of attention: without it far patches hardly count, and a wrong border would change nothing
CHECKED_ROWS_COLUMNS = ((2, 3), (4, 4), (5, 2))  # of tokens
LIMITS = {"o": 4e-2, "d pixels": 8e-2, "d parameters": 8e-2, "o at size": 5e-2, "not finite": 0.0}
NOTES = """
of floor: time in which a large matrix product, at {matmul:.0f} TFLOP/s, would do all multiplications, those of attention
included, over the time taken. forward + backward: gradients of all parameters. extra GB: peak memory of a call beyond them."""


@dataclass(frozen=True)
class VisionMeasurement(Measurement):
    """`kind`: the side of the images in pixels, or mixed."""

    images_per_second: float | None = None


class Features(nn.Module):
    """Tower and projector without the model around them."""

    def __init__(self, config: MoeLcVisionConfig):
        super().__init__()
        self.tower = MoeLcVisionModel._from_config(config)
        self.projector = Projector(config)

    def forward(self, pixel_values: torch.Tensor, grid_thws: torch.Tensor) -> torch.Tensor:
        """`[L, 3, p, p]`, `[images, 3]` -> `[tokens, width of the text model]`."""
        return self.projector(self.tower(pixel_values, grid_thws).pooler_output)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, presets = parser.add_argument, multimodal_preset_names()
    add("--preset", default="kimi-k3", choices=presets, metavar="NAME", help="(default: %(default)s)")
    add("--sides", type=int, nargs="+", default=SIDES, metavar="PIXELS", help="of images (default: %(default)s)")
    add("--patches", type=int, default=PATCHES, help="of a batch, at most (default: %(default)s)")
    add("--only", nargs="+", default=list(PARTS), metavar="PART", help=f"some of {', '.join(PARTS)} (default: all)")
    add("--quick", action="store_true", help="the first of the sides alone")
    add("--output", type=Path, help="file to which one JSON line is appended for each measurement")


def check_arguments(args: argparse.Namespace) -> None:
    if unknown := [part for part in args.only if part not in PARTS]:
        raise ValueError(f"only: expected some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    config = load_multimodal_preset(args.preset).vision_config
    step = config.patch_size * math.lcm(*config.merge_kernel_size)
    for side in args.sides:
        if side % step or not 0 < side <= MAX_SIDE * config.patch_size:
            raise ValueError(
                f"sides: expected multiples of {step}, at most {MAX_SIDE * config.patch_size}, got {side}"
            )
    largest = max((side // config.patch_size) ** 2 for side in args.sides)
    if args.patches < largest:
        raise ValueError(f"patches: expected at least the {largest} of the largest image, got {args.patches}")
    if args.quick:
        args.sides = args.sides[:1]


def run(args: argparse.Namespace) -> int:
    check_arguments(args)
    machine = Cuda()
    built = build(load_multimodal_preset(args.preset).vision_config, machine.device)
    return bench(args, machine, {PLAIN: image_by_image(built), OURS: built})


def bench(args: argparse.Namespace, machine, compared: dict[str, Features]) -> int:
    """Measures every size with every tower; returns the exit status, 1 where one was wrong."""
    config = compared[OURS].tower.config
    directions = [direction for part, direction in PARTS.items() if part in args.only]
    cases = batches(config, args.sides, args.patches)
    short = check_short(compared, machine.device, BACKWARD in directions)
    total = len(cases) * len(directions) * len(compared)
    with Report(machine.name, args.command, args.output, total, rival="SDPA") as report:
        for kind, grids in cases.items():
            for direction in directions:
                measure_case(machine, compared, short, kind, grids.to(machine.device), direction, report)
        tqdm.write(NOTES.format(matmul=machine.matmul_rate / 1e12))
    return int(report.wrong > 0)


def build(config: MoeLcVisionConfig, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Features:
    """Random weights with which every layer changes its input by as much as it is, and attention chooses."""
    torch.manual_seed(0)
    with torch.device(device):
        built = Features(config)
        for module in built.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
            elif isinstance(module, PositionGrid):
                nn.init.normal_(module.weight)
    with torch.no_grad():
        for block in built.tower.encoder.blocks:
            block.wqkv.weight[: 2 * config.qkv_hidden_size] *= SHARPNESS**0.5  # queries and keys
    return built.to(dtype)


def image_by_image(built: Features) -> Features:
    """The same tower with one call of SDPA for each image in place of one launch for all."""
    plain = copy.deepcopy(built)
    plain.tower.set_attn_implementation("sdpa")
    for block in plain.tower.encoder.blocks:
        block.is_flash = lambda q: False
    return plain


def batches(config: MoeLcVisionConfig, sides: Sequence[int], patches: int) -> dict[str, torch.Tensor]:
    """Grids `[images, 3]` by kind: of each side as many images as `patches` allow; of several sides, turn by turn, too."""
    in_patches = [side // config.patch_size for side in sides]
    found = {str(side): [n] * (patches // n**2) for side, n in zip(sides, in_patches, strict=True)}
    if len(sides) > 1 and (rounds := patches // sum(n**2 for n in in_patches)):
        found[MIXED] = in_patches * rounds
    return {kind: torch.tensor([(1, n, n) for n in images]) for kind, images in found.items()}


def make_pixels(config: MoeLcVisionConfig, grids: torch.Tensor, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(grids.device).manual_seed(seed)
    shape = int(grids.prod(-1).sum()), 3, config.patch_size, config.patch_size
    return torch.randn(shape, generator=generator, device=grids.device, dtype=torch.bfloat16)


def measure_case(machine, compared: dict[str, Features], short, kind: str, grids, direction: str, report) -> None:
    config = compared[OURS].tower.config
    pixels = make_pixels(config, grids)
    times = 3 if direction == BACKWARD else 1
    floor = 1e3 * times * vision_flops(config, grids) / machine.matmul_rate
    case = {"images": len(grids), "patches": len(pixels)}
    difference = cache(partial(difference_at_size, compared, pixels, grids))
    rows: list[Measurement] = []
    for name, features in compared.items():
        row = VisionMeasurement("vision", case, kind, direction, name, is_rival=name != OURS)
        check = partial(_errors, short[name], difference, direction)
        call = partial(gradients if direction == BACKWARD else forward, features, pixels, grids)
        row = measure(row, machine, check, LIMITS, [call])
        assert isinstance(row, VisionMeasurement)  # `measure` only fills it in
        if row.ms is not None and row.extra_bytes is not None:
            kept = sum(p.numel() * p.element_size() for p in features.parameters()) if times == 3 else 0
            speed = 1e3 * len(grids) / row.ms
            row = replace(row, extra_bytes=max(0, row.extra_bytes - kept), images_per_second=speed)
        rows.append(row)
        finish(rows, floor, report)
        if row.images_per_second is not None:
            tqdm.write(f"    {row.images_per_second:,.1f} images/s")


def _errors(short, difference, direction: str) -> dict[str, float]:
    errors = short()
    if direction == FORWARD:
        errors = {"o": errors["o"]}
    return errors | {"o at size": difference()}


@torch.no_grad()
def forward(features: Features, pixels: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
    return [features(pixels, grids)]


def gradients(features: Features, pixels: torch.Tensor, grids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Those of all parameters."""
    o = features(pixels, grids)
    return torch.autograd.grad(o, list(features.parameters()), cotangent(o))


def cotangent(o: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(o.device).manual_seed(1)
    return torch.randn(o.shape, generator=generator, device=o.device, dtype=torch.bfloat16).to(o.dtype)


def difference_at_size(compared: dict[str, Features], pixels: torch.Tensor, grids: torch.Tensor) -> float:
    """The largest relative difference between the features of one image."""
    tokens = (grids.prod(-1) // compared[OURS].tower.config.patches_per_token).tolist()
    [ours], [plain] = (forward(compared[name], pixels, grids) for name in (OURS, PLAIN))
    errors = [relative_error(a, b) for a, b in zip(ours.split(tokens), plain.split(tokens), strict=True)]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def check_short(compared: dict[str, Features], device: torch.device, with_gradients: bool):
    """For each tower, a function that returns errors on a few small images and computes them but once."""
    config = compared[OURS].tower.config
    rows, columns = config.merge_kernel_size
    grids = torch.tensor([(1, rows * h, columns * w) for h, w in CHECKED_ROWS_COLUMNS], device=device)
    pixels = make_pixels(config, grids)
    reference = copy.deepcopy(compared[OURS]).double()
    reference.tower.set_attn_implementation("moe_lc_reference")
    expected = results(reference, pixels.double(), grids, with_gradients)

    def errors(features: Features) -> dict[str, float]:
        found = results(features, pixels, grids, with_gradients)
        each = {name: relative_error(found[name], t) for name, t in expected.items()}
        named = {name: error for name, error in each.items() if name in LIMITS}
        return named | _worst("d parameters", [error for name, error in each.items() if name not in LIMITS])

    return {name: cache(partial(errors, features)) for name, features in compared.items()}


def _worst(name: str, errors: list[float]) -> dict[str, float]:
    if not errors:
        return {}
    return {name: math.nan if any(map(math.isnan, errors)) else max(errors)}


def results(features: Features, pixels: torch.Tensor, grids: torch.Tensor, with_gradients: bool):
    """Features and, where wanted, the gradients of the pixels and of every parameter by name."""
    if not with_gradients:
        return {"o": forward(features, pixels, grids)[0]}
    leaves = {"d pixels": pixels.detach().requires_grad_(), **dict(features.named_parameters())}
    o = features(leaves["d pixels"], grids)
    found = torch.autograd.grad(o, list(leaves.values()), cotangent(o))
    return {"o": o.detach(), **dict(zip(leaves, found, strict=True))}
