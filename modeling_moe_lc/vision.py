"""MoonViT-V2 and its projector: pictures and short clips of any size, packed patch by patch, become tokens of the text model.

L  patches of all media items, end to end: frames outermost, then rows, then columns
D  width of the tower, H heads of K channels, p side of a patch in pixels, m patches merged into a token
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .backends import operator_impl
from .configuration.configuration_moe_lc import MoeLcVisionConfig
from .gated_mla import eager_attention_forward
from .norm import RMSNorm


MAX_SIDE = 512  # rows or columns of patches that the released rotary table has
ROTARY_BASE = 10000.0
TIME_BASE = 10000.0
LARGE_RUN = 2048  # patches of neighbours of one length that are worth a launch of their own


class Media(NamedTuple):
    """Where the media items of a packed batch begin and end, and where in its item each patch stands.

    `shapes`: frames, rows and columns of each item in patches. `cu_seqlens` `[items + 1]` int32: its borders among the
    patches. `rows`, `columns` `[L]` int64: the place of each patch in its frame. `merged`, int64, one for each patch of
    each item's first frame: its place when the patches of a token stand side by side, tokens in rows, then columns.
    """

    shapes: list[tuple[int, int, int]]
    cu_seqlens: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    merged: torch.Tensor

    @classmethod
    def of(cls, grid_thws: torch.Tensor, patches: int, config: MoeLcVisionConfig) -> "Media":
        """From `grid_thws` `[items, 3]`; raises `ValueError` where it does not fit the patches or the tower."""
        shapes = checked_shapes(grid_thws, patches, config)
        frames, heights, widths = grid_thws.unbind(1)
        areas = heights * widths
        cu_seqlens = F.pad((frames * areas).cumsum(0), (1, 0))
        begin, area, width = spread((cu_seqlens[:-1], areas, widths), frames * areas, patches)
        in_frame = (torch.arange(patches, device=grid_thws.device) - begin) % area
        merged = merged_places(areas, widths, sum(h * w for _, h, w in shapes), config.merge_kernel_size)
        return cls(shapes, cu_seqlens.to(torch.int32), in_frame // width, in_frame % width, merged)

    @property
    def lengths(self) -> list[int]:
        """Patches of each item."""
        return [t * h * w for t, h, w in self.shapes]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Neighbouring items of one length: how many, and of how many patches each."""
        return [(len(list(run)), length) for length, run in itertools.groupby(self.lengths)]

    def rotation(self, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """`[L, 1, K / 2]` complex: channel 2i turns with the column, 2i + 1 with the row, by base ** (-4i / K)."""
        steps = torch.arange(head_dim // 4, device=self.rows.device, dtype=dtype)
        frequencies = ROTARY_BASE ** (-4 / head_dim * steps)
        places = torch.stack([self.columns, self.rows], dim=-1)  # [L, 2]
        angles = (places[:, None] * frequencies[:, None]).flatten(1)  # [L, K / 2]
        return torch.polar(torch.ones_like(angles), angles)[:, None]


def spread(values: Sequence[torch.Tensor], lengths: torch.Tensor, total: int) -> list[torch.Tensor]:
    """Numbers of items `[items]` for each of their patches `[total]`, without a wait for the device."""
    return [x.repeat_interleave(lengths, output_size=total) for x in values]


def merged_places(areas: torch.Tensor, widths: torch.Tensor, total: int, kernel: Sequence[int]) -> torch.Tensor:
    """`merged` of `Media`, from patches and columns of a frame of each item `[items]`."""
    rows, columns = kernel
    begin, width = spread((areas.cumsum(0) - areas, widths), areas, total)
    place = torch.arange(total, device=areas.device) - begin
    row, column = place // width, place % width
    token = row // rows * (width // columns) + column // columns
    return begin + token * (rows * columns) + row % rows * columns + column % columns


def checked_shapes(grid_thws: torch.Tensor, patches: int, config: MoeLcVisionConfig) -> list[tuple[int, int, int]]:
    """The rows of `grid_thws` as tuples. Raises `ValueError` where they do not fit the patches or the tower."""
    if grid_thws.dim() != 2 or grid_thws.shape[-1] != 3:
        raise ValueError(f"grid_thws: expected shape [items, 3], got {list(grid_thws.shape)}")
    shapes = [(t, h, w) for t, h, w in grid_thws.tolist()]
    rows, columns = config.merge_kernel_size
    for t, h, w in shapes:
        if not 0 < t <= config.init_pos_emb_time:
            raise ValueError(f"grid_thws: expected 1 to {config.init_pos_emb_time} frames in an item, got {t}")
        if not 0 < h <= MAX_SIDE or not 0 < w <= MAX_SIDE or h % rows or w % columns:
            raise ValueError(
                f"grid_thws: expected rows in multiples of {rows} and columns in multiples of {columns}, at most "
                f"{MAX_SIDE} of each, got {h} x {w}"
            )
    total = sum(t * h * w for t, h, w in shapes)
    if total != patches:
        raise ValueError(f"pixel_values: expected the {total} patches that grid_thws describes, got {patches}")
    return shapes


class PositionGrid(nn.Module):
    """A learned grid of positions, resized to the grid of each item, plus a fixed code of the frame in clips."""

    def __init__(self, config: MoeLcVisionConfig):
        super().__init__()
        self.frames = config.init_pos_emb_time
        size = config.init_pos_emb_height, config.init_pos_emb_width, config.vt_hidden_size
        self.weight = nn.Parameter(torch.empty(size))  # [rows, columns, D]

    def forward(self, shapes: list[tuple[int, int, int]]) -> torch.Tensor:
        """`[L, D]`, FP32 or wider."""
        grids = {(h, w): self.resized(h, w) for h, w in {(h, w) for _, h, w in shapes}}
        time = self.time_code()
        places = [grids[h, w] if t == 1 else (grids[h, w] + time[:t, None]).flatten(0, 1) for t, h, w in shapes]
        return torch.cat(places)

    def resized(self, rows: int, columns: int) -> torch.Tensor:
        """`[rows * columns, D]`: bilinear with half-pixel centres."""
        grid = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)).permute(2, 0, 1)
        if grid.shape[1:] != (rows, columns):
            grid = F.interpolate(grid[None], size=(rows, columns), mode="bilinear", align_corners=False)[0]
        return grid.flatten(1).T

    def time_code(self) -> torch.Tensor:
        """`[frames, D]`: the sines of all frequencies, then the cosines."""
        half = self.weight.shape[-1] // 2
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        steps = torch.arange(half, device=self.weight.device, dtype=dtype)
        angles = torch.arange(self.frames, device=steps.device)[:, None] * TIME_BASE ** (-steps / half)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class PatchEmbed(nn.Module):
    """Pixels of a patch to the width of the tower, plus its position."""

    def __init__(self, config: MoeLcVisionConfig):
        super().__init__()
        self.proj = nn.Conv2d(3, config.vt_hidden_size, config.patch_size, stride=config.patch_size, bias=False)
        self.pos_emb = PositionGrid(config)

    def forward(self, pixel_values: torch.Tensor, shapes: list[tuple[int, int, int]]) -> torch.Tensor:
        """`[L, 3, p, p]` -> `[L, D]`."""
        x = self.proj(pixel_values.to(self.proj.weight.dtype)).flatten(1)
        return x + self.pos_emb(shapes).to(x.dtype)


