"""The runtime of one device: `python3 -m runtime --coordinator HOST:PORT --keys KEYS` in the device's directory.

HOST:PORT is the coordinator's listening address. KEYS is a directory with this device's ca.pem, crl.pem, cert.pem and
key.pem. The exit code is 0 after a run that ended normally; otherwise the last line of output names the error. The
package is copied unchanged into each device's directory. It needs only Python, numpy and onnxruntime.
"""

import os

# onnxruntime 1.32 creates a device ID and sends usage data, unless this is set before it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

STATE_DIRECTORY = ".resident"
"""Directory, next to the devices' directories, with the state files and logs of resident devices."""
MANIFEST_FORMAT = "dicompiler.sockets/7"
"""Format of manifest.json that this runtime reads."""
