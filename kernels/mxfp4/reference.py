"""MXFP4 in torch: the definition. Exact wherever FP32 (FP64 for FP64) holds the values."""

import torch

from ..dispatch import compute_dtype, without_autocast


BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*MAGNITUDES, *(-m for m in MAGNITUDES))  # of the sixteen codes, -0.0 among them
BIAS, NAN_SCALE = 127, 255
LARGEST_EXPONENT = 2  # of E2M1: 4 = 2^2
# Halfway points between neighbours, and whether a tie goes up: to the neighbour with an even code.
MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


@without_autocast
def quantize_mxfp4_reference(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of `w` [..., N]; see `quantize_mxfp4`."""
    blocks = w.to(compute_dtype(w)).unflatten(-1, (-1, BLOCK))  # [..., N / 32, 32]
    scales = smallest_scales(blocks)
    return encode(blocks, scales).flatten(-2), scales


@without_autocast
def requantize_mxfp4_reference(w: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of `w` [..., N], with the given scale of every block that it holds exactly; see `requantize_mxfp4`."""
    blocks = w.to(compute_dtype(w)).unflatten(-1, (-1, BLOCK))  # [..., N / 32, 32]
    packed = encode(blocks, scales)  # [..., N / 32, 16]
    again = dequantize_mxfp4_reference(packed.flatten(-2), scales, w.dtype).to(blocks.dtype).view_as(blocks)
    kept = (again == blocks).all(-1)
    scales = torch.where(kept, scales, smallest_scales(blocks))
    packed = torch.where(kept[..., None], packed, encode(blocks, scales))
    return packed.flatten(-2), scales


@without_autocast
def dequantize_mxfp4_reference(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values [..., N] of `packed` [..., N / 2]; see `dequantize_mxfp4`."""
    # A value is one of 16 times a power of two: BF16 holds it as exactly as FP32.
    inside = dtype if dtype in (torch.float64, torch.bfloat16) else torch.float32
    values = torch.tensor(VALUES, dtype=inside, device=packed.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)  # [256, 2] by byte: low code first
    if inside == torch.bfloat16:
        pairs = pairs.view(torch.int32).flatten()  # the two values of a byte move as one: five times as fast
    decoded = pairs.index_select(0, packed.flatten().int()).view(inside).view(*scales.shape, BLOCK)
    return decoded.mul_(powers(scales, inside)[..., None]).flatten(-2).to(dtype)


def powers(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """2^(scale - 127) for bytes of any shape, the NaN of scale 255."""
    table = torch.tensor([2.0 ** (byte - BIAS) for byte in range(NAN_SCALE)] + [float("nan")], dtype=torch.float64)
    return table.to(scales.device, dtype).index_select(0, scales.flatten().int()).view(scales.shape)


def smallest_scales(blocks: torch.Tensor) -> torch.Tensor:
    """[..., N / 32] scale bytes of the standard for `blocks` [..., N / 32, 32]: floor(log2(amax)) less the 2 of E2M1."""
    amax = blocks.abs().amax(-1)
    exponent = torch.frexp(amax).exponent - 1  # floor(log2(amax)), also of subnormal numbers
    byte = (exponent - LARGEST_EXPONENT + BIAS).clamp(0, NAN_SCALE - 1)
    byte = byte.masked_fill(amax == 0, 0).masked_fill(~amax.isfinite(), NAN_SCALE)
    return byte.to(torch.uint8)


def encode(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[..., N / 32, 16] bytes: `blocks` [..., N / 32, 32] over their scales, to the nearest code, ties to even, at most 6."""
    inverse = powers((2 * BIAS - scales.int()).clamp_min(0).to(torch.uint8), blocks.dtype)[..., None]
    ratio = blocks.abs() * inverse
    codes = torch.zeros(blocks.shape, dtype=torch.uint8, device=blocks.device)
    for midpoint, ties_go_up in MIDPOINTS:
        codes += ratio >= midpoint if ties_go_up else ratio > midpoint
    codes += 8 * blocks.signbit()
    codes.masked_fill_(scales[..., None] == NAN_SCALE, 0)
    return codes[..., ::2] | codes[..., 1::2] << 4
