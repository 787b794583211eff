"""Router of the experts and the balancing of its bias, which takes part in the choice only, never in weights or gradients."""

from collections.abc import Callable

import torch
from torch import nn

from .backends import operator_impl
from .kernels.router import auto_ema, load_quantile_bias, quantile_bias, route, router_logits, sign_bias
from .norm import at_least_float32


class Router(nn.Module):
    """Sigmoid scores in FP32, Top-k of score plus bias, unbiased weights.

    In training forwards it counts how often each expert was chosen, and for Quantile Balancing keeps the histogram of
    the bias each token would need, until `update_router_bias`. Both are transient; the bias is saved.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts, dtype=torch.float32))
        self.register_buffer("counts", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("histogram", None, persistent=False)

    def _apply(self, fn, recurse=True):
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)
        self.e_score_correction_bias = at_least_float32(bias, self.e_score_correction_bias)
        return self

    def forward(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None = None):
        """`[N, D]` and a mask `[N]` of real tokens -> logits `[N, E]`, weights `[N, k]` (both FP32), indices `[N, k]`."""
        config = self.config
        logits = router_logits(hidden_states, self.weight)  # [N, E]
        counting = self.training and not _in_backward()
        indices, weights, counts, _ = route(
            logits,
            self.e_score_correction_bias,
            config.num_experts_per_token,
            num_groups=config.num_expert_group,
            topk_group=config.topk_group,
            renormalize=config.moe_renormalize,
            scaling=config.routed_scaling_factor,
            token_mask=token_mask,
            histogram=self._training_histogram() if counting else None,
            impl=operator_impl(config, triton=config.topk_group == config.num_expert_group),
        )
        if counting:
            self.counts.add_(counts)  # not `+=`: under activation checkpointing torch.compile refuses assignments
        return logits, weights, indices

    def _training_histogram(self) -> torch.Tensor | None:
        balance = self.config.router_balance
        if balance["method"] != "quantile":
            return None
        if self.histogram is None:  # allocated at the first training step: inference never pays for it
            self.histogram = self.counts.new_zeros(self.config.num_experts, balance["bins"])
        return self.histogram

    def statistics(self) -> torch.Tensor:
        """What this step's bias is computed from and what ranks must sum: counts `[E]` or histogram `[E, bins]`, int64."""
        return self.counts if self.histogram is None else self.histogram

    @torch.no_grad()
    def update_bias(self, statistics: torch.Tensor, ema: float | torch.Tensor) -> None:
        """Replaces the bias by the one that `statistics` call for, and starts counting anew."""
        balance, bias = self.config.router_balance, self.e_score_correction_bias
        if balance["method"] == "quantile" and self.histogram is not None:
            target = quantile_bias(statistics, bias, self.config.num_experts_per_token)
            bias.copy_(target + ema * bias.any() * (bias - target))  # the first estimate is taken whole
            self.histogram.zero_()
        elif balance["method"] == "load_quantile":
            bias.copy_(load_quantile_bias(statistics, bias, balance["eta"], balance["high"], balance["low"]))
        elif balance["method"] == "sign":
            bias.copy_(sign_bias(statistics, bias, balance["eta"]))
        self.counts.zero_()


def _in_backward() -> bool:
    """Whether autograd is running: then a forward is a recomputation under activation checkpointing."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def update_router_bias(model: nn.Module, all_reduce: Callable[[torch.Tensor], object] | None = None) -> None:
    """Moves every router's bias by `config.router_balance`; call it once per optimiser step, after `optimizer.step()`.

    The statistics cover all training forwards since the last call. `all_reduce(tensor)` sums an int64 tensor in place
    over the ranks that saw different tokens; it is called once for all routers. The new bias acts from the next forward
    on (model-spec 4.1; design section 6).
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if not routers:
        return
    config = routers[0].config
    document_counters = [module.documents_seen for module in model.modules() if hasattr(module, "documents_seen")]
    parts = [router.statistics() for router in routers]
    packed = torch.cat([*(part.flatten() for part in parts), sum(document_counters, parts[0].new_zeros(1))])
    if all_reduce is not None:
        all_reduce(packed)
    *summed, documents = packed.split([*(part.numel() for part in parts), 1])
    ema = config.router_balance["ema"]
    if ema == "auto":
        ema = auto_ema(documents[0], config.num_experts, config.num_experts_per_token)
    for router, part, own in zip(routers, summed, parts, strict=True):
        router.update_bias(part.view_as(own), ema)
    for counter in document_counters:
        counter.zero_()
