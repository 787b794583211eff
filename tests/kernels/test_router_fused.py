"""The Triton router computes what the reference says, the choice exactly; on a CPU under the interpreter."""

import importlib

import pytest
import torch

from modeling_moe_lc.kernels.router import route


triton = pytest.importorskip("triton")
tl = triton.language
fused = importlib.import_module("modeling_moe_lc.kernels.router.fused")
sigmoid = fused.sigmoid


LIMIT = 1e-6  # relative, FP32; measured under the interpreter: at most 2e-7
ROUNDING = 1e-6  # biased scores nearer than this may change places: the two sigmoids round differently


def make(N, E, dtype=torch.float32, device="cpu"):
    """Logits, a bias, and a cotangent for up to 32 weights."""
    generator = torch.Generator(device).manual_seed(E)
    logits = 2 * torch.randn(N, E, generator=generator, device=device)
    bias = 0.3 * torch.randn(E, generator=generator, device=device)
    return logits.to(dtype), bias, torch.randn(N, 32, generator=generator, device=device)


def run(logits, bias, top_k, cotangent, impl="triton", **kwargs):
    logits = logits.detach().clone().requires_grad_()
    indices, weights, counts, cutoff = route(logits, bias, top_k, impl=impl, **kwargs)
    (d_logits,) = torch.autograd.grad(weights, logits, cotangent[:, :top_k].to(weights.dtype))
    names = "indices", "weights", "counts", "cutoff", "d_logits"
    return dict(zip(names, (indices, weights.detach(), counts, cutoff, d_logits), strict=True))


def error(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(0.1)).item()


@triton.jit
def own_scores_kernel(logits, scores, BE: tl.constexpr):
    place = tl.program_id(0) * BE + tl.arange(0, BE)
    tl.store(scores + place, sigmoid(tl.load(logits + place).to(tl.float32)))


def own_scores(logits):
    """The kernel's sigmoid of [N, E] logits."""
    padded = torch.nn.functional.pad(logits.flatten(), (0, -logits.numel() % 1024))
    scores = torch.empty_like(padded)
    own_scores_kernel[(len(padded) // 1024,)](padded, scores, BE=1024, enable_fp_fusion=False)
    return scores[: logits.numel()].view_as(logits)


def assert_exact(logits, bias, top_k, bins, monkeypatch, token_mask=None):
    """The reference, given the kernel's scores, has the same choice, counts, cutoffs and histogram to the bit."""
    histograms = [torch.zeros(len(bias), bins, dtype=torch.int64, device=logits.device) for _ in range(2)]
    ours = route(logits, bias, top_k, token_mask=token_mask, histogram=histograms[0], impl="triton")
    scores = own_scores(logits)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "sigmoid", lambda _: scores)
        theirs = route(logits, bias, top_k, token_mask=token_mask, histogram=histograms[1], impl="reference")
    for i in (0, 2, 3):
        assert torch.equal(ours[i], theirs[i])
    assert error(ours[1], theirs[1]) < LIMIT
    assert torch.equal(*histograms)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    "N, E, top_k",
    [(2, 896, 16), (5, 64, 8), (3, 112, 16), (9, 37, 5), (4, 8, 8), (3, 1, 1), (5, 2, 1), (1, 1024, 32), (0, 8, 2)],
)
def test_fused_equals_the_reference(N, E, top_k, renormalize, poison_empty):
    logits, bias, cotangent = make(N, E)
    arguments = {"renormalize": renormalize, "scaling": 2.446}
    ours = run(logits, bias, top_k, cotangent, **arguments)
    theirs = run(logits, bias, top_k, cotangent, impl="reference", **arguments)
    assert torch.equal(ours["indices"], theirs["indices"]) and torch.equal(ours["counts"], theirs["counts"])
    for name in ("weights", "d_logits"):
        assert error(ours[name], theirs[name]) < LIMIT, name
    torch.testing.assert_close(ours["cutoff"], theirs["cutoff"], rtol=1e-6, atol=1e-7)
    assert [ours[name].dtype for name in ours] == [theirs[name].dtype for name in theirs]


@pytest.mark.parametrize("N, E, top_k", [(12, 37, 5), (2, 896, 16), (3, 33, 32), (5, 64, 8)])
def test_choice_and_statistics_are_exact(N, E, top_k, monkeypatch, poison_empty):
    logits, bias, _ = make(N, E)
    assert_exact(logits, bias, top_k, 64, monkeypatch)  # a power of two: torch divides differently on CPU and GPU


