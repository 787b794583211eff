"""Configuration of the text model. Field names are the released ones, so a released `config.json` reads without renaming."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from .checks import (
    check_layers,
    check_mla,
    check_moe,
    check_multimodal,
    check_released_constants,
    check_residuals,
    check_router_balance,
    check_sizes,
    check_vision,
    expect,
    strict_errors_as_value_errors,
)
from .expert_quantization import QUANT_METHOD, ReleasedQuantization, check_expert_quantization, moved_into


ROUTER_BALANCE_DEFAULTS = {"method": "quantile", "ema": 0.0, "bins": 1000, "eta": 1e-3, "high": 0.9, "low": 0.1}
CHECKPOINT_LAYOUTS = ("kimi_k3", "kimi_linear")
VISION_NORM_EPS = 2.0**-23  # the released tower builds its norms without an eps: torch takes that of FP32 since 2.6
MLA_LATENT_NORM_EPS = 1e-6  # the released MLA builds its low-rank norms without an eps: not `rms_norm_eps`


@strict_errors_as_value_errors
@strict
class MoeLcTextConfig(ReleasedQuantization, PreTrainedConfig):
    r"""
    Configuration of [`MoeLcTextModel`] and [`MoeLcForCausalLM`]: Kimi-K3, Kimi-Linear and everything between.

    Every accepted field changes the graph; inconsistent values raise a `ValueError` that names the field. Sizes are
    counts of channels, heads, experts or tokens.

    Args:
        linear_attn_config (`dict`, *optional*):
            Kimi Delta Attention: `num_heads`, `head_dim`, `short_conv_kernel_size`, `use_full_rank_gate`,
            `gate_lower_bound` (None: softplus gate) and the 1-based lists `kda_layers` and `full_attn_layers`, which
            together name every layer once. Without lists every fourth layer and the last are full attention.
        layer_types (`list[str]`, *optional*):
            Derived, 0-based: `"linear_attention"` (KDA) or `"full_attention"` (MLA) for every layer.
        attn_res_block_size (`int`, *optional*):
            Decoder layers per block of the Block Attention Residuals; None: ordinary residual connections.
        hidden_act (`str`): `"situ"` (SiTU-GLU) or `"silu"` (SwiGLU), in dense, shared and routed MLPs.
        activation_situ_beta (`float`, *optional*): cap of the gate branch of SiTU; None means 1.0.
        activation_situ_linear_beta (`float`, *optional*): cap of the up branch of SiTU; None leaves it as it is.
        routed_expert_hidden_size (`int`, *optional*): width of the latent of LatentMoE; None: experts in full width.
        latent_moe_use_norm (`bool`): RMSNorm between the sum of the experts and the up projection of the latent.
        q_lora_rank (`int`, *optional*): rank of the query projection of MLA; None: one full projection.
        mla_use_output_gate (`bool`): sigmoid gate on the output of MLA.
        router_balance (`dict`, *optional*):
            `method` (`"quantile"`, `"load_quantile"`, `"sign"`, `"none"`), `ema` (0 to 1, or `"auto"`), `bins`, `eta`,
            `high`, `low`; missing keys take their defaults.
        kda_implementation (`str`, *optional*):
            `"auto"`, `"triton"`, `"reference"` or a name registered with `KDAInterface`; None: follows
            `attn_implementation`.
        loss_chunk_size (`int`, *optional*):
            Tokens per chunk of the training loss, so that the logits of a long sequence never exist at once (then
            `logits` is None in training with labels). None: ordinary logits.
        checkpoint_layout (`str`): `"kimi_k3"` or `"kimi_linear"`: shapes and dtypes that `save_pretrained` writes.
        expert_quantization (`dict`, *optional*):
            How the experts are stored: None as they are, or in MXFP4. On disk it is the released `quantization_config`,
            whose `ignore` list is kept but not consulted: nothing but the routed experts is quantised.
    """

    model_type = "moe_lc_text"
    base_config_key = "text_config"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
        "n_group": "num_expert_group",
        "norm_topk_prob": "moe_renormalize",
        "model_max_length": "max_position_embeddings",
    }
    # Heads and MLP widths are split; norms, low-rank inputs, router, latent projections and AttnRes stay whole. The
    # expert-parallel plan differs between versions of transformers: modeling_moe_lc/parallel_plans.py.
    base_model_tp_plan = {
        "embed_tokens": "embedding_rowwise",
        "layers.*.self_attn": "moe_lc_heads",
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.f_b_proj": "colwise",
        "layers.*.self_attn.b_proj": "colwise",
        "layers.*.self_attn.g_proj": "colwise",
        "layers.*.self_attn.g_b_proj": "colwise",
        "layers.*.self_attn.q_b_proj": "colwise",
        "layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
        "layers.*.self_attn.kv_b_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_up_proj": "moe_lc_gate_up",
        "layers.*.mlp.down_proj": "rowwise",
        "layers.*.block_sparse_moe.shared_experts.gate_up_proj": "moe_lc_gate_up",
        "layers.*.block_sparse_moe.shared_experts.down_proj": "rowwise",
        "layers.*.block_sparse_moe.experts.gate_up_proj": "moe_lc_gate_up",
        "layers.*.block_sparse_moe.experts.down_proj": "rowwise",
        "layers.*.block_sparse_moe.experts": "moe_tp_experts",
    }

    vocab_size: int = 163840
    hidden_size: int = 2304
    num_hidden_layers: int = 27
    intermediate_size: int = 9216
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    linear_attn_config: dict | None = None
    layer_types: list[str] | None = None

    attn_res_block_size: int | None = None
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 1048576

    hidden_act: str = "silu"
    activation_situ_beta: float | int | None = None
    activation_situ_linear_beta: float | int | None = None

    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    mla_use_nope: bool = True
    mla_use_output_gate: bool = False

    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    num_experts: int = 256
    num_experts_per_token: int = 8
    num_shared_experts: int | None = 1
    moe_intermediate_size: int = 1024
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    moe_router_activation_func: str = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float | int = 1.0
    topk_method: str = "noaux_tc"
    use_grouped_topk: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    num_nextn_predict_layers: int = 0
    output_router_logits: bool = False

    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    router_balance: dict | None = None
    kda_implementation: str | None = None
    loss_chunk_size: int | None = None
    checkpoint_layout: str = "kimi_k3"
    expert_quantization: dict | None = None

    def __post_init__(self, **kwargs):
        check_released_constants(self, kwargs)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        check_sizes(self)
        self.linear_attn_config, self.layer_types = check_layers(self)
        check_residuals(self)
        check_mla(self)
        check_moe(self)
        self.router_balance = check_router_balance(self, ROUTER_BALANCE_DEFAULTS)
        if self.checkpoint_layout not in CHECKPOINT_LAYOUTS:
            raise ValueError(
                f"checkpoint_layout: expected one of {CHECKPOINT_LAYOUTS}, got {self.checkpoint_layout!r}"
            )
        self.expert_quantization = check_expert_quantization(self, kwargs)
        super().__post_init__(**kwargs)
        if self.expert_quantization is not None:
            # By this transformers finds our quantiser, and not the one that the released field names.
            self.quantization_config = {"quant_method": QUANT_METHOD, "dequantize": True}

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads a `config.json`; that of a released checkpoint becomes one of ours: the text part, and its layout."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return released_text_config(config_dict), kwargs

    @property
    def glu_caps(self) -> tuple[float | None, float | None]:
        """`(beta, linear_beta)` of the gated activation, None where a branch is not capped: SwiGLU caps neither."""
        if self.hidden_act == "silu":
            return None, None
        beta = 1.0 if self.activation_situ_beta is None else self.activation_situ_beta
        return beta, self.activation_situ_linear_beta

    @property
    def expert_hidden_size(self) -> int:
        """Width that the routed experts read and write."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the one MLP that stands for all shared experts; 0 when there is none."""
        return self.moe_intermediate_size * (self.num_shared_experts or 0)

    def is_sparse_layer(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx` (0-based) routes to experts; the others have a dense MLP."""
        return layer_idx >= self.first_k_dense_replace and layer_idx % self.moe_layer_freq == 0


def released_text_config(config_dict: dict[str, Any]) -> dict[str, Any]:
    """The text fields of a config dict in our model type; a K3 one is nested, a Kimi-Linear one flat."""
    if isinstance(config_dict.get("text_config"), dict):
        text = {"checkpoint_layout": "kimi_k3", **config_dict["text_config"]}
        for field in ("dtype", "quantization_config"):  # some writers put these one level up
            if field not in text and field in config_dict:
                text[field] = config_dict[field]
    elif config_dict.get("model_type") == "kimi_linear":
        text = {"checkpoint_layout": "kimi_linear", **config_dict}
    else:
        return config_dict
    text.pop("auto_map", None)  # names the released remote code, which these classes replace
    if text.get("model_type") != MoeLcTextConfig.model_type:
        text |= {"model_type": MoeLcTextConfig.model_type, "architectures": ["MoeLcForCausalLM"]}
    return text


@strict_errors_as_value_errors
@strict
class MoeLcVisionConfig(PreTrainedConfig):
    r"""
    Configuration of [`MoeLcVisionModel`], the vision tower, and of the projector behind it; released field names.

    Args:
        patch_size (`int`): side of a patch in pixels.
        init_pos_emb_height, init_pos_emb_width (`int`):
            Rows and columns of the learned position grid, which is resized to the grid of each picture.
        init_pos_emb_time (`int`): frames of the fixed time table, the most that one media item may have.
        qkv_hidden_size (`int`): width of all attention heads together, independent of `vt_hidden_size`.
        merge_kernel_size (`list[int]`): rows and columns of patches that become one token.
        mm_hidden_size (`int`, *optional*): width that the projector reads; it is `vt_hidden_size`.
        text_hidden_size (`int`, *optional*): width that the projector writes, that of the text model.
        rms_norm_eps (`float`): eps of the norms in the tower; not a released field.
    """

    model_type = "moe_lc_vision"
    base_config_key = "vision_config"
    attribute_map = {
        "hidden_size": "vt_hidden_size",
        "num_hidden_layers": "vt_num_hidden_layers",
        "num_attention_heads": "vt_num_attention_heads",
        "intermediate_size": "vt_intermediate_size",
    }

    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    init_pos_emb_time: int = 4
    pos_emb_type: str = "divided_fixed"
    pos_emb_interpolation_mode: str = "bilinear"

    vt_num_attention_heads: int = 12
    vt_num_hidden_layers: int = 27
    vt_hidden_size: int = 1024
    vt_intermediate_size: int = 4096
    qkv_hidden_size: int = 1536
    activation_func: str = "gelu_pytorch_tanh"
    norm_type: str = "rmsnorm"
    mlp_type: str = "mlp2"
    attn_bias: bool = False
    linear_bias: bool = False
    patch_embed_proj_bias: bool = False

    merge_kernel_size: list[int] | tuple[int, int] = (2, 2)
    merge_type: str = "sd2_tpool"
    mm_projector_type: str = "patchmergerv2"
    mm_hidden_size: int | None = None
    text_hidden_size: int | None = None
    projector_hidden_act: str = "gelu"
    projector_ln_eps: float = 1e-5

    rms_norm_eps: float = VISION_NORM_EPS
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs):
        kwargs.pop("_attn_implementation", None)  # the release names the backend that it was trained with
        if self.mm_hidden_size is None:
            self.mm_hidden_size = self.vt_hidden_size
        self.merge_kernel_size = list(self.merge_kernel_size)
        check_vision(self)
        super().__post_init__(**kwargs)

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.qkv_hidden_size // self.vt_num_attention_heads

    @property
    def patches_per_token(self) -> int:
        """Patches of one frame that become one token of the text model."""
        return self.merge_kernel_size[0] * self.merge_kernel_size[1]


@strict_errors_as_value_errors
@strict
class MoeLcConfig(ReleasedQuantization, PreTrainedConfig):
    r"""
    Configuration of [`MoeLcModel`] and [`MoeLcForConditionalGeneration`]: a text model that reads pictures.

    Args:
        text_config (`MoeLcTextConfig` or `dict`, *optional*): the text model.
        vision_config (`MoeLcVisionConfig` or `dict`, *optional*): tower and projector.
        media_placeholder_token_id (`int`): the token in whose place a feature of a picture stands.
        image_placeholder (`str`): text that a processor replaces by the tokens of a picture.
        tie_word_embeddings, pad_token_id, bos_token_id, eos_token_id (*optional*): those of `text_config`.
    """

    model_type = "moe_lc"
    sub_configs = {"text_config": MoeLcTextConfig, "vision_config": MoeLcVisionConfig}
    attribute_map = {"image_token_id": "media_placeholder_token_id"}
    keys_to_ignore_at_inference = ["past_key_values"]

    text_config: Any = None  # after __post_init__ a MoeLcTextConfig
    vision_config: Any = None  # likewise a MoeLcVisionConfig
    media_placeholder_token_id: int = 163605
    image_placeholder: str = "<|kimi_image_placeholder|>"
    ignore_index: int = -100
    tie_word_embeddings: bool | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        if not isinstance(self.text_config, MoeLcTextConfig):
            self.text_config = MoeLcTextConfig(**moved_into(self.text_config or {}, kwargs))
        if not isinstance(self.vision_config, MoeLcVisionConfig):
            self.vision_config = MoeLcVisionConfig(**(self.vision_config or {}))
        if self.vision_config.text_hidden_size is None:
            self.vision_config.text_hidden_size = self.text_config.hidden_size
        for field in ("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(self, field) is None:
                setattr(self, field, getattr(self.text_config, field))
        check_multimodal(self)
        super().__post_init__(**kwargs)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads a `config.json`; that of a released K3 checkpoint becomes one of ours."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return released_config(config_dict), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """As in transformers; a released K3 dict becomes one of ours, also where an Auto class has read the file."""
        return super().from_dict(released_config(config_dict), **kwargs)


class KimiK3Config(MoeLcConfig):
    """The key under which Auto classes find a K3 `config.json`.

    What they read is a [`MoeLcConfig`], or without a `vision_config` a [`MoeLcTextConfig`].
    """

    model_type = "kimi_k3"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        if config_dict.get("vision_config") is None:
            return MoeLcTextConfig.from_dict(released_text_config(config_dict), **kwargs)
        return MoeLcConfig.from_dict(config_dict, **kwargs)


def released_config(config_dict: dict[str, Any]) -> dict[str, Any]:
    """The config dict of a released K3 checkpoint in our model types; any other dict as it is.

    Raises `ValueError` where the checkpoint is a text model: no tower stands in its files.
    """
    if config_dict.get("model_type") != KimiK3Config.model_type:
        return config_dict
    vision = config_dict.get("vision_config")
    expect(vision is not None, "vision_config", "that of a tower (MoeLcTextConfig reads a text model)", vision)
    ours = {key: value for key, value in config_dict.items() if key != "auto_map"}  # it names the code we replace
    return {
        **ours,
        "model_type": MoeLcConfig.model_type,
        "architectures": ["MoeLcForConditionalGeneration"],
        "text_config": released_text_config(config_dict),
    }
