"""The Triton kernels compute what the recurrence says: outputs, states and every gradient; on a CPU under the interpreter."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from modeling_moe_lc.kernels.kda import combine_state_maps, kda, kda_state_map
from modeling_moe_lc.kernels.kda.reference import kda_chunk, kda_recurrent


# Relative errors, FP32. Measured under the interpreter: 1e-6 for outputs and states, 2e-5 for gradients. dA_log and ddt_bias
# are sums over all tokens that nearly cancel at these lengths: 1e-4.
LIMIT = {"o": 1e-5, "state": 2e-5, "A_log": 5e-4, "dt_bias": 5e-4}
GRADIENT = 5e-5
# Against FP64 on an H200, BF16 inputs; the goal of FLA's own figures is 3e-3 to 5.5e-3.
GPU_LIMIT = {"o": 5e-3, "state": 5e-3, "A_log": 1e-2, "dt_bias": 1e-2}
GPU_GRADIENT = 6e-3
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def make(B, T, H, K, V, *, documents=None, gate="fast", dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    q, k, g, v, beta = random(B, T, H, K), random(B, T, H, K), random(B, T, H, K), random(B, T, H, V), random(B, T, H)
    g = g - 6 if gate == "slow" else g
    inputs = [x.to(dtype) for x in (q, k, v, g, beta)]
    states = B if documents is None else len(documents) - 1
    return [*inputs, 0.3 * random(H), random(H, K), random(states, H, K, V)]


def run(fn, tensors, lower_bound, cu_seqlens, cotangents, **kwargs):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    *tokens, A_log, dt_bias, state = leaves
    o, final = fn(
        *tokens, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, initial_state=state, cu_seqlens=cu_seqlens, **kwargs
    )  # fmt: skip
    gradients = torch.autograd.grad([o, final], leaves, [c.to(x) for c, x in zip(cotangents, (o, final), strict=True)])
    return {"o": o.detach(), "state": final.detach(), **dict(zip(NAMES, gradients, strict=True))}


def assert_close(ours, theirs, limits, gradient):
    for name, reference in theirs.items():
        error = (ours[name].double() - reference).norm() / reference.norm()
        assert error < limits.get(name, gradient), (name, error.item())


CASES = {
    "one token": (1, 1, 2, 16, 16, None),
    "63": (1, 63, 1, 32, 32, None),
    "64, two rows": (2, 64, 2, 16, 32, None),
    "65": (2, 65, 1, 32, 16, None),
    "130": (1, 130, 2, 16, 16, None),
    "documents": (1, 133, 1, 16, 16, [0, 0, 57, 58, 58, 133]),
    "short documents": (1, 64, 2, 16, 16, [0, 1, 2, 3, 64]),
}


@pytest.mark.parametrize("lower_bound", [-5.0, -1.0, None], ids=["bounded", "bounded at -1", "softplus"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_fused_equals_the_recurrence(case, lower_bound, poison_empty):
    B, T, H, K, V, documents = case
    tensors = make(B, T, H, K, V, documents=documents)
    cu_seqlens = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    cotangents = torch.randn(B, T, H, V), torch.randn_like(tensors[-1])
    ours = run(kda, tensors, lower_bound, cu_seqlens, cotangents, impl="triton")
    theirs = run(kda_recurrent, [x.double() for x in tensors], lower_bound, cu_seqlens, cotangents)
    assert_close(ours, theirs, LIMIT, GRADIENT)


@pytest.mark.parametrize("decay", [20.0, 300.0])
def test_any_decay_of_the_softplus_gate(decay):
    tensors = make(1, 70, 1, 16, 16)
    tensors[3] = tensors[3] + decay
    tensors[5] = tensors[5] + 3.0
    cotangents = torch.randn(1, 70, 1, 16), torch.randn_like(tensors[-1])
    ours = run(kda, tensors, None, None, cotangents, impl="triton")
    assert all(x.isfinite().all() for x in ours.values())
    theirs = run(kda_recurrent, [x.double() for x in tensors], None, None, cotangents)
    for name in ("o", "q", "k", "v", "beta"):
        assert (ours[name] - theirs[name]).norm() < 1e-4 * theirs[name].norm() + 1e-6, name


def steep_here_and_there(tensors, T, device="cpu"):
    """Some tokens of every second chunk forget nearly everything, in some channels, so that these chunks are steep."""
    generator = torch.Generator(device).manual_seed(7)
    spikes = torch.rand(tensors[3].shape, generator=generator, device=device) < 0.05
    spikes &= (torch.arange(T, device=device) // 64 % 2 == 1)[:, None, None]
    tensors[3] = torch.where(spikes, tensors[3] + 60.0, tensors[3])
    return tensors


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "computed again"])
@pytest.mark.parametrize("documents", [None, [0, 70, 70, 230]], ids=["one", "documents"])
def test_steep_chunks_beside_others(documents, keep, monkeypatch, poison_empty):
    from modeling_moe_lc.kernels.kda import fused

    monkeypatch.setattr(fused, "KEEP_BYTES", fused.KEEP_BYTES if keep else 0)
    tensors = steep_here_and_there(make(1, 230, 2, 16, 32, documents=documents), 230)
    cu_seqlens = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    steep = fused.Call(*tensors[:7], None, cu_seqlens).prepare(0, 2, save=True)["steep"]
    assert steep.any() and not steep.all()
    cotangents = torch.randn(1, 230, 2, 32), torch.randn_like(tensors[-1])
    ours = run(kda, tensors, None, cu_seqlens, cotangents, impl="triton")
    theirs = run(kda_recurrent, [x.double() for x in tensors], None, cu_seqlens, cotangents)
    assert_close(ours, theirs, LIMIT, GRADIENT)


@pytest.mark.parametrize("nats", [151.0, 152.0, 153.0, 158.0, 174.0])
def test_either_side_of_a_steep_chunk(nats):
    """220 bits in half a chunk are 152.5 nats; with one rate for all tokens, or with all of it in two or three of them."""
    from modeling_moe_lc.kernels.kda import fused

    for where in (slice(None), slice(5, 7), slice(29, 32), slice(40, 42)):
        tensors = make(1, 64, 1, 16, 16)
        tokens = torch.zeros(64, dtype=torch.bool)
        tokens[where] = True
        lost = nats / max(tokens[:32].sum(), tokens[32:].sum())
        tensors[3] = torch.where(tokens[:, None, None], lost, -12.0).expand_as(tensors[3]).clone()
        tensors[5], tensors[6] = torch.zeros_like(tensors[5]), torch.zeros_like(tensors[6])
        cotangents = torch.randn(1, 64, 1, 16), torch.randn_like(tensors[-1])
        ours = run(kda, tensors, None, None, cotangents, impl="triton")
        theirs = run(kda_recurrent, [x.double() for x in tensors], None, None, cotangents)
        assert all(x.isfinite().all() for x in ours.values())
        for name in ("o", "q", "k", "v", "beta"):
            assert (ours[name] - theirs[name]).norm() < 1e-4 * theirs[name].norm() + 1e-6, (where, name)
        steep = fused.Call(*tensors[:7], None, None).prepare(0, 1, save=False)["steep"]
        assert steep.item() == (nats / math.log(2) > 220)


# Channels near the bound need nearly all of FP32's range for themselves.
@pytest.mark.parametrize(
    ("gate", "scale"), [("fast", 2.0**-30), ("slow", 2.0**-60), ("fast", 2.0**20), ("slow", 2.0**20)]
)
@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])
def test_gradients_scale_with_their_cotangents(gate, lower_bound, scale):
    """A step of a million tokens has cotangents of a millionth."""
    tensors = make(1, 100, 1, 16, 16, gate=gate)
    cotangents = torch.randn(1, 100, 1, 16), torch.randn_like(tensors[-1])
    ours = run(kda, tensors, lower_bound, None, [scale * x for x in cotangents], impl="triton")
    theirs = run(kda_recurrent, [x.double() for x in tensors], lower_bound, None, cotangents)
    gradients = {name: ours[name].double() / scale for name in NAMES}
    assert_close(gradients, {name: theirs[name] for name in NAMES}, LIMIT, GRADIENT)


def test_saturated_bounded_gate_and_a_huge_rate():
    tensors = make(1, 70, 1, 16, 16)
    tensors[3] = torch.full_like(tensors[3], 50.0)
    tensors[5] = torch.full_like(tensors[5], 100.0)
    cotangents = torch.randn(1, 70, 1, 16), torch.randn_like(tensors[-1])
    ours = run(kda, tensors, -5.0, None, cotangents, impl="triton")
    theirs = run(kda_recurrent, [x.double() for x in tensors], -5.0, None, cotangents)
    assert all(x.isfinite().all() for x in ours.values())
    assert not ours["A_log"].any()
    for name in ("o", "q", "k", "v", "beta"):
        assert (ours[name] - theirs[name]).norm() < 1e-4 * theirs[name].norm() + 1e-6, name


@torch.no_grad()
def test_suffix_leaves_every_bit_of_the_prefix_alone():
    *tokens, A_log, dt_bias, state = make(1, 100, 1, 16, 16)
    kwargs = {"A_log": A_log, "dt_bias": dt_bias, "initial_state": state, "impl": "triton"}
    o, _ = kda(*tokens, **kwargs)
    for t in (1, 31, 32, 63, 64, 99):
        changed = [torch.cat([x[:, :t], torch.randn_like(x[:, t:])], dim=1) for x in tokens]
        assert torch.equal(kda(*changed, **kwargs)[0][:, :t], o[:, :t]), t


def test_groups_of_heads_change_no_bit(monkeypatch):
    from modeling_moe_lc.kernels.kda import fused

    tensors = make(1, 70, 4, 16, 16)
    cotangents = torch.randn(1, 70, 4, 16), torch.randn_like(tensors[-1])
    whole = run(kda, tensors, -5.0, None, cotangents, impl="triton")
    monkeypatch.setattr(fused, "WORKSPACE_BYTES", 1)
    for name, x in run(kda, tensors, -5.0, None, cotangents, impl="triton").items():
        assert torch.equal(x, whole[name]), name


@pytest.fixture
def every_chunk_a_piece(monkeypatch):
    from modeling_moe_lc.kernels.kda import fused, fused_split

    monkeypatch.setattr(fused, "_processors", lambda device: 1000)
    monkeypatch.setattr(fused_split, "SHORTEST_PIECE", 1)


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "computed again"])
@pytest.mark.parametrize(
    ("B", "T", "documents"), [(1, 250, None), (2, 200, None), (1, 250, [0, 0, 57, 58, 58, 250]), (1, 256, [0, 256])]
)
def test_sequences_in_pieces_equal_the_recurrence(
    B, T, documents, keep, every_chunk_a_piece, poison_empty, monkeypatch
):
    from modeling_moe_lc.kernels.kda import fused

    if not keep:
        monkeypatch.setattr(fused, "KEEP_BYTES", 0)
    tensors = make(B, T, 2, 16, 16, documents=documents, gate="slow")
    cu_seqlens = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    cotangents = torch.randn(B, T, 2, 16), torch.randn_like(tensors[-1])
    ours = run(kda, tensors, -5.0, cu_seqlens, cotangents, impl="triton")
    theirs = run(kda_recurrent, [x.double() for x in tensors], -5.0, cu_seqlens, cotangents)
    assert_close(ours, theirs, LIMIT, GRADIENT)


@torch.no_grad()
def test_pieces_without_a_state_before_or_a_cotangent_behind(every_chunk_a_piece):
    *tokens, A_log, dt_bias, _ = make(1, 250, 1, 16, 16, gate="slow")
    gate = {"A_log": A_log, "dt_bias": dt_bias}
    with torch.enable_grad():
        leaves = [x.clone().requires_grad_() for x in tokens]
        o, final = kda(*leaves, **gate, impl="triton")
        do = torch.randn_like(o)
        ours = torch.autograd.grad(o, leaves, do)
        reference = [x.double().requires_grad_() for x in tokens]
        o_64, final_64 = kda_recurrent(*reference, A_log=A_log.double(), dt_bias=dt_bias.double())
        theirs = torch.autograd.grad(o_64, reference, do.double())
    for a, b in zip((o, final, *ours), (o_64, final_64, *theirs), strict=True):
        assert (a.double() - b).norm() < 5e-5 * b.norm()


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("documents", [None, [0, 0, 57, 58, 58, 150]], ids=["rows", "documents"])
def test_state_maps_give_the_final_state(documents, impl):
    q, k, v, g, beta, A_log, dt_bias, state = make(1, 150, 2, 16, 32, documents=documents, gate="slow")
    gate = {"A_log": A_log, "dt_bias": dt_bias, "impl": impl}
    gate["cu_seqlens"] = None if documents is None else torch.tensor(documents)
    _, expected = kda(q, k, v, g, beta, initial_state=state, **gate)
    phi, psi = kda_state_map(k, v, g, beta, **gate)
    assert torch.allclose(phi @ state + psi, expected, atol=1e-5)


def test_state_maps_of_parts_combine():
    _, k, v, g, beta, A_log, dt_bias, _ = (x.double() for x in make(1, 150, 2, 16, 32, gate="slow"))
    gate = {"A_log": A_log, "dt_bias": dt_bias}
    whole = kda_state_map(k, v, g, beta, **gate)
    first, second, third = (
        kda_state_map(*(x[:, a:b] for x in (k, v, g, beta)), **gate) for a, b in ((0, 70), (70, 71), (71, 150))
    )
    joined = combine_state_maps(combine_state_maps(first, second), third)
    for ours, theirs in zip(joined, whole, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])
def test_what_is_kept_equals_what_is_computed_again(lower_bound, monkeypatch):
    from modeling_moe_lc.kernels.kda import fused

    tensors = make(1, 70, 2, 16, 16)
    cotangents = torch.randn(1, 70, 2, 16), torch.randn_like(tensors[-1])
    kept = run(kda, tensors, lower_bound, None, cotangents, impl="triton")
    monkeypatch.setattr(fused, "KEEP_BYTES", 0)
    for name, x in run(kda, tensors, lower_bound, None, cotangents, impl="triton").items():
        assert torch.equal(x, kept[name]), name


def test_a_second_backward_pass_through_one_graph():
    *tokens, A_log, dt_bias, _ = make(1, 70, 1, 16, 16)
    leaves = [x.requires_grad_() for x in tokens]
    o, _ = kda(*leaves, A_log=A_log, dt_bias=dt_bias, impl="triton")
    do = torch.randn_like(o)
    first = torch.autograd.grad(o, leaves, do, retain_graph=True)
    for ours, theirs in zip(torch.autograd.grad(o, leaves, do), first, strict=True):
        assert torch.equal(ours, theirs)


def test_activation_checkpointing():
    *tokens, A_log, dt_bias, _ = make(1, 70, 1, 16, 16)
    leaves = [x.requires_grad_() for x in tokens]
    do = torch.randn(1, 70, 1, 16)

    def outputs(*inputs):
        return kda(*inputs, A_log=A_log, dt_bias=dt_bias, impl="triton")[0]

    plain = torch.autograd.grad(outputs(*leaves), leaves, do)
    again = torch.autograd.grad(checkpoint(outputs, *leaves, use_reentrant=False), leaves, do)
    for ours, theirs in zip(again, plain, strict=True):
        assert torch.equal(ours, theirs)


def test_a_state_overwritten_before_the_backward_pass():
    *tokens, A_log, dt_bias, state = make(1, 70, 1, 16, 16)
    leaves = [x.requires_grad_() for x in tokens]
    cotangent = torch.randn(1, 70, 1, 16)
    before = state.clone()
    o, _ = kda(*leaves, A_log=A_log, dt_bias=dt_bias, initial_state=state, impl="triton")
    state.zero_()
    ours = torch.autograd.grad(o, leaves, cotangent)
    o, _ = kda(*leaves, A_log=A_log, dt_bias=dt_bias, initial_state=before, impl="triton")
    for a, b in zip(ours, torch.autograd.grad(o, leaves, cotangent), strict=True):
        assert torch.equal(a, b)


def test_inputs_that_the_kernels_do_not_take_are_refused_by_name():
    for tensors, lower_bound, name in (
        (make(1, 5, 1, 24, 16), -5.0, "K"),
        (make(1, 5, 1, 16, 24), -5.0, "V"),
        (make(1, 5, 1, 16, 16), -7.0, "lower_bound"),
        ([x.double() for x in make(1, 5, 1, 16, 16)], -5.0, "q"),
        (make(1, 5, 1, 32, 32, dtype=torch.bfloat16), -5.0, "K"),
        (make(1, 5, 1, 64, 64, dtype=torch.float16), -5.0, "q"),
    ):
        *tokens, A_log, dt_bias, _ = tensors
        with pytest.raises(ValueError, match=name):
            kda(*tokens, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, impl="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["fast", "slow"])
@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 2048, 8192])
def test_bf16_on_a_gpu_against_fp64(T, dim, lower_bound, gate, poison_empty):
    H = 96 if T < 100 else 4  # one number of dbeta, dA_log for each head and token: few of them are all noise
    tensors = make(1, T, H, dim, dim, gate=gate, dtype=torch.bfloat16, device="cuda")
    cotangents = torch.randn(1, T, H, dim, device="cuda").bfloat16(), torch.randn_like(tensors[-1])
    ours = run(kda, tensors, lower_bound, None, cotangents, impl="triton")
    theirs = run(kda_chunk, [x.double() for x in tensors], lower_bound, None, cotangents)
    assert_close(ours, theirs, GPU_LIMIT, GPU_GRADIENT)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("gate", "scale"), [("fast", 2.0**-24), ("slow", 2.0**-40), ("fast", 2.0**20), ("slow", 2.0**20)]
)
@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])
def test_gradients_scale_with_their_cotangents_on_a_gpu(gate, lower_bound, scale):
    tensors = make(1, 300, 4, 128, 128, gate=gate, dtype=torch.bfloat16, device="cuda")
    cotangents = torch.randn(1, 300, 4, 128, device="cuda").bfloat16(), torch.randn_like(tensors[-1])
    ours = run(kda, tensors, lower_bound, None, [scale * x for x in cotangents], impl="triton")
    theirs = run(kda_chunk, [x.double() for x in tensors], lower_bound, None, cotangents)
    gradients = {name: ours[name].double() / scale for name in NAMES}
    assert_close(gradients, {name: theirs[name] for name in NAMES}, GPU_LIMIT, GPU_GRADIENT)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_steep_chunks_beside_others_on_a_gpu(dim, poison_empty):
    T = 2048
    tensors = steep_here_and_there(make(1, T, 4, dim, dim, gate="slow", device="cuda"), T, "cuda")
    tensors = [x.bfloat16() if i < 5 else x for i, x in enumerate(tensors)]
    cotangents = torch.randn(1, T, 4, dim, device="cuda").bfloat16(), torch.randn_like(tensors[-1])
    ours = run(kda, tensors, None, None, cotangents, impl="triton")
    theirs = run(kda_chunk, [x.double() for x in tensors], None, None, cotangents)
    assert_close(ours, theirs, GPU_LIMIT, GPU_GRADIENT)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [4, 40, 140], ids=["narrow value blocks", "narrow forward only", "wide"])
def test_every_value_block_of_the_scans_on_a_gpu(H, poison_empty):
    tensors = make(1, 200, H, 128, 128, dtype=torch.bfloat16, device="cuda")
    cotangents = torch.randn(1, 200, H, 128, device="cuda").bfloat16(), torch.randn_like(tensors[-1])
    ours = run(kda, tensors, -5.0, None, cotangents, impl="triton")
    theirs = run(kda_chunk, [x.double() for x in tensors], -5.0, None, cotangents)
    assert_close(ours, theirs, GPU_LIMIT, GPU_GRADIENT)


@pytest.mark.gpu
def test_recomputing_changes_no_bit_on_a_gpu(monkeypatch):
    from modeling_moe_lc.kernels.kda import fused

    tensors = make(1, 1000, 8, 128, 128, dtype=torch.bfloat16, device="cuda")
    cotangents = torch.randn(1, 1000, 8, 128, device="cuda").bfloat16(), torch.randn_like(tensors[-1])
    kept = run(kda, tensors, -5.0, None, cotangents, impl="triton")
    monkeypatch.setattr(fused, "KEEP_BYTES", 0)
    for name, x in run(kda, tensors, -5.0, None, cotangents, impl="triton").items():
        assert torch.equal(x, kept[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])
def test_packed_bf16_on_a_gpu_against_fp64(lower_bound, poison_empty):
    documents = [0, 0, 57, 58, 58, 700, 1500]
    tensors = make(1, 1500, 4, 128, 128, documents=documents, dtype=torch.bfloat16, device="cuda")
    cu_seqlens = torch.tensor(documents, dtype=torch.int32, device="cuda")
    cotangents = torch.randn(1, 1500, 4, 128, device="cuda").bfloat16(), torch.randn_like(tensors[-1])
    ours = run(kda, tensors, lower_bound, cu_seqlens, cotangents, impl="triton")
    theirs = run(kda_chunk, [x.double() for x in tensors], lower_bound, cu_seqlens, cotangents)
    assert_close(ours, theirs, GPU_LIMIT, GPU_GRADIENT)


@pytest.mark.gpu
def test_fp32_on_a_gpu_against_fp64(poison_empty):
    tensors = make(1, 300, 2, 64, 64, device="cuda")
    cotangents = torch.randn(1, 300, 2, 64, device="cuda"), torch.randn_like(tensors[-1])
    ours = run(kda, tensors, -5.0, None, cotangents, impl="triton")
    theirs = run(kda_chunk, [x.double() for x in tensors], -5.0, None, cotangents)
    assert_close(ours, theirs, {"A_log": 1e-3, "dt_bias": 1e-3}, 1e-4)


@pytest.mark.gpu
def test_runs_repeat_to_the_bit_on_a_gpu():
    tensors = make(1, 1000, 8, 128, 128, dtype=torch.bfloat16, device="cuda")
    cotangents = torch.randn(1, 1000, 8, 128, device="cuda").bfloat16(), torch.randn_like(tensors[-1])
    first = run(kda, tensors, -5.0, None, cotangents, impl="triton")
    for _ in range(1000):
        for name, x in run(kda, tensors, -5.0, None, cotangents, impl="triton").items():
            assert torch.equal(x, first[name]), name


@pytest.mark.gpu
@torch.no_grad()
def test_suffix_leaves_every_bit_of_the_prefix_alone_on_a_gpu():
    *tokens, A_log, dt_bias, state = make(1, 200, 4, 128, 128, dtype=torch.bfloat16, device="cuda")
    kwargs = {"A_log": A_log, "dt_bias": dt_bias, "initial_state": state, "impl": "triton"}
    o, _ = kda(*tokens, **kwargs)
    for t in (1, 31, 32, 63, 64, 100, 199):
        changed = [torch.cat([x[:, :t], torch.randn_like(x[:, t:])], dim=1) for x in tokens]
        assert torch.equal(kda(*changed, **kwargs)[0][:, :t], o[:, :t]), t


@pytest.mark.gpu
def test_more_documents_times_heads_than_a_grid_axis_holds():
    tensors = make(1, 800, 96, 64, 64, documents=list(range(801)), dtype=torch.bfloat16, device="cuda")
    cu_seqlens = torch.arange(801, dtype=torch.int32, device="cuda")
    cotangents = torch.randn(1, 800, 96, 64, device="cuda").bfloat16(), torch.randn_like(tensors[-1])
    ours = run(kda, tensors, -5.0, cu_seqlens, cotangents, impl="triton")
    theirs = run(kda_recurrent, [x.double() for x in tensors], -5.0, cu_seqlens, cotangents)
    assert_close(ours, theirs, GPU_LIMIT, GPU_GRADIENT)


@pytest.mark.gpu
def test_more_than_2_31_elements_on_a_gpu():
    T, H, tail = 180_224, 96, 128  # 2.2e9 elements
    if torch.cuda.mem_get_info()[0] < 120e9:
        pytest.skip("needs 120 GB of free memory")
    *tokens, A_log, dt_bias, _ = make(1, T, H, 128, 128, dtype=torch.bfloat16, device="cuda")
    gate = {"A_log": A_log, "dt_bias": dt_bias, "impl": "triton"}
    with torch.no_grad():
        _, before = kda(*(x[:, :-tail] for x in tokens), **gate)
    whole = [x.requires_grad_() for x in tokens]
    end = [x[:, -tail:].detach().requires_grad_() for x in tokens]
    o, _ = kda(*whole, **gate)
    o_end, _ = kda(*end, **gate, initial_state=before)
    cotangent = torch.randn_like(o_end)
    padded = torch.zeros_like(o)
    padded[:, -tail:] = cotangent
    gradients, gradients_end = torch.autograd.grad(o, whole, padded), torch.autograd.grad(o_end, end, cotangent)
    for a, b in zip((o, *gradients), (o_end, *gradients_end), strict=True):
        assert (a[:, -tail:].float() - b.float()).norm() < 1e-2 * b.float().norm()
