"""The report: an artifact or a Pareto front as one self-contained HTML page."""
