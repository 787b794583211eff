from .api import kda, kda_step
from .state_map import combine_state_maps, kda_state_map


__all__ = ["combine_state_maps", "kda", "kda_state_map", "kda_step"]
