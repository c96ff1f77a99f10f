"""The command line of a device: see the package."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from pathlib import Path

from . import FORMAT
from .device import Device


def main() -> int:
    """Runs the device that the manifest describes until the coordinator ends the run. 0: all went well."""
    parser = argparse.ArgumentParser(prog="runtime", description="Run one device's share of a compiled network.")
    parser.add_argument("--manifest", type=Path, default=Path("manifest.json"), help="the device's manifest.json")
    parser.add_argument("--control", required=True, metavar="HOST:PORT", help="where the coordinator listens")
    parser.add_argument("--threads", type=int, default=0, help="threads of a segment (default: as in the manifest)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds after which the run has failed")
    options = parser.parse_args()
    deadline = time.monotonic() + options.timeout
    manifest = json.loads(options.manifest.read_text(encoding="utf-8"))
    if manifest.get("format") != FORMAT:
        return _end(f"{options.manifest}: format {manifest.get('format')!r}, this runtime reads {FORMAT!r}")
    threads = options.threads or min(manifest["threads"], os.cpu_count() or 1)
    host, _, port = options.control.rpartition(":")
    try:
        control = socket.create_connection((host, int(port)), options.timeout)
    except OSError as error:
        return _end(f"the coordinator at {options.control} cannot be reached: {error}")
    device = Device(options.manifest.resolve().parent, manifest, control, deadline)
    try:
        device.run(threads)
    except Exception as error:
        device.fail(error)
        return _end(f"{device.name}: {error}")
    return 0


def _end(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
