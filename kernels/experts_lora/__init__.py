from .api import LowRank, expert_mlp_lora, expert_mlp_lora_mxfp4


__all__ = ["LowRank", "expert_mlp_lora", "expert_mlp_lora_mxfp4"]
