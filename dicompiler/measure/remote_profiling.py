"""Boards that measure themselves: the package of a profile is run on each host over ssh, then the links between them.

package + Hosts → a Board for each host, and links;   … + Platform → the platform with what was measured.
One board after another, so that none disturbs another; who cannot be measured is left out, and why is said.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dicompiler.base.errors import DicompilerError, RunError, one_line
from dicompiler.cost.profile import Profile, parse_profile
from dicompiler.ir.cluster import Device, Host, Link, Network
from dicompiler.ir.platform import Platform
from dicompiler.measure.profile_package import SCRIPT_FILE
from dicompiler.target.remote import ssh
from dicompiler.target.remote.hosts import DeviceLocation, Hosts

PROFILE_FILE = "PROFILE.json"
MAX_ALL_PAIRS_HOSTS = 6
"""So many hosts at most are measured in all pairs; of more each with the next one alone."""
MIN_LINK_DEVIATION_SHARE = 0.1
"""By what share a link must be other than the usual one to be written down by itself."""
MEASURED_NOTE = " Rates and links measured by 'dicompiler profile --hosts'."
MAX_PROBE_BYTES = 1 << 27
CPU_PROVIDERS = ("CPUExecutionProvider", "AzureExecutionProvider")
"""What onnxruntime's packages for CPUs offer: the second one asks a service elsewhere."""
THROTTLE_REASONS = (
    "under-voltage",
    "its frequency is capped",
    "it is throttled",
    "it is at its soft temperature limit",
)
"""What the low four bits of `vcgencmd get_throttled` say (Raspberry Pi's documentation of vcgencmd)."""
PROBE_SOURCE = """
import json, os, socket, subprocess, sys, sysconfig
found = {"python": ".".join(map(str, sys.version_info[:3])), "error": "", "throttled": 0, "providers": []}
for name in ("numpy", "onnxruntime") if CHECK else ():
    try:
        __import__(name)
    except Exception as error:
        found["error"] = found["error"] or "its Python has no %s (%s)" % (name, error)
if CHECK and not found["error"]:
    found["providers"] = [one for one in sys.modules["onnxruntime"].get_available_providers() if one not in USUAL]
try:
    said = subprocess.check_output(["vcgencmd", "get_throttled"]).decode()
    found["throttled"] = int(said.strip().partition("=")[2], 16)
except (EnvironmentError, subprocess.CalledProcessError, ValueError):
    pass
with socket.socket() as free:
    free.bind(("", 0))
    found["port"] = free.getsockname()[1]
found["managed"] = sys.prefix == getattr(sys, "base_prefix", sys.prefix) and os.path.exists(
    os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))
found["processors"] = len(os.sched_getaffinity(0))
found["memory"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
path = os.path.join(sys.argv[1], PROFILE)
found["profile"] = json.load(open(path)) if os.path.exists(path) and not CHECK else None
print(MARK + json.dumps(found))
"""
PROBE_COMMAND = 'cd / && "$1" - "$2"'
RUN_COMMAND = 'cd "$1" && shift && exec "$@"'
SERVE_COMMAND = 'cd "$1" && shift && exec timeout 60 "$@"'
CONNECT_COMMAND = 'cd "$1" && shift; n=0; until "$@"; do n=$((n+1)); [ $n -lt 20 ] || exit 1; sleep 0.2; done'


@dataclass(frozen=True)
class MeasuredBoard:
    """A host, and its device that was measured. processors, memory (bytes): what it has. document: its profile as a
    file has it, None where it could not be measured; why: the cause then, or what speaks against what was measured.
    providers: what its onnxruntime offers beside the CPU, a GPU for example."""

    host: str
    device: str
    place: DeviceLocation
    processors: int = 0
    memory: int = 0
    document: Mapping[str, Any] | None = None
    reason: str = ""
    providers: tuple[str, ...] = ()

    @property
    def unmeasured_note(self) -> str:
        """What is said of the providers; '' where there are none."""
        if not self.providers:
            return ""
        return (
            f"{self.place.title}: its onnxruntime offers {', '.join(self.providers)}: that is not measured: "
            "target sockets computes on the CPU; a GPU in the platform keeps its published rate"
        )

    @property
    def profile(self) -> Profile | None:
        """Its profile, checked."""
        return None if self.document is None else parse_profile(self.document, f"profile of {self.host}")


@dataclass(frozen=True)
class BoardMeasurements:
    """boards: in the order of the hosts. links: between those that were measured. unlinked: why a link was not."""

    boards: tuple[MeasuredBoard, ...]
    links: tuple[Link, ...]
    link_errors: tuple[str, ...]

    @property
    def profiled_boards(self) -> tuple[MeasuredBoard, ...]:
        """The boards with a profile."""
        return tuple(board for board in self.boards if board.document is not None)


