"""The multimodal model: the vision tower and its projector in front of the text model.

Pictures come as patches packed over the whole batch; their features stand in place of the placeholder tokens, in order.
"""

from typing import Unpack

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MoeCausalLMOutputWithPast,
    MoeModelOutputWithPast,
)
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .cache import holds_tokens
from .configuration.configuration_moe_lc import MoeLcConfig, MoeLcVisionConfig
from .inputs import check_tokens
from .modeling_moe_lc import LanguageModelHead, MoeLcPreTrainedModel, MoeLcTextModel
from .released_names import register_multimodal_names
from .vision import Media, PatchEmbed, PositionGrid, Projector, VisionBlock, VisionEncoder, merged_patches


class MoeLcMultimodalPreTrainedModel(MoeLcPreTrainedModel):
    """What transformers asks of every model class, for those with a vision tower."""

    config: MoeLcConfig
    config_class = MoeLcConfig
    input_modalities: tuple[str, ...] = ("image", "text")
    _no_split_modules = ["MoeLcDecoderLayer", "VisionBlock"]
    _keys_to_ignore_on_load_unexpected: list[str] | None = None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (PositionGrid, nn.Conv2d)):
            init.normal_(module.weight, std=self.config.get_text_config().initializer_range)
        else:
            super()._init_weights(module)


class MoeLcVisionModel(MoeLcMultimodalPreTrainedModel):
    """The vision tower (MoonViT-V2)."""

    config: MoeLcVisionConfig
    config_class = MoeLcVisionConfig
    base_model_prefix = "vision_tower"  # so that it reads the folder of a whole model
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _no_split_modules = ["VisionBlock"]
    _keys_to_ignore_on_load_unexpected = [r"^language_model\.", r"^mm_projector\."]
    _can_record_outputs = {
        "hidden_states": OutputRecorder(VisionBlock, index=0),
        "attentions": OutputRecorder(VisionBlock, index=1),
    }

    def __init__(self, config: MoeLcVisionConfig):
        super().__init__(config)
        self.patch_embed = PatchEmbed(config)
        self.encoder = VisionEncoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.patch_embed

    @capture_outputs
    def forward(
        self, pixel_values: torch.Tensor, grid_thws: torch.Tensor, **kwargs: Unpack[TransformersKwargs]
    ) -> BaseModelOutputWithPooling:
        r"""
        Args:
            pixel_values: `[L, 3, patch, patch]`, normalised; the patches of all items, frames, then rows, then columns.
            grid_thws: `[items, 3]` int64, frames, rows and columns of each item in patches.

        `last_hidden_state` `[L, D]`; `pooler_output` `[tokens, patches per token, D]`, the mean over the frames. Maps
        of attention, where asked for, are a tuple over the items for each block. Raises `ValueError` when the grids do
        not describe the patches, or an item has too many frames or a side that does not divide into tokens.
        """
        media = Media.of(grid_thws, pixel_values.shape[0], self.config)
        hidden_states = self.encoder(self.patch_embed(pixel_values, media.shapes), media)  # [L, D]
        merged = merged_patches(hidden_states, media, self.config.merge_kernel_size)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=merged)


