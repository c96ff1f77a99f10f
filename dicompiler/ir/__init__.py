"""Immutable records: regions, operator rules, layers, plans, platforms, programs, ONNX models."""
