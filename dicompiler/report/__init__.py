"""The report: a compiled network, or a front of plans, as one HTML page with pictures and no need of a network.

artifact (+ log of a run, comparison, front) ──facts──► Facts ──pictures──► markup ──page──► report.html
"""