class VisionMLP(nn.Module):
    def __init__(self, config: MoeLcVisionConfig):
        super().__init__()
        self.fc0 = nn.Linear(config.vt_hidden_size, config.vt_intermediate_size, bias=False)
        self.act = ACT2FN[config.activation_func]
        self.fc1 = nn.Linear(config.vt_intermediate_size, config.vt_hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc1(self.act(self.fc0(x)))


class VisionBlock(GradientCheckpointingLayer):
    """Attention among the patches of one media item, all frames together, and an MLP; each behind a norm."""

    def __init__(self, config: MoeLcVisionConfig):
        super().__init__()
        self.config = config
        self.num_key_value_groups, self.is_causal = 1, False  # what transformers' attention functions ask for
        self.head_dim, self.scaling = config.head_dim, config.head_dim**-0.5
        self.norm0 = RMSNorm(config, config.vt_hidden_size)
        self.wqkv = nn.Linear(config.vt_hidden_size, 3 * config.qkv_hidden_size, bias=False)
        self.wo = nn.Linear(config.qkv_hidden_size, config.vt_hidden_size, bias=False)
        self.norm1 = RMSNorm(config, config.vt_hidden_size)
        self.mlp = VisionMLP(config)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor, media: Media):
        """`[L, D]` -> `[L, D]` and, from the eager backend, the maps `[1, H, n, n]` of each item."""
        attended, weights = self.attention(self.norm0(x), rotation, media)
        x = x + attended
        return x + self.mlp(self.norm1(x)), weights

    def attention(self, x: torch.Tensor, rotation: torch.Tensor, media: Media):
        qkv = self.wqkv(x).unflatten(-1, (-1, self.head_dim))  # [L, 3 H, K]
        heads = qkv.shape[1] // 3
        q, k = rotated(qkv[:, : 2 * heads], rotation).chunk(2, dim=1)  # together: half as many launches
        v = qkv[:, 2 * heads :]
        if not self.is_flash(q):
            o, weights = self.item_by_item(q, k, v, media)  # [L, H, K]
        elif len(q) < LARGE_RUN * len(media.runs):
            o, weights = self.flash_items(q, k, v, media), None
        else:
            o, weights = self.run_by_run(q, k, v, media), None
        return self.wo(o.flatten(1)), weights

    def item_by_item(self, q, k, v, media: Media):
        """Through transformers' attention functions: memory is quadratic in the largest item, not in the batch."""
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        items = zip(*(x.transpose(0, 1)[None].split(media.lengths, dim=2) for x in (q, k, v)), strict=True)
        outputs = [attend(self, *item, None, scaling=self.scaling, dropout=0.0, is_causal=False) for item in items]
        maps = tuple(weights for _, weights in outputs)
        return torch.cat([o[0] for o, _ in outputs]), None if None in maps else maps

    def is_flash(self, q: torch.Tensor) -> bool:
        fits = q.dtype in (torch.bfloat16, torch.float16) and self.head_dim <= 256 and self.head_dim % 8 == 0
        return q.is_cuda and fits and operator_impl(self.config) != "reference"

    def flash_items(self, q, k, v, media: Media) -> torch.Tensor:
        """All items in one launch of the FlashAttention in torch."""
        borders, longest = media.cu_seqlens, max(media.lengths)
        return torch.ops.aten._flash_attention_forward(
            q, k, v, borders, borders, longest, longest, 0.0, False, False, scale=self.scaling
        )[0]

    def run_by_run(self, q, k, v, media: Media) -> torch.Tensor:
        """Items of one length as a batch of SDPA, which on Hopper takes cuDNN's kernels: faster, but of one length each."""
        outputs, sizes = [], [count * length for count, length in media.runs]
        for (count, _), *run in zip(media.runs, *(x.split(sizes) for x in (q, k, v)), strict=True):
            batch = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in run)  # [count, H, n, K]
            o = F.scaled_dot_product_attention(*batch, scale=self.scaling)
            outputs.append(o.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)


