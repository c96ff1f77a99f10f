"""Partition: from layers and a plan to a program, for every kind of split alike.

In: LayerGraph, Plan, Platform. Out: tasks (bounds inference), Routing, PlacedGraph, placed Model, Program.
Here too: how layers are cut along named axes (tiling), and the rules that a plan must keep (plan_rules).
"""
