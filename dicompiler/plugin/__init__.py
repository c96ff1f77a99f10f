"""Plugins: registration of passes, strategies, targets, operator rules, cost models and platforms.

    entry points ──load──► Registry of classes, operator rules and platform families

A platform family finds platforms by name, such as `rpi4x3`. Built-in plugins are registered through the same hooks as
third-party ones.
"""