def rotated(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """`[L, H, K]` with neighbouring channels as one complex number, times `rotation` `[L, 1, K / 2]`."""
    pairs = torch.view_as_complex(x.to(rotation.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


class VisionEncoder(nn.Module):
    """The blocks of the tower and its last norm."""

    def __init__(self, config: MoeLcVisionConfig):
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList([VisionBlock(config) for _ in range(config.vt_num_hidden_layers)])
        self.final_layernorm = RMSNorm(config, config.vt_hidden_size)

    def forward(self, x: torch.Tensor, media: Media) -> torch.Tensor:
        """`[L, D]` -> `[L, D]`."""
        rotation = media.rotation(self.config.head_dim, torch.promote_types(x.dtype, torch.float32))
        for block in self.blocks:
            x, _ = block(x, rotation, media)
        return self.final_layernorm(x)


def merged_patches(x: torch.Tensor, media: Media, kernel: Sequence[int]) -> torch.Tensor:
    """`[L, D]` -> `[tokens, m, D]`: the mean over frames, and cells of `kernel` rows and columns side by side."""
    rows, columns = kernel
    if any(t > 1 for t, _, _ in media.shapes):  # pictures alone, however many, take the launches of one
        items = zip(x.split(media.lengths), media.shapes, strict=True)
        x = torch.cat([item.view(t, h * w, -1).mean(0) for item, (t, h, w) in items])
    return torch.empty_like(x).index_copy(0, media.merged, x).unflatten(0, (-1, rows * columns))


class Projector(nn.Module):
    """Merged patches to the width of the text model."""

    def __init__(self, config: MoeLcVisionConfig):
        super().__init__()
        width = config.patches_per_token * config.mm_hidden_size
        self.proj = nn.Sequential(
            nn.Linear(width, width, bias=False),
            ACT2FN[config.projector_hidden_act],
            nn.Linear(width, config.text_hidden_size, bias=False),
        )
        self.post_norm = RMSNorm(config, config.text_hidden_size, config.projector_ln_eps)

    def forward(self, merged: torch.Tensor) -> torch.Tensor:
        """`[tokens, m, D]` -> `[tokens, width of the text model]`."""
        return self.post_norm(self.proj(merged.flatten(1)))
