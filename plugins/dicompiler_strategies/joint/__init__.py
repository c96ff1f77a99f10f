"""The joint problem: one choice for each layer, all at once, with a lower bound.

It is solved by exact variable elimination, Lagrangian relaxation and CP-SAT. The strategy is `cpsat`.
"""
