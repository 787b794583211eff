"""What Muon does to each element before and after its matrix products, in torch."""

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
