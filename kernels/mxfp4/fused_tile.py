"""A tile of packed weights, dequantised in registers: equal to `dequantize_mxfp4`, to the bit."""

import triton
import triton.language as tl

from .fused import power_of_two, value_of


# Eight codes of a word to four pairs of BF16, and the scale. A code s e1 e0 f moved to s 000000 e1 e0 f 000000 is a BF16 of
# 2^-126 times its value, also where e is 0: both formats count subnormal numbers in the same way. The low byte of it depends on
# e0 f, the high one on s e1, so that one permutation of a table's eight bytes looks up four of them.
# lop3 0xEA is (a & b) | c. 0x7E80 is 2^126; two products, since not all scales times 2^126 are numbers of BF16.
DECODE = tl.constexpr("""
{
    .reg .b32 low, high, low2, high2, l, h, l2, h2, table, table2, up;
    mov.b32 table, 0xC0804000;
    mov.b32 table2, 0x81800100;
    mov.b32 up, 0x7E807E80;
    and.b32 low, $4, 0x33333333;
    shr.u32 high, $4, 2;
    lop3.b32 high, high, 0x33333333, 0x44444444, 0xEA;
    shr.u32 low2, low, 16;
    shr.u32 high2, high, 16;
    prmt.b32 l, table, table2, low;
    prmt.b32 h, table, table2, high;
    prmt.b32 l2, table, table2, low2;
    prmt.b32 h2, table, table2, high2;
    prmt.b32 $0, l, h, 0x5140;
    prmt.b32 $1, l, h, 0x7362;
    prmt.b32 $2, l2, h2, 0x5140;
    prmt.b32 $3, l2, h2, 0x7362;
    mul.bf16x2 $0, $0, up;
    mul.bf16x2 $1, $1, up;
    mul.bf16x2 $2, $2, up;
    mul.bf16x2 $3, $3, up;
    mul.bf16x2 $0, $0, $5;
    mul.bf16x2 $1, $1, $5;
    mul.bf16x2 $2, $2, $6;
    mul.bf16x2 $3, $3, $6;
}
""")


@triton.jit
def dequantized(codes, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """[ROWS, COLUMNS] in DTYPE of bytes `codes` [ROWS, COLUMNS / 2] and `scales` [ROWS, COLUMNS / 32]."""
    GROUPS: tl.constexpr = COLUMNS // 32
    byte = scales.to(tl.int32)
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = tl.where(byte == 0, 0x0040, tl.where(byte == 255, 0x7FC0, byte << 7)).to(tl.int16)
        scale = tl.broadcast_to(bits.to(tl.bfloat16, bitcast=True)[:, :, None], (ROWS, GROUPS, 16))
        pairs = tl.inline_asm_elementwise(
            DECODE, "=&r,=&r,=&r,=&r,r,r,r", [codes, tl.reshape(scale, (ROWS, COLUMNS // 2))],
            dtype=tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
        low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return tl.reshape(tl.join(low, high), (ROWS, COLUMNS))
    else:
        scale = tl.broadcast_to(power_of_two(byte)[:, :, None], (ROWS, GROUPS, 16))
        scale = tl.reshape(scale, (ROWS, COLUMNS // 2))
        both = codes.to(tl.int32)
        pairs = tl.join(value_of(both & 15) * scale, value_of(both >> 4) * scale)
        return tl.reshape(pairs, (ROWS, COLUMNS)).to(DTYPE)