def test_ties_go_to_the_lowest_expert(monkeypatch):
    logits = torch.randint(-2, 3, (3, 200)).float()
    assert_exact(logits, torch.zeros(200), 17, 128, monkeypatch)
    assert_exact(logits, torch.randint(-1, 2, (200,)) / 4, 17, 128, monkeypatch)
    indices, _, _, cutoff = route(torch.zeros(2, 200), torch.zeros(200), 20, impl="triton")
    assert torch.equal(indices, torch.arange(20).expand(2, 20)) and torch.equal(cutoff, torch.full((2,), 0.5))


@pytest.mark.parametrize("order", [1, -1])
def test_the_best_experts_may_all_lie_in_one_lane(order, monkeypatch):
    lane = (128 * torch.arange(7)[:, None] + torch.arange(4)).flatten()  # of the first of 32 lanes
    logits = torch.randn(2, 896)
    logits[:, lane] = 3 + order * torch.arange(28) / 10
    assert_exact(logits, torch.zeros(896), 20, 64, monkeypatch)


def test_infinities_and_nan_rank_as_in_torch():
    logits = torch.randn(4, 40)
    logits[0, 5], logits[1, [3, 30]], logits[2, 7], logits[3] = float("inf"), float("nan"), float("-inf"), -200.0
    logits[1, 30].neg_()
    bias = torch.zeros(40)
    bias[4:] = float("-inf")  # experts that are off, in ascending order where they are needed
    for top_k in (3, 6, 32):
        ours, theirs = (route(logits, bias, top_k, impl=impl) for impl in ("triton", "reference"))
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[2], theirs[2])
        torch.testing.assert_close(ours[3], theirs[3], equal_nan=True)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[-200.0] * 8, [200.0] * 8, [1e30] * 4 + [-1e30] * 4])
    results = run(logits, torch.zeros(8), 3, torch.ones(3, 32))
    assert all(results[name].isfinite().all() for name in ("weights", "cutoff", "d_logits"))


def test_padding_is_neither_counted_nor_a_neighbour():
    logits, bias, _ = make(12, 16)
    mask = torch.rand(12) < 0.6
    logits[~mask] = float("nan")
    histogram, alone = (torch.zeros(16, 100, dtype=torch.int64) for _ in range(2))
    results = route(logits, bias, 3, token_mask=mask, histogram=histogram, impl="triton")
    expected = route(logits[mask], bias, 3, histogram=alone, impl="triton")
    assert torch.equal(results[2], expected[2]) and torch.equal(histogram, alone)
    for i in (0, 1, 3):
        assert torch.equal(results[i][mask], expected[i])
    assert results[0].min() >= 0 and results[0].max() < 16


def test_histograms_of_any_strides_are_added_to():
    logits, bias, _ = make(6, 20)
    plain = torch.ones(20, 50, dtype=torch.int64)
    strided = torch.ones(50, 40, dtype=torch.int64).T[::2]
    for histogram in (plain, strided):
        route(logits, bias, 3, histogram=histogram, impl="triton")
    assert torch.equal(plain, strided) and torch.equal(plain.sum(1), torch.full((20,), 56))


BINS = [1, 7, 1000, 1024, 5000, 20_000]


@pytest.mark.parametrize("bins, masked", [*zip(BINS, [True, False] * 3, strict=True), (1000, True)])
def test_histograms_of_any_size_and_many_shares(bins, masked, monkeypatch):
    monkeypatch.setattr(fused, "HISTOGRAM_TILE", 64)
    monkeypatch.setattr(fused, "LEAST_SHARE", 20)
    N, E = 70, 37 if bins < 5000 else 5
    logits, bias, _ = make(N, E)
    cutoff = torch.linspace(0.2, 1.5, N)
    mask = torch.arange(N) % 3 != 0 if masked else None
    assert min(fused.histogram_grid(N, E, bins)[0]) > 1 or bins > fused.COUNTERS
    histogram = torch.ones(E, bins, dtype=torch.int64)
    for _ in range(2):
        fused.launch_histogram(logits, bias, mask, cutoff, histogram)
    low, width = bias.min() - 1, (bias.max() - bias.min() + 2) * (1 / bins)  # as on a GPU
    index = ((cutoff[:, None] - own_scores(logits) - low) / width).long().clamp(0, bins - 1)
    counted = 2 * torch.ones(N, dtype=torch.int64) if mask is None else 2 * mask.long()
    assert torch.equal(histogram, 1 + torch.zeros_like(histogram).scatter_add_(1, index.T, counted.expand(E, -1)))


