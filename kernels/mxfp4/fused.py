"""MXFP4 on a GPU: one launch in each direction, bound by memory, equal to the reference to the bit.

Exponents are read and made as bits: no logarithm, no power, and no flush of subnormal numbers.
"""

import torch
import triton
import triton.language as tl

from ..dispatch import on_device_of


BLOCKS = 64  # blocks of 32 values in a program: 16 values in each of 128 threads
NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def power_of_two(byte):
    """FP32 2^(byte - 127) for an int32 from 0 to 254, and NaN for 255: 2^-127 is subnormal."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, NAN_BITS, bits).to(tl.float32, bitcast=True)


@triton.jit
def value_of(code):
    """FP32 value of a code 0 ... 15 in int32: sign, two bits of exponent (bias 1), one of fraction."""
    exponent, fraction, sign = (code >> 1) & 3, code & 1, (code & 8) << 28
    bits = tl.where(exponent > 0, ((exponent + 126) << 23) | (fraction << 22), fraction * 0x3F000000)
    return (bits | sign).to(tl.float32, bitcast=True)


@triton.jit
def nearest_code(ratio):
    """Code 0 ... 7 in int32 of a magnitude; ties to the even code, everything above 5 to 7."""
    code = (ratio > 0.25).to(tl.int32) + (ratio >= 0.75).to(tl.int32) + (ratio > 1.25).to(tl.int32)
    code += (ratio >= 1.75).to(tl.int32) + (ratio > 2.5).to(tl.int32) + (ratio >= 3.5).to(tl.int32)
    return code + (ratio > 5.0).to(tl.int32)


@triton.jit(do_not_specialize=("blocks",))
def mxfp4_kernel_dequantize(
    packed,  # [blocks, 16]
    scales,  # [blocks]
    w,  # [blocks, 32]
    blocks,
    BM: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BM
    m, byte, value = tl.arange(0, BM)[:, None], tl.arange(0, 16)[None, :], tl.arange(0, 32)[None, :]
    there = m < blocks - first
    codes = tl.load(packed + first * 16 + (m * 16 + byte), mask=there, other=0).to(tl.int32)  # [BM, 16]
    scale = power_of_two(tl.load(scales + first + m, mask=there, other=0).to(tl.int32))  # [BM, 1]
    pairs = tl.join(value_of(codes & 15) * scale, value_of(codes >> 4) * scale)  # [BM, 16, 2]
    tl.store(w + first * 32 + (m * 32 + value), pairs.reshape(BM, 32).to(w.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=("blocks",))
def mxfp4_kernel_quantize(
    w,  # [blocks, 32]
    packed,  # [blocks, 16]
    scales,  # [blocks]
    blocks,
    BM: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BM
    m, byte, value = tl.arange(0, BM)[:, None], tl.arange(0, 16)[None, :], tl.arange(0, 32)[None, :]
    there = m < blocks - first
    x = tl.load(w + first * 32 + (m * 32 + value), mask=there, other=0.0).to(tl.float32)  # [BM, 32]
    bits = x.to(tl.int32, bitcast=True)
    # Magnitudes compare as integers, infinities above all numbers and NaN above these.
    exponent = tl.max(bits & 0x7FFFFFFF, axis=1) >> 23  # [BM]: of the largest magnitude, with its bias of 127
    scale = tl.where(exponent == 255, 255, tl.maximum(exponent - 2, 0))
    inverse = ((254 - tl.minimum(scale, 253)) << 23).to(tl.float32, bitcast=True)[:, None]
    codes = nearest_code(tl.abs(x) * inverse) | ((bits >> 28) & 8)
    codes = tl.where((scale == 255)[:, None], 0, codes)
    low, high = tl.split(codes.reshape(BM, 16, 2))
    tl.store(packed + first * 16 + (m * 16 + byte), (low | (high << 4)).to(tl.uint8), mask=there)
    each = tl.arange(0, BM)
    tl.store(scales + first + each, scale.to(tl.uint8), mask=each < blocks - first)


def quantize_mxfp4_fused(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and results as in `api.quantize_mxfp4`."""
    w, rows = w.detach().contiguous(), w.shape[:-1]
    packed = torch.empty(*rows, w.shape[-1] // 2, dtype=torch.uint8, device=w.device)
    scales = torch.empty(*rows, w.shape[-1] // 32, dtype=torch.uint8, device=w.device)
    if blocks := scales.numel():
        with on_device_of(w):
            grid = (triton.cdiv(blocks, BLOCKS),)
            mxfp4_kernel_quantize[grid](w, packed, scales, blocks, BM=BLOCKS, num_warps=4)
    return packed, scales


def dequantize_mxfp4_fused(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Arguments and results as in `api.dequantize_mxfp4`."""
    packed, scales = packed.contiguous(), scales.contiguous()
    w = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=dtype, device=packed.device)
    if blocks := scales.numel():
        with on_device_of(packed):
            grid = (triton.cdiv(blocks, BLOCKS),)
            mxfp4_kernel_dequantize[grid](packed, scales, w, blocks, BM=BLOCKS, num_warps=4)
    return w
