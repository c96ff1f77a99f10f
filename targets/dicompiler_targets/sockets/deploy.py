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

from dicompiler.plugin_api import DicompilerError, RunError, RunOptions, UsageError
from dicompiler.plugin_api.artifacts import (
    DEVICES_DIRECTORY,
    DeviceLocation,
    InstalledDevice,
    check_files,
    file_digest,
    ssh,
)
from dicompiler.plugin_api.utilities import CapturedOutput, one_line
from dicompiler_targets.sockets.artifact import Manifest, SocketsArtifact
from dicompiler_targets.sockets.daemon_client import ResidentCluster
from dicompiler_targets.sockets.device_process import DeviceProcess
from dicompiler_targets.sockets.rendezvous import RunAcceptor
from dicompiler_targets.sockets.runtime.transport import KEY_FILES, join_address, split_address
from dicompiler_targets.sockets.session import check_device_options, check_frames_in_flight

log = logging.getLogger("dicompiler")

MIN_VERSIONS = {"Python": (3, 11), "numpy": (1, 26), "onnxruntime": (1, 21)}
"""The oldest versions that the runtime works with: those that dicompiler itself needs."""
KEYS_DIRECTORY = ".keys"
"""Where the devices' keys lie, each in a directory of its name: beside the directories of the devices."""
OTHER_PYTHON_HINT = "install it, or name another one (python in the hosts file)"

# Fed to the Python there, which may be of any version.
PROBE_SCRIPT = """
import hashlib, json, os, sys, sysconfig
def read(*path):
    try:
        with open(os.path.join(*path)) as file:
            return file.read()
    except EnvironmentError:
        return ""
def held(place, name, wanted):
    path, found = os.path.join(place, *name.split("/")), hashlib.sha256()
    try:
        if os.path.islink(path) or not os.path.isfile(path):
            return False
        with open(path, "rb") as file:
            for piece in iter(lambda: file.read(1 << 20), b""):
                found.update(piece)
    except EnvironmentError:
        return False
    return found.hexdigest() == wanted
versions, errors = {"Python": ".".join(map(str, sys.version_info[:3]))}, {}
for name in ("numpy", "onnxruntime"):
    try:
        versions[name] = __import__(name).__version__
    except Exception as error:
        errors[name] = str(error)
places = []
for place, wanted in zip(sys.argv[1:], WANTED):
    names = [name for name in sorted(wanted) if held(place, name, wanted[name])]
    places.append({"stamp": read(place, STAMP), "held": names})
# Debian's own Python, for one, takes nothing from pip (PEP 668).
managed = sys.prefix == getattr(sys, "base_prefix", sys.prefix) and os.path.exists(
    os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))
print(MARK + json.dumps({"versions": versions, "errors": errors, "places": places, "managed": managed}))
"""
RUN_PYTHON_SCRIPT = 'cd / && "$1" - "$2" "$3"'
# The parentheses: a shell stays behind, whose exit code tells of the signal that ends the device.
START_SCRIPT = '(cd "$1" && shift && exec "$@"); exit $?'


@dataclass(frozen=True)
class DirectoryCopy:
    """What a directory on a host is to hold: the file of each name here, and its SHA-256. stamp: what names it all."""

    target: str
    files: Mapping[str, Path]
    digests: Mapping[str, str]
    stamp: str


@dataclass(frozen=True)
class DeployedState:
    """What a host has: versions by program; of each Copy the stamp that is there ('': none), and the names of the files
    whose content is right, which was read there."""

    versions: Mapping[str, str]
    copies: Sequence[tuple[str, frozenset[str]]]

    def needs_copy(self, index: int, copy: DirectoryCopy) -> bool:
        """Whether the directory must be copied."""
        return bool(copy.files) and self.copies[index] != (copy.stamp, frozenset(copy.files))


def install(directory: Path, options: RunOptions) -> tuple[InstalledDevice, ...]:
    """Copies what the hosts lack of the artifact and of the devices' keys: see Target.install."""
    artifact = SocketsArtifact.load(directory)
    check_device_options(options, artifact)
    ResidentCluster.load_for(artifact)
    check_frames_in_flight(options, len(artifact.devices))
    places = device_places(artifact, options)
    for name in places:
        check_files(directory, artifact.files, [f"{name}/{file}" for file in artifact.device_files(name)])
    copies = {name: _plan_copies(artifact, place, options.keys) for name, place in places.items()}
    RunAcceptor(find_listen_address(options, list(places.values())), options.keys, options.insecure).close()
    assert options.hosts is not None
    calls = ssh.RemoteCommands(time.monotonic() + options.timeout_s, options.hosts.file)
    states, failed = dict[str, DeployedState](), dict[str, RunError]()

    def look(name: str) -> None:
        try:
            states[name] = _probe_host(calls, places[name], copies[name])
        except RunError as error:
            failed[name] = error
            if not artifact.make_schedule().tolerates_failures:
                raise

    calls.run_parallel(look, list(places))
    check_failed_devices(artifact, failed)

    def work(name: str) -> InstalledDevice:
        place, copied, state = places[name], 0, states[name]
        for index, one in enumerate(copies[name]):
            if state.needs_copy(index, one):
                stamp, held = state.copies[index]
                copied += calls.copy_files(place, one.target, one.files, one.stamp, held if stamp else ())
        if copied:
            _check_copied(place, copies[name], _probe_host(calls, place, copies[name]))
        return InstalledDevice(name, place.ssh_destination, place.directory, copied, state.versions)

    return tuple(calls.run_parallel(work, [name for name in places if name in states]))


