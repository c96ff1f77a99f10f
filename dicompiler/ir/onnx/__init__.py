"""The ONNX model in memory: loading, checks, an editable graph, and writing."""
