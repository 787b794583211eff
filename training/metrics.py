"""What is measured in an optimiser step: everything stays on the device until one transfer in each logged step."""

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ..kernels.router import max_violation, sampling_floor
from ..router import Router
from .balance import routers
from .observation import AllReduce, Numbers, Observation, reduced


DEAD = 0.1  # of the mean load: an expert with less counts as dead
WINDOW, FEWEST = 64, 16  # losses that a spike is judged by
SPREADS = 8.0  # median absolute deviations above the median
LEAST_SPREAD = 1e-3  # of the median: a loss that stands still has no spread of its own


class StepMeter:
    """Adds up what the micro-batches of a rank give, and reads it in the steps that are logged.

    In every step `start_step()`, then `add(...)` for each micro-batch. In a logged step `read(...)`, after the backward
    pass and before `update_router_bias`, which forgets the counts. Loss, gradient norm and routing are those of the step,
    so that a resumed run reads them again; the rates are over all steps since the last `read`, since nothing else waits
    for the device.

    Args:
        model: bare or wrapped.
        peak_flops: FLOP/s of a rank's device; None leaves MFU out.
        all_reduce, all_reduce_max: put the sum, or the maximum, over the ranks that see different tokens into a tensor.
            `read` calls them, on every rank alike. None: one process.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        peak_flops: float | None = None,
        all_reduce: AllReduce | None = None,
        all_reduce_max: AllReduce | None = None,
    ):
        self.routers, self.peak_flops = routers(model), peak_flops
        self.all_reduce, self.all_reduce_max = all_reduce, all_reduce_max
        self.device = next(model.parameters()).device
        self.start_step()
        self._start_interval()

    def start_step(self) -> None:
        """Forgets the losses of the step before."""
        self.nats, self.predictions = torch.zeros((), dtype=torch.float64, device=self.device), 0

    def _start_interval(self) -> None:
        self.begun, self.tokens, self.flops = time.monotonic(), 0, 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The time inside, say of an evaluation or a checkpoint, is left out of the rates."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.begun += time.monotonic() - begun

    def add(self, nats: Tensor, predictions: int, tokens: int, flops: float) -> None:
        """One micro-batch of this rank.

        Args:
            nats: 0-d, the sum of its losses: the model's loss times the `num_items_in_batch` that it was divided by.
            predictions, tokens: how many were predicted, and read.
            flops: `training_flops` of its documents; of what is shared by context parallelism, the rank's part.
        """
        self.nats += nats.detach()
        self.predictions += predictions
        self.tokens += tokens
        self.flops += flops

    def read(self, gradient_norm: Tensor, observation: Observation | None = None) -> dict:
        """The numbers of all ranks, for a log: floats, and lists with one number for each MoE layer.

        `loss` (nats per prediction) and `gradient_norm`; `step_tokens`, `seconds`, `tokens_per_second` and `mfu` since the
        last `read`; `max_violation` and its sampling `floor`, `dead_experts`, `bias_range`; what `observation` holds.

        Args:
            gradient_norm: 0-d, of the whole model.
        """
        amounts = [1.0, self.predictions, self.tokens, self.flops]
        sums = {"nats": self.nats, "amounts": torch.tensor(amounts, dtype=torch.float64, device=self.device)}
        if self.routers:
            sums["counts"], biases = routing_state(self.routers)
        numbers = {**reduced(sums, self.all_reduce), "gradient_norm": gradient_norm}
        if self.routers:
            numbers |= routing_numbers(numbers.pop("counts"), biases)
        if observation is not None:
            numbers |= observation.numbers(self.all_reduce, self.all_reduce_max)
        host = on_host(numbers)
        seconds = time.monotonic() - self.begun
        self._start_interval()

        nats, (ranks, predictions, tokens, flops) = host.pop("nats"), host.pop("amounts")
        record = {
            "loss": nats / predictions if predictions else math.nan,
            "gradient_norm": host.pop("gradient_norm"),
            "step_tokens": int(tokens),
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
        }
        if self.peak_flops is not None:
            record["mfu"] = flops / (seconds * self.peak_flops * ranks)
        return record | (with_floor(self.routers[0], host) if self.routers else host)


def routing_state(watched: Sequence[Router]) -> tuple[Tensor, Tensor]:
    """Copies of the counts (of this rank, in this step) and the biases of L routers, [L, E] each."""
    return (
        torch.stack([router.counts for router in watched]),
        torch.stack([router.e_score_correction_bias for router in watched]),
    )


def routing_numbers(counts: Tensor, biases: Tensor) -> Numbers:
    """Of each layer: `max_violation`, `dead_experts`, `bias_range` and `routed`, the choices made; [L] each.

    `counts` [L, E]: over all micro-batches and ranks of a step; `biases` [L, E]: those that routed it.
    """
    low, high = torch.aminmax(biases, dim=-1)
    loads = counts.double()
    return {
        "max_violation": max_violation(counts),
        "dead_experts": (loads < DEAD * loads.mean(-1, keepdim=True)).sum(-1),
        "bias_range": high - low,
        "routed": loads.sum(-1),
    }


def with_floor(router: Router, host: dict) -> dict:
    """`routing_numbers` on the host with the sampling `floor` of MaxVio for that many tokens in place of `routed`."""
    top_k = router.config.num_experts_per_token
    tokens = round(host["routed"][0] / top_k)
    floor = sampling_floor(tokens, router.config.num_experts, top_k) if tokens else math.nan
    rest = {name: value for name, value in host.items() if name != "routed"}
    return rest | {"floor": floor, "dead_experts": [int(number) for number in host["dead_experts"]]}


def on_host(numbers: Numbers) -> dict:
    """Floats of 0-d tensors and lists of floats of 1-d ones, moved in one transfer: one wait for the device."""
    flat = torch.cat([number.detach().double().flatten() for number in numbers.values()]).tolist()
    host, place = {}, 0
    for name, number in numbers.items():
        host[name] = flat[place : place + number.numel()] if number.ndim else flat[place]
        place += number.numel()
    return host


class SpikeDetector:
    """Calls a loss a spike if it is far above the median of the last ones, measured by their median absolute deviation.

    `losses`: those of the steps in the log, None where one was not finite, so that a resumed run goes on judging as before.
    """

    def __init__(self, losses: Iterable[float | None] = ()):
        self.losses = deque((loss for loss in losses if loss is not None and math.isfinite(loss)), WINDOW)

    def is_spike(self, loss: float) -> bool:
        """Judges the next loss; one that is not finite always is a spike, and no measure for others."""
        if not math.isfinite(loss):
            return True
        spike = len(self.losses) >= FEWEST and loss > self._limit()
        self.losses.append(loss)
        return spike

    def _limit(self) -> float:
        median = statistics.median(self.losses)
        spread = statistics.median(abs(loss - median) for loss in self.losses)
        return median + SPREADS * max(spread, LEAST_SPREAD * abs(median))