def measure_boards(
    package: Path,
    hosts: Hosts,
    platform: Platform | None,
    arguments: Sequence[str],
    timeout: float,
    force: bool,
    progress: Callable[[str], object],
) -> BoardMeasurements:
    """Runs a package on each host of the platform, without one on each of the hosts file.

    arguments: of its script. timeout: seconds for each board. force: takes those that are busy or throttled. tell:
    hears what is being done. DicompilerError where no board could be measured, with the cause of the first, and for a
    host of the platform that the hosts file does not name.
    """
    files = {path.relative_to(package).as_posix(): path for path in sorted(package.rglob("*")) if path.is_file()}
    boards = []
    for host, device in _hosts_to_measure(hosts, platform):
        progress(f"{host}: measuring")
        boards.append(_measure_board(hosts, host, device, files, arguments, timeout, force))
    found = BoardMeasurements(tuple(boards), (), ())
    if not found.profiled_boards:
        raise DicompilerError(f"profile: no board could be measured: {boards[0].reason}")
    links, unlinked = [], []
    for one, other in _host_pairs(found.profiled_boards):
        progress(f"{one.host} and {other.host}: measuring the link")
        try:
            links.append(_measure_link(one, other, hosts, timeout))
        except RunError as error:
            unlinked.append(f"the link of {one.host} and {other.host}: {error}")
    return replace(found, links=tuple(links), link_errors=tuple(unlinked))


def _hosts_to_measure(hosts: Hosts, platform: Platform | None) -> Iterator[tuple[str, str]]:
    """(Host, device that is measured there): the first one of its CPU cores."""
    if platform is None:
        yield from ((name, name) for name in hosts.entries)
        return
    for host in platform.hosts:
        own = [one for one in platform.devices if one.host == host.name and one.can_compute and not one.gpu]
        if own:
            yield host.name, own[0].name


def _host_pairs(boards: Sequence[MeasuredBoard]) -> list[tuple[MeasuredBoard, MeasuredBoard]]:
    if len(boards) <= MAX_ALL_PAIRS_HOSTS:
        return list(itertools.combinations(boards, 2))
    return list(zip(boards, (*boards[1:], boards[0]), strict=True))


def _python_word(place: DeviceLocation) -> str:
    return ssh.quote_path(place.python) if "/" in place.python else shlex.quote(place.python)


def _probe_host(calls: ssh.RemoteCommands, place: DeviceLocation, check: bool = False) -> Mapping[str, Any]:
    """What PROBE tells of a host, its profile too; with `check` RunError where it lacks what measuring needs."""
    code = f"MARK, PROFILE, CHECK, USUAL = {ssh.LINE_PREFIX!r}, {PROFILE_FILE!r}, {check}, {CPU_PROVIDERS!r}\n{PROBE_SOURCE}".encode()
    words = [_python_word(place), ssh.quote_path(place.directory)]
    done = calls.run(place, PROBE_COMMAND, words, lambda stream: stream.write(code), MAX_PROBE_BYTES)
    if not done.prefixed_lines:
        said = (done.errors.strip().splitlines() or [f"exit code {done.exit_code}"])[-1]
        raise RunError(f"{place.title}: there is no Python {place.python!r} ({one_line(said)}): install it, or name it")
    found: Mapping[str, Any] = json.loads(done.prefixed_lines[-1])
    if found["error"]:
        pip, more = f"{place.python} -m pip", ""
        if found["managed"]:
            pip, more = f"{place.python} -m venv ~/venv && ~/venv/bin/pip", ', and say python = "venv/bin/python"'
        raise RunError(f"{place.title}: {one_line(found['error'])}: run '{pip} install numpy onnxruntime' there{more}")
    return found


def _measure_board(
    hosts: Hosts,
    host: str,
    device: str,
    files: Mapping[str, Path],
    arguments: Sequence[str],
    timeout: float,
    force: bool,
) -> MeasuredBoard:
    """A board's profile, or why there is none."""
    place = hosts.locate_device(device, host, "profile")
    calls = ssh.RemoteCommands(time.monotonic() + timeout, hosts.file)
    board = MeasuredBoard(host, device, place)
    try:
        before = _probe_host(calls, place, check=True)
        own = {"processors": before["processors"], "memory": before["memory"], "providers": tuple(before["providers"])}
        board = replace(board, **own)
        stamp = hashlib.sha256(b"".join(path.read_bytes() for path in files.values())).hexdigest()
        calls.copy_files(place, place.directory, files, stamp)
        _run_script(
            calls,
            place,
            RUN_COMMAND,
            [
                *_script_command(place),
                "-o",
                PROFILE_FILE,
                "--device",
                shlex.quote(device),
                *_thread_options(place),
                *arguments,
            ],
        )
        after = _probe_host(calls, place)
    except RunError as error:
        return replace(board, reason=str(error))
    board = replace(board, document=after["profile"])
    profile, throttled = board.profile, (before["throttled"] | after["throttled"]) & 15
    throttled |= (after["throttled"] & ~before["throttled"]) >> 16 & 15  # it was, in the meantime
    assert profile is not None
    why = profile.busy_message
    if throttled:
        marks = ", ".join(mark for bit, mark in enumerate(THROTTLE_REASONS) if throttled >> bit & 1)
        why = f"{place.title}: it throttles ({marks}): cool it, and give it the power that it needs"
    return replace(board, reason=why, document=None if why and not force else board.document)


