"""The Triton residual mix computes what the reference says, outputs and every gradient; on a CPU under the interpreter."""

import pytest
import torch

from modeling_moe_lc.kernels.attn_res import attn_res, attn_res_norm, attn_res_norm_through


EPS = 1e-5
LIMIT = 5e-6  # relative, FP32; measured under the interpreter: at most 1e-6
GPU_LIMIT, GPU_GRADIENT_LIMIT = 6e-3, 1e-2  # BF16 inputs against FP64


def make(M, *shape, norm=False, dtype=torch.float32, device="cpu"):
    """Sources, query, norm_weight and, for `attn_res_norm`, out_norm_weight; the cotangent."""
    generator = torch.Generator(device).manual_seed(M)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    # The larger D, the more would the scores differ, and a softmax that is all on one source tests nothing.
    sources = [(random(*shape) * (1 + j / 2)).to(dtype) for j in range(M)]
    weights = [random(shape[-1]) * 1.5 * shape[-1] ** -0.5, *(1 + 0.2 * random(shape[-1]) for _ in range(1 + norm))]
    return sources, [w.to(dtype) for w in weights], random(*shape).to(dtype)


def run(sources, weights, dy, **kwargs):
    """The output and all gradients, by name."""
    sources, weights = ([t.detach().requires_grad_() for t in tensors] for tensors in (sources, weights))
    blocks, partial = (sources[:-1], sources[-1]) if len(sources) > 1 else (sources, None)
    query, norm_weight, *out_norm_weight = weights
    if out_norm_weight:
        y = attn_res_norm(blocks, partial, query, norm_weight, EPS, *out_norm_weight, 2 * EPS, **kwargs)
    else:
        y = attn_res(blocks, partial, query, norm_weight, EPS, **kwargs)
    gradients = torch.autograd.grad(y, [*sources, *weights], dy)
    names = ["y", *(f"d_source_{j}" for j in range(len(sources))), "d_query", "d_norm_weight", "d_out_norm_weight"]
    return dict(zip(names, (y.detach(), *gradients)))


def check(sources, weights, dy, limit, gradient_limit=None):
    ours = run(sources, weights, dy, impl="triton")
    wide = ([s.double() for s in sources], [w.double() for w in weights], dy.double())
    theirs = run(*wide, impl="reference")
    for name, reference in theirs.items():
        # A lone source has the probability 1, whatever the query.
        scale = reference.norm() if reference.any() else dy.double().norm()
        error = (ours[name].double() - reference).norm() / scale
        assert error < (limit if name == "y" else gradient_limit or limit), (name, error.item())


both = pytest.mark.parametrize("norm", [False, True], ids=["mix", "norm"])


@both
@pytest.mark.parametrize("M, shape", [(1, (2, 7)), (2, (1, 300)), (5, (2, 3, 37)), (17, (1, 16)), (3, (1, 1537))])
def test_fused_equals_the_reference(M, shape, norm, poison_empty):
    check(*make(M, *shape, norm=norm), LIMIT)


@both
@pytest.mark.parametrize("D", [768, 2304, 7168, 8192])
def test_wide_rows(D, norm, poison_empty):
    # With one token the gradient of the query hangs on the difference of two products of D terms.
    check(*make(2, 1, D, norm=norm), LIMIT, 1e-4)


@both
def test_a_program_takes_several_tokens(norm, poison_empty, monkeypatch):
    from modeling_moe_lc.kernels.attn_res import fused

    monkeypatch.setattr(fused, "MULTIPROCESSORS", 1)
    for table in ("FORWARD_WARPS", "BACKWARD_WARPS", "BACKWARD_NORM_WARPS"):
        monkeypatch.setattr(fused, table, (2, 2, 2, 2, 2))
    check(*make(3, 5, 24, norm=norm), LIMIT)


def run_through(sources, weights, dy, later, **kwargs):
    """Gradients where some sources are read again: source j, times `later[j]`, None for those that are not."""
    sources, weights = ([t.detach().requires_grad_() for t in tensors] for tensors in (sources, weights))
    blocks, partial = (sources[:-1], sources[-1]) if len(sources) > 1 else (sources, None)
    query, norm_weight, out_norm_weight = weights
    y, blocks, partial = attn_res_norm_through(
        blocks, partial, query, norm_weight, EPS, out_norm_weight, 2 * EPS, **kwargs
    )
    outputs, cotangents = ([], []) if dy is None else ([y], [dy])
    for source, factor in zip([*blocks, partial], later):
        if factor is not None:
            outputs.append(source * factor)
            cotangents.append(torch.ones_like(source))
    gradients = torch.autograd.grad(outputs, [*sources, *weights], cotangents, allow_unused=True)
    return [y.detach(), *gradients]


