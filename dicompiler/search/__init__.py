"""The problem that strategies solve, and everything that judges their plans.

This package holds `Problem` and `Strategy`, the constraints that a plan must keep, the work budget of a search, lower
bounds, Pareto fronts, and the choice of plans for failed devices.
"""
