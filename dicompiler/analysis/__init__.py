"""Analysis of plans and runs: comparison of strategies, Pareto fronts, explanations, and prediction errors."""