class MoeLcModel(MoeLcMultimodalPreTrainedModel):
    """Tower, projector and decoder, without a head."""

    def __init__(self, config: MoeLcConfig):
        super().__init__(config)
        self.vision_tower = MoeLcVisionModel._from_config(config.vision_config)
        self.mm_projector = Projector(config.vision_config)
        self.language_model = MoeLcTextModel._from_config(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language_model.set_input_embeddings(value)

    @can_return_tuple
    def get_image_features(
        self, pixel_values: torch.Tensor, grid_thws: torch.Tensor, **kwargs: Unpack[TransformersKwargs]
    ) -> BaseModelOutputWithPooling:
        """What the tower returns, with `pooler_output` the projected features of each item, `[tokens, width]` each.

        An item of `h` rows and `w` columns has `h * w / patches per token` features, however many frames it has.
        """
        outputs = self.vision_tower(pixel_values, grid_thws, **{**kwargs, "return_dict": True})
        tokens = media_tokens(grid_thws, self.config.vision_config).tolist()
        outputs.pooler_output = self.mm_projector(outputs.pooler_output).split(tokens)
        return outputs

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        pixel_values: torch.Tensor | None = None,
        grid_thws: torch.Tensor | None = None,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoeModelOutputWithPast:
        r"""
        Args:
            pixel_values, grid_thws: as in [`MoeLcVisionModel`], the items of all rows in the order of their placeholders.
            mm_encoder_outputs: what `get_image_features` returned, under "image", instead of pixels.

        Other arguments: [`MoeLcTextModel`]. Raises `ValueError` when there are not as many placeholders as features.
        """
        check_tokens(input_ids, inputs_embeds)
        if (pixel_values is None) != (grid_thws is None):
            given = "pixel_values" if grid_thws is None else "grid_thws"
            raise ValueError(f"pixel_values, grid_thws: expected both or none, got only {given}")
        media = (mm_encoder_outputs or {}).get("image")
        if media is not None and pixel_values is not None:
            raise ValueError("pixel_values, mm_encoder_outputs: expected at most one of them, got both")
        if pixel_values is not None:
            media = self.get_image_features(pixel_values, grid_thws, return_dict=True)

        embeds = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds  # [B, T, D]
        if media is not None:
            embeds = self.with_features(embeds, input_ids, torch.cat(list(media.pooler_output)))
        elif input_ids is not None and self.starts_a_text(past_key_values):
            check_counts(0, self.placeholders(input_ids, None).sum())
        return self.language_model(
            inputs_embeds=embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )

    def starts_a_text(self, cache: Cache | None) -> bool:
        """Whether a forward without pictures is the first one, and not compiled: then no placeholder may wait for features."""
        kinds = self.config.text_config.layer_types
        return not torch.compiler.is_compiling() and (cache is None or not holds_tokens(cache, kinds))

    def placeholders(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """`[B, T]`: where features belong; without ids: where the embedding of the placeholder stands."""
        token = self.config.media_placeholder_token_id
        if input_ids is not None:
            return input_ids == token
        embedding = self.get_input_embeddings()(torch.tensor(token, device=inputs_embeds.device))
        return (inputs_embeds == embedding.to(inputs_embeds.dtype)).all(-1)

    def with_features(self, embeds: torch.Tensor, input_ids: torch.Tensor | None, features: torch.Tensor):
        """`[B, T, D]` with the features `[tokens, D]` in place of the placeholders, in order."""
        mask = self.placeholders(input_ids, embeds)
        check_counts(features.shape[0], mask.sum())
        return embeds.masked_scatter(mask[..., None].to(embeds.device), features.to(embeds.device, embeds.dtype))


class MoeLcForConditionalGeneration(LanguageModelHead, MoeLcMultimodalPreTrainedModel, GenerationMixin):
    """The multimodal model with its language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: MoeLcConfig):
        super().__init__(config)
        self.model = MoeLcModel(config)
        self.vocab_size = config.text_config.vocab_size
        self.lm_head = nn.Linear(config.text_config.hidden_size, self.vocab_size, bias=False)
        self.post_init()

    def get_image_features(self, pixel_values: torch.Tensor, grid_thws: torch.Tensor, **kwargs):
        """Those of [`MoeLcModel`]."""
        return self.model.get_image_features(pixel_values, grid_thws, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        pixel_values: torch.Tensor | None = None,
        grid_thws: torch.Tensor | None = None,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        mm_token_type_ids: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MoeCausalLMOutputWithPast:
        r"""
        Args:
            mm_token_type_ids: what processors can return; the placeholders say the same, so it is not used.

        Other arguments: [`MoeLcModel`] and [`MoeLcForCausalLM`].
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            pixel_values=pixel_values,
            grid_thws=grid_thws,
            mm_encoder_outputs=mm_encoder_outputs,
            **kwargs,
        )
        return self.with_head(outputs, labels, logits_to_keep, **kwargs)

    def prepare_inputs_for_generation(self, *args, inputs_embeds=None, **kwargs):
        """As in transformers, which drops pixels after the prefill but does not know their grids, and looks for the name of
        `inputs_embeds` here."""
        inputs = super().prepare_inputs_for_generation(*args, inputs_embeds=inputs_embeds, **kwargs)
        if inputs.get("pixel_values") is None:
            inputs.pop("grid_thws", None)
        return inputs

    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=False, input_ids=None, **kwargs):
        """Beams and several answers: transformers before 5.23 would repeat patches one by one, not the items of a row."""
        if expand_size == 1:  # ids may be those of a whole chat then, whose earlier pictures a cache holds
            return input_ids, kwargs
        pixels, grids = kwargs.pop("pixel_values", None), kwargs.pop("grid_thws", None)
        encoded = (kwargs.get("mm_encoder_outputs") or {}).get("image")
        if pixels is not None or encoded is not None:
            embeds = kwargs.get("inputs_embeds")
            found = self.model.placeholders(input_ids if embeds is None else None, embeds).sum(-1)  # [B]
            if encoded is not None:
                rows_of_items(found.new_tensor([len(item) for item in encoded.pooler_output]), found)
            else:
                rows = rows_of_items(media_tokens(grids, self.config.vision_config), found)
                pixels, grids = repeated_media(pixels, grids, rows, expand_size)
        input_ids, kwargs = super()._expand_inputs_for_generation(
            expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **kwargs
        )
        return input_ids, kwargs if pixels is None else {**kwargs, "pixel_values": pixels, "grid_thws": grids}