@pytest.mark.parametrize("used", ["all", "none", "last", "second", "not y"])
@pytest.mark.parametrize("M, shape", [(1, (2, 7)), (3, (2, 300)), (9, (3, 37))])
def test_later_gradients_are_added(M, shape, used, poison_empty):
    sources, weights, dy = make(M, *shape, norm=True)
    places = {"all": range(M), "none": (), "last": [M - 1], "second": [min(1, M - 1)], "not y": range(M)}[used]
    later = [torch.randn_like(s) if j in places else None for j, s in enumerate(sources)]
    dy = None if used == "not y" else dy
    ours = run_through(sources, weights, dy, later, impl="triton")
    wide = ([s.double() for s in sources], [w.double() for w in weights], None if dy is None else dy.double())
    theirs = run_through(*wide, [None if x is None else x.double() for x in later], impl="reference")
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            scale = other.norm() if other.any() else torch.ones(())
            assert (one.double() - other).norm() / scale < LIMIT


def test_later_gradients_of_several_dtypes():
    sources, weights, dy = make(2, 2, 64, norm=True)
    sources = [sources[0], sources[1].half()]
    later = [torch.randn_like(source) for source in sources]
    ours = run_through(sources, weights, dy, later, impl="triton")
    theirs = run_through(sources, weights, dy, later, impl="reference")
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype and (one - other).norm() / other.norm() < 1e-3


def test_zero_query_is_the_mean_and_a_lone_source_passes_unchanged():
    sources, (query, norm_weight), _ = make(5, 4, 33)
    mean = torch.stack(sources).mean(0)
    ours = attn_res(sources[1:], sources[0], torch.zeros_like(query), norm_weight, EPS, impl="triton")
    torch.testing.assert_close(ours, mean)
    assert torch.equal(attn_res(sources[:1], None, query, norm_weight, EPS, impl="triton"), sources[0])


def test_large_scores_do_not_overflow():
    sources, (query, norm_weight), dy = make(3, 2, 24)
    results = run(sources, [1e4 * query, norm_weight], dy, impl="triton")
    assert all(x.isfinite().all() for x in results.values())


def test_zero_sources_give_zeros_and_finite_gradients():
    sources, weights, dy = make(2, 2, 8, norm=True)
    results = run([torch.zeros_like(s) for s in sources], weights, dy, impl="triton")
    assert not results["y"].any() and all(x.isfinite().all() for x in results.values())


@both
def test_tokens_are_independent_to_the_bit(norm):
    sources, weights, dy = make(3, 3, 20, norm=norm)
    whole = run(sources, weights, dy, impl="triton")
    edited = [s.clone() for s in sources]
    for source in edited:
        source[0] = float("nan")
    others = run(edited, weights, dy, impl="triton")
    alone = run([s[1:2] for s in sources], weights, dy[1:2], impl="triton")
    for name in ("y", "d_source_0", "d_source_2"):
        assert torch.equal(others[name][1:], whole[name][1:]) and torch.equal(alone[name], whole[name][1:2]), name


@both
def test_sources_of_several_dtypes(norm, poison_empty):
    """The FP32 embedding and the rest in 16 bits, as under autocast; the widest decides."""
    sources, weights, dy = make(3, 2, 64, norm=norm)
    sources = [sources[0], *(s.half() for s in sources[1:])]
    results = run(sources, weights, dy, impl="triton")
    assert results["y"].dtype == torch.float32
    assert [results[f"d_source_{j}"].dtype for j in range(3)] == [torch.float32, torch.float16, torch.float16]
    check(sources, weights, dy, LIMIT, 1e-3)


@torch.no_grad()
def test_without_gradients_nothing_is_kept_and_autocast_changes_nothing():
    sources, weights, _ = make(3, 2, 20, norm=True)
    query, norm_weight, out_norm_weight = weights
    arguments = (sources, None, query, norm_weight, EPS, out_norm_weight, EPS)
    y = attn_res_norm(*arguments, impl="triton")
    torch.testing.assert_close(y, attn_res_norm(*arguments, impl="reference"))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attn_res_norm(*arguments, impl="triton"), y)
    with torch.enable_grad():
        assert torch.equal(attn_res_norm([s.requires_grad_() for s in sources], *arguments[1:], impl="triton"), y)


def test_any_strides_and_no_tokens():
    sources, weights, dy = make(3, 4, 20)
    expected = run(sources, weights, dy, impl="triton")
    strided = [s.mT.contiguous().mT for s in sources]
    for name, x in run(strided, weights, dy.mT.contiguous().mT, impl="triton").items():
        assert torch.equal(x, expected[name]), name
    results = run(*make(2, 0, 8, norm=True), impl="triton")
    assert results["y"].shape == (0, 8) and not any(results[name].any() for name in results if "weight" in name)


