"""The report: an artifact or a Pareto front as one self-contained HTML page.

artifact directory (+ run log, comparison, front) ──report_data──► ReportData ──charts and tables──► Markup
──page──► report.html
"""
