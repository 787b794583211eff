"""The Triton MLA decoding computes what the reference says; on a CPU under the interpreter."""

import pytest
import torch

from modeling_moe_lc.kernels.mla import mla_decode


LIMIT = 2e-6  # relative, FP32; measured under the interpreter: at most 4e-7
GPU_LIMIT = 6e-3  # BF16 inputs against FP64: probabilities and results are rounded to BF16
SCALE = 24**-0.5


def make(B=2, T=3, S=37, H=3, R=13, P=5, dtype=torch.float32, device="cpu"):
    generator = torch.Generator(device).manual_seed(S)
    shapes = (B, T, H, R), (B, T, H, P), (B, S, R), (B, S, P)
    return [torch.randn(*shape, generator=generator, device=device).to(dtype) for shape in shapes]


def make_mask(form, B, T, S, device="cpu", dtype=torch.float32):
    if form == "causal":
        return None
    visible = torch.rand(B, 1, T, S, device=device) < 0.7
    visible[0, :, -1] = False  # a query that sees nothing
    visible[-1, :, 0, : S // 2] = False  # and one that sees nothing in whole pieces
    if form == "bool":
        return visible
    return torch.randn(B, 1, T, S, device=device).masked_fill(~visible, torch.finfo(dtype).min).to(dtype)


@torch.no_grad()
def check(inputs, limit, mask=None, scale=SCALE):
    ours = mla_decode(*inputs, scale=scale, mask=mask, impl="triton")
    double = mask if mask is None or mask.dtype == torch.bool else mask.double().masked_fill(mask < -1e30, -torch.inf)
    theirs = mla_decode(*(x.double() for x in inputs), scale=scale, mask=double, impl="reference")
    assert ours.dtype == inputs[0].dtype and ours.shape == theirs.shape
    assert (ours.double() - theirs).norm() <= limit * theirs.norm()
    return ours


@pytest.fixture
def short_pieces(monkeypatch):
    """Contexts of a test are cut and merged as long ones are."""
    from modeling_moe_lc.kernels.mla import fused

    monkeypatch.setattr(fused, "LEAST_KEYS", 16)
    monkeypatch.setattr(fused, "OVERHEAD_TILES", 0)
    monkeypatch.setattr(fused, "MERGED", 2)


@pytest.mark.parametrize("form", ["causal", "bool", "additive"])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"T": 1, "S": 1},
        {"T": 1, "S": 63, "R": 64, "P": 64},
        {"B": 1, "T": 2, "S": 35, "H": 17, "P": 0},
        {"B": 1, "T": 16, "S": 16, "H": 2},
        {"T": 1, "S": 130, "R": 32, "P": 16},
    ],
    ids=str,
)
def test_fused_equals_the_reference(sizes, form, poison_empty, short_pieces):
    inputs = make(**sizes)
    B, T, S = *inputs[0].shape[:2], inputs[2].shape[1]
    ours = check(inputs, LIMIT, make_mask(form, B, T, S))
    if form != "causal":
        assert torch.equal(ours[0, -1], torch.zeros_like(ours[0, -1]))


def test_one_piece_and_the_published_widths(poison_empty):
    check(make(B=1, T=1, S=50, H=32, R=512, P=64), LIMIT)


def test_every_hidden_key_counts_as_none(poison_empty, short_pieces):
    inputs = make(T=2)
    for hide in (float("-inf"), torch.finfo(torch.float16).min):
        mask = torch.full((2, 1, 2, 37), hide, dtype=torch.float16)
        assert not mla_decode(*inputs, scale=SCALE, mask=mask, impl="triton").any()


