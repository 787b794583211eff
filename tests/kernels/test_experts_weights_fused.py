"""The gradients of the projections, a^T b over the rows of each expert, by themselves; on a CPU under the interpreter."""

import pytest
import torch


HEIGHTS = (0, 1, 63, 64, 65, 0, 127, 128, 129, 300, 0)  # rows of the experts
K = 2  # slots of a token
LIMIT = 1e-6  # relative, FP32; measured under the interpreter: 1.2e-7
GPU_LIMITS = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-4}


class Sums:
    """Rows of experts in a random order of their tokens. Behind the last row, and the last place, is what nobody may read."""

    def __init__(self, gather_a, M, N, *, spare=0, begin=0, dtype=torch.float32, device="cpu"):
        g = torch.Generator(device).manual_seed(M + N)
        pairs, self.spare, self.begin, self.gather_a = sum(HEIGHTS), spare, begin, gather_a
        tokens = pairs // K + 40
        junk = torch.full((50,), 1 << 30, dtype=torch.int32, device=device)
        self.order = torch.cat([torch.randperm(tokens * K, generator=g, device=device)[:pairs].int(), junk])
        self.offsets = torch.tensor((0, *HEIGHTS), device=device).cumsum(0).int()
        rows = (tokens, pairs + 50) if gather_a else (pairs + 50, tokens)
        sizes = zip(rows, (M, N), strict=True)
        self.a, self.b = (torch.randn(*size, generator=g, device=device).to(dtype) for size in sizes)
        self.ordered, self.gathered = (self.b, self.a) if gather_a else (self.a, self.b)
        self.ordered[pairs:] = float("nan")

    def run(self, tile, precision="tf32"):
        from modeling_moe_lc.kernels.experts.fused_weights import launch_weights

        M, N, E = self.a.shape[1], self.b.shape[1], len(HEIGHTS)
        out = self.a.new_empty((E, M, N + self.spare) if self.gather_a else (E, M + 2 * self.spare, N))
        launch_weights(
            self.a, self.b, self.order, self.offsets, out, self.begin, tile, precision, k=K, gather_a=self.gather_a
        )  # fmt: skip
        if self.gather_a:
            own = out[:, :, self.begin : self.begin + N]
        else:
            halves = out.unflatten(1, (2, -1))[:, :, self.begin : self.begin + M // 2]
            own = halves.transpose(1, 2).flatten(1, 2)  # the rows g_0 u_0 g_1 u_1 ...
        assert out.isnan().sum() == out.numel() - own.numel() + own.isnan().sum(), "written outside of the channels"
        return own

    def exact(self):
        sums = []
        for first, last in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True):
            token, row = self.order[first:last].long() // K, slice(first, last)
            a, b = (self.a[token], self.b[row]) if self.gather_a else (self.a[row], self.b[token])
            sums.append(a.mT.double() @ b.double())
        return torch.stack(sums)

    def check(self, tile, precision="tf32", limit=LIMIT):
        ours, exact = self.run(tile, precision), self.exact()
        for expert, rows in enumerate(HEIGHTS):
            error = (ours[expert].double() - exact[expert]).norm()
            assert error <= limit * exact[expert].norm(), (expert, rows, error.item())
        return ours


@pytest.fixture
def fused():
    from modeling_moe_lc.kernels.experts import fused

    return fused


@pytest.mark.parametrize("gather_a", [True, False])
@pytest.mark.parametrize(
    "M, N, channels", [(64, 128, {}), (72, 44, {"spare": 16, "begin": 8}), (136, 12, {"spare": 4})]
)
def test_sums_over_rows(gather_a, M, N, channels, fused, poison_empty):
    tile = fused.weight_tile(sum(HEIGHTS), len(HEIGHTS), 64, torch.float32, gather_a=gather_a)
    Sums(gather_a, M, N, **channels).check(tile, "tf32x3")


