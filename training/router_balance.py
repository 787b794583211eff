"""Router balancing inside transformers' `Trainer`."""

from transformers import TrainerCallback

from ..router import update_router_bias


class RouterBalanceCallback(TrainerCallback):
    """Calls `update_router_bias` after every optimiser step; the statistics of all micro-batches count.

    `all_reduce(tensor)` sums an int64 tensor in place over ranks with different tokens; None: one process.
    """

    def __init__(self, all_reduce=None):
        self.all_reduce = all_reduce

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        update_router_bias(model, self.all_reduce)
