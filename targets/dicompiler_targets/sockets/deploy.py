"""Devices on other hosts over ssh: copy their files and keys, check their Python, and start them.

An artifact and RunOptions with hosts ⇒ the copied files, and a function that starts the devices of a session.
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
from dicompiler_targets.sockets.rendezvous import ANY_LOOPBACK_PORT, RunAcceptor
from dicompiler_targets.sockets.runtime.transport import KEY_FILES, join_address, split_address
from dicompiler_targets.sockets.session import check_device_options, check_frames_in_flight

log = logging.getLogger("dicompiler")

MIN_VERSIONS = {"Python": (3, 11), "numpy": (1, 26), "onnxruntime": (1, 21)}
"""The oldest versions that the runtime works with: the same that dicompiler itself needs."""
KEYS_DIRECTORY = ".keys"
"""Directory of the devices' keys, next to the devices' directories."""
OTHER_PYTHON_HINT = "install it, or name another one (python in the hosts file)"

# Run by the Python of the host, which may be of any version.
PROBE_SCRIPT = """
import hashlib, json, os, sys, sysconfig
def read(*path):
    try:
        with open(os.path.join(*path)) as file:
            return file.read()
    except EnvironmentError:
        return ""
def is_intact(directory, name, expected):
    path, digest = os.path.join(directory, *name.split("/")), hashlib.sha256()
    try:
        if os.path.islink(path) or not os.path.isfile(path):
            return False
        with open(path, "rb") as file:
            for piece in iter(lambda: file.read(1 << 20), b""):
                digest.update(piece)
    except EnvironmentError:
        return False
    return digest.hexdigest() == expected
versions, errors = {"Python": ".".join(map(str, sys.version_info[:3]))}, {}
for name in ("numpy", "onnxruntime"):
    try:
        versions[name] = __import__(name).__version__
    except Exception as error:
        errors[name] = str(error)
directories = []
for directory, expected in zip(sys.argv[1:], EXPECTED):
    intact = [name for name in sorted(expected) if is_intact(directory, name, expected[name])]
    directories.append({"stamp": read(directory, STAMP), "intact": intact})
# Debian's own Python, for example, does not allow pip to install packages (PEP 668).
managed = sys.prefix == getattr(sys, "base_prefix", sys.prefix) and os.path.exists(
    os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))
