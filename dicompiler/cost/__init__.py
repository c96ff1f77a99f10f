"""Prediction of costs: operation counts, cost models, runtime overheads, simulator, metrics and memory."""
