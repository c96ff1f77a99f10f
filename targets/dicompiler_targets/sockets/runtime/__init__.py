"""Runs one device's share of a compiled network: `python3 -m runtime --control HOST:PORT --keys KEYS` in its directory.

HOST:PORT is where the coordinator listens; KEYS holds ca.pem, cert.pem and key.pem of this device. The exit code is 0
after a run that ended well; else the last line says why not. This package is copied into every device's directory as it
is. It needs Python, numpy and onnxruntime, nothing else.
"""

import os

# onnxruntime 1.32 keeps a number of the device and sends what it is used for, unless told before it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

STATE_DIRECTORY = ".kept"
"""The directory, beside those of devices, that says which of them stay."""
MANIFEST_FORMAT = "dicompiler.sockets/6"
"""The manifest's format, which this runtime reads."""
