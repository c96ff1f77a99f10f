"""Verification that a split network computes the same outputs as onnxruntime on the whole network.

There are two checks. The exact check (`verify.exact`) runs the split with small integers and compares the results bit
by bit, so it detects elements that are missing or misplaced. The other check (`comparison`, `tolerances`) compares the
outputs with the real weights, within tolerances.
"""