def test_expanded_masks_and_slices_of_a_cache(short_pieces):
    B, T, S = 2, 2, 37
    q_latent, q_rope, latent, k_rope = make(B, T, S)
    visible = (torch.rand(1, 1, 1, 2 * S) < 0.6)[..., ::2].expand(B, 1, T, S)
    caches = [torch.full((B, 1, 50, x.shape[-1]), float("nan")) for x in (latent, k_rope)]
    for cache, x in zip(caches, (latent, k_rope), strict=True):
        cache[:, 0, :S] = x
    cached = [cache[:, 0, :S] for cache in caches]
    expected = mla_decode(q_latent, q_rope, latent, k_rope, scale=SCALE, mask=visible.contiguous(), impl="triton")
    for keys in (cached, [x.mT.contiguous().mT for x in (latent, k_rope)]):
        ours = mla_decode(q_latent.mT.contiguous().mT, q_rope, *keys, scale=SCALE, mask=visible, impl="triton")
        assert torch.equal(ours, expected)


def test_rows_are_independent_to_the_bit(short_pieces):
    inputs = make(B=2, T=2, S=35, R=32, P=16)
    before = mla_decode(*inputs, scale=SCALE, impl="triton")
    for x in inputs:
        x[0] = torch.randn_like(x[0]) * 50
    after = mla_decode(*inputs, scale=SCALE, impl="triton")
    assert torch.equal(after[1:], before[1:]) and not torch.equal(after[0], before[0])


@pytest.mark.parametrize("form", ["causal", "bool", "additive"])
def test_keys_behind_the_mask_change_no_bit(form, short_pieces):
    B, T, S = 1, 6, 33
    inputs = make(B=B, T=T, S=S, R=32, P=16)
    visible = (torch.arange(S) <= S - T + torch.arange(T)[:, None]).expand(B, 1, T, S)
    additive = torch.zeros(B, 1, T, S).masked_fill(~visible, float("-inf"))
    mask = {"causal": None, "bool": visible, "additive": additive}[form]
    before = mla_decode(*inputs, scale=SCALE, mask=mask, impl="triton")
    for x in inputs[2:]:
        x[:, S - 4 :] = torch.randn_like(x[:, S - 4 :]) * 1e3
    after = mla_decode(*inputs, scale=SCALE, mask=mask, impl="triton")
    assert torch.equal(after[:, : T - 4], before[:, : T - 4])
    assert (after[:, T - 4 :] != before[:, T - 4 :]).flatten(2).any(-1).all()


def test_autocast_changes_nothing():
    inputs = make()
    expected = mla_decode(*inputs, scale=SCALE, impl="triton")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mla_decode(*inputs, scale=SCALE, impl="triton"), expected)


def test_pieces_cover_the_context_and_fill_the_gpu():
    from modeling_moe_lc.kernels.mla.fused import PROGRAMS, _pieces

    for S in (1, 63, 64, 65, 4096, 131_072, 1_048_576, 2**31 - 1):
        for programs in (1, 2, 3, 7, 100, 132, 133, 5000):
            piece, splits = _pieces(S, programs, 64)
            assert piece % 64 == 0 and piece * (splits - 1) < S <= piece * splits
    assert _pieces(1_048_576, 1, 64)[1] == PROGRAMS
    assert _pieces(1_048_576, 2, 64)[1] == PROGRAMS // 2
    assert _pieces(1_048_576, 5000, 64)[1] == 1


def test_no_rows_and_no_keys():
    assert mla_decode(*make(B=0), scale=SCALE, impl="triton").shape == (0, 3, 3, 13)
    blind = make(T=1, S=0)
    mask = torch.ones(2, 1, 1, 0, dtype=torch.bool)
    assert not mla_decode(*blind, scale=SCALE, mask=mask, impl="triton").any()


