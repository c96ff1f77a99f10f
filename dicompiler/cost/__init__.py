"""Prediction of costs: operation counts, cost models, overheads, simulator, metrics and memory."""
