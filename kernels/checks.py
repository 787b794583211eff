"""Argument checks shared by the operators; every failure is a ValueError that names the argument."""

import itertools

import torch


def check_shape(name: str, tensor: torch.Tensor, spec: str, dims: dict[str, int]) -> None:
    """Compare the shape of `tensor` with `spec`, letters such as "B T H K" or numbers such as "C 1 W".

    A letter that `dims` does not hold yet is read from the tensor and stored there, so that the calls for all the
    arguments of an operator agree on one set of sizes.
    """
    letters = spec.split()
    shape = list(tensor.shape)
    expected = [int(letter) if letter.isdigit() else dims.get(letter) for letter in letters]
    if len(shape) != len(letters) or any(want is not None and want != got for want, got in zip(expected, shape)):
        known = ", ".join("?" if want is None else str(want) for want in expected)
        raise ValueError(f"{name}: expected [{', '.join(letters)}] = [{known}], got {shape}")
    dims.update({letter: size for letter, size in zip(letters, shape) if not letter.isdigit()})


def check_floating(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"{name}: expected a floating point dtype, got {tensor.dtype}")


def check_cu_seqlens(cu_seqlens: torch.Tensor, batch: int, length: int) -> None:
    """Check the N + 1 boundaries of N documents packed into one row of `length` tokens.

    The values are looked at only where that makes no device wait: on a GPU, and in a traced graph, they are the caller's
    promise.
    """
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        raise ValueError(
            "cu_seqlens: expected a 1-D tensor of at least two int32 or int64 bounds, "
            f"got shape {list(cu_seqlens.shape)} of {cu_seqlens.dtype}"
        )
    if batch != 1:
        raise ValueError(f"cu_seqlens: expected packed inputs with batch size 1, got batch size {batch}")
    if cu_seqlens.is_cuda or torch.compiler.is_compiling():
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length or any(left > right for left, right in itertools.pairwise(bounds)):
        raise ValueError(f"cu_seqlens: expected non-decreasing bounds from 0 to {length}, got {bounds}")
