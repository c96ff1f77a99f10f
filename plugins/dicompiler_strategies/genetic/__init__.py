"""AutoDiCE's exploration (Guo et al., 2022): a genetic search for the Pareto front of the plans of a network.

Problem + Options → Front, see `exploring.explore`; the strategy `genetic` is in strategy.py.
"""
