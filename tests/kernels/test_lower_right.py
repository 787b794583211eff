"""Attention of the last queries = masked attention in FP64, values and gradients; refusals."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from modeling_moe_lc.kernels.mla import lower_right, lower_right_attention


def relative(x, reference):
    return ((x - reference).norm() / reference.norm()).item()


def compare(n, S, K, V, device, dtype):
    generator = torch.Generator().manual_seed(n + S)
    shapes = (2, 3, n, K), (2, 3, S, K), (2, 3, S, V)
    leaves = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    do = torch.randn(2, 3, n, V, generator=generator).to(device, dtype)
    o = lower_right_attention(*leaves, 0.2)
    mask = torch.ones(n, S, dtype=torch.bool, device=device).tril(S - n)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = F.scaled_dot_product_attention(*wide, mask, scale=0.2)
    found = torch.autograd.grad(o, leaves, do)
    gradients = torch.autograd.grad(expected, wide, do.double())
    return max(itertools.starmap(relative, zip((o, *found), (expected, *gradients), strict=True)))


@pytest.mark.parametrize("triangles", [1 << 20, 1])
@pytest.mark.parametrize(("n", "S"), [(1, 2), (1, 40), (17, 17), (17, 18), (17, 34), (40, 100), (40, 170)])
def test_last_queries(n, S, triangles, monkeypatch):
    monkeypatch.setattr(lower_right, "TRIANGLES", triangles)
    assert compare(n, S, 24, 16, "cpu", torch.float64) < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["_kernel", "_cudnn", "_flash"])
@pytest.mark.parametrize(
    ("n", "S"), [(1, 2), (1, 40), (17, 300), (256, 256), (200, 5000), (4096, 4100), (8200, 24700)]
)
def test_last_queries_on_a_gpu(n, S, kernel, monkeypatch):
    if kernel == "_cudnn" and n == 1:
        pytest.skip("cuDNN has no attention of one query and one key")
    if kernel != "_kernel":
        chosen = getattr(lower_right, kernel)
        monkeypatch.setattr(lower_right, "_kernel", lambda q, k, v: chosen)
    assert compare(n, S, 192, 128, "cuda", torch.bfloat16) < 1e-2


def test_refusals_name_the_argument():
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="v: expected .B, H, S, V. = .1, 2, 4, ?"):
        lower_right_attention(x, x, x[:, :, :3], 1.0)
    with pytest.raises(ValueError, match="k, v: expected at least 4 keys"):
        lower_right_attention(x, x[:, :, :3], x[:, :, :3], 1.0)