def check_failed_devices(artifact: SocketsArtifact, failed: Mapping[str, RunError]) -> None:
    """Warns of devices that failed before a run, or raises the first error where no plan does without them."""
    if failed and artifact.make_schedule().find_failed_set(failed) is None:
        raise next(iter(failed.values()))
    for error in failed.values():
        log.warning("%s; the others can do without it", error)


def _plan_copies(artifact: SocketsArtifact, place: DeviceLocation, keys: Path | None) -> list[DirectoryCopy]:
    """What a device's host is to hold: its directory, its keys."""
    here = artifact.directory / place.device
    own = {name: here / name for name in artifact.device_files(place.device)}
    files = _key_files(keys, place.device, artifact.directory)
    digests = _file_digests(files)
    stamp = hashlib.sha256("".join(digests.values()).encode()).hexdigest()
    return [
        DirectoryCopy(place.directory, own, _file_digests(own), artifact.digest),
        DirectoryCopy(_remote_keys_path(place), files, digests, stamp),
    ]


def _file_digests(files: Mapping[str, Path]) -> dict[str, str]:
    return {name: file_digest(path) for name, path in files.items()}


def _check_copied(place: DeviceLocation, copies: Sequence[DirectoryCopy], state: DeployedState) -> None:
    """RunError where a host holds something else than what was just copied to it."""
    for index, one in enumerate(copies):
        wrong = sorted(one.files.keys() - state.copies[index][1])
        if wrong:
            raise RunError(
                f"{place.title}: {one.target}/{wrong[0]} is not there as it was sent: is its disk or memory failing? "
                "copy it again"
            )


def device_places(artifact: SocketsArtifact, options: RunOptions) -> dict[str, DeviceLocation]:
    """Where each device runs that is ours to start."""
    if options.hosts is None:
        raise UsageError("deploy: no hosts: say where the devices are reached (--hosts)")
    if options.pin:
        raise UsageError("deploy: devices on other hosts are not pinned from here: give their cores in the hosts file")
    name = artifact.directory.resolve().name or "root"
    manifests = [m for m in artifact.manifests if m["device"] not in options.start_manually]
    return {m["device"]: options.hosts.locate_device(m["device"], m["host"], name) for m in manifests}


def _key_files(keys: Path | None, device: str, directory: Path) -> dict[str, Path]:
    """The files of the device's keys by name; none without keys."""
    if keys is None:
        return {}
    files = {name: keys / DEVICES_DIRECTORY / device / name for name in KEY_FILES}
    for path in files.values():
        if not path.is_file():
            raise DicompilerError(f"{path}: no such file: make it with 'dicompiler keys {directory} -o {keys}'")
    return files


def _remote_keys_path(place: DeviceLocation) -> str:
    return posixpath.join(posixpath.dirname(place.directory), KEYS_DIRECTORY, place.device)


def find_listen_address(options: RunOptions, places: Sequence[DeviceLocation]) -> str:
    """Where the devices are to reach this process: by default our address on the way to the first of them."""
    if options.listen or not places:
        return options.listen or "127.0.0.1:0"
    host = ssh.get_address(places[0])
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


def quoted_python(place: DeviceLocation) -> str:
    """The Python there as a word for the shell."""
    return ssh.quote_path(place.python) if "/" in place.python else shlex.quote(place.python)


def _probe_host(calls: ssh.RemoteCommands, place: DeviceLocation, copies: Sequence[DirectoryCopy]) -> DeployedState:
    """Looks at a host. RunError if it cannot be reached, or has no Python with what the runtime needs."""
    wanted = [dict(one.digests) for one in copies]
    code = f"MARK, STAMP, WANTED = {ssh.LINE_PREFIX!r}, {ssh.STAMP_FILE!r}, {wanted!r}\n{PROBE_SCRIPT}".encode()
    words = [quoted_python(place), *(ssh.quote_path(one.target) for one in copies)]
    done = calls.run(place, RUN_PYTHON_SCRIPT, words, lambda stream: stream.write(code))
    if not done.prefixed_lines:
        said = done.errors.strip().splitlines()[-1:] or [f"exit code {done.exit_code}"]
        raise RunError(f"{place.title}: there is no Python {place.python!r} ({one_line(said[0])}): {OTHER_PYTHON_HINT}")
    try:
        return _parse_probe(place, json.loads(done.prefixed_lines[-1]))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunError(f"{place.title}: its answer is not as agreed ({error!r}): {OTHER_PYTHON_HINT}") from None


