"""The joint problem: choose one way to split each layer, for all layers at once, with a lower bound.

Exact variable elimination, Lagrangian relaxation and CP-SAT solve it for the strategy `cpsat`.
"""
