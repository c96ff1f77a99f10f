"""Plugin: how passes, strategies, targets, rules, cost models and platforms come in, built-in ones too.

In: entry points. Out: a registry that hands out what they provide, guarded where a third party made it; the hooks, the
pass manager and its instruments.
"""
