"""What Muon does to each element, in place, and a step of its matrix products: the public functions."""

import torch

from ..checks import check_floating
from ..dispatch import choose, without_autocast
from .reference import muon_descend_reference, muon_direction_reference, newton_schulz_step_reference


def muon_direction(
    gradient: torch.Tensor, momentum: torch.Tensor, out: torch.Tensor, *, beta: float, impl: str = "auto"
) -> None:
    """Moves `momentum` towards `gradient` and writes what is to be orthogonalised, in one pass:

        momentum <- beta momentum + (1 - beta) gradient        out <- gradient + beta / (1 - beta) momentum

    `out` is Nesterov's direction but for its scale, which Newton-Schulz takes away (Jordan et al., Muon, 2024).

    Args:
        gradient, momentum: [N, R, C] of one floating dtype, each matrix [R, C] contiguous.
        out: [N, R, C], contiguous, of any floating dtype.
        beta: at least 0 and less than 1.
        impl: "auto", "triton" or "reference".

    Raises:
        ValueError: a shape, layout or dtype that does not fit, or an implementation that cannot run here.
    """
    _check(gradient=gradient, momentum=momentum, out=out)
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"beta: expected at least 0 and less than 1, got {beta}")
    if _is_fused(impl, gradient=gradient, momentum=momentum):
        from .fused import muon_direction_fused

        return muon_direction_fused(gradient, momentum, out, beta=beta)
    return muon_direction_reference(gradient, momentum, out, beta=beta)


def muon_descend(
    parameter: torch.Tensor,
    update: torch.Tensor,
    *,
    lr: float | torch.Tensor,
    weight_decay: float = 0.0,
    impl: str = "auto",
) -> None:
    """parameter <- (1 - lr weight_decay) parameter - lr update, in one pass.

    Args:
        parameter: [N, R, C], floating, each matrix [R, C] contiguous.
        update: [N, R, C], contiguous, of any floating dtype.
        lr: a number, or a tensor [] on the device of the parameter, which is read there.
        impl: "auto", "triton" or "reference".

    Raises:
        ValueError: as `muon_direction`.
    """
    _check(parameter=parameter, update=update)
    if _is_fused(impl, parameter=parameter):
        from .fused import muon_descend_fused

        return muon_descend_fused(parameter, update, lr=lr, weight_decay=weight_decay)
    return muon_descend_reference(parameter, update, lr=lr, weight_decay=weight_decay)


@torch.no_grad()
@without_autocast
def newton_schulz_step(x: torch.Tensor, a: float, b: float, c: float, *, impl: str = "auto") -> torch.Tensor:
    """(a I + b G + c G^2) x with G = x x^T, for each matrix of a stack; x (a I + b G + c G^2) with G = x^T x where it is tall.

    The singular values s of each matrix become a s + b s^3 + c s^5 (Jordan et al., Muon, 2024). Without gradients.

    Args:
        x: [N, R, C], floating, contiguous.
        a, b, c: coefficients of the polynomial.
        impl: "auto", "triton" or "reference".

    Returns:
        [N, R, C] in the dtype of `x`, in which G and the polynomial in it are rounded too. A matrix has the same bits
        of G and of the polynomial beside any others.

    Raises:
        ValueError: a shape, layout or dtype that does not fit, or an implementation that cannot run here.
    """
    check_floating("x", x)
    if x.ndim != 3 or not x.is_contiguous():
        raise ValueError(f"x: expected a contiguous [N, R, C], got {list(x.shape)} with strides {list(x.stride())}")
    if choose(impl, x, triton=True) == "triton":
        from .fused_products import newton_schulz_step_fused, supports

        refused = supports(x)
        if refused is None:
            return newton_schulz_step_fused(x, a, b, c)
        if impl == "triton":
            raise ValueError(f"impl: 'triton' was asked for, but {refused}")
    return newton_schulz_step_reference(x, a, b, c)


def _check(**tensors: torch.Tensor) -> None:
    (_, first), *_ = tensors.items()
    for name, tensor in tensors.items():
        check_floating(name, tensor)
        if tensor.ndim != 3 or tensor.shape != first.shape:
            raise ValueError(f"{name}: expected [N, R, C] = {list(first.shape)}, got {list(tensor.shape)}")
        if len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(f"{name}: expected contiguous matrices, got strides {list(tensor.stride())}")


def _is_fused(impl: str, **wide: torch.Tensor) -> bool:
    (_, tensor), *_ = wide.items()
    if choose(impl, tensor, triton=True) != "triton":
        return False
    refused = [f"{name}: expected FP32, got {one.dtype}" for name, one in wide.items() if one.dtype != torch.float32]
    if refused and impl == "triton":
        raise ValueError(f"impl: 'triton' was asked for, but {refused[0]}")
    return not refused
