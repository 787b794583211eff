"""The Triton experts compute what the reference says, forward and every gradient; on a CPU under the interpreter."""

import math

import pytest
import torch

from modeling_moe_lc.kernels.experts import expert_mlp


LIMIT = 1e-5  # relative, FP32; measured under the interpreter: 2e-6, and 6e-6 for the gradient of one weight alone
GPU_LIMITS = {torch.bfloat16: (6e-3, 1e-2), torch.float16: (2e-3, 4e-3), torch.float32: (1e-4, 1e-4)}
CAPS = {"beta": 4.0, "linear_beta": 25.0}
NAMES = ("y", "dx", "dweights", "dgate_up", "ddown")


@pytest.fixture
def fused():
    from modeling_moe_lc.kernels.experts import fused

    return fused


def make(N=11, D=12, I=20, E=5, k=3, *, dtype=torch.float32, device="cpu", seed=0):
    """Inputs with sentinels and, where k > 1, an expert that a token has twice; and the cotangent of the output."""
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, device=device)

    indices = torch.rand(N, E, generator=g, device=device).argsort(dim=1)[:, :k]
    indices[1::4, 0] = E
    indices[2::5, -1] = indices[2::5, 0]
    weights = torch.rand(N, k, generator=g, device=device)
    x, dy = normal(N, D).to(dtype), normal(N, D).to(dtype)
    return (
        x,
        indices,
        weights,
        (2 * D**-0.5 * normal(E, 2 * I, D)).to(dtype),
        (I**-0.5 * normal(E, D, I)).to(dtype),
        dy,
    )


def run(x, indices, weights, gate_up_proj, down_proj, dy, impl="triton", caps=CAPS):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weights, gate_up_proj, down_proj)]
    y = expert_mlp(leaves[0], indices, *leaves[1:], **caps, impl=impl)
    return dict(zip(NAMES, (y.detach(), *torch.autograd.grad(y, leaves, dy)), strict=True))


def exact(inputs, caps=CAPS):
    return run(*(t.double() if t.is_floating_point() else t for t in inputs), impl="reference", caps=caps)


def check(inputs, forward=LIMIT, backward=LIMIT, caps=CAPS):
    ours, theirs = run(*inputs, caps=caps), exact(inputs, caps)
    for name, reference in theirs.items():
        error = (ours[name].double() - reference).norm() / reference.norm()
        assert error < (forward if name == "y" else backward), (name, error.item())
    return ours


def decode(x, indices, weights, gate_up_proj, down_proj, dy=None):
    with torch.no_grad():
        return expert_mlp(x, indices, weights, gate_up_proj, down_proj, **CAPS, impl="triton")


@pytest.mark.parametrize(
    "sizes, keep",
    [
        ({}, True),
        ({}, False),
        ({"N": 2, "k": 1}, True),
        ({"N": 65, "D": 36, "I": 44, "E": 3, "k": 2}, False),
        ({"N": 63, "D": 16, "I": 16, "E": 2, "k": 1}, True),
        ({"N": 4, "D": 36, "I": 8, "E": 12, "k": 3}, True),
        ({"N": 3, "E": 1, "k": 1}, False),
    ],
    ids=str,
)
def test_fused_equals_the_reference(sizes, keep, fused, poison_empty, monkeypatch):
    if not keep:
        monkeypatch.setattr(fused, "KEEP_BYTES", 0)
    check(make(**sizes))


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "computed again"])
def test_chunks_of_channels_columns_and_tokens(keep, fused, poison_empty, monkeypatch):
    monkeypatch.setattr(fused, "KEEP_BYTES", keep * fused.KEEP_BYTES)
    monkeypatch.setattr(fused, "ROWS_BYTES", 1 << 10)
    monkeypatch.setattr(fused, "CHUNK_BYTES", 1 << 11)
    monkeypatch.setattr(fused, "row_tile", lambda *sizes, **longest: fused.Tile(64, 256, 256, 4, 2))
    monkeypatch.setattr(fused, "weight_tile", lambda *sizes, **gather_a: fused.Tile(256, 256, 64, 4, 2))
    inputs = make(N=3, D=260, I=272, E=1, k=1)
    todo = fused.plan(3, 1, 260, 272, 4, fused.KEEP_BYTES)
    assert todo == fused.Plan(keep, [0, 256, 272], 256, 3 if keep else 2)
    check(inputs)


