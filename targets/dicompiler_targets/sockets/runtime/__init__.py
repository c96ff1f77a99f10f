"""Runs one device's share of a compiled network: `python -m runtime --manifest manifest.json --control HOST:PORT`.

This package is copied into every device's directory as it is. It needs Python, numpy and onnxruntime, nothing else.
"""

FORMAT = "dicompiler.sockets/1"
"""The manifest's format, which this runtime reads."""