def media_tokens(grid_thws: torch.Tensor, config: MoeLcVisionConfig) -> torch.Tensor:
    """`[items]`: placeholders of each item of `grid_thws` `[items, 3]`."""
    return grid_thws[:, 1] * grid_thws[:, 2] // config.patches_per_token


def rows_of_items(tokens: torch.Tensor, placeholders: torch.Tensor) -> torch.Tensor:
    """`[items]`: the row of the batch that each item stands in, from the placeholders `[B]` of the rows.

    Raises `ValueError` when the numbers differ, or when an item would begin in one row and end in another.
    """
    check_counts(int(tokens.sum()), placeholders.sum())
    ends = tokens.cumsum(0)
    if not torch.isin(placeholders.cumsum(0)[placeholders > 0], ends).all():
        raise ValueError(
            "input_ids: expected rows whose placeholders belong to whole media items, "
            f"got rows of {placeholders.tolist()} placeholders and items of {tokens.tolist()} features"
        )
    return torch.searchsorted(placeholders.cumsum(0), ends)


def repeated_media(pixels: torch.Tensor, grids: torch.Tensor, rows: torch.Tensor, times: int):
    """Patches and grids with the items of each row, as a group, `times` times in a row."""
    patches = pixels.split(grids.prod(-1).tolist())
    groups = [(rows == row).nonzero()[:, 0].tolist() for row in rows.unique_consecutive().tolist()]
    order = [item for group in groups for item in group * times]
    return torch.cat([patches[item] for item in order]), grids[order]


def check_counts(features: int, placeholders: torch.Tensor) -> None:
    if features != placeholders:
        raise ValueError(
            "input_ids: expected as many media placeholders as features of the media, "
            f"got {int(placeholders)} placeholders and {features} features"
        )


def freeze_vision(model: MoeLcModel | MoeLcForConditionalGeneration) -> None:
    """The tower stops learning, and costs no memory in the backward pass; the projector goes on."""
    model.base_model.vision_tower.requires_grad_(False)


register_multimodal_names(MoeLcConfig.model_type)