HEIGHTS = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193)  # of the rows of an expert: around the parts of tall tiles


def with_heights(*, dtype=torch.float32, device="cpu", **sizes):
    """Inputs whose expert number e has HEIGHTS[e] tokens; the last one has none."""
    E = len(HEIGHTS) + 1
    x, indices, *rest = make(N=sum(HEIGHTS), E=E, k=1, dtype=dtype, device=device, **sizes)
    owners = torch.arange(E - 1).repeat_interleave(torch.tensor(HEIGHTS))
    return x, owners[torch.randperm(len(owners))].to(indices)[:, None], *rest


@pytest.fixture
def tall(fused, monkeypatch):
    """Tall tiles whatever the sizes are."""
    monkeypatch.setattr(fused, "tall_rows", lambda *sizes: 192)
    monkeypatch.setattr(fused, "tall_tile", lambda BM, *sizes: fused.Tile(BM, 64, 32, 4, 1))


def test_tall_tiles(tall, poison_empty):
    inputs = with_heights(D=12, I=20)
    ours = check(inputs)
    torch.testing.assert_close(decode(*inputs), ours["y"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "computed again"])
def test_tall_tiles_of_parts_and_chunks(keep, tall, fused, poison_empty, monkeypatch):
    monkeypatch.setattr(fused, "KEEP_BYTES", keep * fused.KEEP_BYTES)
    monkeypatch.setattr(fused, "ROWS_BYTES", 1 << 16)
    monkeypatch.setattr(fused, "CHUNK_BYTES", 1 << 16)
    todo = fused.plan(261, 1, 36, 132 + 128 * (not keep), 4, fused.KEEP_BYTES)
    assert todo.keep == keep and todo.parts > 1 and len(todo.bounds) == 3
    check(make(N=261, D=36, I=todo.bounds[-1], E=1, k=1))


def test_an_expert_does_not_see_the_others_beside_its_tall_tile(tall, poison_empty):
    x, indices, *rest = with_heights(D=12, I=20)
    before = decode(x, indices, *rest)
    others = indices[:, 0] % 2 == 1
    x[others] = float("nan")
    assert torch.equal(decode(x, indices, *rest)[~others], before[~others])


def packed(x, indices, weights, gate_up_proj, down_proj, dy):
    """Inputs on packed weights, and on what these are."""
    from modeling_moe_lc.kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4

    both = [quantize_mxfp4(w.bfloat16()) for w in (gate_up_proj, down_proj)]
    tensors = [t for codes, scales in both for t in (codes, scales.mT.contiguous())]
    plain = (dequantize_mxfp4(*one, x.dtype) for one in both)
    return (x, indices, weights, *tensors, dy), (x, indices, weights, *plain, dy)


def run_packed(x, indices, weights, *tensors_and_dy):
    from modeling_moe_lc.kernels.mxfp4 import expert_mlp_mxfp4

    leaves, (*tensors, dy) = [t.detach().clone().requires_grad_() for t in (x, weights)], tensors_and_dy
    y = expert_mlp_mxfp4(leaves[0], indices, leaves[1], *tensors, **CAPS, impl="triton")
    return dict(zip(NAMES, (y.detach(), *torch.autograd.grad(y, leaves, dy))))


def test_tall_tiles_of_packed_weights(tall, poison_empty):
    inputs, plain = packed(*make(N=140, D=32, I=32, E=1, k=1))
    ours, theirs = run_packed(*inputs), exact(plain)
    for name, result in ours.items():
        assert (result.double() - theirs[name]).norm() < LIMIT * theirs[name].norm(), name


def test_tall_tiles_are_for_wide_experts_of_some_rows(fused):
    K3 = {"E": 896, "D": 3584, "dtype": torch.bfloat16}
    assert fused.tall_rows(16 * 8192, **K3) == 192
    assert not fused.tall_rows(16 * 8192, **{**K3, "dtype": torch.float32})
    assert not fused.tall_rows(16 * 8192, **{**K3, "D": 512})
    assert fused.tall_rows(16 * 8192, **{**K3, "E": 112}) == 192 and not fused.tall_rows(16 * 1024, **K3)
    assert fused.tall_tile(192, 3584, 6144) == fused.Tile(192, 256, 64, 8, 4)
    assert fused.tall_tile(192, 512, 6144) == fused.tall_tile(192, 3584, 128) == fused.Tile(192, 128, 64, 4, 2)


