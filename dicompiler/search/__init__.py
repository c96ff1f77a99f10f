"""Search: the problem that strategies solve, and what judges their plans.

In: layers, platform, cost model, objective. Out: a Problem that evaluates plans (here or in other processes), the
constraints that a plan must keep, lower bounds, Pareto fronts; the base of all strategies.
"""