print(PREFIX + json.dumps({"versions": versions, "errors": errors, "directories": directories, "managed": managed}))
"""
RUN_PYTHON_SCRIPT = 'cd / && "$1" - "$2" "$3"'
# The subshell and `exit` keep a shell running; its exit code tells the signal that ended the device.
START_SCRIPT = '(cd "$1" && shift && exec "$@"); exit $?'


@dataclass(frozen=True)
class DirectoryCopy:
    """The content that a directory on a host must have.

    Attributes:
        target: The directory on the host.
        files: The local file of each name.
        digests: SHA-256 of each file.
        stamp: Identifies the whole content.
    """

    target: str
    files: Mapping[str, Path]
    digests: Mapping[str, str]
    stamp: str


@dataclass(frozen=True)
class DeployedState:
    """What a host has.

    Attributes:
        versions: Version by program.
        copies: For each DirectoryCopy the stamp on the host ('': none) and the names of intact files.
    """

    versions: Mapping[str, str]
    copies: Sequence[tuple[str, frozenset[str]]]

    def needs_copy(self, index: int, copy: DirectoryCopy) -> bool:
        return bool(copy.files) and self.copies[index] != (copy.stamp, frozenset(copy.files))


def install(directory: Path, options: RunOptions) -> tuple[InstalledDevice, ...]:
    """Copy the files and keys that the hosts lack: see Target.install."""
    artifact = SocketsArtifact.load(directory)
    check_device_options(options, artifact)
    ResidentCluster.load_for(artifact)
    check_frames_in_flight(options, len(artifact.devices))
    locations = device_locations(artifact, options)
    for name in locations:
        check_files(directory, artifact.files, [f"{name}/{file}" for file in artifact.device_files(name)])
    copies = {name: _plan_copies(artifact, location, options.keys) for name, location in locations.items()}
    # Check the coordinator's address and keys before anything is copied.
    RunAcceptor(find_listen_address(options, list(locations.values())), options.keys, options.insecure).close()
    assert options.hosts is not None
    commands = ssh.RemoteCommands(time.monotonic() + options.timeout_s, options.hosts.file)
    states, failed = dict[str, DeployedState](), dict[str, RunError]()

    def probe(name: str) -> None:
        try:
            states[name] = _probe_host(commands, locations[name], copies[name])
        except RunError as error:
            failed[name] = error
            if not artifact.make_schedule().tolerates_failures:
                raise

    commands.run_parallel(probe, list(locations))
    check_failed_devices(artifact, failed)

    def copy(name: str) -> InstalledDevice:
        location, copied_bytes, state = locations[name], 0, states[name]
        for index, directory_copy in enumerate(copies[name]):
            if state.needs_copy(index, directory_copy):
                stamp, intact = state.copies[index]
                target, files = directory_copy.target, directory_copy.files
                kept = intact if stamp else ()
                copied_bytes += commands.copy_files(location, target, files, directory_copy.stamp, kept)
        if copied_bytes:
            _check_copied(location, copies[name], _probe_host(commands, location, copies[name]))
        return InstalledDevice(name, location.ssh_destination, location.directory, copied_bytes, state.versions)

    return tuple(commands.run_parallel(copy, [name for name in locations if name in states]))


def check_failed_devices(artifact: SocketsArtifact, failed: Mapping[str, RunError]) -> None:
    """Warn about devices that failed before a run; raise the first error if no failure plan covers them."""
    if failed and artifact.make_schedule().find_failed_set(failed) is None:
        raise next(iter(failed.values()))
    for error in failed.values():
        log.warning("%s; the other devices can run without it", error)


def _plan_copies(artifact: SocketsArtifact, location: DeviceLocation, keys: Path | None) -> list[DirectoryCopy]:
    """Return the directories that a device needs on its host: its own and its keys."""
    source = artifact.directory / location.device
    files = {name: source / name for name in artifact.device_files(location.device)}
    key_files = _key_files(keys, location.device, artifact.directory)
    key_digests = _file_digests(key_files)
    key_stamp = hashlib.sha256("".join(key_digests.values()).encode()).hexdigest()
    return [
        DirectoryCopy(location.directory, files, _file_digests(files), artifact.digest),
        DirectoryCopy(_remote_keys_path(location), key_files, key_digests, key_stamp),
    ]


def _file_digests(files: Mapping[str, Path]) -> dict[str, str]:
    return {name: file_digest(path) for name, path in files.items()}


def _check_copied(location: DeviceLocation, copies: Sequence[DirectoryCopy], state: DeployedState) -> None:
    """Raise RunError if a host has other content than what was just copied to it."""
    for index, directory_copy in enumerate(copies):
        damaged = sorted(directory_copy.files.keys() - state.copies[index][1])
        if damaged:
            raise RunError(
                f"{location.title}: {directory_copy.target}/{damaged[0]} differs from the copied file: is the disk or "
                "memory failing? copy it again"
            )


def device_locations(artifact: SocketsArtifact, options: RunOptions) -> dict[str, DeviceLocation]:
    """Return the location of each device that is not started manually; raise UsageError without hosts."""
    if options.hosts is None:
        raise UsageError("deploy: no hosts: give the file that describes them (--hosts)")
    if options.pin:
        raise UsageError("deploy: --pin applies to this host only: give the cores of each device in the hosts file")
    name = artifact.directory.resolve().name or "root"
    manifests = [m for m in artifact.manifests if m["device"] not in options.start_manually]
    return {m["device"]: options.hosts.locate_device(m["device"], m["host"], name) for m in manifests}


def _key_files(keys: Path | None, device: str, directory: Path) -> dict[str, Path]:
    """Return the files of the device's keys by name; none without keys."""
    if keys is None:
        return {}
    files = {name: keys / DEVICES_DIRECTORY / device / name for name in KEY_FILES}
    for path in files.values():
        if not path.is_file():
            raise DicompilerError(f"{path}: no such file: create it with 'dicompiler keys {directory} -o {keys}'")
    return files


