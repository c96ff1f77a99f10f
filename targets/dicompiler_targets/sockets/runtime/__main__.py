"""The command line of the runtime: reads the options, and starts a device for one run or a resident device."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import MANIFEST_FORMAT, STATE_DIRECTORY
from .addresses import connect, split_address
from .handshake import TOKEN_VARIABLE, RunCredentials
from .integrity import mark_as_used, read_manifest
from .transport import TlsKeys

if TYPE_CHECKING:
    from .device import DeviceRun


def main() -> int:
    """Run the device until the coordinator ends the run; return 0 if the run ended normally, else 1."""
    options = _parse_options()
    token = os.environ.get(TOKEN_VARIABLE, "")
    if options.detach:
        return _start_detached()
    if options.resident:
        return _run_daemon(options, token)
    if options.end_with_stdin:
        with open(0, "rb", buffering=0, closefd=False) as starter:
            token = starter.readline().decode(errors="replace").strip()
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        manifest = _load_manifest(options.manifest)
    except (ValueError, OSError) as error:
        return _fail(str(error))
    try:
        if options.cores:
            os.sched_setaffinity(0, map(int, options.cores.split(",")))
        device = _make_device(options, manifest, RunCredentials(options.run, token))
        address = split_address(options.coordinator)
    except (ValueError, OSError) as error:
        return _fail(f"{manifest['device']}: {error}")
    try:
        control = connect(*address, options.timeout, "--listen HOST:PORT sets the port")
    except OSError as error:
        return _fail(f"{device.name}: cannot reach the coordinator at {options.coordinator}: {error}")
    try:
        device.run(control, options.threads or min(manifest["threads"], os.cpu_count() or 1))
    except Exception as error:
        device.send_error(error)
        return _fail(f"{device.name}: {error}")
    return 0


def _start_detached() -> int:
    """Start this command again in the background; return the exit code when clients can connect to the new process.

    The cluster's secret token is read from standard input. The process ID and the address are printed as a line of
    JSON.
    """
    token = sys.stdin.readline().strip()
    reader, writer = os.pipe()
    arguments = [argument for argument in sys.orig_argv[1:] if argument != "--detach"]
    subprocess.Popen(
        [sys.executable, *arguments, "--announce", str(writer)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(writer,),
        start_new_session=True,
        env=os.environ | ({TOKEN_VARIABLE: token} if token else {}),
    )
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        answer = pipe.read()
    if not answer.startswith("{"):
        return _fail(answer or "the device ended before clients could connect: see its log")
    print(f"dicompiler: {answer}", flush=True)
    return 0


def _run_daemon(options: Any, token: str) -> int:
    if options.announce is not None:
        os.set_inheritable(options.announce, False)
    try:
        # This import loads onnxruntime and may fail, so it is inside `try`, which reports the error to the parent
        # process.
        from .daemon import DaemonLockFile, DaemonLog, DeviceDaemon, bind_listener, run_daemon

        log = DaemonLog(options.log)
        os.environ.pop(TOKEN_VARIABLE, None)
        manifest = _load_manifest(options.manifest)
        directory = options.manifest.resolve().parent
        if options.cores:
            os.sched_setaffinity(0, map(int, options.cores.split(",")))
        addresses = [None if text is None else split_address(text) for text in (options.listen, options.coordinator)]
        listener = bind_listener(*addresses)
        keys = None if options.keys is None else TlsKeys(options.keys)
        daemon = DeviceDaemon(directory, manifest, listener, keys, token, options.insecure, log)
        lock_file = DaemonLockFile(directory.parent / STATE_DIRECTORY, manifest["device"])
        return run_daemon(daemon, lock_file, options.threads, log, options.announce)
    except (ValueError, OSError, ImportError) as error:
        if options.announce is not None:
            os.write(options.announce, str(error).encode())
        return _fail(str(error))


def _load_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest in a file, and mark its artifact as used until the process ends.

    Raise ValueError or OSError if this runtime cannot read the file.
    """
    manifest = read_manifest(path)
    if manifest.get("format") != MANIFEST_FORMAT:
        raise ValueError(
            f"{path}: format {manifest.get('format')} is not supported (this version reads {MANIFEST_FORMAT}): compile "
            "the model again with 'dicompiler compile', and copy the device's directory again"
        )
    mark_as_used(path.resolve().parent.parent)
    return manifest


