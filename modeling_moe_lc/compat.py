"""The one place that knows differences between supported versions of transformers."""

import transformers
from packaging.version import Version


TRANSFORMERS = Version(transformers.__version__)


def expert_parallel_plan(experts: str, gate: str) -> dict[str, str]:
    """The expert-parallel plan for modules called `experts` and `gate` (patterns): 5.23 dispatches in the experts."""
    plan = {f"{experts}.gate_up_proj": "grouped_gemm", f"{experts}.down_proj": "grouped_gemm"}
    if TRANSFORMERS < Version("5.23"):
        return {**plan, gate: "ep_router", experts: "moe_tp_experts"}
    return {**plan, experts: "ep_dispatch_experts"}
