"""Copying an artifact to other hosts over ssh, and starting its devices there.

`install` copies files and TLS keys. `RemoteStarter` starts devices for a session.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import posixpath
import shlex
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from dicompiler.plugin_api.utilities import CapturedOutput, one_line, parse_release
from dicompiler_targets.sockets.artifact import Manifest, SocketsArtifact
from dicompiler_targets.sockets.daemon_client import ResidentCluster
from dicompiler_targets.sockets.device_connections import ANY_LOOPBACK_PORT, DeviceProcess, RunAcceptor
from dicompiler_targets.sockets.piece_copies import MIN_PIECED_BYTES, PieceCopier, is_pieced
from dicompiler_targets.sockets.runtime.addresses import find_local_host, join_address
from dicompiler_targets.sockets.runtime.transport import KEY_FILES
from dicompiler_targets.sockets.session import check_device_options, resolve_frames_in_flight

log = logging.getLogger("dicompiler")

MIN_PYTHON = (3, 11)
"""The oldest version of Python that can run the runtime on a device."""
KEYS_DIRECTORY = ".keys"
"""Directory of the devices' TLS keys on a host, next to the devices' directories."""
MAX_SEARCHED_DIRECTORIES = 8
"""Number of device directories that are searched on a host for files that need not be sent; the newest are searched."""
OTHER_PYTHON_HINT = "install it, or name another Python (key python in the hosts file)"

# The host's Python runs this script. It works with any version of Python, so that it can report one that is too old.
PROBE_SCRIPT = """
import hashlib, json, os, sys, sysconfig
def read(*path):
    try:
        with open(os.path.join(*path)) as file:
            return file.read()
    except EnvironmentError:
        return ""
def file_digest(path):
    digest = hashlib.sha256()
    try:
        if os.path.islink(path) or not os.path.isfile(path):
            return ""
        with open(path, "rb") as file:
            for piece in iter(lambda: file.read(1 << 20), b""):
                digest.update(piece)
    except EnvironmentError:
        return ""
    return digest.hexdigest()
def list_names(directory):
    try:
        return [name for name in sorted(os.listdir(directory)) if not name.startswith(".")]
    except EnvironmentError:
        return []
def list_files(directory):
    paths = [os.path.join(parent, name) for parent, _, names in os.walk(directory) for name in sorted(names)]
    return [path for path in paths if os.path.isfile(path) and not os.path.islink(path)]
def find_copied_directories(target):
    # These are the directories of all artifacts next to this one: first the target itself, then the newest ones.
    place, found = os.path.dirname(os.path.dirname(target)), []
    for artifact in list_names(place):
        for device in list_names(os.path.join(place, artifact)):
            directory = os.path.join(place, artifact, device)
            try:
                status = os.lstat(os.path.join(directory, STAMP))
            except EnvironmentError:
                continue
            if status.st_uid == os.geteuid():
                found.append((directory == target, status.st_mtime, directory))
    return [directory for _, _, directory in sorted(found, reverse=True)][:MAX_DIRECTORIES]
def find_elsewhere(wanted, directories):
    found, sizes = {}, set(size for size, _ in wanted.values())
    for path in (path for directory in directories for path in list_files(directory)):
        if os.path.getsize(path) in sizes:
            found.setdefault(file_digest(path), path)
    return dict((name, found[digest]) for name, (_, digest) in sorted(wanted.items()) if digest in found)
def find_files(target, expected):
    intact = [name for name, (_, digest) in sorted(expected.items())
        if file_digest(os.path.join(target, *name.split("/"))) == digest]
    missing = dict((name, expected[name]) for name in expected if name not in intact)
    directories = find_copied_directories(target) if missing else []
    # The directory of another device of the same artifact may be replaced at the same time.
    lasting = [path for path in directories if path == target or os.path.dirname(path) != os.path.dirname(target)]
    old_files = [path for directory in directories for path in list_files(directory)
        if os.path.getsize(path) >= MIN_PIECED_BYTES]
    return {"path": target, "stamp": read(target, STAMP), "intact": intact,
        "elsewhere": find_elsewhere(missing, lasting), "old_files": old_files}