def _remote_keys_path(location: DeviceLocation) -> str:
    return posixpath.join(posixpath.dirname(location.directory), KEYS_DIRECTORY, location.device)


def find_listen_address(options: RunOptions, locations: Sequence[DeviceLocation]) -> str:
    """Return the address at which devices reach this process: `options.listen`, or that of the route to the first."""
    if options.listen or not locations:
        return options.listen or ANY_LOOPBACK_PORT
    host = ssh.get_address(locations[0])
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # Sends nothing, but selects the route.
            return join_address(str(probe.getsockname()[0]), 0)
    except OSError as error:
        raise DicompilerError(
            f"{locations[0].title}: there is no route to {host!r} ({error.strerror or error}): check its ssh in the "
            "hosts file, or give the address at which devices reach this process (--listen)"
        ) from None


def quoted_python(location: DeviceLocation) -> str:
    """Return the host's Python, quoted for the shell."""
    return ssh.quote_path(location.python) if "/" in location.python else shlex.quote(location.python)


def _probe_host(
    commands: ssh.RemoteCommands, location: DeviceLocation, copies: Sequence[DirectoryCopy]
) -> DeployedState:
    """Return what a host has; raise RunError if it is unreachable or its Python lacks what the runtime needs."""
    expected = [dict(directory_copy.digests) for directory_copy in copies]
    code = f"PREFIX, STAMP, EXPECTED = {ssh.LINE_PREFIX!r}, {ssh.STAMP_FILE!r}, {expected!r}\n{PROBE_SCRIPT}".encode()
    arguments = [quoted_python(location), *(ssh.quote_path(directory_copy.target) for directory_copy in copies)]
    result = commands.run(location, RUN_PYTHON_SCRIPT, arguments, lambda stream: stream.write(code))
    if not result.prefixed_lines:
        cause = last_error_line(result)
        raise RunError(f"{location.title}: Python {location.python!r} cannot be run ({cause}): {OTHER_PYTHON_HINT}")
    try:
        return _parse_probe(location, json.loads(result.prefixed_lines[-1]))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunError(f"{location.title}: invalid answer ({error!r}): {OTHER_PYTHON_HINT}") from None


def last_error_line(result: ssh.CommandResult) -> str:
    """Return the last line that a command wrote to stderr, or its exit code."""
    lines = result.errors.strip().splitlines() or [f"exit code {result.exit_code}"]
    return one_line(lines[-1])


def _parse_probe(location: DeviceLocation, answer: Mapping[str, Any]) -> DeployedState:
    """Return the state in the answer of PROBE_SCRIPT; raise RunError if a program is missing or too old."""
    versions = {name: one_line(version, 60) for name, version in answer["versions"].items()}
    for name, minimum in MIN_VERSIONS.items():
        version, oldest = versions.get(name), ".".join(map(str, minimum))
        pip, hosts_file_hint = f"{location.python} -m pip install", ""
        if answer.get("managed"):
            pip = f"{location.python} -m venv ~/venv && ~/venv/bin/pip install"
            hosts_file_hint = ', and write python = "venv/bin/python" in the hosts file'
        if version is None:
            cause = one_line(answer["errors"][name])
            raise RunError(
                f"{location.title}: its Python has no {name} ({cause}): run '{pip} numpy onnxruntime' there"
                f"{hosts_file_hint}"
            )
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < minimum:
            remedy = OTHER_PYTHON_HINT
            if name != "Python":
                remedy = f"run '{pip} --upgrade {name}' there{hosts_file_hint}"
            raise RunError(f"{location.title}: {name} {version} is too old, {oldest} or newer is needed: {remedy}")
    return DeployedState(versions, [(entry["stamp"], frozenset(entry["intact"])) for entry in answer["directories"]])


