"""What importing the package adds to the registries of transformers. Every call is idempotent."""

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from .gated_mla import eager_attention_forward


def register_backends() -> None:
    """`attn_implementation="moe_lc_reference"`: every operator by its definition in torch."""
    AttentionInterface.register("moe_lc_reference", eager_attention_forward)
    AttentionMaskInterface.register("moe_lc_reference", sdpa_mask)
