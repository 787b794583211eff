"""The public face of MXFP4."""

import torch

from ..checks import check_floating
from ..dispatch import choose
from .reference import (
    BLOCK,
    dequantize_mxfp4_reference,
    quantize_mxfp4_reference,
    requantize_mxfp4_reference,
)


DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # that the Triton kernels read and write


def quantize_mxfp4(w: torch.Tensor, *, impl: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    """Each value to the nearest of +-{0, 0.5, 1, 1.5, 2, 3, 4, 6} times the power of two of its block.

    Args:
        w: [..., N] of any floating dtype, N a multiple of 32; 32 consecutive values are a block.
        impl: "auto", "triton" or "reference".

    Returns:
        packed: [..., N / 2] uint8, the code of value 2i in the low half of byte i, that of 2i + 1 in the high half.
        scales: [..., N / 32] uint8, s for 2^(s - 127): floor(log2(max |w|)) - 2, at least -127. Ties go to the even
            code, what is above 6 becomes 6, signs stay (also of zero). A block without any other value than zero has
            scale 0. A block that holds an infinity or a NaN has scale 255, which is NaN, and codes 0.

    Raises:
        ValueError: no floating dtype, N not a multiple of 32, an implementation that cannot run here.

    Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3, 5.4 and 6.3.
    """
    _check_values(w)
    if choose(impl, w, triton=True) == "triton" and _triton_takes("w", w.dtype, impl):
        from .fused import quantize_mxfp4_fused

        return quantize_mxfp4_fused(w)
    return quantize_mxfp4_reference(w)


def requantize_mxfp4(w: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_mxfp4`, but a block that its given scale holds exactly keeps it: unchanged weights get back their bytes.

    The standard's scale is the smallest one that holds the largest value of a block. A checkpoint may use another rule.

    Args:
        w: [..., N] as in `quantize_mxfp4`.
        scales: [..., N / 32] uint8.

    Returns:
        As `quantize_mxfp4`. No rounding hides in a block that keeps its scale. A NaN block has codes 0.

    Raises:
        ValueError: as `quantize_mxfp4`; scales of another shape or dtype.
    """
    _check_values(w)
    _check_bytes("scales", scales, [*w.shape[:-1], w.shape[-1] // BLOCK])
    return requantize_mxfp4_reference(w, scales)


def dequantize_mxfp4(
    packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, *, impl: str = "auto"
) -> torch.Tensor:
    """The values of MXFP4 codes, multiplied in FP32 (FP64 for FP64) and rounded once to `dtype`.

    Args:
        packed: [..., N / 2] uint8, as `quantize_mxfp4` returns it.
        scales: [..., N / 32] uint8.
        dtype: of the result. BF16 and FP32 hold every value up to scale 252; FP64 holds all.
        impl: "auto", "triton" or "reference".

    Returns:
        [..., N] in `dtype`. A block of scale 255 is NaN.

    Raises:
        ValueError: dtypes or shapes that do not fit, an implementation that cannot run here.
    """
    if packed.ndim == 0 or packed.shape[-1] % (BLOCK // 2):
        raise ValueError(f"packed: expected [..., N / 2] with N a multiple of {BLOCK}, got {list(packed.shape)}")
    _check_bytes("packed", packed, list(packed.shape))
    _check_bytes("scales", scales, [*packed.shape[:-1], packed.shape[-1] // (BLOCK // 2)])
    if not dtype.is_floating_point:
        raise ValueError(f"dtype: expected a floating point dtype, got {dtype}")
    if choose(impl, packed, triton=True) == "triton" and _triton_takes("dtype", dtype, impl):
        from .fused import dequantize_mxfp4_fused

        return dequantize_mxfp4_fused(packed, scales, dtype)
    return dequantize_mxfp4_reference(packed, scales, dtype)


def _check_values(w: torch.Tensor) -> None:
    check_floating("w", w)
    if w.ndim == 0 or w.shape[-1] % BLOCK:
        raise ValueError(f"w: expected [..., N] with N a multiple of {BLOCK}, got {list(w.shape)}")


def _check_bytes(name: str, tensor: torch.Tensor, shape: list[int]) -> None:
    if tensor.dtype != torch.uint8 or list(tensor.shape) != shape:
        raise ValueError(f"{name}: expected uint8 of shape {shape}, got {tensor.dtype} of {list(tensor.shape)}")


def _triton_takes(name: str, dtype: torch.dtype, impl: str) -> bool:
    """Whether the kernels know `dtype`; ValueError where "triton" was asked for and they do not."""
    if dtype not in DTYPES and impl == "triton":
        raise ValueError(
            f"impl: 'triton' was asked for, but {name}: expected bfloat16, float16 or float32, got {dtype}"
        )
    return dtype in DTYPES
