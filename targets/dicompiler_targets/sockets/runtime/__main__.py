"""The command line of a device: see the package."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import MANIFEST_FORMAT, STATE_DIRECTORY
from .handshake import TOKEN_VARIABLE, RunCredentials
from .integrity import read_manifest
from .transport import TlsKeys, split_address

if TYPE_CHECKING:
    from .device import DeviceRun


def main() -> int:
    """Runs the device that the manifest describes until the coordinator ends the run. 0: all went well."""
    options = _parse_options()
    token = os.environ.get(TOKEN_VARIABLE, "")
    if options.detach:
        return _start_detached()
    if options.serve:
        return _run_daemon(options, token)
    if options.tethered:
        with open(0, "rb", buffering=0, closefd=False) as starter:
            token = starter.readline().decode(errors="replace").strip()
        threading.Thread(target=_end_with_starter, daemon=True).start()
    try:
        manifest = _load_manifest(options.manifest)
    except (ValueError, OSError) as error:
        return _fail(str(error))
    try:
        if options.cores:
            os.sched_setaffinity(0, map(int, options.cores.split(",")))
        device = _make_device(options, manifest, RunCredentials(options.run, token))
        address = split_address(options.control)
    except (ValueError, OSError) as error:
        return _fail(f"{manifest['device']}: {error}")
    try:
        control = socket.create_connection(address, options.timeout)
    except OSError as error:
        return _fail(f"{device.name}: the coordinator at {options.control} cannot be reached: {error}")
    try:
        device.run(control, options.threads or min(manifest["threads"], os.cpu_count() or 1))
    except Exception as error:
        device.send_error(error)
        return _fail(f"{device.name}: {error}")
    return 0


def _start_detached() -> int:
    """Starts this command once more as a process of its own, that stays, with the token that standard input tells; and
    ends when that can be called, with a line of JSON that says where, or with its error."""
    token = sys.stdin.readline().strip()
    reader, writer = os.pipe()
    words = [word for word in sys.orig_argv[1:] if word != "--detach"]
    nothing = subprocess.DEVNULL
    subprocess.Popen(
        [sys.executable, *words, "--announce", str(writer)],
        stdin=nothing,
        stdout=nothing,
        stderr=nothing,
        pass_fds=(writer,),
        start_new_session=True,
        env=os.environ | ({TOKEN_VARIABLE: token} if token else {}),
    )
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        said = pipe.read()
    if not said.startswith("{"):
        return _fail(said or "it ended before it could be called: its log says why")
    print(f"dicompiler: {said}", flush=True)
    return 0


def _run_daemon(options: Any, token: str) -> int:
    """Runs the device as one that stays."""
    if options.announce is not None:
        os.set_inheritable(options.announce, False)
    try:
        from .daemon import (  # takes its time, as `device`
            DaemonLockFile,
            DaemonLog,
            DeviceDaemon,
            bind_listener,
            run_daemon,
        )

        log = DaemonLog(options.log)
        os.environ.pop(TOKEN_VARIABLE, None)
        manifest = _load_manifest(options.manifest)
        directory = options.manifest.resolve().parent
        if options.cores:
            os.sched_setaffinity(0, map(int, options.cores.split(",")))
        addresses = [None if text is None else split_address(text) for text in (options.listen, options.control)]
        listener = bind_listener(*addresses)
        keys = None if options.keys is None else TlsKeys(options.keys)
        service = DeviceDaemon(directory, manifest, listener, keys, token, options.insecure, log)
        held = DaemonLockFile(directory.parent / STATE_DIRECTORY, manifest["device"])
        return run_daemon(
            service, held, options.threads or min(manifest["threads"], os.cpu_count() or 1), log, options.announce
        )
    except (ValueError, OSError, ImportError) as error:
        if options.announce is not None:
            os.write(options.announce, str(error).encode())
        return _fail(str(error))


def _load_manifest(path: Path) -> dict[str, Any]:
    """ValueError or OSError for one that this runtime cannot read."""
    manifest = read_manifest(path)
    if manifest.get("format") != MANIFEST_FORMAT:
        raise ValueError(f"{path}: format {manifest.get('format')!r}, this runtime reads {MANIFEST_FORMAT!r}")
    return manifest


def _end_with_starter() -> None:
    """Ends this process when its standard input ends: before it has joined, nothing else tells that nobody waits."""
    while os.read(0, 4096):
        continue
    os._exit(1)


def _make_device(options: Any, manifest: dict[str, Any], membership: RunCredentials) -> DeviceRun:
    """ValueError for keys or an address that cannot be used."""
    directory = options.manifest.resolve().parent
    from .device import DeviceRun  # takes its time (onnxruntime), in which the starter may go

    keys = None if options.keys is None else TlsKeys(options.keys)
    if keys is not None and keys.expiry_notice:
        print(f"{manifest['device']}: {keys.expiry_notice}", file=sys.stderr)
    listen = None if options.listen is None else split_address(options.listen)
    if not options.heartbeat > 0:
        raise ValueError(f"--heartbeat must be more than 0 s, not {options.heartbeat:g}")
    return DeviceRun(
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


def _parse_options() -> Any:
    parser = argparse.ArgumentParser(prog="runtime", description="Run one device's share of a compiled network.")
    add = parser.add_argument
    add("--manifest", type=Path, default=Path("manifest.json"), help="the device's manifest.json")
    add("--control", metavar="HOST:PORT", help="where the coordinator listens; with --serve: by whom to be reached")
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
    add("--serve", action="store_true", help="stay, and wait for one client after another at --listen")
    add(
        "--detach", action="store_true", help="with --serve: go on in a process of its own, with the token on our input"
    )
    add("--announce", type=int, help=argparse.SUPPRESS)
    add("--log", type=Path, help="with --serve: where to write what happens, and what this process writes")
    parser.epilog = (
        f"Without keys, the environment variable {TOKEN_VARIABLE} must hold the run's token, or standard input does."
    )
    options = parser.parse_args()
    if not options.serve and options.control is None:
        parser.error("say where the coordinator listens (--control), or let it stay (--serve)")
    return options


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
