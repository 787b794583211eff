"""The lookup of compiled kernels tells apart all that Triton compiles differently for."""

from types import SimpleNamespace

import pytest
import torch

from modeling_moe_lc.kernels.launch import Launched, kind, launched


jit = pytest.importorskip("triton.runtime.jit")
descriptors = pytest.importorskip("triton.tools.tensor_descriptor")
WHOLE = [
    0,
    1,
    2,
    15,
    16,
    17,
    32,
    -16,
    -1,
    2**31 - 16,
    2**31,
    2**31 + 1,
    2**32,
    -(2**31),
    -(2**31) - 16,
    2**62,
    2**63 - 1,
]


def arguments():
    memory = torch.zeros(64)
    plain = [memory, memory[4:], memory[1:], memory[:0], memory.view(8, 8), memory.view(8, 8).T]
    tensors = [
        *plain,
        memory.double(),
        memory.bfloat16(),
        memory.bfloat16()[1:],
        memory.int(),
        memory.long(),
        memory.bool(),
    ]
    tuples = [(memory,), (memory, memory), (memory, memory[1:]), (memory, 16), (memory, 17)]
    rows = memory.view(8, 8)
    boxes = [
        descriptors.TensorDescriptor.from_tensor(x, box) for x in (rows, rows.double()) for box in ([4, 4], [8, 4])
    ]
    return [*WHOLE, *tensors, *tuples, *boxes, True, False, None, 0.0, 1.0, 16.5]


def specialisation(argument):
    """What Triton's own launch looks an argument up by."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    return native_specialize_impl(CUDABackend, argument, False, True, True)


def test_what_triton_tells_apart_is_told_apart():
    known = {}
    for argument in arguments():
        own, theirs = kind(argument), specialisation(argument)
        assert known.setdefault(own, theirs) == theirs, (argument, own)


class FakeKernel:
    """Returns, as Triton does, what it has compiled, and counts how often."""

    params = [SimpleNamespace(is_constexpr=constant) for constant in (False, False, True, True, True)]
    arg_names = ["x", "n", "H", "BLOCK", "FLAG"]

    def __init__(self):
        self.compiled, self.launches = 0, []

    def __getitem__(self, grid):
        def launch(*args, **named):
            self.compiled += 1
            return CompiledKernel(self)

        return launch


class CompiledKernel:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launches.append((grid, args))


def test_a_known_form_is_launched_with_all_arguments_in_their_order(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel = FakeKernel()
    launch, x = Launched(kernel), torch.zeros(16)
    launch[(3,)](x, 7, 96, FLAG=True, BLOCK=64, num_warps=4)
    launch[(5, 2)](x[4:], 9, 96, FLAG=True, BLOCK=64, num_warps=4)
    assert kernel.compiled == 1
    (grid, args), *others = kernel.launches
    assert (
        not others and grid == (5, 2, 1) and args[1:] == (9, 96, 64, True) and args[0].data_ptr() == x[4:].data_ptr()
    )
    for other in ({"FLAG": False}, {"BLOCK": 32}, {"num_warps": 8}):
        launch[(3,)](x, 7, 96, **{"FLAG": True, "BLOCK": 64, "num_warps": 4} | other)
    launch[(3,)](x, 7, 97, FLAG=True, BLOCK=64, num_warps=4)
    launch[(3,)](x[1:], 7, 96, FLAG=True, BLOCK=64, num_warps=4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch[(3,)](x, 7, 96, FLAG=True, BLOCK=64, num_warps=4)
    assert kernel.compiled == 7


@pytest.mark.gpu
def test_a_known_form_reads_the_tensors_it_is_given():
    import triton
    import triton.language as tl

    @triton.jit
    def scaled(x, y, factor, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        tl.store(y + at, tl.load(x + at) * factor)

    launch = launched(scaled)
    for number in range(5):
        x, y = torch.randn(64, device="cuda"), torch.full((64,), torch.nan, device="cuda")
        launch[(1,)](torch.nn.Parameter(x), y, 10 + 2 * number, SIZE=64)
        assert torch.equal(y, x * (10 + 2 * number))
        shifted = torch.full((65,), torch.nan, device="cuda")
        launch[(1,)](x, shifted[1:], 3, SIZE=64)
        assert torch.equal(shifted[1:], 3 * x) and shifted[0].isnan()
    with pytest.raises(ValueError, match="cpu tensor"):
        launch[(1,)](x.cpu(), y, 10, SIZE=64)


def test_interpreted_kernels_stay_what_they_are():
    kernel = object()
    assert launched(kernel) is kernel
