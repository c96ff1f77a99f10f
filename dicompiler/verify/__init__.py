"""Verification that a split network computes the same outputs as onnxruntime on the whole network.

Two checks complement each other. The exact check (`verify.exact`) runs the split with small integers and compares the
results bit by bit, so it detects elements that are missing or misplaced. The comparison with real weights
(`comparison`, `tolerances`) checks the numbers that users receive.
"""
