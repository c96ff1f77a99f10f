"""Driver: the whole way from a model to an artifact, and what is done with an artifact.

In: model, platform, strategy, target. Out: a compilation, an artifact on disk, its runs and verification; comparisons,
explorations, profiles, the demo.
"""