def test_without_caps_the_experts_are_swiglu(poison_empty):
    check(make(N=4), caps={"beta": None, "linear_beta": None})
    check(make(N=4), caps={"beta": 2.0, "linear_beta": None})


def test_one_expert_gets_everything_and_the_others_have_zero_gradients(poison_empty):
    x, indices, *rest = make(N=65, k=1)
    ours = check((x, torch.full_like(indices, 3), *rest))
    for name in ("dgate_up", "ddown"):
        idle = ours[name][[0, 1, 2, 4]]
        assert torch.equal(idle, torch.zeros_like(idle))


@pytest.mark.parametrize("N", [0, 5])
def test_nothing_to_compute_gives_zeros(N, poison_empty):
    x, indices, *rest = make(N=N)
    for result in run(x, torch.full_like(indices, 5), *rest).values():
        assert torch.equal(result, torch.zeros_like(result))
    assert torch.equal(decode(x, torch.full_like(indices, 5), *rest), torch.zeros_like(x))


def test_a_sentinel_has_no_influence_and_no_gradient(poison_empty):
    x, indices, weights, *rest = make(N=6)
    ours = run(x, indices, weights.masked_fill(indices == 5, float("nan")), *rest)
    for name, expected in exact((x, indices, weights, *rest)).items():
        assert (ours[name].double() - expected).norm() < LIMIT * expected.norm(), name
    assert not ours["dweights"][indices == 5].any()
    junk = decode(x, indices, weights.masked_fill(indices == 5, float("nan")), *rest)
    torch.testing.assert_close(junk, ours["y"], rtol=1e-5, atol=1e-6)


def test_an_expert_is_seen_by_its_tokens_alone(poison_empty):
    x, indices, weights, gate_up_proj, down_proj, dy = make(k=1, N=9)
    before = run(x, indices, weights, gate_up_proj, down_proj, dy)
    chosen = int(indices[0, 0])
    gate_up_proj[chosen], down_proj[chosen] = float("nan"), float("inf")
    after = run(x, indices, weights, gate_up_proj, down_proj, dy)
    others = indices[:, 0] != chosen
    for name in ("y", "dx", "dweights"):
        assert torch.equal(after[name][others], before[name][others]), name
    for name in ("dgate_up", "ddown"):
        kept = torch.arange(5) != chosen
        assert torch.equal(after[name][kept], before[name][kept]), name


def test_a_token_does_not_see_the_others_to_the_bit(poison_empty):
    x, indices, weights, gate_up_proj, down_proj, dy = make(k=2)
    first, others = slice(0, 5), slice(5, None)
    before = run(x, indices, weights, gate_up_proj, down_proj, dy)
    together = decode(x, indices, weights, gate_up_proj, down_proj)
    x[others], indices[others] = -3 * x[others], torch.arange(2)
    after = run(x, indices, weights, gate_up_proj, down_proj, dy)
    for name in ("y", "dx", "dweights"):
        assert torch.equal(after[name][first], before[name][first]), name
    assert torch.equal(decode(x, indices, weights, gate_up_proj, down_proj)[first], together[first])


@pytest.mark.parametrize(
    "sizes", [{"N": 1, "k": 5}, {"N": 3, "D": 72, "I": 132, "k": 2}, {"N": 5, "E": 1, "k": 1}], ids=str
)
def test_decoding_equals_the_reference(sizes, poison_empty):
    inputs = make(**sizes)
    expected = exact(inputs)["y"]
    assert (decode(*inputs).double() - expected).norm() < LIMIT * expected.norm()


def test_a_sum_in_parts_when_decoding(poison_empty, monkeypatch):
    from modeling_moe_lc.kernels.experts import fused_decode

    monkeypatch.setattr(fused_decode, "tiles", lambda *sizes: (64, 64, 32, 4))
    inputs = make(N=3, D=40, I=100, k=2)
    expected = exact(inputs)["y"]
    assert (decode(*inputs).double() - expected).norm() < LIMIT * expected.norm()


