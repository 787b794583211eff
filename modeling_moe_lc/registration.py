"""What importing the package adds to the registries of transformers. Every call is idempotent."""

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .gated_mla import eager_attention_forward


def register_backends() -> None:
    """Values of `attn_implementation`.

    "moe_lc_reference": every operator by its definition in torch. "moe_lc_triton": by its Triton kernel where it has one,
    which MLA has not: its full-length attention is that of "sdpa".
    """
    AttentionInterface.register("moe_lc_reference", eager_attention_forward)
    AttentionMaskInterface.register("moe_lc_reference", sdpa_mask)
    AttentionInterface.register("moe_lc_triton", sdpa_attention_forward)
    AttentionMaskInterface.register("moe_lc_triton", sdpa_mask)