def _parse_probe(place: DeviceLocation, answer: Mapping[str, Any]) -> DeployedState:
    """What a host has, of its answer. RunError where its Python lacks what the runtime needs."""
    versions = {name: one_line(version, 60) for name, version in answer["versions"].items()}
    for name, needed in MIN_VERSIONS.items():
        version, oldest = versions.get(name), ".".join(map(str, needed))
        pip, other = f"{place.python} -m pip install", ""
        if answer.get("managed"):
            pip = f"{place.python} -m venv ~/venv && ~/venv/bin/pip install"
            other = ', and say python = "venv/bin/python" in the hosts file'
        if version is None:
            cause = one_line(answer["errors"][name])
            raise RunError(
                f"{place.title}: its Python has no {name} ({cause}): run '{pip} numpy onnxruntime' there{other}"
            )
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < needed:
            remedy = OTHER_PYTHON_HINT if name == "Python" else f"run '{pip} --upgrade {name}' there{other}"
            raise RunError(f"{place.title}: {name} {version} is too old, {oldest} or newer is needed: {remedy}")
    return DeployedState(versions, [(one["stamp"], frozenset(one["held"])) for one in answer["places"]])


def start_command(place: DeviceLocation, arguments: Sequence[str], options: RunOptions) -> list[str]:
    """The arguments of START: where a device is started, and how."""
    return [
        ssh.quote_path(place.directory),
        quoted_python(place),
        *map(shlex.quote, runtime_command(place, arguments, options)),
    ]


def runtime_command(place: DeviceLocation, arguments: Sequence[str], options: RunOptions) -> list[str]:
    """What Python is told to run a device in its directory."""
    words = ["-B", "-m", "runtime", *arguments]
    if options.keys is not None:
        words += ["--keys", f"../{KEYS_DIRECTORY}/{place.device}"]
    if place.listen_address is not None:
        words += ["--listen", place.listen_address]
    if place.threads is not None:
        words += ["--threads", str(place.threads)]
    if place.cores:
        words += ["--cores", ",".join(map(str, place.cores))]
    return words


class RemoteStarter:
    """Starts the devices of an artifact on their hosts, where `install` has put them. `options`: those of the session,
    with the address at which the devices reach it. A `Start`."""

    def __init__(self, artifact: SocketsArtifact, options: RunOptions) -> None:
        self._places = device_places(artifact, options)
        self.options = replace(options, listen=find_listen_address(options, list(self._places.values())))
        beside = artifact.directory.absolute()
        self._default_logs = beside.with_name(f"{beside.name}.logs")
        self._has_logs = False

    def __call__(self, manifest: Manifest, arguments: Sequence[str]) -> DeviceProcess:
        place = self._places[manifest["device"]]
        words = start_command(place, [*arguments, "--tethered"], self.options)
        popen = subprocess.Popen(
            ssh.build_command(place, START_SCRIPT, words),
            env=ssh.english_environment(),
            stdin=subprocess.PIPE,  # held open by this process: ssh, and the device at its other end, end with it
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert popen.stdout is not None
        addresses = () if place.listen_address is None else (split_address(place.listen_address)[0],)
        return RemoteProcess(
            manifest,
            popen,
            CapturedOutput(popen.stdout),
            location=f" on {place.ssh_destination}",
            allowed_addresses=addresses,
            place=place,
            starter=self,
        )

    def save_output(self, device: str, written: bytes, failed: bool) -> None:
        """Keeps what a device wrote, if it was asked for, or if the run failed and it is anything."""
        place = self.options.logs or self._default_logs
        if self.options.logs is None and not (failed and written):
            return
        try:
            place.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=place, prefix=".") as temporary:
                stage = Path(temporary, device)
                stage.write_bytes(written)
                os.replace(stage, place / f"{device}.log")
            self._has_logs = True
        except OSError as error:
            log.warning("%s: what device %r wrote cannot be kept: %s", place, device, error.strerror or error)

    @contextlib.contextmanager
    def with_log_hint(self) -> Iterator[None]:
        """Adds to the error of a run where to read more."""
        try:
            yield
        except RunError as error:
            if self._has_logs:
                raise RunError(f"{error}; what the devices wrote: {self.options.logs or self._default_logs}") from None
            raise


@dataclass
class RemoteProcess(DeviceProcess):
    """A device's process on another host: `popen` is the ssh that it hangs on."""

    place: DeviceLocation = field(kw_only=True)
    starter: RemoteStarter = field(kw_only=True)

    def exit_code(self) -> int | None:
        """As that of a process here: a shell says 128 + n for signal n."""
        code = super().exit_code()
        return 128 - code if code is not None and 128 < code < ssh.SSH_ERROR_EXIT_CODE else code

    def describe_exit(self) -> str | None:
        if self.exit_code() == ssh.SSH_ERROR_EXIT_CODE:
            return f"ssh has lost it: {ssh.explain_failure(self.place, self.last_line())}"
        return super().describe_exit()

    def close(self) -> None:
        super().close()
        if self.output is not None:
            self.starter.save_output(self.device, self.output.read(), self.report is None)
            self.output = None