def test_many_tokens_without_gradients_keep_nothing(fused, poison_empty):
    inputs = make(N=66, D=8, I=8, k=1)
    assert torch.equal(decode(*inputs), run(*inputs)["y"])


@pytest.mark.parametrize(
    "T, k, E, BM",
    [(1, 1, 1, 64), (5, 2, 3, 64), (300, 3, 7, 64), (300, 3, 3, 192), (40, 8, 100, 128), (90, 2, 1024, 64)],
)
def test_the_sort_is_stable_and_its_tiles_cover_every_row_once(T, k, E, BM):
    from modeling_moe_lc.kernels.experts.fused_sort import launch_sort

    indices = torch.randint(0, E + 1, (T, k))
    indices[0, 0] = -5
    found = launch_sort(indices, E, BM)
    expert = indices.flatten()
    expert = torch.where((expert < 0) | (expert >= E), E, expert)
    order = expert.argsort(stable=True)
    known = int((expert < E).sum())
    counts = expert.bincount(minlength=E + 1)[:E].tolist()
    assert torch.equal(found.order[:known].long(), order[:known])
    assert torch.equal(found.inverse.long(), order.argsort().masked_fill(expert == E, -1))
    assert found.offsets.tolist() == [sum(counts[:e]) for e in range(E + 1)]
    tiles = [
        [e, sum(counts[:e]) + row, min(BM, counts[e] - row)] for e in range(E) for row in range(0, counts[e], BM)
    ]  # fmt: skip
    table = found.table.view(3, -1).mT
    assert table[: len(tiles)].tolist() == tiles and not table[len(tiles) :, 2].any()
    assert found.tiles % 8 == 0 and found.tiles <= math.ceil(T * k / BM) + E + 7


