"""The Triton experts on packed weights are those on what these dequantise to; on a CPU under the interpreter."""

import pytest
import torch

from modeling_moe_lc.kernels.experts import expert_mlp
from modeling_moe_lc.kernels.mxfp4 import dequantize_mxfp4, expert_mlp_mxfp4, quantize_mxfp4


triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
dequantized = pytest.importorskip("modeling_moe_lc.kernels.mxfp4.fused_tile").dequantized


LIMIT = 1e-5  # relative, FP32; measured under the interpreter: 9e-7
GPU_LIMITS = {torch.bfloat16: (6e-3, 1e-2), torch.float16: (2e-3, 4e-3), torch.float32: (1e-4, 1e-4)}
CAPS = {"beta": 4.0, "linear_beta": 25.0}
NAMES = ("y", "dx", "dweights")


@pytest.fixture
def fused():
    from modeling_moe_lc.kernels.experts import fused

    return fused


@triton.jit
def dequantize_tiles(codes, scales, w, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    m, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    byte, group = tl.arange(0, COLUMNS // 2)[None, :], tl.arange(0, COLUMNS // 32)[None, :]
    packed, exponents = tl.load(codes + m * (COLUMNS // 2) + byte), tl.load(scales + m * (COLUMNS // 32) + group)
    tl.store(w + m * COLUMNS + n, dequantized(packed, exponents, ROWS, COLUMNS, w.dtype.element_ty))


def make(N=6, D=64, I=32, E=3, k=2, *, dtype=torch.float32, device="cpu", seed=0):
    """x, indices with sentinels and an expert that a token has twice, weights; packed and plain projections; a cotangent."""
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, device=device)

    indices = torch.rand(N, E, generator=g, device=device).argsort(dim=1)[:, :k]
    indices[1::4, 0] = E
    indices[2::5, -1] = indices[2::5, 0]
    weights = torch.rand(N, k, generator=g, device=device)
    packed, plain = [], []
    for rows, inputs in ((2 * I, D), (D, I)):
        projection = normal(E, rows, inputs).mul_(inputs**-0.5).to(torch.bfloat16)
        codes, scales = quantize_mxfp4(projection)
        packed += [codes, scales.mT.contiguous()]
        plain.append(dequantize_mxfp4(codes, scales, dtype))
    return normal(N, D).to(dtype), indices, weights, packed, plain, normal(N, D).to(dtype)


def run(operator, x, indices, weights, projections, dy, impl="triton"):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weights)]
    y = operator(leaves[0], indices, leaves[1], *projections, **CAPS, impl=impl)
    return dict(zip(NAMES, (y.detach(), *torch.autograd.grad(y, leaves, dy)), strict=True))


def ours(x, indices, weights, packed, plain, dy):
    return run(expert_mlp_mxfp4, x, indices, weights, packed, dy)


def exact(x, indices, weights, packed, plain, dy):
    doubled = [t.double() for t in plain]
    return run(expert_mlp, x.double(), indices, weights.double(), doubled, dy.double(), impl="reference")


def decode(x, indices, weights, packed, plain=None, dy=None):
    with torch.no_grad():
        return expert_mlp_mxfp4(x, indices, weights, *packed, **CAPS, impl="triton")


def close(found, expected, limit):
    return (found.double() - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize(
    "sizes, keep",
    [
        ({}, True),
        ({"N": 70, "D": 32, "I": 96, "E": 2, "k": 1}, False),
        ({"N": 2, "D": 96, "I": 32, "E": 12, "k": 2}, True),
    ],
    ids=str,
)
def test_fused_is_the_operator_on_dequantised_weights_to_the_bit(sizes, keep, fused, poison_empty, monkeypatch):
    monkeypatch.setattr(fused, "KEEP_BYTES", keep * fused.KEEP_BYTES)
    x, indices, weights, _, plain, dy = inputs = make(**sizes)
    found, expected, same = ours(*inputs), exact(*inputs), run(expert_mlp, x, indices, weights, plain, dy)
    for name in NAMES:
        assert torch.equal(found[name], same[name]), name
        assert close(found[name], expected[name], LIMIT), name


def test_chunks_of_channels_columns_and_tokens(fused, poison_empty, monkeypatch):
    monkeypatch.setattr(fused, "ROWS_BYTES", 1 << 10)
    monkeypatch.setattr(fused, "CHUNK_BYTES", 1 << 10)
    x, indices, weights, _, plain, dy = inputs = make(N=3, D=288, I=160, E=1, k=1)
    todo = fused.plan(3, 1, 288, 160, 4, fused.KEEP_BYTES)
    assert todo == fused.Plan(True, [0, 128, 160], 256, 2)
    found = ours(*inputs)
    for name, result in run(expert_mlp, x, indices, weights, plain, dy).items():
        assert torch.equal(found[name], result), name


@pytest.mark.parametrize(
    "sizes", [{"N": 1, "k": 3}, {"N": 4, "D": 160, "I": 128, "E": 2}, {"D": 128, "k": 1}], ids=str
)
def test_decoding_equals_the_reference(sizes, poison_empty):
    inputs = make(**sizes)
    assert close(decode(*inputs), exact(*inputs)["y"], LIMIT)


def test_decoding_with_more_tokens_of_an_expert_than_a_tile_has(poison_empty):
    x, indices, *rest = make(N=35, E=2, k=1, D=32)
    inputs = x, indices.fill_(1), *rest
    assert close(decode(*inputs), exact(*inputs)["y"], LIMIT)


def test_a_sum_in_parts_when_decoding(poison_empty, monkeypatch):
    from modeling_moe_lc.kernels.mxfp4 import fused_decode

    monkeypatch.setattr(fused_decode, "tiles", lambda *sizes: (64, 32, 2))
    for I in (256, 192):
        inputs = make(N=3, D=32, I=I, E=2)
        assert close(decode(*inputs), exact(*inputs)["y"], LIMIT)


def test_a_token_does_not_see_the_others_to_the_bit(poison_empty):
    x, indices, weights, packed, plain, dy = make(N=6)
    first, others = slice(0, 3), slice(3, None)
    before, together = ours(x, indices, weights, packed, plain, dy), decode(x, indices, weights, packed)
    x[others], indices[others] = -3 * x[others], torch.arange(2)
    after = ours(x, indices, weights, packed, plain, dy)
    for name in NAMES:
        assert torch.equal(after[name][first], before[name][first]), name
    assert torch.equal(decode(x, indices, weights, packed)[first], together[first])


def test_every_scale_and_a_block_of_nan(poison_empty):
    """Scales of zero, of NaN and the largest: what they make is what dequantising makes."""
    x, indices, weights, packed, plain, dy = make(N=6, k=1, D=32)
    x, dy = torch.ones_like(x), torch.ones_like(dy)
    packed[3][0], packed[3][1, :, 5], packed[3][2, :, :8] = 0, 255, torch.arange(127, 135, dtype=torch.uint8)
    plain[1] = dequantize_mxfp4(packed[2], packed[3].mT, torch.float32)
    found, expected = ours(x, indices, weights, packed, plain, dy), run(expert_mlp, x, indices, weights, plain, dy)
    assert expected["y"].isnan().any() and not expected["y"].isnan().all()
    for name in NAMES:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, equal_nan=True)
    found = decode(x, indices, weights, packed)
    torch.testing.assert_close(found, expected["y"], rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("N", [0, 5])
def test_nothing_to_compute_gives_zeros(N, poison_empty):
    x, indices, *rest = make(N=N)
    inputs = x, torch.full_like(indices, 3), *rest
    for result in (*ours(*inputs).values(), decode(*inputs)):
        assert torch.equal(result, torch.zeros_like(result))


def test_a_retained_graph_and_autocast():
    x, indices, weights, packed, plain, dy = make(N=4)
    expected = ours(x, indices, weights, packed, plain, dy)
    leaves = [x.requires_grad_(), weights.requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        y = expert_mlp_mxfp4(x, indices, weights, *packed, **CAPS, impl="triton")
        first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    assert torch.equal(y, expected["y"]) and torch.equal(first[0], expected["dx"])
    for one, two in zip(first, torch.autograd.grad(y, leaves, dy), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_no_dequantised_weight_is_saved():
    x, indices, weights, packed, *_ = make(N=4)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        expert_mlp_mxfp4(x.requires_grad_(), indices, weights, *packed, **CAPS, impl="triton")
    assert not [t for t in saved if t.ndim == 3 and t.is_floating_point()]


def test_refused_inputs_are_named():
    x, indices, weights, packed, *_ = make(N=4)
    with pytest.raises(ValueError, match="impl: 'triton' was asked for, but x: expected bfloat16"):
        expert_mlp_mxfp4(x.double(), indices, weights, *packed, **CAPS, impl="triton")
    many = [t[:1].expand(1025, -1, -1) for t in packed]
    with pytest.raises(ValueError, match="but gate_up_packed: expected 1 to 1024 experts, got 1025"):
        expert_mlp_mxfp4(x, indices, weights, *many, **CAPS, impl="triton")


def check_tile(dtype, device):
    """All bytes of codes with all scales."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(4, 64).repeat(256, 1)  # [1024, 64]
    scales = torch.arange(256, dtype=torch.uint8, device=device).repeat_interleave(4)[:, None].repeat(1, 4)
    w = torch.empty(1024, 128, dtype=dtype, device=device)
    dequantize_tiles[(8,)](codes, scales, w, 128, 128)
    expected = dequantize_mxfp4(codes, scales, dtype, impl="reference")
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    assert ((w.view(whole) == expected.view(whole)) | (w.isnan() & expected.isnan())).all()


def test_a_tile_is_dequantised_to_the_bit():
    check_tile(torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_LIMITS, ids=str)
def test_on_a_gpu_a_tile_is_dequantised_to_the_bit(dtype):
    check_tile(dtype, "cuda")


GPU_SIZES = (
    {"N": 200, "D": 512, "I": 256, "E": 64, "k": 8},
    {"N": 4096, "D": 1024, "I": 512, "E": 32, "k": 8},
    {"N": 2048, "D": 2304, "I": 1024, "E": 64, "k": 8},
    {"N": 4096, "D": 1056, "I": 1184, "E": 8, "k": 3},
    {"N": 300, "D": 96, "I": 32, "E": 5, "k": 2},
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_LIMITS, ids=str)
@pytest.mark.parametrize("sizes", GPU_SIZES, ids=str)
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "computed again"])
def test_on_a_gpu_fused_is_exact_and_repeats_to_the_bit(sizes, dtype, keep, fused, monkeypatch, poison_empty):
    monkeypatch.setattr(fused, "KEEP_BYTES", keep * fused.KEEP_BYTES)
    x, indices, weights, _, plain, dy = inputs = make(**sizes, dtype=dtype, device="cuda")
    first, expected = ours(*inputs), exact(*inputs)
    for name in NAMES:
        assert close(first[name], expected[name], GPU_LIMITS[dtype][name != "y"]), name
    for name, result in run(expert_mlp, x, indices, weights, plain, dy).items():
        assert torch.equal(result, first[name]), f"{name}: not that of dequantised weights"
    for _ in range(20):
        for name, result in ours(*inputs).items():
            assert torch.equal(result, first[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_LIMITS, ids=str)
@pytest.mark.parametrize("N", [1, 7, 32, 64])
@pytest.mark.parametrize(
    "sizes", [(512, 256, 64, 8), (2304, 1024, 64, 8), (3584, 3072, 16, 8), (96, 32, 5, 2), (96, 160, 1, 1)], ids=str
)
def test_on_a_gpu_decoding(N, sizes, dtype, poison_empty):
    D, I, E, k = sizes
    inputs = make(N=N, D=D, I=I, E=E, k=k, dtype=dtype, device="cuda")
    first = decode(*inputs)
    assert close(first, exact(*inputs)["y"], GPU_LIMITS[dtype][0])
    assert all(torch.equal(decode(*inputs), first) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("N", [8, 512])
def test_on_a_gpu_nothing_waits_and_a_graph_replays_with_other_routing(N):
    sizes = {"N": N, "D": 512, "I": 256, "E": 64, "k": 8, "dtype": torch.bfloat16, "device": "cuda"}
    inputs, other = make(**sizes), make(**sizes, seed=1)
    ours(*inputs), decode(*inputs)
    x, indices, weights, packed, _, dy = inputs
    leaves = [x.requires_grad_(), weights.requires_grad_()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = expert_mlp_mxfp4(x, indices, weights, *packed, **CAPS, impl="triton")
        captured = y, *torch.autograd.grad(y, leaves, dy), decode(x, indices, weights, packed)
    with torch.no_grad():
        for tensor, value in zip((x, indices, weights, *packed, dy), (*other[:3], *other[3], other[5]), strict=True):
            tensor.copy_(value)
    graph.replay()
    for result, expected in zip(captured, (*ours(*other).values(), decode(*other)), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.gpu
def test_on_a_gpu_beyond_two_to_the_31():
    """Bytes of codes: the last experts of a layer as large as K3's."""
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    x, indices, weights, few, plain, dy = make(N=40, D=3584, I=3072, E=2, k=2, dtype=torch.bfloat16, device="cuda")
    packed = [t.new_zeros(896, *t.shape[1:]) for t in few]
    for large, small in zip(packed, few, strict=True):
        large[-2:] = small
    moved = torch.where(indices < 2, indices + 894, 896)
    expected = exact(x, indices, weights, few, plain, dy)
    for name, result in ours(x, moved, weights, packed, None, dy).items():
        assert close(result, expected[name], 1e-2), name
    assert close(decode(x, moved, weights, packed), expected["y"], 6e-3)
