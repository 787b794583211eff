"""The vision tower: equal to an independent implementation, each item as if it were alone, and differentiable."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling_moe_lc import MoeLcForConditionalGeneration, MoeLcModel, MoeLcVisionConfig, MoeLcVisionModel, vision
from modeling_moe_lc.configuration.presets import load_multimodal_preset
from modeling_moe_lc.vision import Media, PatchEmbed, PositionGrid, Projector, VisionBlock, merged_patches, rotated


FIXTURE = Path(__file__).parents[1] / "fixtures" / "k3-vision-tiny"
LIMIT = 1e-4  # norm of the difference over norm; measured: at most 1e-6. The smallest listed mistake moves 1e-3
ATTENTION = ["sdpa", "eager", "moe_lc_reference", "moe_lc_triton"]
SHAPES = [(1, 2, 2), (1, 6, 4), (4, 2, 6), (1, 10, 2), (2, 4, 4)]


def relative(x, reference):
    return ((x - reference).norm() / reference.norm()).item()


def config(**overrides):
    sizes = {"patch_size": 2, "init_pos_emb_height": 3, "init_pos_emb_width": 4, "vt_num_attention_heads": 2,
             "vt_num_hidden_layers": 1, "vt_hidden_size": 6, "vt_intermediate_size": 5, "qkv_hidden_size": 8,
             "text_hidden_size": 7}  # fmt: skip
    return MoeLcVisionConfig(**{**sizes, **overrides})


def media_of(*shapes, config):
    grid_thws = torch.tensor(shapes)
    return Media.of(grid_thws, int(grid_thws.prod(-1).sum()), config)


@pytest.fixture(scope="module")
def expected():
    return load_file(FIXTURE / "expected.safetensors")


@pytest.fixture(scope="module")
def inputs():
    return load_file(FIXTURE / "inputs.safetensors")


@pytest.fixture(scope="module")
def released():
    return MoeLcModel.from_pretrained(FIXTURE, dtype=torch.float32).eval()


@pytest.mark.parametrize("attention", ATTENTION)
@torch.no_grad()
def test_features_of_all_items_together(released, inputs, expected, attention):
    released.set_attn_implementation(attention)
    tower = released.vision_tower(inputs["pixel_values"], inputs["grid_thws"])
    assert relative(tower.pooler_output, expected["merged"]) < LIMIT
    features = released.get_image_features(inputs["pixel_values"], inputs["grid_thws"]).pooler_output
    assert [len(item) for item in features] == (inputs["grid_thws"][:, 1:].prod(-1) // 4).tolist()
    assert relative(torch.cat(features), expected["features"]) < LIMIT


@torch.no_grad()
def test_features_of_one_item_at_a_time(released, inputs, expected):
    grids = inputs["grid_thws"]
    assert grids[:, 0].max() == 2  # one is a clip
    patches = inputs["pixel_values"].split(grids.prod(-1).tolist())
    features = [released.get_image_features(p, g[None]).pooler_output[0] for p, g in zip(patches, grids, strict=True)]
    assert relative(torch.cat(features), expected["features"]) < LIMIT


@torch.no_grad()
def test_features_with_the_other_plausible_eps(inputs, expected):
    model = MoeLcModel.from_pretrained(FIXTURE, dtype=torch.float32, vision_config={"rms_norm_eps": 2.0**-7}).eval()
    features = torch.cat(
        model.get_image_features(**{k: inputs[k] for k in ("pixel_values", "grid_thws")}).pooler_output
    )
    assert relative(features, expected["features.eps_2e-7"]) < LIMIT


@pytest.mark.parametrize("attention", ATTENTION)
@torch.no_grad()
def test_an_item_does_not_see_its_neighbours(tiny_multimodal, pictures, attention):
    model = tiny_multimodal()
    model.set_attn_implementation(attention)
    media = pictures(*SHAPES)
    together = model.get_image_features(**media).pooler_output
    patches = media["pixel_values"].split(media["grid_thws"].prod(-1).tolist())
    for features, pixels, grid in zip(together, patches, media["grid_thws"], strict=True):
        alone = model.get_image_features(pixels, grid[None]).pooler_output[0]
        assert relative(features, alone) < 1e-6


@torch.no_grad()
def test_backends_agree(tiny_multimodal, pictures):
    model, media, results = tiny_multimodal(), pictures(*SHAPES), []
    for attention in ATTENTION:
        model.set_attn_implementation(attention)
        results.append(torch.cat(model.get_image_features(**media).pooler_output))
    assert max(relative(result, results[0]) for result in results) < 1e-6


@torch.no_grad()
def test_frames_of_a_clip_attend_to_one_another_and_have_a_time(tiny_multimodal, pictures):
    tower, clip = tiny_multimodal().double().model.vision_tower, pictures((3, 2, 2))
    whole = tower(**clip).last_hidden_state
    clip["pixel_values"][8:] += 1
    assert relative(tower(**clip).last_hidden_state[:4], whole[:4]) > 1e-3
    still = pictures((1, 2, 2))["pixel_values"].repeat(2, 1, 1, 1)
    first, second = tower(still, torch.tensor([[2, 2, 2]])).last_hidden_state.split(4)
    assert relative(first, second) > 1e-3


def test_maps_of_attention_are_those_of_each_item(tiny_multimodal, pictures):
    model = tiny_multimodal()
    model.set_attn_implementation("eager")
    out = model.model.vision_tower(**pictures((1, 4, 2), (2, 2, 2)), output_attentions=True, output_hidden_states=True)
    assert len(out.attentions) == 2 and len(out.hidden_states) == 3
    for maps in out.attentions:
        assert [tuple(item.shape) for item in maps] == [(1, 2, 8, 8), (1, 2, 8, 8)]
        assert all(torch.allclose(item.sum(-1), torch.ones(())) for item in maps)


def test_grid_of_its_own_size_is_the_learned_one_and_a_constant_stays_constant():
    grid = PositionGrid(config())
    torch.nn.init.normal_(grid.weight)
    assert torch.equal(grid([(1, 3, 4)]), grid.weight.flatten(0, 1))
    torch.nn.init.constant_(grid.weight, 0.5)
    assert torch.allclose(grid([(1, 7, 2), (1, 2, 11)]), torch.tensor(0.5))


def test_resizing_is_bilinear_between_half_pixel_centres():
    grid = PositionGrid(config())
    rows, columns = torch.arange(3.0) + 0.5, torch.arange(4.0) + 0.5
    with torch.no_grad():
        grid.weight.copy_((10 * rows[:, None] + columns)[..., None].expand(-1, -1, 6))
    resized = grid([(1, 6, 8)]).view(6, 8, 6)
    y, x = ((torch.arange(n) + 0.5) / 2 for n in (6, 8))
    plane = 10 * y.clamp(0.5, 2.5)[:, None] + x.clamp(0.5, 3.5)  # linear inside, constant outside the outer centres
    assert torch.allclose(resized, plane[..., None].expand(-1, -1, 6))


def test_time_code_is_sines_then_cosines_and_only_in_clips():
    grid = PositionGrid(config())
    torch.nn.init.zeros_(grid.weight)
    assert not grid([(1, 2, 2)]).any()
    frames = grid([(3, 2, 2)]).view(3, 4, 6)[:, 0]
    for frame in range(3):
        angles = frame / 10000 ** (torch.arange(3) / 3)
        assert torch.allclose(frames[frame], torch.cat([angles.sin(), angles.cos()]))


def test_rotation_turns_even_channels_with_the_column_and_odd_ones_with_the_row():
    settings = config(qkv_hidden_size=16)
    media = media_of((1, 2, 2), (2, 4, 6), config=settings)
    angles = media.rotation(8, torch.float64)[:, 0].log().imag  # [L, 4]
    patch = 4 + 24 + 2 * 6 + 1  # in the second frame of the clip
    assert (media.rows[patch], media.columns[patch]) == (2, 1)
    expected = torch.tensor([1.0, 2.0, 1.0 * 10000**-0.5, 2.0 * 10000**-0.5], dtype=torch.float64)
    assert torch.allclose(angles[patch], expected)


def test_rotated_products_depend_on_the_distance_only():
    settings = config(qkv_hidden_size=16)
    rotation = media_of((1, 8, 8), config=settings).rotation(8, torch.float64).view(8, 8, 1, 4)
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)

    def product(a, b):
        return (rotated(q, rotation[a][None]) * rotated(k, rotation[b][None])).sum()

    assert torch.allclose(product((1, 2), (4, 3)), product((3, 5), (6, 6)))
    assert not torch.allclose(product((1, 2), (4, 3)), product((1, 2), (3, 4)))


def test_merging_puts_rows_before_columns_and_takes_the_mean_of_frames():
    media = media_of((2, 2, 4), config=config())
    x = torch.arange(16.0)[:, None]  # two frames of 2 x 4
    merged = merged_patches(x, media, [2, 2])[..., 0]
    assert torch.equal(merged, torch.tensor([[4.0, 5, 8, 9], [6, 7, 10, 11]]))


def gradcheck(module, function, *inputs):
    module = module.double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)

    def call(*tensors):
        names = [name for name, _ in module.named_parameters()]
        given = dict(zip(names, tensors[len(inputs) :], strict=True))
        return torch.func.functional_call(Calling(module, function), {f"module.{n}": t for n, t in given.items()},
                                          tensors[: len(inputs)])  # fmt: skip

    parameters = [parameter.detach().clone().requires_grad_() for parameter in module.parameters()]
    assert torch.autograd.gradcheck(call, [*inputs, *parameters], fast_mode=True)


class Calling(torch.nn.Module):
    def __init__(self, module, function):
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *inputs):
        return self.function(self.module, *inputs)


def random(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_gradients_of_every_piece():
    settings = config()
    settings._attn_implementation = "sdpa"
    media = media_of((1, 2, 2), (2, 4, 2), config=settings)
    rotation = media.rotation(settings.head_dim, torch.float64)
    gradcheck(PatchEmbed(settings), lambda m, x: m(x, media.shapes), random(20, 3, 2, 2))
    gradcheck(VisionBlock(settings), lambda m, x: m(x, rotation, media)[0], random(20, 6))
    gradcheck(Projector(settings), lambda m, x: m(merged_patches(x, media, [2, 2])), random(20, 6))


@pytest.mark.parametrize(
    ("shapes", "patches", "named"),
    [
        ([(5, 2, 2)], 20, "frames.*got 5"),
        ([(0, 2, 2)], 0, "frames.*got 0"),
        ([(1, 3, 2)], 6, "multiples.*got 3 x 2"),
        ([(1, 2, 514)], 1028, "512.*got 2 x 514"),
        ([(1, 2, 2), (1, 4, 2)], 8, "12 patches.*got 8"),
        ([(1, 2)], 4, r"\[items, 3\], got \[1, 2\]"),
    ],
)
def test_grids_that_do_not_fit_are_refused(shapes, patches, named):
    with pytest.raises(ValueError, match=named):
        Media.of(torch.tensor(shapes), patches, config())


@pytest.mark.parametrize(
    ("field", "value"),
    [("pos_emb_type", "learned"), ("attn_bias", True), ("qkv_hidden_size", 6), ("mm_hidden_size", 8),
     ("merge_kernel_size", [2]), ("vt_hidden_size", 7), ("vt_num_hidden_layers", 0), ("patch_size", "big")],
)  # fmt: skip
def test_a_config_that_no_tower_has_is_refused(field, value):
    with pytest.raises(ValueError, match=field):
        config(**{field: value})


def test_tower_alone_reads_a_released_folder_and_its_own(tmp_path, inputs):
    with torch.no_grad():
        tower, info = MoeLcVisionModel.from_pretrained(FIXTURE, dtype=torch.float32, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        tower.save_pretrained(tmp_path)
        again = MoeLcVisionModel.from_pretrained(tmp_path)
        outputs = [m.eval()(inputs["pixel_values"], inputs["grid_thws"]).pooler_output for m in (tower, again)]
    assert torch.equal(*outputs)


def test_neighbours_of_one_length_as_a_batch_equal_one_item_at_a_time():
    settings = config(vt_num_attention_heads=2)
    media = media_of((1, 2, 2), (1, 4, 4), (1, 8, 2), (4, 2, 2), (1, 2, 2), config=settings)
    assert media.runs == [(1, 4), (3, 16), (1, 4)]
    block = VisionBlock(settings).double()
    q, k, v = torch.randn(3, sum(media.lengths), 2, settings.head_dim, dtype=torch.float64)
    expected, _ = block.item_by_item(q, k, v, media)
    assert relative(block.run_by_run(q, k, v, media), expected) < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("large_run", [1, 1 << 20])
def test_flash_on_a_gpu_equals_one_item_at_a_time(large_run, monkeypatch):
    monkeypatch.setattr(vision, "LARGE_RUN", large_run)
    torch.manual_seed(0)
    sizes = {"vt_num_hidden_layers": 2, "vt_hidden_size": 256, "qkv_hidden_size": 384, "vt_num_attention_heads": 3}
    model = MoeLcForConditionalGeneration(load_multimodal_preset("tiny", vision_config=sizes)).to(
        "cuda", torch.bfloat16
    )
    grids = torch.tensor(SHAPES, device="cuda") * torch.tensor([1, 8, 8], device="cuda")
    pixels = torch.randn(int(grids.prod(-1).sum()), 3, 4, 4, device="cuda", dtype=torch.bfloat16)
    together = torch.cat(model.get_image_features(pixels, grids).pooler_output)
    weight = torch.randn_like(together)
    qkv = model.model.vision_tower.encoder.blocks[0].wqkv.weight
    gradient = torch.autograd.grad((together * weight).sum(), qkv)[0]
    model.float()
    exact = torch.cat(model.get_image_features(pixels.float(), grids).pooler_output)
    qkv = model.model.vision_tower.encoder.blocks[0].wqkv.weight
    expected = torch.autograd.grad((exact * weight.float()).sum(), qkv)[0]
    assert relative(together.float(), exact) < 2e-2
    assert relative(gradient.float(), expected) < 5e-2