def test_a_retained_graph_gives_the_same_gradients_again(poison_empty):
    x, indices, *leaves, dy = make()
    leaves = [t.requires_grad_() for t in (x, *leaves)]
    y = expert_mlp(leaves[0], indices, *leaves[1:], **CAPS, impl="triton")
    first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    for one, two in zip(first, torch.autograd.grad(y, leaves, dy), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_frozen_projections_have_no_gradient_and_change_no_other(poison_empty):
    x, indices, weights, gate_up_proj, down_proj, dy = make()
    expected = run(x, indices, weights, gate_up_proj, down_proj, dy)["dx"]
    y = expert_mlp(x.requires_grad_(), indices, weights, gate_up_proj, down_proj, **CAPS, impl="triton")
    y.backward(dy)
    assert torch.equal(x.grad, expected) and weights.grad is None and gate_up_proj.grad is None


def test_any_strides_and_dtypes():
    x, indices, weights, gate_up_proj, down_proj, dy = make(N=4)
    expected = run(x, indices, weights, gate_up_proj.half().float(), down_proj.half().float(), dy)
    strided = [t.mT.contiguous().mT for t in (x, indices, weights, gate_up_proj.half(), down_proj.half(), dy)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = run(*strided)
    for name in NAMES:
        assert torch.equal(results[name], expected[name].to(results[name].dtype)), name
    assert [results[name].dtype for name in ("y", "dgate_up", "ddown")] == [
        torch.float32,
        torch.float16,
        torch.float16,
    ]
    assert torch.equal(decode(*strided), decode(x, indices, weights, *(t.float() for t in strided[3:5])))


def test_refused_inputs_are_named():
    x, indices, weights, gate_up_proj, down_proj, _ = make()
    with pytest.raises(ValueError, match="impl: 'triton' was asked for, but x: expected bfloat16"):
        expert_mlp(x.double(), indices, weights, gate_up_proj, down_proj, **CAPS, impl="triton")
    wide = torch.zeros(11, 33, dtype=torch.int64)
    with pytest.raises(ValueError, match="but indices: expected 1 to 32 experts per token, got 33"):
        expert_mlp(x, wide, wide.float(), gate_up_proj, down_proj, **CAPS, impl="triton")
    many = torch.zeros(1025, 2, 12), torch.zeros(1025, 12, 1)
    with pytest.raises(ValueError, match="but gate_up_proj: expected 1 to 1024 experts, got 1025"):
        expert_mlp(x, indices, weights, *many, **CAPS, impl="triton")


# The widths of the models: E, D, I, k. The extra memory of the best baseline at T 8,192, without gradients, in GB.
WIDTHS = {
    (64, 512, 256, 8): 0.387,
    (128, 1024, 512, 8): 0.471,
    (256, 2304, 1024, 8): 0.57,
    (112, 3584, 3072, 16): 2.61,
}


@pytest.mark.parametrize("sizes, baseline", WIDTHS.items(), ids=str)
def test_memory_stays_below_the_baseline(sizes, baseline, fused):
    """Counted from the plan: 3/4 of the baseline where all is kept, 0.35 of it where nothing is."""
    T, (_, D, I, k) = 8192, sizes
    for keep_bytes, share in ((fused.KEEP_BYTES, 0.75), (0, 0.35)):
        todo = fused.plan(T, k, D, I, 2, keep_bytes)
        chunk = max(end - begin for begin, end in zip(todo.bounds, todo.bounds[1:]))
        pairs, y, kept = T * k, T * D, T * k * 2 * I * todo.keep
        sort = 4 * pairs
        forward = kept + y + sort + pairs * (I + todo.columns) // todo.parts
        paired = 0 if todo.keep else 2 * chunk
        backward = kept + y + sort + pairs * (paired + max(chunk, todo.columns))
        assert todo.keep == (keep_bytes > 0)
        assert 2 * max(forward, backward) <= share * baseline * 1e9, (keep_bytes, 2 * forward, 2 * backward)


GPU_SIZES = (
    {"N": 200, "D": 512, "I": 256, "E": 64, "k": 8},
    {"N": 2048, "D": 512, "I": 256, "E": 64, "k": 8},
    {"N": 4096, "D": 1024, "I": 512, "E": 32, "k": 8},
    {"N": 2048, "D": 2304, "I": 1024, "E": 64, "k": 8},
    {"N": 4096, "D": 1032, "I": 1160, "E": 8, "k": 3},
    {"N": 600, "D": 1024, "I": 1152, "E": 32, "k": 8},  # tall tiles, of 256 columns
    {"N": 600, "D": 1032, "I": 520, "E": 32, "k": 8},  # and of 128 for the outputs
    {"N": 300, "D": 72, "I": 40, "E": 5, "k": 2},
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_LIMITS, ids=str)
@pytest.mark.parametrize("sizes", GPU_SIZES, ids=str)
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "computed again"])
def test_on_a_gpu_fused_is_exact_and_repeats_to_the_bit(sizes, dtype, keep, fused, monkeypatch, poison_empty):
    monkeypatch.setattr(fused, "KEEP_BYTES", keep * fused.KEEP_BYTES)
    inputs = make(**sizes, dtype=dtype, device="cuda")
    first = check(inputs, *GPU_LIMITS[dtype])
    for _ in range(20):
        for name, result in run(*inputs).items():
            assert torch.equal(result, first[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [{"D": 1024, "I": 1024}, {"D": 1032, "I": 1160}, {"D": 256, "I": 136}], ids=str)
def test_on_a_gpu_tall_tiles_change_no_bit(sizes, dtype, fused, monkeypatch, poison_empty):
    """Those of both widths, over rows of every part: also with sizes for which they are not chosen."""
    inputs = with_heights(**sizes, dtype=dtype, device="cuda")
    expected, y = run(*inputs), decode(*inputs)
    monkeypatch.setattr(fused, "tall_rows", lambda *sizes: 192)
    check(inputs, *GPU_LIMITS[dtype])
    for _ in range(20):
        assert torch.equal(decode(*inputs), y)
        for name, result in run(*inputs).items():
            assert torch.equal(result, expected[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_tall_tiles_of_packed_weights_change_no_bit(dtype, fused, monkeypatch, poison_empty):
    inputs, plain = packed(*with_heights(D=1024, I=576, dtype=dtype, device="cuda"))
    expected = run(*plain)
    monkeypatch.setattr(fused, "tall_rows", lambda *sizes: 192)
    for _ in range(20):
        for name, result in run_packed(*inputs).items():
            assert torch.equal(result, expected[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "computed again"])
def test_on_a_gpu_in_parts(keep, fused, monkeypatch, poison_empty):
    monkeypatch.setattr(fused, "KEEP_BYTES", keep * fused.KEEP_BYTES)
    monkeypatch.setattr(fused, "ROWS_BYTES", 1 << 20)
    check(make(N=2048, D=1024, I=1024, E=16, k=8, dtype=torch.bfloat16, device="cuda"), *GPU_LIMITS[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_LIMITS, ids=str)
@pytest.mark.parametrize("N", [1, 7, 64])
@pytest.mark.parametrize("sizes", [(512, 256, 64, 8), (2304, 1024, 64, 8), (72, 40, 5, 2)], ids=str)
def test_on_a_gpu_decoding(N, sizes, dtype, poison_empty):
    D, I, E, k = sizes
    inputs = make(N=N, D=D, I=I, E=E, k=k, dtype=dtype, device="cuda")
    expected = exact(inputs)["y"]
    first = decode(*inputs)
    assert (first.double() - expected).norm() <= GPU_LIMITS[dtype][0] * expected.norm()
    assert all(torch.equal(decode(*inputs), first) for _ in range(20))


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_a_graph_replays_with_other_routing():
    inputs = make(N=512, D=512, I=256, E=64, k=8, dtype=torch.bfloat16, device="cuda")
    other = make(N=512, D=512, I=256, E=64, k=8, dtype=torch.bfloat16, device="cuda", seed=1)
    run(*inputs)
    leaves = [inputs[i].requires_grad_() for i in (0, 2, 3, 4)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = expert_mlp(leaves[0], inputs[1], *leaves[1:], **CAPS, impl="triton")
        captured = y, *torch.autograd.grad(y, leaves, inputs[5])
    with torch.no_grad():
        for tensor, value in zip(inputs, other, strict=True):
            tensor.copy_(value)
    graph.replay()
    for result, expected in zip(captured, run(*other).values(), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("wide", ["tokens", "experts"])
def test_on_a_gpu_beyond_two_to_the_31(wide):
    """Elements of x, y and their gradients, or of the projections and theirs."""
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of GPU memory")
    last = slice(-300, None)
    if wide == "tokens":
        x, indices, *rest = make(N=530_000, D=4096, I=64, E=2, k=1, dtype=torch.bfloat16, device="cuda")
        few = x[last], indices[last], *rest
    else:
        x, indices, weights, gate_up_proj, down_proj, dy = make(
            N=300, D=4096, I=4096, E=66, k=2, dtype=torch.bfloat16, device="cuda"
        )  # fmt: skip
        few = x, indices % 2, weights, gate_up_proj[-2:], down_proj[-2:], dy
        indices, rest = indices % 2 + 64, (weights, gate_up_proj, down_proj, dy)
    few = [t[last] if len(t) == len(x) else t for t in few]
    ours, expected = run(x, indices, *rest), exact(few)
    for name, limit in (("y", 6e-3), ("dx", 1e-2), ("dweights", 1e-2)):
        assert (ours[name][last].double() - expected[name]).norm() <= limit * expected[name].norm(), name
    if wide == "experts":
        for name in ("dgate_up", "ddown"):
            assert not ours[name][:64].any()
            assert (ours[name][64:].double() - expected[name]).norm() <= 1e-2 * expected[name].norm(), name


def test_projections_at_odd_addresses_and_strides(fused, poison_empty):
    """Nobody sees the stride of a dimension of one element, but a descriptor."""
    x, indices, weights, *projections, dy = make(E=1, k=1, D=12, I=20)

    def odd(t):
        wide = torch.cat([torch.zeros(1), t.flatten(), torch.zeros(3)])
        return wide.as_strided(t.shape, (t.numel() + 1, *t.stride()[1:]), 1)

    ours = run(x, indices, weights, *projections, dy)
    moved = [odd(t) for t in projections]
    assert all(t.data_ptr() % 16 for t in moved)
    for name, value in run(x, indices, weights, *moved, dy).items():
        assert torch.equal(value, ours[name]), name


def test_decoding_of_no_width():
    nothing = torch.empty(3, 0), torch.zeros(3, 1, dtype=torch.int64), torch.rand(3, 1)
    assert decode(*nothing, torch.empty(1, 16, 0), torch.empty(1, 0, 8)).shape == (3, 0)
