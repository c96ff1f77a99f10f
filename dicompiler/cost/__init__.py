"""Cost: what a plan comes to, predicted.

In: LayerGraph, Routing, Program, Platform. Out: operations and bytes, seconds by a cost model, a workload, its
simulation and trace, metrics, and the memory that a program holds.
"""
