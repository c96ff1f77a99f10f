"""The command line of a device: see the package."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import FORMAT
from .files import read_manifest
from .greeting import TOKEN, Membership
from .line import Keys, split_address

if TYPE_CHECKING:
    from .device import Device


def main() -> int:
    """Runs the device that the manifest describes until the coordinator ends the run. 0: all went well."""
    options = _options()
    token = os.environ.get(TOKEN, "")
    if options.tethered:
        with open(0, "rb", buffering=0, closefd=False) as starter:
            token = starter.readline().decode(errors="replace").strip()
        threading.Thread(target=_end_with_starter, daemon=True).start()
    try:
        manifest = read_manifest(options.manifest)
    except (ValueError, OSError) as error:
        return _end(str(error))
    if manifest.get("format") != FORMAT:
        return _end(f"{options.manifest}: format {manifest.get('format')!r}, this runtime reads {FORMAT!r}")
    try:
        if options.cores:
            os.sched_setaffinity(0, map(int, options.cores.split(",")))
        device = _device(options, manifest, Membership(options.run, token))
        address = split_address(options.control)
    except (ValueError, OSError) as error:
        return _end(f"{manifest['device']}: {error}")
    try:
        control = socket.create_connection(address, options.timeout)
    except OSError as error:
        return _end(f"{device.name}: the coordinator at {options.control} cannot be reached: {error}")
    try:
        device.run(control, options.threads or min(manifest["threads"], os.cpu_count() or 1))
    except Exception as error:
        device.fail(error)
        return _end(f"{device.name}: {error}")
    return 0


def _end_with_starter() -> None:
    """Ends this process when its standard input ends: before it has joined, nothing else tells that nobody waits."""
    while os.read(0, 4096):
        continue
    os._exit(1)


def _device(options: Any, manifest: dict[str, Any], membership: Membership) -> Device:
    """ValueError for keys or an address that cannot be used."""
    directory = options.manifest.resolve().parent
    from .device import Device  # takes its time (onnxruntime), in which the starter may go

    keys = None if options.keys is None else Keys(options.keys)
    if keys is not None and keys.notice:
        print(f"{manifest['device']}: {keys.notice}", file=sys.stderr)
    listen = None if options.listen is None else split_address(options.listen)
    if not options.heartbeat > 0:
        raise ValueError(f"--heartbeat must be more than 0 s, not {options.heartbeat:g}")
    return Device(
        directory,
        manifest,
        time.monotonic() + options.timeout,
        keys,
        listen,
        options.insecure,
        options.heartbeat,
        membership,
        tuple(map(float, filter(None, options.least.split(",")))),
    )


def _options() -> Any:
    parser = argparse.ArgumentParser(prog="runtime", description="Run one device's share of a compiled network.")
    add = parser.add_argument
    add("--manifest", type=Path, default=Path("manifest.json"), help="the device's manifest.json")
    add("--control", required=True, metavar="HOST:PORT", help="where the coordinator listens")
    add("--run", default="", metavar="NUMBER", help="the run to join, as the coordinator numbers it")
    add("--listen", metavar="HOST:PORT", help="where peers reach this device (port 0: any)")
    add("--keys", type=Path, help="the device's directory of those that 'dicompiler keys' made")
    add("--insecure", action="store_true", help="allow connections in the clear to other hosts")
    add("--threads", type=int, default=0, help="threads of a segment (default: as in the manifest)")
    add("--cores", help="run on these processors only (0,1,…)")
    add("--least", default="", metavar="S,S,…", help="seconds that a call of each segment takes at least: emulation")
    add("--timeout", type=float, default=3600.0, help="seconds until the run must have begun")
    add("--heartbeat", type=float, default=2.0, help="seconds between signs of life; who misses three is lost")
    add("--tethered", action="store_true", help="read the run's token from standard input, and end when that does")
    parser.epilog = f"Without keys, the environment variable {TOKEN} must hold the run's token, or standard input does."
    return parser.parse_args()


def _end(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
