from .api import muon_descend, muon_direction, newton_schulz_step


__all__ = ["muon_descend", "muon_direction", "newton_schulz_step"]