def _run_script(calls: ssh.RemoteCommands, place: DeviceLocation, script: str, words: Sequence[str]) -> None:
    """Runs the package's script there. RunError with the last line that it wrote."""
    done = calls.run(place, script, [ssh.quote_path(place.directory), *words])
    if done.exit_code:
        said = (done.errors.strip().splitlines() or [f"exit code {done.exit_code}"])[-1]
        raise RunError(f"{place.title}: the measurement failed: {one_line(said)}")


def _script_command(place: DeviceLocation) -> list[str]:
    """How its Python is started, with the package's script."""
    cores = ["taskset", "-c", ",".join(map(str, place.cores))] if place.cores else []
    return [*cores, _python_word(place), "-B", SCRIPT_FILE]


def _thread_options(place: DeviceLocation) -> list[str]:
    return [] if place.threads is None else ["--threads", str(place.threads)]


def _measure_link(one: MeasuredBoard, other: MeasuredBoard, hosts: Hosts, timeout: float) -> Link:
    """The link between two hosts: `one` serves, `other` measures. RunError where they do not reach each other."""
    calls = ssh.RemoteCommands(time.monotonic() + timeout, hosts.file)
    port = _probe_host(calls, one.place)["port"]
    address = (
        ssh.get_address(one.place) if one.place.listen_address is None else one.place.listen_address.rpartition(":")[0]
    )
    at = f"[{address}]:{port}" if ":" in address and "[" not in address else f"{address}:{port}"
    script = [_python_word(one.place), "-B", SCRIPT_FILE]
    measuring = [
        _python_word(other.place),
        "-B",
        SCRIPT_FILE,
        "-o",
        PROFILE_FILE,
        "--connect",
        at,
        "--name",
        shlex.quote(other.host),
    ]
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(
            _run_script,
            calls,
            one.place,
            SERVE_COMMAND,
            [*script, "--serve", str(port), "--name", shlex.quote(one.host)],
        )
        try:
            _run_script(calls, other.place, CONNECT_COMMAND, [*measuring, "--megabytes", "4", "--repeat", "3"])
        except BaseException:
            calls.kill_all()
            raise
        served.result()
    links = (_probe_host(calls, other.place)["profile"] or {}).get("links", [])
    found = next(link for link in links if set(link["hosts"]) == {one.host, other.host})
    return Link((one.host, other.host), found["bandwidth"], found["latency"])


def apply_measurements(found: BoardMeasurements, platform: Platform | None) -> Platform:
    """The platform with what was measured in place of its figures; what was not measured stays as it is. Without one, a
    platform of the boards that were measured: a device of all processors each, on a switch."""
    rates = {board.device: _compute_rate(board) for board in found.profiled_boards}
    if platform is None:
        hosts = tuple(Host(board.host, board.memory) for board in found.profiled_boards)
        devices = tuple(
            Device(one.device, one.host, rates[one.device], one.processors) for one in found.profiled_boards
        )
        platform = Platform("measured", hosts, devices, Network("switch", 1e9))
    else:
        own = tuple(replace(one, rate=rates.get(one.name, one.rate)) for one in platform.devices)
        platform = replace(platform, devices=own)
    described = (platform.description.removesuffix(MEASURED_NOTE) + MEASURED_NOTE).strip()
    return replace(platform, network=_merge_links(platform.network, found.links), description=described)


def _compute_rate(board: MeasuredBoard) -> float:
    """FLOP/s at which it computes the whole network."""
    profile = board.profile
    assert profile is not None
    wholes = [
        (m.flops, len(layer.names)) for layer in profile.layers.values() for m in layer.measurements if m.cut == "whole"
    ]
    seconds = profile.isolated_s if profile.whole_model_s is None else profile.whole_model_s - profile.call_s
    if seconds <= 0 or not any(flops for flops, _ in wholes):
        raise DicompilerError(f"profile: {board.host}: no layer takes any time there: measure a larger network")
    return _round_figure(sum(flops * count for flops, count in wholes) / seconds)


def _merge_links(network: Network, links: Sequence[Link]) -> Network:
    """With the usual bandwidth and latency of the links, and on a switch those links that are other than usual."""
    if not links:
        return network
    bandwidth = _round_figure(statistics.median(link.bandwidth for link in links))
    latency = _round_figure(statistics.median(link.latency for link in links))
    usual = replace(network, bandwidth=bandwidth, latency=latency)
    ends = {frozenset(link.hosts) for link in links}
    kept = [link for link in network.links if frozenset(link.hosts) not in ends]
    if network.kind == "switch":
        own = (
            replace(one, bandwidth=_round_figure(one.bandwidth), latency=_round_figure(one.latency)) for one in links
        )
        kept += [one for one in own if abs(one.bandwidth / bandwidth - 1) > MIN_LINK_DEVIATION_SHARE]
    return replace(usual, links=tuple(kept))


def _round_figure(value: float) -> float:
    """With as many digits as mean something."""
    return float(f"{value:.4g}")
