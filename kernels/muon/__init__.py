from .api import muon_descend, muon_direction


__all__ = ["muon_descend", "muon_direction"]
