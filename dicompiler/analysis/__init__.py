"""Comparison of strategies, Pareto exploration, explanations and prediction errors."""
