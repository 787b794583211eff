"""Memory of the chunked form: bounded without gradients, linear in the number of tokens with them."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modeling_moe_lc.kernels.kda import kda


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operators return while this mode is on: alive now, and at most at one time."""

    def __init__(self, *known):
        super().__init__()
        self.live = self.peak = 0
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.follow(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def follow(self, storage):
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            self.live += storage.nbytes()
            weakref.finalize(storage, self.forget, storage._cdata)

    def forget(self, address):
        self.live -= self.sizes.pop(address)


def inputs(T, requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, T, 1, 128, generator=generator) for _ in range(4))
    beta = torch.randn(1, T, 1, generator=generator)
    x = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": torch.zeros(1), "dt_bias": torch.zeros(1, 128)}
    return {name: t.requires_grad_(requires_grad) for name, t in x.items()}


def test_the_measure_itself():
    x = torch.ones(1000)
    with LiveBytes(x) as memory:
        y = (x[10:] + 1) * 2
        assert memory.live == y.nbytes and memory.peak == 2 * y.nbytes
        del y
        assert memory.live == 0


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("bounds", [None, [*range(0, 2049, 32)], [0, 3, 2000, 2048]])
@torch.no_grad()
def test_memory_without_gradients_is_bounded(bounds, lower_bound):
    x = inputs(2048)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    with LiveBytes(*x.values()) as memory:
        outputs = kda(**x, lower_bound=lower_bound, cu_seqlens=cu_seqlens)
    kept = sum(t.nbytes for t in outputs)
    assert memory.peak - kept < 8 * x["q"].nbytes  # measured 5.6 for 64 documents, whose states count, 3.3 for one


def test_memory_with_gradients_is_linear():
    def peak_per_token(T):
        x = inputs(T, requires_grad=True)
        with LiveBytes(*x.values()) as memory:
            o, S = kda(**x)
            torch.autograd.grad(o.sum() + S.sum(), list(x.values()))
        return memory.peak / T

    # Measured: 23.5 and 23.3 times the size of q.
    assert peak_per_token(4096) < 1.02 * peak_per_token(2048)
