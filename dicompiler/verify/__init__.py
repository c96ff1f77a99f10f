"""Verification that a split network computes the same as onnxruntime.

Two checks complement each other. The exact check (`verify.exact`) proves the geometry of a split with integers, bit by
bit. The comparison with real weights (`comparison`, `tolerances`) checks the numbers that users get.
"""
