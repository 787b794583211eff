"""Tensor and expert parallelism by transformers' plans: the styles that it lacks, and the plan of the experts."""

from contextlib import contextmanager

from torch import nn
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    ColwiseParallel,
    PackedColwiseParallel,
    ParallelInterface,
    TensorParallelLayer,
)
from transformers.utils import is_torch_distributed_available

from .norm import FullPrecision, GatedRMSNorm


if is_torch_distributed_available():
    from transformers.distributed.tensor_parallel import _AllReduceBackward


def expert_parallel_plan(experts: str, gate: str) -> dict[str, str]:
    """The expert-parallel plan for modules called `experts` and `gate` (patterns): 5.23 dispatches in the experts."""
    plan = {f"{experts}.gate_up_proj": "grouped_gemm", f"{experts}.down_proj": "grouped_gemm"}
    if "ep_router" in ALL_PARALLEL_STYLES:
        return {**plan, gate: "ep_router", experts: "moe_tp_experts"}
    return {**plan, experts: "ep_dispatch_experts"}


def register_parallel_styles() -> None:
    """The styles that `base_model_tp_plan` names and transformers lacks. Safe to call twice."""
    if not is_torch_distributed_available():
        return
    ParallelInterface.register("moe_lc_heads", HeadsParallel())
    ParallelInterface.register("moe_lc_gate_up", GateUpParallel())


class HeadsParallel(TensorParallelLayer):
    """An attention module whose projections hold the heads of this rank.

    The FP32 parameters of KDA stay whole on every rank, where loading and saving need no care: their forward sees the
    rows of this rank's heads (all of the norm, which the heads share), and their gradient is summed over the ranks.
    """

    def install_forward(self, module: nn.Module, mesh) -> nn.Module:
        heads, ranks = module.num_heads, mesh.size()
        if heads % ranks:
            field = "num_attention_heads" if hasattr(module, "kv_b_proj") else "linear_attn_config.num_heads"
            raise ValueError(f"{field}: expected a multiple of the tensor-parallel size {ranks}, got {heads}")
        for child in module.children():
            if isinstance(child, FullPrecision):
                super().install_forward(child, mesh)
        return module

    @contextmanager
    def context_around_forward(self, module: nn.Module, mesh):
        whole = dict(module._parameters)
        for name, parameter in whole.items():
            summed = _AllReduceBackward.apply(parameter, mesh.get_group())
            rows = summed if isinstance(module, GatedRMSNorm) else summed.chunk(mesh.size())[mesh.get_local_rank()]
            module._parameters[name] = rows
        try:
            yield
        finally:
            module._parameters.update(whole)


class GateUpParallel(PackedColwiseParallel):
    """`packed_colwise` for gate and up in one matrix, also where they are two tensors on disk.

    The loader cuts a tensor of the checkpoint before the converter concatenates it, and would cut gate, and up, into
    the pieces of the packed layout. So the matrix passes for an ordinary column-wise one as long as it has no values.
    """

    def validate_param(self, module: nn.Module, param: str, mesh, parameter_name: str | None = None) -> None:
        width, ranks = module._parameters[param].shape[-2] // 2, mesh.size()
        if width % ranks:
            raise ValueError(
                f"{parameter_name or param}: expected an intermediate size that is a multiple of the tensor-parallel "
                f"size {ranks}, got {width}"
            )

    def shard_param(self, module: nn.Module, param: str, mesh) -> None:
        if module._parameters[param].dim() == 2:
            columns = nn.Module()
            columns.register_parameter(param, module._parameters[param])
            ColwiseParallel().shard_param(columns, param, mesh)

            def show_columns(linear: nn.Module, state_dict: dict, prefix: str, metadata) -> None:
                if state_dict[prefix + param].is_meta:
                    state_dict[prefix + param] = columns._parameters[param].detach()

            module.register_state_dict_post_hook(show_columns)
        super().shard_param(module, param, mesh)


register_parallel_styles()
