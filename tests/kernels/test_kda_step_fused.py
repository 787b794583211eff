"""The Triton step computes one token of the recurrence, in place; on a CPU under the interpreter."""

import pytest
import torch

from modeling_moe_lc.kernels.kda import api, kda, kda_step


FP32 = 2e-6  # measured 2e-7
# 16-bit inputs against FP64; measured under the interpreter, which cuts o to BF16 instead of rounding it: 4e-3 and 1e-7.
GPU_LIMIT = {"o": 5e-3, "state": 1e-5}
GATES = pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])


def make(B, H, K, V, *, dtype=torch.float32, device="cpu", shift=0.0, seed=0):
    """Inputs of a step by name, and a state."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    tokens = {"q": random(B, H, K), "k": random(B, H, K), "v": random(B, H, V), "g": random(B, H, K) + shift}
    tokens = {name: x.to(dtype) for name, x in {**tokens, "beta": random(B, H)}.items()}
    return {**tokens, "A_log": 0.3 * random(H), "dt_bias": random(H, K)}, random(B, H, K, V)


def step(x, state, lower_bound=-5.0, impl="triton"):
    """o, and the state after the step, which must be the tensor it was."""
    address = state.data_ptr()
    o = kda_step(**x, lower_bound=lower_bound, state=state, impl=impl)
    assert state.data_ptr() == address
    return {"o": o, "state": state}


def exact(x, state, lower_bound=-5.0):
    return step({name: t.double() for name, t in x.items()}, state.double(), lower_bound, impl="reference")


def assert_close(ours, theirs, limits):
    for name, reference in theirs.items():
        error = (ours[name].double() - reference).norm() / reference.norm()
        assert error < limits[name], (name, error.item())


@GATES
@pytest.mark.parametrize("shape", [(1, 2, 16, 32), (3, 2, 64, 16), (1, 1, 16, 128)], ids=str)
def test_fused_equals_the_reference(shape, lower_bound, poison_empty):
    x, state = make(*shape)
    expected = exact(x, state, lower_bound)
    ours = step(x, state, lower_bound)
    assert ours["o"].dtype == x["v"].dtype
    assert_close(ours, expected, {"o": FP32, "state": FP32})


@pytest.mark.parametrize("heads", [1, 264, 2048, 4096])
def test_every_tile_equals_the_reference(heads, monkeypatch):
    from modeling_moe_lc.kernels.kda import fused_step

    chosen = fused_step.tile(heads, 32)
    monkeypatch.setattr(fused_step, "tile", lambda heads, V: chosen)
    x, state = make(2, 1, 16, 32)
    expected = exact(x, state)
    assert_close(step(x, state), expected, {"o": FP32, "state": FP32})


def test_tiles_divide_the_value_channels_and_fit_a_thread():
    from modeling_moe_lc.kernels.kda.fused_step import HEAD_DIMS, tile

    for V in HEAD_DIMS:
        for heads in (1, 6, 32, 33, 96, 511, 512, 3072, 24576, 1 << 20):
            BV, warps = tile(heads, V)
            assert V % BV == 0 and max(HEAD_DIMS) * BV <= 64 * 32 * warps


def test_a_chain_of_steps_equals_a_whole_sequence():
    T = 70
    generator = torch.Generator().manual_seed(1)
    q, k, g, v = (torch.randn(1, T, 1, 16, generator=generator) for _ in range(4))
    beta, gate = torch.randn(1, T, 1, generator=generator), {"A_log": torch.zeros(1), "dt_bias": torch.zeros(1, 16)}
    state = torch.randn(1, 1, 16, 16, generator=generator)
    sequence = [x.double() for x in (q, k, v, g, beta)]
    o, final = kda(*sequence, **gate, initial_state=state.double(), impl="reference")
    steps = [kda_step(*(x[:, t] for x in (q, k, v, g, beta)), **gate, state=state, impl="triton") for t in range(T)]
    ours = {"o": torch.stack(steps, dim=1), "state": state}
    assert_close(ours, {"o": o, "state": final}, {"o": FP32, "state": FP32})


@pytest.mark.parametrize("lower_bound", [-1000.0, None], ids=["bounded", "softplus"])
def test_a_log_decay_of_1000_forgets(lower_bound):
    x, state = make(1, 1, 16, 16)
    x["g"] = torch.full_like(x["g"], 1000.0)
    x["A_log"] = torch.full_like(x["A_log"], 100.0)
    expected = exact(x, torch.zeros_like(state), lower_bound)
    assert_close(step(x, state, lower_bound), expected, {"o": FP32, "state": FP32})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(dtype):
    x, state = make(2, 1, 16, 16, dtype=dtype)
    expected = exact(x, state)
    ours = step(x, state)
    assert ours["o"].dtype == dtype
    assert_close(ours, expected, GPU_LIMIT)


def test_rows_apart_and_heads_apart_change_no_bit():
    x, state = make(3, 2, 16, 16)
    expected = step(x, state.clone())
    fused = torch.cat([x[name].flatten(1) for name in ("q", "k", "v", "g")], dim=1)  # [B, 4 * H * K]
    slices = {name: t.unflatten(1, (2, 16)) for name, t in zip(("q", "k", "v", "g"), fused.chunk(4, dim=1))}
    assert not slices["q"].is_contiguous()
    swapped = {name: x[name].transpose(0, 1).contiguous().transpose(0, 1) for name in ("k", "beta")}
    assert not swapped["k"][0].is_contiguous()
    for views in (slices, swapped):
        for name, t in step({**x, **views}, state.clone()).items():
            assert torch.equal(t, expected[name]), name


def test_neighbours_change_no_bit():
    x, state = make(3, 2, 16, 16)
    expected = step(x, state.clone())
    poisoned = {name: t.clone() if len(t) == 3 else t for name, t in x.items()}
    for name in ("q", "k", "v", "g", "beta"):
        poisoned[name][0] = float("nan")
    for name, t in step(poisoned, state.clone()).items():
        assert torch.equal(t[1:], expected[name][1:]), name


def test_no_rows():
    x, state = make(0, 2, 16, 16)
    assert step(x, state)["o"].shape == (0, 2, 16)


REFUSED = {
    "q": lambda x, state: ({name: t.double() for name, t in x.items()}, state.double()),
    "v": lambda x, state: ({**x, "v": x["v"].double()}, state),
    "K": lambda x, state: make(1, 2, 24, 16),
    "V": lambda x, state: make(1, 2, 16, 8),
    "state": lambda x, state: (x, state.transpose(2, 3).contiguous().transpose(2, 3)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_does_not_take_is_refused_by_name_or_goes_to_the_reference(name, monkeypatch):
    x, state = REFUSED[name](*make(1, 2, 16, 16))
    with pytest.raises(ValueError, match=f"^impl: 'triton' was asked for, but {name}: expected"):
        step(x, state)
    expected = step(x, state.clone(), impl="reference")
    monkeypatch.setattr(api, "choose", lambda impl, tensor, triton: "triton")  # as on a GPU
    for result, t in step(x, state, impl="auto").items():
        assert torch.equal(t, expected[result])


@pytest.mark.gpu
@GATES
@pytest.mark.parametrize("shift", [0.0, -6.0], ids=["fast", "slow"])
@pytest.mark.parametrize("K, V", [(128, 128), (16, 16), (32, 64), (128, 32), (64, 128)])
@pytest.mark.parametrize("B, H", [(1, 4), (3, 16), (40, 16), (256, 32)])
def test_bf16_on_a_gpu_against_fp64(B, H, K, V, shift, lower_bound, poison_empty):
    x, state = make(B, H, K, V, dtype=torch.bfloat16, device="cuda", shift=shift)
    expected = exact(x, state, lower_bound)
    assert_close(step(x, state, lower_bound), expected, GPU_LIMIT)


def test_the_gpu_shapes_meet_every_tile():
    from modeling_moe_lc.kernels.kda.fused_step import tile

    tested = {tile(B * H, V) for B, H in [(1, 4), (3, 16), (40, 16), (256, 32)] for V in (16, 32, 64, 128)}
    assert tested == {tile(heads, V) for heads in range(1, 10000) for V in (16, 32, 64, 128)}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_on_a_gpu_against_fp64(dtype, poison_empty):
    x, state = make(3, 16, 128, 128, dtype=dtype, device="cuda")
    expected = exact(x, state)
    assert_close(step(x, state), expected, GPU_LIMIT | ({"o": 1e-5} if dtype == torch.float32 else {}))


@pytest.mark.gpu
def test_a_graph_replays_what_eager_steps_compute():
    x, state = make(3, 16, 128, 128, dtype=torch.bfloat16, device="cuda")
    first, eager = state.clone(), state.clone()
    expected = [step(x, eager)["o"] for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step(x, state)["o"]
    state.copy_(first)
    for reference in expected:
        graph.replay()
        assert torch.equal(o, reference)
    assert torch.equal(state, eager)


@pytest.mark.gpu
def test_a_state_of_more_than_2_to_the_31_numbers():
    B, H, D = 1400, 96, 128
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free device memory")
    x, last = make(2, H, D, D, dtype=torch.bfloat16, device="cuda")
    state = torch.zeros(B, H, D, D, device="cuda")
    assert state.numel() > 1 << 31
    state[-2:] = last
    big = {name: torch.cat([t.new_zeros(B - 2, *t.shape[1:]), t]) if len(t) == 2 else t for name, t in x.items()}
    expected = exact(x, last)
    ours = step(big, state)
    assert_close({name: t[-2:] for name, t in ours.items()}, expected, GPU_LIMIT)
    assert not state[:-2].any()
