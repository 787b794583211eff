"""Muon's elements and products: reference = definition, fused = reference under the interpreter and on a GPU, refusals."""

import pytest
import torch

from modeling_moe_lc.kernels.muon import muon_descend, muon_direction, newton_schulz_step


BETA, LR, DECAY = 0.95, 0.02, 0.1
POLYNOMIAL = 3.4445, -4.7750, 2.0315


def make(shape, device="cpu", dtype=torch.float32):
    """As cut from parameters: heads with other rows between them."""
    generator = torch.Generator(device).manual_seed(sum(shape))
    count, rows, columns = shape
    return [
        torch.randn(count, rows + more, columns, generator=generator, device=device, dtype=dtype)[:, :rows]
        for more in (3, 1, 0)
    ]


def moved(function, changed, *others, **options):
    """A copy of the tensor that `function` changes, in a layout like its own, after it has."""
    whole = torch.full((len(changed), changed.shape[1] + 2, changed.shape[2]), 7.0).to(changed)
    here = whole[:, : changed.shape[1]]
    here.copy_(changed)
    function(here, *others, **options)
    assert (whole[:, changed.shape[1] :] == 7.0).all()
    return here.clone()


def direction(gradient, momentum, dtype, impl):
    out = torch.full(gradient.shape, torch.nan, dtype=dtype, device=gradient.device)
    after = moved(lambda m, **options: muon_direction(gradient, m, out, **options), momentum, beta=BETA, impl=impl)
    return after, out


def compare(shape, impl, dtype, device, limit):
    gradient, momentum, parameter = make(shape, device)
    for ours, exact in zip(
        direction(gradient, momentum, dtype, impl),
        direction(gradient.double(), momentum.double(), torch.float64, "reference"),
        strict=True,
    ):
        assert (ours.double() - exact).norm() <= (limit if ours.dtype == dtype else 1e-6) * exact.norm()
    update = gradient.to(dtype).contiguous()
    for lr in (LR, torch.tensor(LR, device=device)):
        ours = moved(muon_descend, parameter, update, lr=lr, weight_decay=DECAY, impl=impl)
        exact = (1 - LR * DECAY) * parameter.double() - LR * update.double()
        assert (ours.double() - exact).norm() <= 1e-6 * exact.norm()


def test_the_definition():
    gradient, momentum, parameter = make((2, 3, 5), dtype=torch.float64)
    after, out = direction(gradient, momentum, torch.float64, "reference")
    torch.testing.assert_close(after, BETA * momentum + (1 - BETA) * gradient)
    torch.testing.assert_close(out, gradient + BETA / (1 - BETA) * after)
    ours = moved(muon_descend, parameter, gradient.contiguous(), lr=LR, impl="reference")
    torch.testing.assert_close(ours, parameter - LR * gradient)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (2, 64, 96), (1, 3, 2049), (0, 4, 4)])
def test_equals_fp64(shape, impl):
    compare(shape, impl, torch.float32, "cpu", 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 4e-3), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (256, 512, 1024), (1, 3, 2049)])
def test_on_a_gpu_against_fp64(shape, dtype, limit):
    compare(shape, "triton", dtype, "cuda", limit)


def blocks(count, rows, columns, dtype, device="cpu"):
    """Of norm 1, as Newton-Schulz begins with."""
    generator = torch.Generator(device).manual_seed(rows + columns)
    x = torch.randn(count, rows, columns, generator=generator, device=device)
    return (x / x.norm(dim=(1, 2), keepdim=True)).to(dtype)


def step_error(x, impl):
    """The singular values of an exact step are known, and its singular vectors are those of x."""
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    a, b, c = POLYNOMIAL
    exact = u * (a * s + b * s**3 + c * s**5)[:, None] @ v
    return ((newton_schulz_step(x, *POLYNOMIAL, impl=impl).double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize(
    "shape", [(2, 8, 12), (2, 12, 8), (1, 64, 64), (2, 72, 100), (2, 140, 68), (1, 136, 264), (1, 200, 132)]
)
def test_a_step_is_the_polynomial_of_the_singular_values(shape, impl, poison_empty):
    assert step_error(blocks(*shape, torch.float32), impl) < 1e-5


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_stack_without_matrices_stays_empty(impl):
    assert newton_schulz_step(torch.empty(0, 8, 16), *POLYNOMIAL, impl=impl).shape == (0, 8, 16)


GPU_STACKS = [
    (64, 256, 512),
    (64, 512, 256),
    (48, 128, 1024),
    (33, 64, 512),
    (4, 1024, 1024),
    (3, 200, 1000),
    (3, 1000, 200),
    (2, 8, 16),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("shape", GPU_STACKS, ids=str)
def test_on_a_gpu_a_step_is_exact_and_repeats_to_the_bit(shape, dtype, limit, poison_empty):
    x = blocks(*shape, dtype, "cuda")
    assert step_error(x, "triton") < limit
    first = newton_schulz_step(x, *POLYNOMIAL, impl="triton")
    for _ in range(30):
        assert torch.equal(newton_schulz_step(x, *POLYNOMIAL, impl="triton"), first)


def test_refusals_name_the_argument():
    gradient, momentum, parameter = make((2, 3, 5))
    with pytest.raises(ValueError, match="momentum: expected .N, R, C. = .2, 3, 5., got .1, 3, 5."):
        muon_direction(gradient, momentum[:1], gradient, beta=BETA)
    with pytest.raises(ValueError, match="beta: expected at least 0"):
        muon_direction(gradient, momentum, parameter, beta=1.0)
    with pytest.raises(ValueError, match="update: expected a floating point dtype"):
        muon_descend(parameter, gradient.long(), lr=LR)
    with pytest.raises(ValueError, match="parameter: expected FP32, got torch.float64"):
        muon_descend(parameter.double(), gradient, lr=LR, impl="triton")
    with pytest.raises(ValueError, match="x: expected a contiguous .N, R, C., got .3, 2, 5."):
        newton_schulz_step(torch.ones(3, 5, 2).mT, *POLYNOMIAL)
    with pytest.raises(ValueError, match="expected matrices of multiples of 4 rows and columns, got .3, 5."):
        newton_schulz_step(torch.ones(2, 3, 5), *POLYNOMIAL, impl="triton")


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_turned_matrices_are_refused(impl):
    x, turned = torch.ones(2, 4, 6), torch.ones(2, 6, 4).mT
    for name, tensors in (("gradient", (turned, x, x)), ("momentum", (x, turned, x)), ("out", (x, x, turned))):
        with pytest.raises(ValueError, match=f"{name}: expected contiguous matrices"):
            muon_direction(*tensors, beta=BETA, impl=impl)
    with pytest.raises(ValueError, match="parameter: expected contiguous matrices"):
        muon_descend(turned, x, lr=LR, impl=impl)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_step_has_no_gradients_and_ignores_autocast(impl):
    x = blocks(2, 8, 16, torch.float32).requires_grad_()
    expected = newton_schulz_step(x, *POLYNOMIAL, impl=impl)
    assert not expected.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(newton_schulz_step(x, *POLYNOMIAL, impl=impl), expected)


def test_a_step_at_an_odd_address():
    x = blocks(3, 8, 16, torch.float32)
    odd = torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape)
    assert odd.data_ptr() % 16
    assert torch.equal(
        newton_schulz_step(odd, *POLYNOMIAL, impl="triton"), newton_schulz_step(x, *POLYNOMIAL, impl="triton")
    )
