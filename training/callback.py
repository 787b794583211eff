"""Balancing and its numbers for transformers' `Trainer` and what is built on it, such as TRL's trainers."""

from typing import Self

from torch import Tensor
from torch import distributed as dist
from transformers import Trainer, TrainerCallback
from transformers.utils import logging

from ..router import update_router_bias
from .balance import routers
from .metrics import on_host, routing_numbers, routing_state, with_floor
from .observation import AllReduce, reduced


logger = logging.get_logger(__name__)


class MoeLcCallback(TrainerCallback):
    """Calls `update_router_bias` after every optimiser step and adds the balance of a logged step to Trainer's logs.

    With `callbacks=[MoeLcCallback()]` the numbers reach `state.log_history` and the console. Trainer tells the trackers of
    `report_to` before the callbacks that it is given: to have the numbers there as well, `MoeLcCallback.attach(trainer)`.

    Added to a log with a loss, from all ranks and all MoE layers: `max_violation` (the mean) and `max_violation_worst`,
    their sampling `floor`, `dead_experts` (how many have less than a tenth of the mean load), `bias_range` (the widest).

    Args:
        all_reduce: sums a tensor in place over the ranks that see different tokens. None: over all ranks, if
            torch.distributed is initialised. Tensor-parallel ranks then count the same tokens several times, which moves no
            bias unless `router_balance["ema"]` is "auto": that one counts documents.
    """

    def __init__(self, all_reduce: AllReduce | None = None):
        self.all_reduce = all_reduce
        self.is_first = False
        self.of_last_step: tuple[Tensor, Tensor] | None = None  # counts and biases [L, E]

    @classmethod
    def attach(cls, trainer: Trainer, all_reduce: AllReduce | None = None) -> Self:
        """A new callback, in front of all others of `trainer`."""
        callback = cls(all_reduce)
        callback.is_first = True
        trainer.callback_handler.callbacks.insert(0, callback)
        return callback

    def on_train_begin(self, args, state, control, **kwargs):
        if args.report_to and not self.is_first:
            logger.warning(
                f"{', '.join(args.report_to)}: will not show the balance of the experts; give Trainer no MoeLcCallback and "
                "call MoeLcCallback.attach(trainer)"
            )

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        watched = routers(model)
        if watched:
            self.of_last_step = routing_state(watched)
        update_router_bias(model, self._all_reduce())

    def on_log(self, args, state, control, model=None, logs=None, **kwargs):
        if self.of_last_step is None or "loss" not in logs:
            return
        counts, biases = self.of_last_step
        counts = reduced({"counts": counts}, self._all_reduce())["counts"]
        numbers = with_floor(routers(model)[0], on_host(routing_numbers(counts, biases)))
        logs |= (added := summary(numbers))
        state.log_history[-1] |= added  # Trainer copied `logs` into it before

    def _all_reduce(self) -> AllReduce | None:
        return self.all_reduce or (dist.all_reduce if dist.is_available() and dist.is_initialized() else None)


def summary(numbers: dict) -> dict[str, float]:
    """One number for all layers, of each kind."""
    violations = numbers["max_violation"]
    return {
        "max_violation": sum(violations) / len(violations),
        "max_violation_worst": max(violations),
        "floor": numbers["floor"],
        "dead_experts": sum(numbers["dead_experts"]),
        "bias_range": max(numbers["bias_range"]),
    }
