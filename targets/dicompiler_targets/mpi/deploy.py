"""Packages on other hosts, over ssh: they are copied and built there; mpirun of this host then starts all ranks.

In: an artifact, RunOptions with hosts. Out: what was copied; outputs, times, and what each rank reported. A host needs
sshd, Open MPI of the version that is here, a C++ compiler, cmake and onnxruntime's library; its headers go along.
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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dicompiler.plugin_api import RunError, RunOptions, RunResult, UsageError
from dicompiler.plugin_api.artifacts import DeviceLocation, InstalledDevice, check_files, file_digest, ssh
from dicompiler.plugin_api.utilities import load_json, one_line
from dicompiler_targets.mpi import failover, mpirun, toolchain
from dicompiler_targets.mpi.artifact import (
    DeliveredFrames,
    MpiArtifact,
    read_finished_outputs,
    read_outputs,
    write_inputs,
)
from dicompiler_targets.mpi.emit import CONTENTS_FILE, MANIFEST_FILE
from dicompiler_targets.mpi.host_monitor import START_SCRIPT, FailedDevices, HostMonitor, MonitoredHost

log = logging.getLogger("dicompiler")

REQUIRED_TOOLS = ("mpirun", "mpicxx", "cmake", "make", "g++", "sha256sum")
# Arguments: the package's place, the directory of its Python where that is no plain command. Reads what sha256sum does.
PROBE_SCRIPT = f"""
PATH=$2:$PATH; cd /; mkdir -p "$1" || exit 1;
for tool in {" ".join(REQUIRED_TOOLS)}; do echo "{ssh.LINE_PREFIX}$tool $(command -v $tool || echo -)"; done;
echo "{ssh.LINE_PREFIX}version $(mpirun --version 2>/dev/null | head -n 1)"; cd "$1"; echo "{ssh.LINE_PREFIX}place $(pwd)";
echo "{ssh.LINE_PREFIX}stamp $(cat {ssh.STAMP_FILE} 2>/dev/null)";
sha256sum -c - 2>/dev/null | sed -n "s/^\\(.*\\): OK\\$/{ssh.LINE_PREFIX}held \\1/p"; cd /; rmdir "$1" 2>/dev/null; exit 0
"""
BUILD_SCRIPT = """
PATH=$2:$PATH; cd "$1"; if [ -x build/program ] && sha256sum -c build/sum >/dev/null 2>&1; then exit 0; fi;
rm -f build/program;
{ cmake -S . -B build && cmake --build build && sha256sum build/program >build/sum; } >build.log 2>&1 && exit 0;
grep -m 1 -i -A 1 -E "error:|CMake Error|missing" build.log >&2 || tail -n 1 build.log >&2; rm -rf build; exit 1
"""
FETCH_SCRIPT = 'cd "$1" && tar -cf - outputs | base64'
MAX_OUTPUT_BYTES = 1 << 30
"""Bytes that are read of what a host delivers."""


@dataclass(frozen=True)
class PackageHost:
    """A host of the platform: `place` is that of its first device, its directory that of the package. bin: where its
    programs are beside PATH."""

    host: str
    location: DeviceLocation
    devices: tuple[str, ...]

    @property
    def package_directory(self) -> str:
        return posixpath.join(posixpath.dirname(self.location.directory), self.host)

    @property
    def run_directory(self) -> str:
        """Where the inputs and outputs of a run lie."""
        return posixpath.join(posixpath.dirname(self.location.directory), f".{self.host}.run")

    @property
    def tool_directory(self) -> str:
        return posixpath.dirname(self.location.python) or "/usr/bin"


@dataclass(frozen=True)
class PackageState:
    """What a host has: the absolute path of the package's place, its stamp ('': none), the version of mpirun, and the
    names of the files whose content is right, which was read there."""

    package: str
    stamp: str
    mpi_version: str
    intact_files: frozenset[str]


def install(directory: Path, options: RunOptions) -> tuple[InstalledDevice, ...]:
    """Copies what the hosts lack and builds it there: see Target.install. Hosts that cannot be reached are left out,
    with a warning, where a plan does without their devices."""
    artifact = MpiArtifact.load(directory)
    mpirun.check_options(artifact, options)
    sites = _find_package_hosts(artifact, options)
    assert options.hosts is not None
    check_files(directory, artifact.files, artifact.files)
    calls = ssh.RemoteCommands(time.monotonic() + options.timeout_s, options.hosts.file)

    def work(site: PackageHost) -> list[InstalledDevice] | ssh.UnreachableHost:
        try:
            return _install_on_host(calls, site, artifact)
        except ssh.UnreachableHost as error:
            if "lost" not in artifact.program:
                raise
            return error

    found, missing, away = dict[str, InstalledDevice](), list[ssh.UnreachableHost](), list[str]()
    for site, done in zip(sites, calls.run_parallel(work, sites), strict=True):
        if isinstance(done, ssh.UnreachableHost):
            missing.append(done)
            away += site.devices
        else:
            found |= {one.device: one for one in done}
    if missing and artifact.find_roles(away) is None:
        raise missing[0]
    for error in missing:
        log.warning("%s; the others can do without it", error)
    return tuple(found[device] for device in artifact.devices if device in found)


def _install_on_host(calls: ssh.RemoteCommands, site: PackageHost, artifact: MpiArtifact) -> list[InstalledDevice]:
    """Copies what a host lacks and builds it there."""
    files, digest = _list_package_files(artifact, site), artifact.document["digest"]
    sums = {name: file_digest(path) for name, path in files.items()}
    state, copied = _probe_host(calls, site, sums), 0
    if (state.stamp, state.intact_files) != (digest, frozenset(files)):
        copied = calls.copy_files(
            site.location,
            site.package_directory,
            files,
            digest,
            _find_reusable_files(files, state) if state.stamp else (),
        )
        wrong = sorted(files.keys() - _probe_host(calls, site, sums).intact_files)
        if wrong:
            raise RunError(
                f"{_describe_host(site)}: {site.package_directory}/{wrong[0]} is not there as it was sent: is its disk or memory "
                "failing? copy it again"
            )
    done = calls.run(site.location, BUILD_SCRIPT, _make_script_arguments(site, site.package_directory))
    if done.exit_code:
        said = one_line(done.errors) or f"exit code {done.exit_code}"
        raise RunError(
            f"{_describe_host(site)}: the program cannot be built: {said} (all of it: build.log in {state.package})"
        )
    versions = {"Open MPI": state.mpi_version.rpartition(" ")[2]}
    counts = [copied, *[0] * len(site.devices)]
    return [
        InstalledDevice(name, site.location.ssh_destination, f"{state.package}/{name}", count, versions)
        for name, count in zip(site.devices, counts, strict=False)
    ]


def run_on_hosts(directory: Path, frames: Sequence[Mapping[str, NDArray[Any]]], options: RunOptions) -> RunResult:
    """Runs an installed artifact for `frames` on its hosts: see Target.run."""
    artifact = MpiArtifact.load(directory)
    mpirun.check_options(artifact, options)
    call = partial(_run_once, artifact, _find_package_hosts(artifact, options), toolchain.find_program("mpirun"))
    return failover.run_with_failover(artifact, frames, options, call)


def _run_once(
    artifact: MpiArtifact,
    every: Sequence[PackageHost],
    mpirun_here: Path,
    frames: failover.Frames,
    options: RunOptions,
    away: Collection[str],
    roles: tuple[int, int],
) -> tuple[Mapping[str, Any], DeliveredFrames]:
    """See restart.Call: the rank of a device that is away is on the first host that is left, and does nothing."""
    sites = [site for site in every if not {*away} >= {*site.devices}]
    words = mpirun.make_arguments(artifact, len(frames), options, roles)
    keep, survives = mpirun.count_kept_frames(len(frames), options), "lost" in artifact.program
    assert options.hosts is not None
    calls = ssh.RemoteCommands(time.monotonic() + options.timeout_s, options.hosts.file)
    with tempfile.TemporaryDirectory(prefix="dicompiler-mpi-") as temporary:
        scratch = Path(temporary)
        write_inputs(scratch / "inputs", frames)
        places = _prepare_hosts(calls, sites, artifact, scratch, away)
        agent = scratch / "agent"
        named = [(site.host, site) for site in sites] + [(_stand_in_host_name(name), sites[0]) for name in away]
        agent.write_text(_make_launch_agent(named), encoding="utf-8")
        agent.chmod(0o700)
        # Not by its path: Open MPI would look for itself at that path on the other hosts.
        line = ["mpirun", "--oversubscribe", "--bind-to", "none"]
        for device, package in artifact.packages.items():
            site = next((site for site in sites if device in site.devices), sites[0])
            host = site.host if device in site.devices else _stand_in_host_name(device)
            line += [] if device == artifact.devices[0] else [":"]
            line += ["-n", "1", "--host", host, "--wdir", "/"]
            line += (
                ["sh", "-c", START_SCRIPT, f"{_get_run_directory(places[site.host], site)}/.{device}.pid"]
                if survives
                else []
            )
            line += [f"{places[site.host]}/build/program", *_make_data_options(places[site.host], site), *words]
            line += _make_thread_options(site, device, package, options)
        more = {name: str(agent) for name in ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent")}
        more |= {"PATH": f"{mpirun_here.parent}:{toolchain.get_search_path()}"}
        more |= {"OMPI_MCA_mpi_ft_enable": "true"} if survives else {}
        watched = [
            MonitoredHost(s.host, s.location, s.run_directory, tuple({*s.devices} - {*away})) for s in sites if survives
        ]
        watch, lost = HostMonitor(watched, options.heartbeat_s), None
        try:
            report = mpirun.run_mpirun(artifact, line, scratch, options.timeout_s, more, watch.find_failure)
        except mpirun.RankFailure as error:
            lost = error
            sites = [site for site in sites if not {*lost.failed_devices.devices} >= {*site.devices} - {*away}]
        finally:
            watch.stop()
        for site in sites:
            # What lies on one more that cannot be reached is computed again.
            with contextlib.suppress(ssh.UnreachableHost) if lost is not None else contextlib.nullcontext():
                _fetch_outputs(calls, site, scratch / "outputs")
        if lost is not None:
            raise failover.UnfinishedRun(lost, read_finished_outputs(artifact, scratch / "outputs", keep, roles[0]))
        return report, read_outputs(artifact, scratch / "outputs", keep)


def _find_package_hosts(artifact: MpiArtifact, options: RunOptions) -> list[PackageHost]:
    """The hosts in the order of their first devices. UsageError for what this target cannot do on them."""
    if options.hosts is None:
        raise UsageError("deploy: no hosts: say where the devices are reached (--hosts)")
    if options.pin or options.listen:
        raise UsageError("deploy: target 'mpi' takes neither --pin nor --listen: Open MPI finds its own ways")
    if not options.insecure:
        raise UsageError("deploy: MPI encrypts nothing: allow connections in the clear (--insecure)")
    name = artifact.directory.resolve().name or "root"
    devices: dict[str, list[str]] = {}
    for device, package in artifact.packages.items():
        devices.setdefault(package.name, []).append(device)
    return [
        PackageHost(host, options.hosts.locate_device(names[0], host, name), tuple(names))
        for host, names in devices.items()
    ]


def _describe_host(site: PackageHost) -> str:
    return f"host {site.host!r} ({site.location.ssh_destination}), device {site.devices[0]!r}"


def _make_script_arguments(site: PackageHost, path: str) -> list[str]:
    return [ssh.quote_path(path), ssh.quote_path(site.tool_directory)]


def _probe_host(calls: ssh.RemoteCommands, site: PackageHost, sums: Mapping[str, str]) -> PackageState:
    """Looks at a host. sums: SHA-256 of the files that it may hold. RunError if it cannot be reached, or lacks what
    building and starting takes."""
    listed = "".join(f"{digest}  {name}\n" for name, digest in sums.items()).encode()
    done = calls.run(
        site.location,
        PROBE_SCRIPT,
        _make_script_arguments(site, site.package_directory),
        lambda stream: stream.write(listed),
    )
    answers = {name: value.strip() for name, _, value in (line.partition(" ") for line in done.prefixed_lines)}
    for name in REQUIRED_TOOLS:
        if answers.get(name, "-") == "-":
            said = f" ({one_line(done.errors.strip().splitlines()[-1])})" if done.errors.strip() else ""
            raise RunError(
                f"{_describe_host(site)}: {name} is missing there{said}: install it with {toolchain.INSTALL_HINTS[name]}"
            )
    held = frozenset(line.removeprefix("held ") for line in done.prefixed_lines if line.startswith("held "))
    place, stamp, version = (one_line(answers.get(name, "")) for name in ("place", "stamp", "version"))
    return PackageState(place, stamp, version, held)


def _list_package_files(artifact: MpiArtifact, site: PackageHost) -> dict[str, Path]:
    """The files of a host's package by their path in it, and onnxruntime's headers, which not every system has."""
    names = [name for name in artifact.files if name.startswith(f"{site.host}/")]
    files = {name.removeprefix(f"{site.host}/"): artifact.directory / name for name in names}
    return files | {f"include/{path.name}": path for path in sorted(toolchain.find_include_directory().glob("*.h"))}


def _find_reusable_files(files: Mapping[str, Path], state: PackageState) -> frozenset[str]:
    """What of a package on a host stays: files as they should be, and what was built of such."""
    built = {
        name for name in files if name.endswith((".cc", ".hpp", ".h", ".txt")) and not name.endswith(CONTENTS_FILE)
    }
    return state.intact_files | ({"build"} if built <= state.intact_files else set())


def _prepare_hosts(
    calls: ssh.RemoteCommands, sites: Sequence[PackageHost], artifact: MpiArtifact, scratch: Path, away: Collection[str]
) -> dict[str, str]:
    """Makes the hosts ready, see `_ready`: host → its package's path. Unfinished where some cannot be reached and plans
    do without others."""

    def work(site: PackageHost) -> str | ssh.UnreachableHost:
        try:
            return _prepare_host(calls, site, artifact, scratch)
        except ssh.UnreachableHost as error:
            if "lost" not in artifact.program:
                raise
            return error

    places, gone, why = dict[str, str](), list[str](), ""
    for site, found in zip(sites, calls.run_parallel(work, sites), strict=True):
        if isinstance(found, str):
            places[site.host] = found
        else:
            gone += [name for name in site.devices if name not in away]
            why = why or f"host {site.host!r} cannot be reached: {found.reason}"
    if gone:
        raise failover.UnfinishedRun(mpirun.RankFailure(artifact, FailedDevices(tuple(gone), why)), ())
    return places


def _prepare_host(calls: ssh.RemoteCommands, site: PackageHost, artifact: MpiArtifact, scratch: Path) -> str:
    """Copies the inputs to where they are read, and takes away old outputs; the absolute path of the package."""
    state = _probe_host(calls, site, {})
    if state.stamp != artifact.document["digest"]:
        raise RunError(
            f"{_describe_host(site)}: it does not hold this artifact: copy it there with 'dicompiler deploy'"
        )
    ranks = load_json(artifact.packages[site.devices[0]] / MANIFEST_FILE)["ranks"]
    given = any(rank["inputs"] for rank in ranks)
    files = {f"inputs/{path.name}": path for path in sorted((scratch / "inputs").iterdir()) if given}
    calls.copy_files(site.location, site.run_directory, files, "run")
    return state.package


def _get_run_directory(package: str, site: PackageHost) -> str:
    return posixpath.join(posixpath.dirname(package), f".{site.host}.run")


def _make_data_options(package: str, site: PackageHost) -> list[str]:
    place = _get_run_directory(package, site)
    return ["--data", package, "--inputs", f"{place}/inputs", "--outputs", f"{place}/outputs"]


def _make_thread_options(site: PackageHost, device: str, package: Path, options: RunOptions) -> list[str]:
    """The threads that the hosts file asks for."""
    assert options.hosts is not None
    place = options.hosts.locate_device(device, site.host, package.parent.name)
    return [] if place.threads is None else ["--threads", str(place.threads)]


def _stand_in_host_name(device: str) -> str:
    """What mpirun calls the host where it starts the rank of a device that is away. It is one more host to it: it fails
    to start more ranks on one than on another where hosts bear the same name."""
    return f"instead.of.{device}"


def _make_launch_agent(hosts: Iterable[tuple[str, PackageHost]]) -> str:
    """A shell script that mpirun calls in place of ssh: what it calls a host, then the command for it."""
    cases = []
    for name, site in hosts:
        # All but the command, which mpirun gives.
        line = ssh.build_command(site.location, "", ())[:-1]
        cases.append(
            f'{shlex.quote(name)}) exec {shlex.join(line)} "PATH={ssh.quote_path(site.tool_directory)}:\\$PATH; $*" ;;'
        )
    body = "\n".join(cases)
    return f'#!/bin/sh\nname=$1; shift\ncase $name in\n{body}\nesac\necho "there is no host $name" >&2\nexit 1\n'


def _fetch_outputs(calls: ssh.RemoteCommands, site: PackageHost, target: Path) -> None:
    """Copies the outputs that lie on a host to `target`."""
    done = calls.run(
        site.location, FETCH_SCRIPT, [ssh.quote_path(site.run_directory)], max_output_bytes=MAX_OUTPUT_BYTES
    )
    if done.exit_code:
        return  # none were delivered there
    try:
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(done.output))) as archive:
            # What another host packed: plain files below the target, whatever their names say.
            for member in archive:
                place, content = target.parent / member.name, archive.extractfile(member)
                if content is not None and place.resolve().is_relative_to(target.parent.resolve()):
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(content.read())
    except (ValueError, tarfile.TarError) as error:
        raise RunError(
            f"{_describe_host(site)}: its outputs cannot be read ({error}): run it again, with fewer kept"
        ) from None
