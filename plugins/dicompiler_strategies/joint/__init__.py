"""The joint problem: one choice for each layer, all at once, with a bound. Exact elimination, Lagrange, CP-SAT.

Tables → Solution; the strategy `cpsat` is in `..cpsat`.
"""
