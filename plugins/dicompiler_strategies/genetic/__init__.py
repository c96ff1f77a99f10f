"""The strategy `genetic`: AutoDiCE's exploration (Guo et al., 2022), a genetic search for the Pareto front of plans."""
