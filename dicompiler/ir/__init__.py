"""Immutable records: regions, operator rules, layers, plans, platforms, programs; in `ir.onnx` the ONNX model."""
