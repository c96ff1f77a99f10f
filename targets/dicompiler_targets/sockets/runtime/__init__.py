"""The runtime: the program that runs one device's segments and transfers of a compiled network.

Start it in the device's directory: `python3 -m runtime --coordinator HOST:PORT --keys KEYS`. HOST:PORT is the address
of the coordinator, the process that supplies the frames. KEYS is a directory with this device's ca.pem, crl.pem,
cert.pem and key.pem. The exit code is 0 after a run that ended normally; otherwise the last line of output names the
error. The package needs only Python, numpy, onnxruntime and the packages of the device's other engines.

A frame (one inference request) passes through these modules:

1. `__main__` reads the options and creates a `device.DeviceRun`, which joins the coordinator and the other devices (its
   peers), by means of `addresses`, `handshake` and `transport`.
2. `channel.EventLoop` polls the connections. For each of them, `channel.MessageChannel` reads the messages that
   `protocol` describes and checks.
3. `device` puts announced frames and received tensors into the mailbox.
4. `executor` takes them out and runs the steps of the frame: segments (ONNX submodels) and sends. `segments` calls
   onnxruntime or another engine (`engine_ncnn`, `engine_mnn`).
5. `device` queues the computed transfers and outputs in a channel, and the event loop sends them.

`daemon` replaces `__main__` in a resident device. `protocol.RoleSchedule` selects the plan of each frame. `value_codec`
encodes values of unknown size, and `integrity` finds damaged files.
"""

import os

# onnxruntime 1.32 creates a device ID and sends usage data, unless ORT_DISABLE_TELEMETRY is set before its import.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

STATE_DIRECTORY = ".resident"
"""Directory for state files and logs of resident devices (daemons), next to the devices' directories."""
MANIFEST_FORMAT = "dicompiler.sockets/7"
"""The only format of manifest.json (the description of a device's segments and transfers) that this runtime reads."""