def test_programs_of_the_histogram_cover_all_and_have_room():
    for N in (1, 100, 8192, 65_536, 2**21 + 1):
        for E in (1, 37, 64, 896, 1024):
            for bins in (1, 7, 255, 1000, 1024, 1025, 5000, 8192, 8193, 100_000):
                (blocks, shares), share, BE, BT = fused.histogram_grid(N, E, bins)
                assert blocks * BE >= E and shares * share >= N > (shares - 1) * share and share % BT == 0
                assert BE * bins <= fused.COUNTERS or bins > fused.COUNTERS
                assert BE * BT == fused.HISTOGRAM_TILE >= fused.HISTOGRAM_THREADS
                assert blocks * shares <= fused.HISTOGRAM_PROGRAMS or shares == 1
    assert fused.histogram_grid(65_536, 896, 1000)[0] == (112, 3)


def test_tokens_are_independent_to_the_bit():
    logits, bias, cotangent = make(6, 70)
    before = run(logits, bias, 9, cotangent)
    edited = logits.clone()
    edited[2:] = 5 * torch.randn(4, 70)
    after, alone = run(edited, bias, 9, cotangent), run(logits[1:2], bias, 9, cotangent[1:2])
    for name in ("indices", "weights", "cutoff", "d_logits"):
        assert torch.equal(after[name][:2], before[name][:2]), name
        assert torch.equal(alone[name], before[name][1:2]), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("E", [48, 36])
def test_16_bit_logits_of_any_strides(E, dtype):
    logits, bias, cotangent = make(4, E, dtype=dtype)
    ours = run(logits.mT.contiguous().mT, bias, 5, cotangent)
    expected = run(logits.float(), bias, 5, cotangent)
    # Not to the bit: the interpreter truncates to BF16.
    assert ours["d_logits"].dtype == dtype and error(ours["d_logits"], expected["d_logits"]) < 4e-3
    assert torch.equal(ours["indices"], expected["indices"]) and torch.equal(ours["weights"], expected["weights"])


def test_only_the_weights_have_gradients():
    logits, bias, _ = make(3, 16)
    logits.requires_grad_()
    indices, weights, counts, cutoff = route(logits, bias.requires_grad_(), 4, impl="triton")
    assert weights.requires_grad and not any(x.requires_grad for x in (indices, counts, cutoff))
    weights.square().sum().backward()
    assert bias.grad is None and torch.equal(logits.grad != 0, torch.zeros(3, 16).scatter(1, indices, 1.0) != 0)


@torch.no_grad()
def test_autocast_changes_nothing():
    logits, bias, _ = make(3, 16)
    expected = route(logits, bias, 4, impl="triton")
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, route(logits, bias, 4, impl="triton"), expected))


def test_inputs_that_the_kernels_do_not_take_are_refused_by_name():
    logits, bias, _ = make(2, 12)
    wide = torch.zeros(2, 1025)
    for name, arguments, kwargs in (
        ("logits", (logits.double(), bias, 3), {}),
        ("logits", (wide, wide[0], 3), {}),
        ("bias", (logits, bias.double(), 3), {}),
        ("top_k", (wide[:, :40], wide[0, :40], 33), {}),
        ("topk_group", (logits, bias, 3), {"num_groups": 4, "topk_group": 2}),
    ):
        with pytest.raises(ValueError, match=f"^impl: .*but {name}: "):
            route(*arguments, impl="triton", **kwargs)


SIZES = [(20_000, 896, 16), (5000, 1024, 32), (3001, 112, 16), (2000, 64, 8), (512, 37, 5), (333, 256, 8)]