def find_version(name):
    module = __import__(name)
    if not hasattr(module, "__version__"):
        from importlib.metadata import version
        return version(name)
    return module.__version__
versions, errors = {"Python": ".".join(map(str, sys.version_info[:3]))}, {}
for name in PACKAGES:
    try:
        versions[name] = find_version(name)
    except Exception as error:
        errors[name] = str(error)
def field(number, content):
    return bytes([number << 3 | 2, len(content)]) + content
def supports(ir_version, opset):
    # This is an ONNX model of one Relu, in the encoding of protobuf.
    value = field(2, field(1, b"\\x08\\x01" + field(2, field(1, b"\\x08\\x01"))))
    graph = field(1, field(1, b"x") + field(2, b"y") + field(4, b"Relu")) + field(2, b"g")
    graph += field(11, field(1, b"x") + value) + field(12, field(1, b"y") + value)
    model = bytes([1 << 3, ir_version]) + field(7, graph) + field(8, bytes([2 << 3, opset]))
    onnxruntime = sys.modules["onnxruntime"]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception:
        return False
    return True
def find_highest(wanted, is_supported):
    return next((version for version in range(min(wanted, 127), 0, -1) if is_supported(version)), 0)
highest = {}
if "onnxruntime" in versions and NEEDED and not supports(*NEEDED):
    highest["IR version"] = find_highest(NEEDED[0], lambda version: supports(version, 13))
    highest["opset"] = find_highest(NEEDED[1], lambda version: supports(8, version))
directories = [find_files(*pair) for pair in zip(sys.argv[1:], EXPECTED)]
# If Python comes with the operating system, pip may not be allowed to install packages (PEP 668).
managed = sys.prefix == getattr(sys, "base_prefix", sys.prefix) and os.path.exists(
    os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))
print(PREFIX + json.dumps({
    "versions": versions, "errors": errors, "highest": highest, "directories": directories, "managed": managed}))
