"""What importing the package adds to the registries of transformers. Every call is idempotent."""

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .gated_mla import eager_attention_forward
from .latent_moe import triton_experts_forward
from .quantizer_mxfp4 import register_quantizer


def register_backends() -> None:
    """Values of `attn_implementation` and of `experts_implementation`.

    "moe_lc_reference": every operator by its definition in torch. "moe_lc_triton": by its Triton kernel where it has one,
    which full-length MLA has not: that is "sdpa". As experts alone: the Triton kernels, whatever the attention key says.
    """
    AttentionInterface.register("moe_lc_reference", eager_attention_forward)
    AttentionMaskInterface.register("moe_lc_reference", sdpa_mask)
    AttentionInterface.register("moe_lc_triton", sdpa_attention_forward)
    AttentionMaskInterface.register("moe_lc_triton", sdpa_mask)
    ExpertsInterface.register("moe_lc_triton", triton_experts_forward)
    register_quantizer()
