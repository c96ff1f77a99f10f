"""The strategy `genetic`: a search for the Pareto front of plans after AutoDiCE (Guo et al., 2022)."""