def _end_with_stdin() -> None:
    """End this process when its standard input ends, because its parent process has then ended."""
    while os.read(0, 4096):
        continue
    os._exit(1)


def _make_device(options: Any, manifest: dict[str, Any], credentials: RunCredentials) -> DeviceRun:
    # These imports load onnxruntime, which takes long. The thread that waits for the end of standard input runs
    # already.
    from .device import ConnectionSettings, DeviceRun
    from .executor import EmulatedSpeed

    keys = None if options.keys is None else TlsKeys(options.keys)
    if keys is not None and keys.expiry_notice:
        print(f"{manifest['device']}: {keys.expiry_notice}", file=sys.stderr)
    listen = None if options.listen is None else split_address(options.listen)
    if not options.heartbeat > 0:
        raise ValueError(f"--heartbeat must be more than 0 s, not {options.heartbeat:g}")
    settings = ConnectionSettings(time.monotonic() + options.timeout, keys, options.insecure, options.heartbeat)
    min_segment_s = tuple(map(float, filter(None, options.min_seconds.split(","))))
    directory = options.manifest.resolve().parent
    speed = EmulatedSpeed.parse(options.speeds)
    return DeviceRun(directory, manifest, settings, credentials, listen, min_segment_s, speed)


def _parse_options() -> Any:
    parser = argparse.ArgumentParser(prog="runtime", description="Run one device's share of a compiled network.")
    add = parser.add_argument
    add("--manifest", type=Path, default=Path("manifest.json"), help="the device's manifest.json")
    add(
        "--coordinator",
        metavar="HOST:PORT",
        help="the coordinator's address; with --resident, it only selects the network at which to listen",
    )
    add("--run", default="", metavar="ID", help="ID of the run to join, as the coordinator printed it")
    add("--listen", metavar="HOST:PORT", help="address at which other devices connect (port 0: any)")
    add("--keys", type=Path, help="this device's directory of keys, made by 'dicompiler keys'")
    add("--insecure", action="store_true", help="allow unencrypted connections to other hosts")
    add("--threads", type=int, default=0, help="threads that compute (default: as in the manifest)")
    add("--cores", help="run only on the processors with these numbers (0,1,…)")
    add("--min-seconds", default="", metavar="S,S,…", help="minimum seconds of each segment, to emulate a slower board")
    add(
        "--speeds",
        default="",
        metavar="TIME:SPEED,…",
        help="factors for the emulated board's speed from these times on (Python's time.perf_counter)",
    )
    add("--timeout", type=float, default=3600.0, help="seconds until the run must have started")
    add("--heartbeat", type=float, default=2.0, help="seconds between heartbeats; missing three counts as a failure")
    add(
        "--end-with-stdin",
        action="store_true",
        help="read the run's token from standard input, and end when standard input ends",
    )
    add("--resident", action="store_true", help="keep running, and serve one client after another at --listen")
    add(
        "--detach",
        action="store_true",
        help="with --resident: read the token from standard input, and run in the background",
    )
    add("--announce", type=int, help=argparse.SUPPRESS)
    add("--log", type=Path, help="with --resident: append events and all output to this file")
    parser.epilog = f"Without keys, give the run's token in the variable {TOKEN_VARIABLE} or on standard input."
    options = parser.parse_args()
    if not options.resident and options.coordinator is None:
        parser.error("give the coordinator's address (--coordinator), or --resident")
    return options


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
