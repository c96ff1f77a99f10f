"""Plugins: registration of passes, strategies, targets, operator rules, cost models and platforms.

    entry points ──load──► Registry of classes, rules and families

Classes of third parties are wrapped, so that errors in their code name the plugin. Built-in plugins are registered
through the same hooks. The package also has the pass manager and its instruments.
"""
