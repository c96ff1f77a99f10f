"""The problem that strategies solve, and checks and metrics of their plans.

The package contains `Problem` and `Strategy`, constraints on plans, the work budget of a search, lower bounds, Pareto
fronts, and failure plans.
"""