@pytest.mark.parametrize("gather_a", [True, False])
def test_every_shape_of_a_tile_gives_the_same(gather_a, fused, poison_empty):
    sums = Sums(gather_a, 72, 136)
    first, *others = [sums.check(fused.Tile(BM, BN, 64, 4, 1)) for BM, BN in ((64, 64), (128, 256), (256, 128))]
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-5, atol=1e-5)


def isolated(sums, tile, precision="tf32"):
    """What is not finite in the rows of an expert stays in its sums, both ways through the rows."""
    before, expert = sums.run(tile, precision), HEIGHTS.index(128)
    first, last = sums.offsets[expert].item(), sums.offsets[expert + 1].item()
    tokens = sums.order[: sums.offsets[-1]].long() // K
    sums.ordered[first:last] = float("nan")
    alone = ~torch.isin(tokens[first:last], torch.cat([tokens[:first], tokens[last:]]))
    sums.gathered[tokens[first:last][alone]] = float("inf")
    after, others = sums.run(tile, precision), torch.arange(len(HEIGHTS)) != expert
    assert after[expert].isnan().all() and torch.equal(after[others], before[others])


@pytest.mark.parametrize("gather_a", [True, False])
def test_an_expert_does_not_see_the_rows_of_the_others(gather_a, fused, poison_empty):
    isolated(Sums(gather_a, 72, 44), fused.Tile(64, 64, 32, 4, 1), "tf32x3")


def test_the_gathered_side_of_a_wide_tile_is_the_narrow_one(fused):
    many, few, bf16 = 112 * 1024, 112 * 512, torch.bfloat16
    for gather_a, wide in ((True, (128, 256)), (False, (256, 128))):
        assert fused.weight_tile(many, 112, 768, bf16, gather_a=gather_a)[:2] == wide
        assert fused.weight_tile(few, 112, 768, bf16, gather_a=gather_a)[:2] == (128, 128)
        assert fused.weight_tile(many, 112, 768, torch.float32, gather_a=gather_a) == fused.Tile(64, 64, 32, 4, 1)


def test_no_half_of_a_wide_tile_is_empty(fused):
    for width in (128, 384, 640):
        assert fused.weight_tile(112 * 1024, 112, width, torch.bfloat16, gather_a=True)[:2] == (128, 128)


GPU_SIZES = ((512, 512, {}), (264, 392, {"spare": 16, "begin": 8}), (1024, 768, {"spare": 256, "begin": 256}))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_LIMITS, ids=str)
@pytest.mark.parametrize("gather_a", [True, False])
@pytest.mark.parametrize("rows_per_expert", [256, 1024])
@pytest.mark.parametrize("M, N, channels", GPU_SIZES, ids=str)
def test_on_a_gpu_sums_are_exact_and_repeat_to_the_bit(
    M, N, channels, rows_per_expert, gather_a, dtype, fused, poison_empty
):
    """Of every tile that can be chosen, also over rows for which it is not."""
    tile = fused.weight_tile(rows_per_expert, 1, 256, dtype, gather_a=gather_a)
    sums = Sums(gather_a, M, N, **channels, dtype=dtype, device="cuda")
    first = sums.check(tile, fused.precision(dtype), GPU_LIMITS[dtype])
    for _ in range(50):
        assert torch.equal(sums.run(tile, fused.precision(dtype)), first)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_LIMITS, ids=str)
@pytest.mark.parametrize("gather_a", [True, False])
@pytest.mark.parametrize("rows_per_expert", [256, 1024])
def test_on_a_gpu_an_expert_does_not_see_the_rows_of_the_others(rows_per_expert, gather_a, dtype, fused, poison_empty):
    tile = fused.weight_tile(rows_per_expert, 1, 256, dtype, gather_a=gather_a)
    isolated(Sums(gather_a, 264, 392, dtype=dtype, device="cuda"), tile, fused.precision(dtype))
