"""The joint problem: choose one way to split each layer, for all layers at once.

Variable elimination, Lagrangian relaxation and CP-SAT solve it, with a lower bound, for the strategy `cpsat`.
"""
