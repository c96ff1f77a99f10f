"""Base classes of targets, records of their runs, and the integrity of artifacts.

The targets themselves are plugins.
"""
