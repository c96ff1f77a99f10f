"""Plugins: registration of passes, strategies, targets, operator rules, cost models and platforms.

    entry points ──load──► Registry of classes, operator rules and platform families

A platform family finds platforms by name, such as `rpi4x3`. Classes and functions of third-party plugins are wrapped:
exceptions in their code become errors that name the plugin. Built-in plugins are registered through the same hooks.
The package also has the pass manager and its instruments.
"""