@pytest.mark.gpu
@pytest.mark.parametrize("N, E, top_k", SIZES)
def test_exact_on_a_gpu(N, E, top_k, monkeypatch, poison_empty):
    logits, bias, _ = make(N, E, device="cuda")
    assert_exact(logits, bias, top_k, 1000, monkeypatch)
    assert_exact(logits.round(), bias, top_k, 1000, monkeypatch)
    assert_exact(torch.zeros_like(logits[:32]), bias * 0, top_k, 1000, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bins", [*BINS, 40, 500, 2048, 8192])
def test_histograms_of_any_size_on_a_gpu(bins, masked, dtype, monkeypatch, poison_empty):
    for N, E, top_k in ((20_000, 896, 16), (3001, 37, 5), (1100, 1024, 32), (7, 3, 1)):
        logits, bias, _ = make(N, E, dtype=dtype, device="cuda")
        mask = torch.rand(N, device="cuda") < 0.7 if masked else None
        assert_exact(logits.float(), bias, top_k, bins, monkeypatch, mask)
        assert_exact(logits.float() * 0, bias * 0, top_k, bins, monkeypatch, mask)
        plain, strided = torch.zeros(E, bins, dtype=torch.int64, device="cuda"), logits.new_zeros(bins, 2 * E).long()
        route(logits.float(), bias, top_k, token_mask=mask, histogram=plain, impl="triton")
        for _ in range(2):
            route(logits, bias, top_k, token_mask=mask, histogram=strided.T[::2], impl="triton")
        assert torch.equal(strided.T[::2], 2 * plain) and not strided.T[1::2].any()


@pytest.mark.gpu
def test_a_graph_adds_at_every_replay_on_a_gpu():
    logits, bias, _ = make(20_000, 896, device="cuda")
    once, histogram = (torch.zeros(896, 1000, dtype=torch.int64, device="cuda") for _ in range(2))
    route(logits, bias, 16, histogram=once, impl="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        route(logits, bias, 16, histogram=histogram, impl="triton")
    for _ in range(3):
        graph.replay()
    assert torch.equal(histogram, 3 * once) and torch.equal(once.sum(1), torch.full_like(once[:, 0], 20_000))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("N, E, top_k", SIZES)
def test_weights_and_gradients_on_a_gpu_against_fp64(N, E, top_k, dtype, limit, poison_empty):
    logits, bias, cotangent = make(N, E, dtype=dtype, device="cuda")
    ours = run(logits, bias, top_k, cotangent, scaling=2.446)
    leaf = logits.double().requires_grad_()
    scores = leaf.sigmoid().gather(1, ours["indices"])
    weights = 2.446 * scores / scores.sum(1, keepdim=True)
    (d_logits,) = torch.autograd.grad(weights, leaf, cotangent[:, :top_k].double())
    assert error(ours["weights"], weights) < 2e-6
    assert error(ours["d_logits"], d_logits) < limit


@pytest.mark.gpu
def test_a_million_tokens_on_a_gpu():
    """Where the biased scores around every place differ by more than rounding, the choice is that of FP64."""
    wide = 0
    for seed in range(16):
        torch.manual_seed(seed)
        logits, bias = 2 * torch.randn(65536, 896, device="cuda"), 0.2 * torch.randn(896, device="cuda")
        indices, _, counts, _ = route(logits, bias, 16, impl="triton")
        best, order = (logits.double().sigmoid() + bias.double()).topk(17)
        clear = (best[:, :-1] - best[:, 1:] > ROUNDING).all(1)
        assert torch.equal(indices[clear], order[:, :16][clear])
        assert torch.equal(counts, torch.bincount(indices.flatten(), minlength=896))
        wide += clear.sum().item()
    assert wide > 900_000


@pytest.mark.gpu
def test_runs_repeat_to_the_bit_on_a_gpu():
    logits, bias, cotangent = make(20_000, 896, device="cuda")
    first = run(logits, bias, 16, cotangent)
    for _ in range(20):
        for name, x in run(logits, bias, 16, cotangent).items():
            assert torch.equal(x, first[name]), name


@pytest.mark.gpu
def test_more_than_2_31_elements():
    N, E = 2**21 + 400_000, 896
    if torch.cuda.mem_get_info()[0] < 5 * 2 * N * E:
        pytest.skip("needs 23 GB of free memory")
    logits = torch.zeros(N, E, dtype=torch.bfloat16, device="cuda")
    logits[-50:] = torch.randn(50, E, device="cuda")
    bias, cotangent = torch.zeros(E, device="cuda"), torch.randn(50, 32, device="cuda")
    end = run(logits[-50:], bias, 16, cotangent)
    indices, weights, _, _ = route(logits.requires_grad_(), bias, 16, impl="triton")
    (d_logits,) = torch.autograd.grad(weights[-50:], logits, cotangent[:, :16])
    assert torch.equal(indices[-50:], end["indices"]) and torch.equal(weights[-50:], end["weights"])
    assert torch.equal(d_logits[-50:], end["d_logits"])
