"""Analysis of plans and runs: comparison, exploration, explanation, prediction error."""