def test_inputs_that_the_kernels_do_not_take_are_refused_by_name():
    sources, (query, weight), _ = make(2, 2, 8)
    for name, arguments in (
        ("source 1", ([sources[0], sources[1].double()], None, query, weight, EPS)),
        ("query", (sources, None, query.double(), weight, EPS)),
        ("norm_weight", (sources, None, query, weight.double(), EPS)),
        ("D", ([torch.zeros(1, 8193)], None, torch.zeros(8193), torch.zeros(8193), EPS)),
    ):
        with pytest.raises(ValueError, match=f"^impl: .*but {name}: "):
            attn_res(*arguments, impl="triton")
    with pytest.raises(ValueError, match="^impl: .*but out_norm_weight: "):
        attn_res_norm(sources, None, query, weight, EPS, weight.double(), EPS, impl="triton")
    with pytest.raises(ValueError, match="^out_norm_weight: "):
        attn_res_norm(sources, None, query, weight, EPS, weight[1:], EPS)
    with pytest.raises(ValueError, match="^out_eps: "):
        attn_res_norm(sources, None, query, weight, EPS, weight, 0.0)


# Every number of pieces and of warps.
GPU_WIDTHS = (37, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2304, 2560, 3072, 4096, 5120, 6144, 7168, 8192)


@pytest.mark.gpu
@both
@pytest.mark.parametrize("D", GPU_WIDTHS)
@pytest.mark.parametrize("M, tokens", [(1, 3), (5, 3000), (9, 700), (17, 65)])
def test_bf16_on_a_gpu_against_fp64(M, tokens, D, norm, poison_empty):
    inputs = make(M, tokens, D, norm=norm, dtype=torch.bfloat16, device="cuda")
    check(*inputs, GPU_LIMIT, GPU_GRADIENT_LIMIT)


@pytest.mark.gpu
@pytest.mark.parametrize("D", GPU_WIDTHS)
@pytest.mark.parametrize("M, tokens", [(1, 3), (5, 3000), (9, 700), (17, 65)])
def test_later_gradients_are_added_on_a_gpu(M, tokens, D, poison_empty):
    sources, weights, dy = make(M, tokens, D, norm=True, dtype=torch.bfloat16, device="cuda")
    later = [torch.randn_like(s) if j != 1 else None for j, s in enumerate(sources)]
    ours = run_through(sources, weights, dy, later, impl="triton")
    wide = ([s.double() for s in sources], [w.double() for w in weights], dy.double())
    theirs = run_through(*wide, [None if x is None else x.double() for x in later], impl="reference")
    for one, other in zip(ours, theirs, strict=True):
        scale = other.norm() if other.any() else dy.double().norm()
        assert (one.double() - other).norm() / scale < GPU_GRADIENT_LIMIT


@pytest.mark.gpu
@both
@pytest.mark.parametrize("D", [37, 1024, 2304, 7168])
def test_fp32_on_a_gpu_against_fp64(D, norm, poison_empty):
    check(*make(5, 300, D, norm=norm, device="cuda"), 1e-4)


@pytest.mark.gpu
@both
def test_dtypes_may_differ_on_a_gpu(norm, poison_empty):
    sources, weights, dy = make(5, 300, 2304, norm=norm, device="cuda")
    check([sources[0], *(s.bfloat16() for s in sources[1:])], weights, dy, 1e-4, 5e-3)


@pytest.mark.gpu
@both
@pytest.mark.parametrize("D", [1024, 2304, 7168])
def test_runs_repeat_to_the_bit_on_a_gpu(D, norm):
    inputs = make(5, 5000, D, norm=norm, dtype=torch.bfloat16, device="cuda")
    first = run(*inputs, impl="triton")
    for _ in range(10):
        for name, x in run(*inputs, impl="triton").items():
            assert torch.equal(x, first[name]), name


@pytest.mark.gpu
def test_more_than_2_31_elements():
    tokens, D = 2**20 + 40, 2048
    if torch.cuda.mem_get_info()[0] < 9 * 2 * tokens * D:
        pytest.skip("needs 39 GB of free memory")
    sources, weights, dy = make(2, 50, D, dtype=torch.bfloat16, device="cuda")
    expected = run(sources, weights, dy, impl="triton")
    whole = [torch.ones(tokens, D, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    for tensor, end in zip(whole, (*sources, dy), strict=True):
        tensor[-50:] = end
    results = run(whole[:2], weights, whole[2], impl="triton")
    assert all(torch.equal(results[name][-50:], expected[name]) for name in ("y", "d_source_0", "d_source_1"))


@pytest.mark.parametrize("used", [(0,), (2,), (0, 1, 2)])
def test_later_gradients_of_some_sources_beside_a_norm_in_fp32(used, poison_empty):
    """What stands for a gradient that is not there has the dtype of the sources."""

    def gradients(impl):
        torch.manual_seed(0)
        sources = [torch.randn(5, 24).half().requires_grad_() for _ in range(3)]
        query, weight, out_weight = (torch.randn(24, requires_grad=True) for _ in range(3))
        y, blocks, partial = attn_res_norm_through(
            sources[:-1], sources[-1], query, weight, 1e-6, out_weight, 1e-6, impl=impl
        )
        later = [*blocks, partial]
        loss = (y.double() * torch.arange(24)).sum() + sum(later[j].double().square().sum() for j in used)
        return torch.autograd.grad(loss, [*sources, query, weight, out_weight])

    for ours, reference in zip(gradients("triton"), gradients("reference"), strict=True):
        assert (ours.double() - reference.double()).norm() < 1e-2 * reference.double().norm()
