"""Target: what emits and runs a program, as an interface; the targets themselves are plugins.

In: a Compilation with its program. Out: an artifact directory with its manifest; records of its runs; a client.
How other hosts are reached is in `target.remote`.
"""
