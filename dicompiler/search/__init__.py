"""The problem that strategies solve, and checks and metrics of their plans."""