def test_inputs_that_the_kernels_do_not_take_are_refused_by_name():
    inputs = q_latent, q_rope, latent, k_rope = make()
    mask = torch.zeros(2, 1, 3, 37, dtype=torch.float64)
    for name, arguments, given in (
        ("q_latent", [x.double() for x in inputs], None),
        ("latent", (q_latent, q_rope, latent.half(), k_rope), None),
        ("k_rope", (q_latent, q_rope, latent, k_rope.clone().requires_grad_()), None),
        ("R", make(R=513), None),
        ("P", make(P=65), None),
        ("T", make(T=17), None),
        ("mask", inputs, mask),
    ):
        with pytest.raises(ValueError, match=f"^impl: .*but {name}: "):
            mla_decode(*arguments, scale=SCALE, mask=given, impl="triton")


GPU_SIZES = [
    {"B": 1, "T": 1, "S": 5000, "H": 32},
    {"B": 1, "T": 1, "S": 4096, "H": 96},
    {"B": 3, "T": 2, "S": 1000, "H": 96},
    {"B": 2, "T": 16, "S": 333, "H": 6},
    {"B": 200, "T": 1, "S": 129, "H": 32},
    {"B": 2, "T": 3, "S": 700, "H": 5, "R": 256, "P": 32},
    {"B": 2, "T": 1, "S": 700, "H": 8, "R": 128, "P": 0},
    {"B": 2, "T": 1, "S": 65, "H": 8, "R": 64},
    {"B": 2, "T": 2, "S": 700, "H": 8, "R": 300, "P": 20},
]


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["causal", "bool", "additive"])
@pytest.mark.parametrize("sizes", GPU_SIZES, ids=str)
@pytest.mark.parametrize(
    "dtype, limit", [(torch.bfloat16, GPU_LIMIT), (torch.float16, GPU_LIMIT), (torch.float32, 1e-4)]
)
def test_on_a_gpu_against_fp64(sizes, form, dtype, limit, poison_empty):
    sizes = {"R": 512, "P": 64} | sizes
    inputs = make(**sizes, dtype=dtype, device="cuda")
    scale = (sizes["R"] + sizes["P"]) ** -0.5
    for mask_dtype in (torch.float32, torch.bfloat16) if form == "additive" else (torch.float32,):
        mask = make_mask(form, sizes["B"], sizes["T"], sizes["S"], "cuda", mask_dtype)
        check(inputs, limit, mask, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["causal", "bool"])
@pytest.mark.parametrize("H", [32, 96])
@torch.no_grad()
def test_runs_repeat_to_the_bit_on_a_gpu(H, form):
    """Contexts long enough that a tile is read while the one before it may still be in use."""
    inputs = make(1, 1, 100_001, H, 512, 64, dtype=torch.bfloat16, device="cuda")
    mask = make_mask(form, 1, 1, 100_001, "cuda")
    if mask is not None:
        mask[..., ::3] = True
    first = check(inputs, GPU_LIMIT, mask, 576**-0.5)
    for _ in range(50):
        assert torch.equal(mla_decode(*inputs, scale=576**-0.5, mask=mask, impl="triton"), first)


@pytest.mark.gpu
@torch.no_grad()
def test_more_than_2_31_elements():
    """A context of 2^22 tokens whose first part is hidden equals its visible end."""
    S, seen = 2**22 + 5000, 4000
    if torch.cuda.mem_get_info()[0] < 1.3 * 1152 * S:
        pytest.skip("needs 7 GB of free memory")
    q_latent, q_rope, latent, k_rope = make(1, 1, seen, 32, 512, 64, dtype=torch.bfloat16, device="cuda")
    long = [x.new_zeros(1, S, x.shape[-1]) for x in (latent, k_rope)]
    for x, end in zip(long, (latent, k_rope), strict=True):
        x[:, -seen:] = end
    mask = (torch.arange(S, device="cuda") >= S - seen)[None, None, None]
    ours = mla_decode(q_latent, q_rope, *long, scale=576**-0.5, mask=mask, impl="triton")
    expected = mla_decode(q_latent, q_rope, latent, k_rope, scale=576**-0.5, impl="triton")
    assert (ours - expected).norm() < 6e-3 * expected.norm()
