"""What Muon does to each element, and a step of its matrix products, in torch."""

import torch


def muon_direction_reference(gradient, momentum, out, *, beta):
    """Arguments as in `api.muon_direction`."""
    momentum.lerp_(gradient, 1.0 - beta)
    torch.add(gradient, momentum, alpha=beta / (1.0 - beta), out=out)


def muon_descend_reference(parameter, update, *, lr, weight_decay):
    """Arguments as in `api.muon_descend`."""
    if weight_decay:
        parameter.mul_(1.0 - lr * weight_decay)
    if isinstance(lr, torch.Tensor):
        parameter.addcmul_(update, lr, value=-1.0)
    else:
        parameter.add_(update, alpha=-lr)


def newton_schulz_step_reference(x, a, b, c):
    """Arguments and result as in `api.newton_schulz_step`."""
    tall = x.shape[1] > x.shape[2]
    gram = x.mT @ x if tall else x @ x.mT  # [N, min(R, C), min(R, C)]
    polynomial = gram * b
    polynomial.diagonal(dim1=1, dim2=2).add_(a)  # so that no product adds to x, which would cost a copy of it
    polynomial.baddbmm_(gram, gram, alpha=c)
    return x @ polynomial if tall else polynomial @ x
