"""The experts on packed weights on a GPU: the launches of `kernels/experts`, whose products dequantise a tile in registers.

The weights are read four bits a value in both directions, and no dequantised copy exists. A few tokens that need no gradients
take the path of `fused_decode.py`.
"""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..dispatch import for_descriptors
from ..experts.fused import Call, run
from ..experts.fused import supports as supports_plain
from ..experts.fused_tiles import Tile
from .fused_decode import launch_decode


class PackedCall(Call):
    """`gate_up_proj` and `down_proj` are bytes, [E, 2I, D / 2] and [E, D, I / 2], and have their scales beside them."""

    def prepare(self, *projections: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Bytes and scales of both projections, in this order."""
        # Contiguous tensors may have any stride along a dimension of one element, descriptors may not.
        prepared = tuple(map(for_descriptors, projections))
        self.gate_up_proj, self.gate_up_scales, self.down_proj, self.down_scales = prepared
        self.E, _, width = self.down_proj.shape
        self.I = 2 * width
        return prepared

    def paired_tiles(self, rows: int, columns: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        codes = self.gate_up_proj.view(self.E, 2, self.I, self.D // 2).transpose(1, 2)  # [E, I, 2, D / 2]
        scales = self.gate_up_scales.view(self.E, self.D // 32, 2, self.I)
        return (
            TensorDescriptor.from_tensor(codes, [1, rows // 2, 2, columns // 2]),
            TensorDescriptor.from_tensor(scales, [1, columns // 32, 2, rows // 2]),
        )

    def down_tiles(self, rows: int, columns: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        return (
            TensorDescriptor.from_tensor(self.down_proj, [1, rows, columns // 2]),
            TensorDescriptor.from_tensor(self.down_scales, [1, columns // 32, rows]),
        )

    def tile(self, depth: int, columns: int, **longest: int) -> Tile:
        return packed_tile(self.BM, self.x.dtype)


def packed_tile(BM: int, dtype: torch.dtype) -> Tile:
    """Two programs on a multiprocessor: one dequantises while the other one multiplies."""
    return Tile(BM, 64, 32, 4, 1) if dtype == torch.float32 else Tile(BM, 128, 64, 4, 3)


def supports(x: torch.Tensor, indices: torch.Tensor, gate_up_packed: torch.Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None when they can."""
    refused = supports_plain(x, indices, gate_up_packed)
    return refused and refused.replace("gate_up_proj", "gate_up_packed")


# A break of the graph where no operator of torch stands for it (`custom_ops.py`): a descriptor cannot be traced.
@torch.compiler.disable
def expert_mlp_mxfp4_fused(
    x, indices, weights, gate_up_packed, gate_up_scales, down_packed, down_scales, beta, linear_beta
):
    """Arguments and results as in `experts.expert_mlp_mxfp4`."""
    tensors = x, indices, weights, gate_up_packed, gate_up_scales, down_packed, down_scales
    return run(PackedCall, launch_decode, tensors, beta, linear_beta)
