"""Devices on other hosts, over ssh: their directories and keys are copied, their Python is checked, they are started.

In: an artifact, RunOptions with hosts. Out: what was copied, then for a session how its devices are started.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import posixpath
import re
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dicompiler.plugin_api import DEVICES, DicompilerError, Installed, Place, RunError, RunOptions, UsageError, ssh
from dicompiler_targets.sockets.artifact import Artifact, Manifest
from dicompiler_targets.sockets.joining import Door
from dicompiler_targets.sockets.processes import Process
from dicompiler_targets.sockets.runtime.line import KEY_FILES, join_address
from dicompiler_targets.sockets.session import check_elsewhere, in_flight

log = logging.getLogger("dicompiler")

NEEDED = {"Python": (3, 11), "numpy": (1, 26), "onnxruntime": (1, 21)}
"""The oldest versions that the runtime works with: those that dicompiler itself needs."""
KEYS = ".keys"
"""Where the devices' keys lie, each in a directory of its name: beside the directories of the devices."""
OTHER_PYTHON = "install it, or name another one (python in the hosts file)"

# Fed to the Python there, which may be of any version.
PROBE = """
import json, os, sys
def read(*path):
    try:
        with open(os.path.join(*path)) as file:
            return file.read()
    except EnvironmentError:
        return ""
def whole(place):
    try:
        files = json.loads(read(place, "manifest.json"))["files"]
        return all(os.path.getsize(os.path.join(place, name)) == files[name]["bytes"] for name in files)
    except Exception:
        return False
versions, errors = {"Python": ".".join(map(str, sys.version_info[:3]))}, {}
for name in ("numpy", "onnxruntime"):
    try:
        versions[name] = __import__(name).__version__
    except Exception as error:
        errors[name] = str(error)
device, keys = sys.argv[1:]
stamp = read(device, STAMP) if whole(device) else ""
found = {"versions": versions, "errors": errors, "stamp": stamp, "keys": read(keys, STAMP)}
print(MARK + json.dumps(found))
"""
RUN_PYTHON = 'cd / && "$1" - "$2" "$3"'
# The parentheses: a shell stays behind, whose exit code tells of the signal that ends the device.
START = '(cd "$1" && shift && exec "$@"); exit $?'


@dataclass(frozen=True)
class HostState:
    """What a host has: versions by program, and the stamps of the device's directory and of its keys ('': none)."""

    versions: Mapping[str, str]
    stamp: str
    keys: str


def install(directory: Path, options: RunOptions) -> tuple[Installed, ...]:
    """Copies what the hosts lack of the artifact and of the devices' keys: see Target.install."""
    artifact = Artifact.load(directory, check=True)
    check_elsewhere(options, artifact)
    in_flight(options, len(artifact.devices))
    places = _places(artifact, options)
    keys = {name: _keys(options.keys, name, directory) for name in places}
    Door(_listen(options, list(places.values())), options.keys, options.insecure, artifact.digest).close()
    assert options.hosts is not None
    calls = ssh.Calls(time.monotonic() + options.timeout_s, options.hosts.file)
    states = dict(zip(places, calls.each(lambda place: _probe(calls, place), list(places.values())), strict=True))

    def work(manifest: Manifest) -> Installed:
        name = str(manifest["device"])
        place, copied = places[name], 0
        if states[name].stamp != artifact.digest:
            names = ("manifest.json", *manifest["files"])
            copied += calls.copy(place, place.directory, {n: directory / name / n for n in names}, artifact.digest)
        stamp = _stamp(keys[name])
        if keys[name] and states[name].keys != stamp:
            copied += calls.copy(place, _keys_there(place), keys[name], stamp)
        return Installed(name, place.ssh, place.directory, copied, states[name].versions)

    return tuple(calls.each(work, [manifest for manifest in artifact.manifests if manifest["device"] in places]))


def _places(artifact: Artifact, options: RunOptions) -> dict[str, Place]:
    """Where each device runs that is ours to start."""
    if options.hosts is None:
        raise UsageError("deploy: no hosts: say where the devices are reached (--hosts)")
    if options.pin:
        raise UsageError("deploy: devices on other hosts are not pinned from here: give their cores in the hosts file")
    name = artifact.directory.resolve().name or "root"
    manifests = [m for m in artifact.manifests if m["device"] not in options.elsewhere]
    return {m["device"]: options.hosts.place(m["device"], m["host"], name) for m in manifests}


def _keys(keys: Path | None, device: str, directory: Path) -> dict[str, Path]:
    """The files of the device's keys by name; none without keys."""
    if keys is None:
        return {}
    files = {name: keys / DEVICES / device / name for name in KEY_FILES}
    for path in files.values():
        if not path.is_file():
            raise DicompilerError(f"{path}: no such file: make it with 'dicompiler keys {directory} -o {keys}'")
    return files


def _stamp(files: Mapping[str, Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in files.values())).hexdigest()


def _keys_there(place: Place) -> str:
    return posixpath.join(posixpath.dirname(place.directory), KEYS, place.device)