def start_command(location: DeviceLocation, arguments: Sequence[str], options: RunOptions) -> list[str]:
    """Return the arguments of START_SCRIPT that start a device in its directory."""
    return [
        ssh.quote_path(location.directory),
        quoted_python(location),
        *map(shlex.quote, _runtime_command(location, arguments, options)),
    ]


def _runtime_command(location: DeviceLocation, arguments: Sequence[str], options: RunOptions) -> list[str]:
    """Return the arguments of Python that run a device in its directory."""
    command = ["-B", "-m", "runtime", *arguments]
    if options.keys is not None:
        command += ["--keys", f"../{KEYS_DIRECTORY}/{location.device}"]
    if location.listen_address is not None:
        command += ["--listen", location.listen_address]
    if location.threads is not None:
        command += ["--threads", str(location.threads)]
    if location.cores:
        command += ["--cores", ",".join(map(str, location.cores))]
    return command


class RemoteStarter:
    """Starts the devices of an artifact on the hosts to which `install` has copied them; a `StartDevice`.

    Attributes:
        options: The options of the session, with the address at which devices reach this process.
    """

    def __init__(self, artifact: SocketsArtifact, options: RunOptions) -> None:
        self._locations = device_locations(artifact, options)
        self.options = replace(options, listen=find_listen_address(options, list(self._locations.values())))
        directory = artifact.directory.absolute()
        self._default_logs = directory.with_name(f"{directory.name}.logs")
        self._has_logs = False

    def __call__(self, manifest: Manifest, arguments: Sequence[str]) -> DeviceProcess:
        location = self._locations[manifest["device"]]
        command = start_command(location, [*arguments, "--end-with-stdin"], self.options)
        popen = subprocess.Popen(
            ssh.build_command(location, START_SCRIPT, command),
            env=ssh.english_environment(),
            stdin=subprocess.PIPE,  # Kept open by this process: ssh, and the device at its other end, end with it.
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert popen.stdout is not None
        address = location.listen_address
        return RemoteProcess(
            manifest,
            popen,
            CapturedOutput(popen.stdout),
            location=f" on {location.ssh_destination}",
            allowed_addresses=() if address is None else (split_address(address)[0],),
            device_location=location,
            starter=self,
        )

    def save_output(self, device: str, output: bytes, has_failed: bool) -> None:
        """Save a device's output if the user asked for logs, or if the run failed and there is output."""
        directory = self.options.logs or self._default_logs
        if self.options.logs is None and not (has_failed and output):
            return
        try:
            directory.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=directory, prefix=".") as temporary:
                file = Path(temporary, device)
                file.write_bytes(output)
                os.replace(file, directory / f"{device}.log")
            self._has_logs = True
        except OSError as error:
            log.warning("%s: cannot save the output of device %r: %s", directory, device, error.strerror or error)

    @contextlib.contextmanager
    def with_log_hint(self) -> Iterator[None]:
        """Add the place of the saved output to a RunError."""
        try:
            yield
        except RunError as error:
            if self._has_logs:
                logs = self.options.logs or self._default_logs
                raise RunError(f"{error}; output of the devices: {logs}") from None
            raise


@dataclass
class RemoteProcess(DeviceProcess):
    """A device's process on another host; `popen` is the local ssh.

    Attributes:
        device_location: Where the device runs.
        starter: Saves its output.
    """

    device_location: DeviceLocation = field(kw_only=True)
    starter: RemoteStarter = field(kw_only=True)

    def exit_code(self) -> int | None:
        """Return the exit code as for a local process; a shell reports signal n as 128 + n."""
        code = super().exit_code()
        return 128 - code if code is not None and 128 < code < ssh.SSH_ERROR_EXIT_CODE else code

    def describe_exit(self) -> str | None:
        if self.exit_code() == ssh.SSH_ERROR_EXIT_CODE:
            return f"the ssh connection was lost: {ssh.explain_failure(self.device_location, self.last_line())}"
        return super().describe_exit()

    def close(self) -> None:
        super().close()
        if self.output is not None:
            self.starter.save_output(self.device, self.output.read(), self.report is None)
            self.output = None