"""
RUN_PYTHON_SCRIPT = 'cd / && python=$1 && shift && "$python" - "$@"'
# The device runs in a subshell, so that the outer shell continues if a signal ends the device. The exit code of the
# outer shell then tells which signal it was.
START_SCRIPT = '(cd "$1" && shift && exec "$@"); exit $?'


@dataclass(frozen=True)
class DirectoryCopy:
    """The content that a directory on a host must have.

    Attributes:
        target: Path of the directory on the host.
        files: Local path of each file, by its name in the directory.
        digests: SHA-256 of each file, by name.
        stamp: Text that identifies the whole content. It is also stored in a file of the directory.
    """

    target: str
    files: Mapping[str, Path]
    digests: Mapping[str, str]
    stamp: str


@dataclass(frozen=True)
class FoundFiles:
    """The files of a DirectoryCopy that the host has already.

    Attributes:
        path: Absolute path of the directory on the host.
        stamp: The text that identifies the content (`DirectoryCopy.stamp`); '' if the host has no such text.
        intact: Names of the intact files in the directory.
        elsewhere: By name of another file, the path of an intact copy in a directory of another artifact.
        old_files: Paths of large files of artifacts on the host, which may share byte ranges with new files.
    """

    path: str
    stamp: str
    intact: frozenset[str]
    elsewhere: Mapping[str, str]
    old_files: tuple[str, ...]


@dataclass(frozen=True)
class DeployedState:
    """The program versions and the files that a host has before an artifact is copied to it.

    Attributes:
        versions: Version of Python and of each needed package.
        copies: For each directory to copy, the files that the host has.
    """

    versions: Mapping[str, str]
    copies: Sequence[FoundFiles]


def install(directory: Path, options: RunOptions) -> tuple[InstalledDevice, ...]:
    """Copy the files and TLS keys of an artifact to the devices' hosts, except those that the hosts already have.

    Return a record for each device, with the copied bytes and the versions. `Target.install` calls this function.
    """
    artifact = SocketsArtifact.load(directory)
    check_device_options(options, artifact)
    ResidentCluster.load_for(artifact)
    resolve_frames_in_flight(options, len(artifact.devices))
    locations = device_locations(artifact, options)
    for name in locations:
        check_files(directory, artifact.files, [f"{name}/{file}" for file in artifact.device_files(name)])
    copies = {name: _plan_copies(artifact, at, options.keys) for name, at in locations.items()}
    # Opening an acceptor checks the listening address and the keys, so that errors are found before files are copied.
    RunAcceptor(find_listen_address(options, list(locations.values())), options.keys, options.insecure).close()
    assert options.hosts is not None
    bytes_per_s = options.copy_bytes_per_s / len(locations)
    seconds = options.timeout_s + (_longest_copy_bytes(copies) / bytes_per_s if bytes_per_s else 0.0)
    commands = ssh.RemoteCommands(min(time.monotonic() + seconds, options.deadline), options.hosts.file)
    states, failed = dict[str, DeployedState](), dict[str, RunError]()

    def probe(name: str) -> None:
        try:
            states[name] = _probe_host(commands, locations[name], copies[name], artifact)
        except RunError as error:
            failed[name] = error
            if not artifact.make_schedule().tolerates_failures:
                raise

    commands.run_parallel(probe, list(locations))
    check_failed_devices(artifact, failed)

    # All files are assembled before the first directory is replaced, because the old files in a directory may have
    # pieces of new files in any directory.
    names = [name for name in locations if name in states]
    copiers = [
        _DeviceCopier(commands, artifact, locations[name], copies[name], states[name], bytes_per_s) for name in names
    ]
    commands.run_parallel(_DeviceCopier.assemble, copiers)
    return tuple(commands.run_parallel(_DeviceCopier.copy, copiers))


@dataclass
class _DeviceCopier:
    """Copies the missing files of a device to its host.

    Attributes:
        commands: Runs commands over ssh.
        artifact: The artifact whose files are copied.
        location: How to reach the host.
        copies: The content that the directories on the host must have.
        state: The files that the host has.
        bytes_per_s: Maximum number of bytes that are sent per second; 0 means no limit.
        assembled: By directory on the host, the names of the files that `assemble` has assembled.
        copied_bytes: Number of bytes sent so far.
    """

    commands: ssh.RemoteCommands
    artifact: SocketsArtifact
    location: DeviceLocation
    copies: Sequence[DirectoryCopy]
    state: DeployedState
    bytes_per_s: float
    assembled: dict[str, list[str]] = field(default_factory=dict)
    copied_bytes: int = 0

    def assemble(self) -> None:
        """Assemble large files on the host from byte ranges of its old files and ranges that are sent."""
        for wanted, found in zip(self.copies, self.state.copies, strict=True):
            missing = wanted.files.keys() - found.intact - found.elsewhere.keys()
            large = {name: wanted.files[name] for name in sorted(missing) if is_pieced(wanted.files[name])}
            if large and found.old_files:
                copier = PieceCopier(
                    self.commands, self.location, quote_python_path(self.location), found.old_files, self.bytes_per_s
                )
                directory = ssh.assembled_directory(found.path)
                self.assembled[wanted.target] = copier.assemble(directory, large, wanted.digests)
                self.copied_bytes += copier.sent_bytes

    def copy(self) -> InstalledDevice:
        """Replace the directories whose content differs; raise RunError if a file on the host still differs afterwards.

        Files that the host has in other directories are linked. If such a file has changed since it was found, all
        files are sent.
        """
        changed = [
            (wanted, found)
            for wanted, found in zip(self.copies, self.state.copies, strict=True)
            if wanted.files and (found.stamp, found.intact) != (wanted.stamp, frozenset(wanted.files))
        ]
        for wanted, found in changed:
            directory = ssh.assembled_directory(found.path)
            others = {name: f"{directory}/{name}" for name in self.assembled.get(wanted.target, ())}
            self._send(wanted, found.intact if found.stamp else (), {**found.elsewhere, **others})
        if changed and any(_find_damaged_files(self.copies, self._probe())):
            for wanted, _ in changed:
                self._send(wanted)
            _check_copied(self.location, self.copies, self._probe())
        location = self.location
        return InstalledDevice(
            location.device, location.ssh_destination, location.directory, self.copied_bytes, self.state.versions
        )

    def _send(self, wanted: DirectoryCopy, kept: Collection[str] = (), others: Mapping[str, str] | None = None) -> None:
        self.copied_bytes += self.commands.copy_files(
            self.location, wanted.target, wanted.files, wanted.stamp, kept, others, self.bytes_per_s
        )

    def _probe(self) -> Sequence[FoundFiles]:
        return _probe_host(self.commands, self.location, self.copies, self.artifact).copies


def check_failed_devices(artifact: SocketsArtifact, failed: Mapping[str, RunError]) -> None:
    """Warn about devices that cannot take part in a run; raise the first error if no failure plan covers their failure.

    `failed` has the error of each device, by device name.
    """
    if failed and artifact.make_schedule().find_failed_set(failed) is None:
        raise next(iter(failed.values()))
    for error in failed.values():
        log.warning("%s; the other devices can run without this device", error)


def _longest_copy_bytes(copies: Mapping[str, Sequence[DirectoryCopy]]) -> int:
    sizes = (
        [path.stat().st_size for wanted in of_device for path in wanted.files.values()] for of_device in copies.values()
    )
    return max(map(sum, sizes), default=0)


def _plan_copies(artifact: SocketsArtifact, location: DeviceLocation, keys: Path | None) -> list[DirectoryCopy]:
    """Return the directories that a device needs on its host: one with its files and, with TLS, one with keys."""
    source = artifact.directory / location.device
    files = {name: source / name for name in artifact.device_files(location.device)}
    key_files = _key_files(keys, location.device, artifact.directory)
    key_digests = _file_digests(key_files)
    key_stamp = hashlib.sha256("".join(key_digests.values()).encode()).hexdigest()
    key_directory = posixpath.join(posixpath.dirname(location.directory), KEYS_DIRECTORY, location.device)
    return [
        DirectoryCopy(location.directory, files, _file_digests(files), artifact.digest),
        DirectoryCopy(key_directory, key_files, key_digests, key_stamp),
    ]


def _file_digests(files: Mapping[str, Path]) -> dict[str, str]:
    return {name: file_digest(path) for name, path in files.items()}


def _check_copied(location: DeviceLocation, copies: Sequence[DirectoryCopy], found_files: Sequence[FoundFiles]) -> None:
    """Raise RunError if files on a host differ from those that were just copied to it.

    `found_files` has, for each directory in `copies`, the files that are now on the host.
    """
    for directory_copy, damaged in zip(copies, _find_damaged_files(copies, found_files), strict=True):
        if damaged:
            raise RunError(
                f"{location.title}: {directory_copy.target}/{damaged[0]} differs from the copied file: copy it again; "
                "if that does not help, check the disk and the memory of the host"
            )


def _find_damaged_files(copies: Sequence[DirectoryCopy], found_files: Sequence[FoundFiles]) -> list[list[str]]:
    return [sorted(wanted.files.keys() - found.intact) for wanted, found in zip(copies, found_files, strict=True)]


def device_locations(artifact: SocketsArtifact, options: RunOptions) -> dict[str, DeviceLocation]:
    """Return the host and the settings of each device that is not started manually, from the hosts file.

    Raises:
        UsageError: The options have no hosts file, or they pin devices to cores of this host.
    """
    if options.hosts is None:
        raise UsageError("deploy: no hosts: pass the file that describes the hosts (--hosts)")
    if options.pin:
        raise UsageError("deploy: --pin applies to this host only: set the cores of each device in the hosts file")
    name = artifact.directory.resolve().name or "root"
    manifests = [m for m in artifact.manifests if m["device"] not in options.start_manually]
    return {m["device"]: options.hosts.locate_device(m["device"], m["host"], name) for m in manifests}


def _key_files(keys: Path | None, device: str, directory: Path) -> dict[str, Path]:
    """Return the local paths of a device's TLS key files, by file name; none if `keys` is None.

    `directory` is the artifact's directory, for error messages.
    """
    if keys is None:
        return {}
    files = {name: keys / DEVICES_DIRECTORY / device / name for name in KEY_FILES}
    for path in files.values():
        if not path.is_file():
            raise DicompilerError(f"{path}: no such file: create it with 'dicompiler keys {directory} -o {keys}'")
    return files


def find_listen_address(options: RunOptions, locations: Sequence[DeviceLocation]) -> str:
    """Return the address HOST:PORT at which devices connect to this process.

    By default, it is this host's address on the route to the first location, or a loopback address if there are none.
    """
    if options.listen or not locations:
        return options.listen or ANY_LOOPBACK_PORT
    host = ssh.get_address(locations[0])
    try:
        return join_address(find_local_host(host, 0), 0)
    except OSError as error:
        raise DicompilerError(
            f"{locations[0].title}: there is no route to {host!r} ({error.strerror or error}): check the key ssh in "
            "the hosts file, or set the address at which devices connect to this process (--listen)"
        ) from None


def quote_python_path(location: DeviceLocation) -> str:
    return ssh.quote_path(location.python) if "/" in location.python else shlex.quote(location.python)


def _probe_host(
    commands: ssh.RemoteCommands, location: DeviceLocation, copies: Sequence[DirectoryCopy], artifact: SocketsArtifact
) -> DeployedState:
    """Run PROBE_SCRIPT on a host; return its program versions, and the files of `copies` that it has.

    Raise RunError if the host is unreachable, or if its Python lacks a package that the device needs.
    """
    expected = [
        {name: (path.stat().st_size, wanted.digests[name]) for name, path in wanted.files.items()} for wanted in copies
    ]
    packages, needed = artifact.required_packages(location.device), artifact.required_onnx(location.device)
    constants: dict[str, Any] = {
        "PREFIX": ssh.LINE_PREFIX,
        "STAMP": ssh.STAMP_FILE,
        "EXPECTED": expected,
        "PACKAGES": tuple(packages),
    }
    constants |= {"NEEDED": needed, "MAX_DIRECTORIES": MAX_SEARCHED_DIRECTORIES, "MIN_PIECED_BYTES": MIN_PIECED_BYTES}
    lines = [f"{name} = {value!r}" for name, value in constants.items()]
    code = "\n".join([*lines, PROBE_SCRIPT]).encode()
    arguments = [quote_python_path(location), *(ssh.quote_path(wanted.target) for wanted in copies)]
    result = commands.run(location, RUN_PYTHON_SCRIPT, arguments, lambda stream: stream.write(code))
    if not result.prefixed_lines:
        cause = f"Python {location.python!r} cannot be run ({last_error_line(result)})"
        raise RunError(f"{location.title}: {cause}: {OTHER_PYTHON_HINT}")
    try:
        return _parse_probe(location, json.loads(result.prefixed_lines[-1]), packages, needed)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        cause = f"invalid answer of Python {location.python!r} ({error!r})"
        raise RunError(f"{location.title}: {cause}: {OTHER_PYTHON_HINT}") from None


def last_error_line(result: ssh.CommandResult) -> str:
    lines = result.errors.strip().splitlines() or [f"exit code {result.exit_code}"]
    return one_line(lines[-1])


def _parse_probe(
    location: DeviceLocation,
    answer: Mapping[str, Any],
    packages: Mapping[str, tuple[int, ...]],
    needed: tuple[int, int] | None,
) -> DeployedState:
    """Convert the answer of PROBE_SCRIPT; raise RunError if Python, a package or onnxruntime is missing or too old.

    `packages` has the oldest supported versions. `needed` is the IR version and opset that onnxruntime must support.
    """
    versions = {name: one_line(version, 60) for name, version in answer["versions"].items()}
    pip, hosts_file_hint = f"{location.python} -m pip install", ""
    if answer.get("managed"):
        pip = f"{location.python} -m venv ~/venv && ~/venv/bin/pip install"
        hosts_file_hint = ', and write python = "venv/bin/python" in the hosts file'
    for name, minimum in {"Python": MIN_PYTHON, **packages}.items():
        version, oldest = versions.get(name), ".".join(map(str, minimum))
        if version is None:
            cause = f"its Python has no {name} ({one_line(answer['errors'][name])})"
            raise RunError(f"{location.title}: {cause}: run '{pip} {' '.join(packages)}' there{hosts_file_hint}")
        if parse_release(version) < minimum:
            remedy = OTHER_PYTHON_HINT
            if name != "Python":
                remedy = f"run '{pip} --upgrade {name}' there{hosts_file_hint}"
            raise RunError(f"{location.title}: {name} {version} is too old, {oldest} or newer is needed: {remedy}")
    if needed is not None and answer["highest"]:
        pairs = zip(("IR version", "opset"), needed, strict=True)
        limits = [f"{kind} {number} (it supports {answer['highest'][kind]})" for kind, number in pairs]
        cause = f"onnxruntime {versions['onnxruntime']} is too old for this model, which needs {' and '.join(limits)}"
        remedy = f"run '{pip} --upgrade onnxruntime' there{hosts_file_hint}, or export the model with an older opset"
        raise RunError(f"{location.title}: {cause}: {remedy}")
    found = [
        FoundFiles(
            entry["path"], entry["stamp"], frozenset(entry["intact"]), entry["elsewhere"], tuple(entry["old_files"])
        )
        for entry in answer["directories"]
    ]
    return DeployedState(versions, found)


def start_command(location: DeviceLocation, arguments: Sequence[str], options: RunOptions) -> list[str]:
    """Return the shell-quoted arguments of START_SCRIPT, which starts a device in its directory on its host."""
    command = ["-B", "-m", "runtime", *arguments]
    if options.keys is not None:
        command += ["--keys", f"../{KEYS_DIRECTORY}/{location.device}"]
    if (address := location.resolve_address()) is not None:
        command += ["--listen", join_address(*address)]
    if location.threads is not None:
        command += ["--threads", str(location.threads)]
    if location.cores:
        command += ["--cores", ",".join(map(str, location.cores))]
    return [ssh.quote_path(location.directory), quote_python_path(location), *map(shlex.quote, command)]


class RemoteStarter:
    """Starts a session's devices on other hosts, to which `install` has copied the artifact.

    `ClusterState` calls the object once for each device.

    Attributes:
        options: The options of the session, with the address at which devices connect to this process.
    """

    def __init__(self, artifact: SocketsArtifact, options: RunOptions) -> None:
        self._locations = device_locations(artifact, options)
        self.options = replace(options, listen=find_listen_address(options, list(self._locations.values())))
        directory = artifact.directory.absolute()
        self._logs = options.logs or directory.with_name(f"{directory.name}.logs")
        self._has_logs = False

    def __call__(self, manifest: Manifest, arguments: Sequence[str]) -> DeviceProcess:
        location = self._locations[manifest["device"]]
        command = start_command(location, [*arguments, "--end-with-stdin"], self.options)
        popen = subprocess.Popen(
            ssh.build_command(location, START_SCRIPT, command),
            env=ssh.english_environment(),
            # When this process ends, its end of the pipe closes. Then ssh and the remote device end too.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert popen.stdout is not None
        address = location.resolve_address()
        return RemoteProcess(
            manifest,
            popen,
            CapturedOutput(popen.stdout),
            location=f" on {location.ssh_destination}",
            allowed_hosts=() if address is None else (address[0],),
            device_location=location,
            starter=self,
        )

    def save_output(self, device: str, output: bytes, has_failed: bool) -> None:
        if self.options.logs is None and not (has_failed and output):
            return
        try:
            self._logs.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._logs, prefix=".") as temporary:
                file = Path(temporary, device)
                file.write_bytes(output)
                os.replace(file, self._logs / f"{device}.log")
            self._has_logs = True
        except OSError as error:
            log.warning("%s: cannot save the output of device %r: %s", self._logs, device, error.strerror or error)

    @contextlib.contextmanager
    def with_log_hint(self) -> Iterator[None]:
        """Return a context manager that appends the directory of the saved output to a RunError."""
        try:
            yield
        except RunError as error:
            if self._has_logs:
                raise RunError(f"{error}; see the output of the devices in {self._logs}") from None
            raise


@dataclass
class RemoteProcess(DeviceProcess):
    """A device's process on another host. `popen` is the local ssh process that runs it.

    Attributes:
        device_location: The host and the settings of the device.
        starter: The object that has started the process and saves its output.
    """

    device_location: DeviceLocation = field(kw_only=True)
    starter: RemoteStarter = field(kw_only=True)

    def exit_code(self) -> int | None:
        """Return the exit code as for a local process: -n if signal n ended the device.

        The remote shell reports signal n as exit code 128 + n.
        """
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