def _listen(options: RunOptions, places: Sequence[Place]) -> str:
    """Where the devices are to reach this process: by default our address on the way to the first of them."""
    if options.listen or not places:
        return options.listen or "127.0.0.1:0"
    host = ssh.address(places[0])
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(address)  # sends nothing: it finds the way
            return join_address(str(way.getsockname()[0]), 0)
    except OSError as error:
        raise DicompilerError(
            f"{places[0].title}: there is no way to {host!r} ({error.strerror or error}): check its ssh in the hosts "
            "file, or say where devices reach this process (--listen)"
        ) from None


def _python(place: Place) -> str:
    return ssh.path_word(place.python) if "/" in place.python else shlex.quote(place.python)


def _probe(calls: ssh.Calls, place: Place) -> HostState:
    """Looks at a host. RunError if it cannot be reached, or has no Python with what the runtime needs."""
    code = f"MARK, STAMP = {ssh.MARK!r}, {ssh.STAMP!r}\n{PROBE}".encode()
    words = [_python(place), ssh.path_word(place.directory), ssh.path_word(_keys_there(place))]
    done = calls.run(place, RUN_PYTHON, words, lambda stream: stream.write(code))
    if not done.marked:
        said = done.errors.strip().splitlines()[-1:] or [f"exit code {done.code}"]
        raise RunError(f"{place.title}: there is no Python {place.python!r} ({said[0]}): {OTHER_PYTHON}")
    answer: dict[str, Any] = json.loads(done.marked[-1])
    for name, needed in NEEDED.items():
        version, oldest = answer["versions"].get(name), ".".join(map(str, needed))
        pip = f"{place.python} -m pip install"
        if version is None:
            cause = " ".join(answer["errors"][name].split())
            raise RunError(f"{place.title}: its Python has no {name} ({cause}): run '{pip} numpy onnxruntime' there")
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < needed:
            remedy = OTHER_PYTHON if name == "Python" else f"run '{pip} --upgrade {name}' there"
            raise RunError(f"{place.title}: {name} {version} is too old, {oldest} or newer is needed: {remedy}")
    return HostState(answer["versions"], answer["stamp"], answer["keys"])


class Remote:
    """Starts the devices of an artifact on their hosts, where `install` has put them. `options`: those of the session,
    with the address at which the devices reach it. A `Start`."""

    def __init__(self, artifact: Artifact, options: RunOptions) -> None:
        self._places = _places(artifact, options)
        self.options = replace(options, listen=_listen(options, list(self._places.values())))
        beside = artifact.directory.absolute()
        self._default = beside.with_name(f"{beside.name}.logs")
        self._kept = False

    def __call__(self, manifest: Manifest, arguments: Sequence[str]) -> Process:
        place = self._places[manifest["device"]]
        options = [*arguments, "--tethered"]
        if self.options.keys is not None:
            options += ["--keys", f"../{KEYS}/{place.device}"]
        if place.listen is not None:
            options += ["--listen", place.listen]
        if place.threads is not None:
            options += ["--threads", str(place.threads)]
        if place.cores:
            options += ["--cores", ",".join(map(str, place.cores))]
        words = [ssh.path_word(place.directory), _python(place), "-m", "runtime", *map(shlex.quote, options)]
        written = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `Process.close`)
        popen = subprocess.Popen(
            ssh.command(place, START, words),
            env=ssh.environment(),
            stdin=subprocess.PIPE,  # held open by this process: ssh, and the device at its other end, end with it
            stdout=written,
            stderr=written,
            start_new_session=True,
        )
        return RemoteProcess(manifest, popen, written, where=f" on {place.ssh}", place=place, remote=self)

    def keep(self, device: str, written: bytes, failed: bool) -> None:
        """Keeps what a device wrote, if it was asked for, or if the run failed and it is anything."""
        place = self.options.logs or self._default
        if self.options.logs is None and not (failed and written):
            return
        try:
            place.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=place, prefix=".") as temporary:
                stage = Path(temporary, device)
                stage.write_bytes(written)
                os.replace(stage, place / f"{device}.log")
            self._kept = True
        except OSError as error:
            log.warning("%s: what device %r wrote cannot be kept: %s", place, device, error.strerror or error)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Adds to the error of a run where to read more."""
        try:
            yield
        except RunError as error:
            if self._kept:
                raise RunError(f"{error}; what the devices wrote: {self.options.logs or self._default}") from None
            raise


@dataclass
class RemoteProcess(Process):
    """A device's process on another host: `popen` is the ssh that it hangs on."""

    place: Place = field(kw_only=True)
    remote: Remote = field(kw_only=True)

    def exit_code(self) -> int | None:
        """As that of a process here: a shell says 128 + n for signal n."""
        code = super().exit_code()
        return 128 - code if code is not None and 128 < code < ssh.SSH_FAILED else code

    def ending(self) -> str | None:
        if self.exit_code() == ssh.SSH_FAILED:
            last = "".join(self.written().splitlines()[-1:])
            return f"ssh has lost it: {ssh.failure(self.place, last)}"
        return super().ending()

    def close(self) -> None:
        if self.log is not None and not self.log.closed:
            self.log.seek(0)
            self.remote.keep(self.device, self.log.read(), self.report is None)
        super().close()
