"""Verify: whether a split network computes what onnxruntime computes.

In: a Model, a Program, inputs. Out: outputs of both, checks with their differences; check models that are exact
whatever the order of sums (`verify.exact`).
"""
