"""Profiles of boards, and measurements of the links between them, over ssh.

Boards are measured one after another, so that they do not disturb each other.
"""

from __future__ import annotations

import hashlib
import ipaddress
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

from dicompiler.base.addresses import is_ip_address, join_address
from dicompiler.base.errors import DicompilerError, RunError, one_line
from dicompiler.cost.profile import Profile, parse_profile
from dicompiler.ir.cluster import DEFAULT_ENGINE, OTHER_KINDS, Device, EngineRate, Host, Link, Network
from dicompiler.ir.platform import Platform
from dicompiler.measure.fit_links import round_to_4_digits
from dicompiler.measure.profile_package import SCRIPT_FILE
from dicompiler.target.remote import ssh
from dicompiler.target.remote.hosts import DeviceLocation, Hosts

PROFILE_FILE = "PROFILE.json"
MAX_ALL_PAIRS_HOSTS = 6
"""Up to this number of hosts, the links of all pairs are measured; with more hosts, only those of neighbors."""
MIN_LINK_DEVIATION_SHARE = 0.1
"""A link gets its own entry in the platform if its bandwidth differs from the median by more than this fraction."""
MEASURED_NOTE = " Rates and links measured by 'dicompiler profile --hosts'."
MAX_PROBE_BYTES = 1 << 27
CPU_PROVIDERS = ("CPUExecutionProvider", "AzureExecutionProvider")
"""Execution providers of onnxruntime about which no note is printed: the CPU, and a client of a web service."""
THROTTLE_REASONS = (
    "under-voltage",
    "its frequency is capped",
    "it is throttled",
    "it is at its soft temperature limit",
)
"""Meanings of bits 0 to 3 of `vcgencmd get_throttled` on a Raspberry Pi, from its documentation."""
PROBE_SOURCE = """
import json, os, socket, subprocess, sys, sysconfig
report = {"python": ".".join(map(str, sys.version_info[:3])), "error": "", "throttled": 0, "providers": []}
for name in ("numpy", "onnxruntime") if CHECK else ():
    try:
        __import__(name)
    except Exception as error:
        report["error"] = report["error"] or "its Python has no %s (%s)" % (name, error)
if CHECK and not report["error"]:
    providers = sys.modules["onnxruntime"].get_available_providers()
    report["providers"] = [provider for provider in providers if provider not in CPU_PROVIDERS]
try:
    output = subprocess.check_output(["vcgencmd", "get_throttled"]).decode()
    report["throttled"] = int(output.strip().partition("=")[2], 16)
except (EnvironmentError, subprocess.CalledProcessError, ValueError):
    pass
report["address"] = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2]
with socket.socket() as free:
    free.bind(("", 0))
    report["port"] = free.getsockname()[1]
report["managed"] = sys.prefix == getattr(sys, "base_prefix", sys.prefix) and os.path.exists(
    os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))
report["processors"] = len(os.sched_getaffinity(0))
report["memory"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
path = os.path.join(sys.argv[1], PROFILE_FILE)
report["profile"] = json.load(open(path)) if os.path.exists(path) and not CHECK else None
print(LINE_PREFIX + json.dumps(report))
"""
PROBE_COMMAND = 'cd / && "$1" - "$2"'
RUN_COMMAND = 'cd "$1" && shift && exec "$@"'
SERVE_COMMAND = 'cd "$1" && shift && exec timeout 60 "$@"'
CONNECT_COMMAND = """
cd "$1" && shift; end=$(($(date +%s) + 15)); until "$@"; do [ $(date +%s) -lt $end ] || exit 1; sleep 0.2; done
"""
"""A shell script that repeats a client for up to 15 s, because the server needs time to start."""


@dataclass(frozen=True)
class MeasuredBoard:
    """A host and the measurements of one of its devices.

    Attributes:
        host: Name of the host.
        device: Name of the device.
        location: Address and settings by which ssh reaches the host.
        processors: Number of processors of the host.
        memory: Bytes of memory of the host.
        document: Profile of the device as JSON; None if it could not be measured or must not be used.
        reason: Reason why the device could not be measured, or why its profile is doubtful.
        providers: Execution providers of the host's onnxruntime that do not use the CPU.
        address: The host's own IP address in the ssh connection; empty if it is unknown.
    """

    host: str
    device: str
    location: DeviceLocation
    processors: int = 0
    memory: int = 0
    document: Mapping[str, Any] | None = None
    reason: str = ""
    providers: tuple[str, ...] = ()
    address: str = ""

    @property
    def unmeasured_note(self) -> str:
        """A note about execution providers of onnxruntime that are not measured; empty if there are none."""
        if not self.providers:
            return ""
        return (
            f"{self.location.title}: its onnxruntime offers {', '.join(self.providers)}, which is not measured: "
            "target sockets computes on the CPU; a GPU in the platform keeps its published rate"
        )

    @property
    def profile(self) -> Profile | None:
        return None if self.document is None else parse_profile(self.document, f"profile of {self.host}")


@dataclass(frozen=True)
class BoardMeasurements:
    """Measurements of all boards.

    Attributes:
        boards: The boards, in the order of the hosts.
        links: Bandwidth and latency of each measured link between two hosts.
        link_errors: Reasons why other links could not be measured.
    """

    boards: tuple[MeasuredBoard, ...]
    links: tuple[Link, ...]
    link_errors: tuple[str, ...]

    @property
    def profiled_boards(self) -> tuple[MeasuredBoard, ...]:
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
    """Measure the layers of a network on each host, then the links between the hosts.

    Args:
        package: Directory of the profile package, whose script measures the layers.
        hosts: The hosts file, which says how to reach each host.
        platform: The platform of which the hosts are measured; None: all hosts of the hosts file.
        arguments: Arguments of the package's script.
        timeout: Seconds for each board.
        force: True to accept busy or throttled boards.
        progress: Called with a message before each step.

    Raises:
        DicompilerError: No board could be measured, or the hosts file lacks a host of the platform.
    """
    files = {path.relative_to(package).as_posix(): path for path in sorted(package.rglob("*")) if path.is_file()}
    boards = []
    for host, device in _hosts_to_measure(hosts, platform):
        progress(f"{host}: measuring")
        boards.append(_measure_board(hosts, host, device, files, arguments, timeout, force))
    measurements = BoardMeasurements(tuple(boards), (), ())
    if not measurements.profiled_boards:
        raise DicompilerError(f"profile: no board could be measured: {boards[0].reason}")
    links, errors = [], []
    for server, client in _host_pairs(measurements.profiled_boards):
        progress(f"{server.host} and {client.host}: measuring the link")
        try:
            links.append(_measure_link(server, client, hosts, timeout))
        except RunError as error:
            errors.append(f"the link of {server.host} and {client.host}: {error}")
    return replace(measurements, links=tuple(links), link_errors=tuple(errors))


def _hosts_to_measure(hosts: Hosts, platform: Platform | None) -> Iterator[tuple[str, str]]:
    """Yield each host name, with the name of its first device that is a group of CPU cores.

    Without a platform, the device has the name of the host.
    """
    if platform is None:
        yield from ((name, name) for name in hosts.entries)
        return
    for host in platform.hosts:
        for device in platform.devices:
            if device.host == host.name and device.can_compute and not device.gpu:
                yield host.name, device.name
                break


def _host_pairs(boards: Sequence[MeasuredBoard]) -> list[tuple[MeasuredBoard, MeasuredBoard]]:
    if len(boards) <= MAX_ALL_PAIRS_HOSTS:
        return list(itertools.combinations(boards, 2))
    return list(zip(boards, (*boards[1:], boards[0]), strict=True))


def _python_word(location: DeviceLocation) -> str:
    return ssh.quote_path(location.python) if "/" in location.python else shlex.quote(location.python)


def _last_line(result: ssh.CommandResult) -> str:
    return one_line((result.errors.strip().splitlines() or [f"exit code {result.exit_code}"])[-1])


def _probe_host(commands: ssh.RemoteCommands, location: DeviceLocation, check: bool = False) -> Mapping[str, Any]:
    """Run the Python program PROBE_SOURCE on a host, and return its report about the host.

    Args:
        commands: Connection to the hosts.
        location: The host.
        check: True to check the packages that a measurement needs; False to report the written profile.

    Raises:
        RunError: `check` is True, and a package is missing; or Python is missing.
    """
    header = (
        f"LINE_PREFIX = {ssh.LINE_PREFIX!r}\nPROFILE_FILE = {PROFILE_FILE!r}\nCHECK = {check!r}\n"
        f"CPU_PROVIDERS = {CPU_PROVIDERS!r}\n"
    )
    code = f"{header}{PROBE_SOURCE}".encode()
    words = [_python_word(location), ssh.quote_path(location.directory)]
    result = commands.run(location, PROBE_COMMAND, words, lambda stream: stream.write(code), MAX_PROBE_BYTES)
    if not result.prefixed_lines:
        raise RunError(
            f"{location.title}: there is no Python {location.python!r} ({_last_line(result)}): install it, or set "
            "'python' in the hosts file"
        )
    report: Mapping[str, Any] = json.loads(result.prefixed_lines[-1])
    if report["error"]:
        pip, hint = f"{location.python} -m pip", ""
        if report["managed"]:
            pip = f"{location.python} -m venv ~/venv && ~/venv/bin/pip"
            hint = ', and set python = "venv/bin/python"'
        raise RunError(
            f"{location.title}: {one_line(report['error'])}: run '{pip} install numpy onnxruntime' there{hint}"
        )
    return report


def _measure_board(
    hosts: Hosts,
    host: str,
    device: str,
    files: Mapping[str, Path],
    arguments: Sequence[str],
    timeout: float,
    force: bool,
) -> MeasuredBoard:
    """Measure a device over ssh; return the board with its profile, or with the reason why it has none.

    Args:
        hosts: The hosts file.
        host: Name of the host.
        device: Name of the device.
        files: Local files of the profile package, by their path on the host.
        arguments: Arguments of the package's script.
        timeout: Seconds for the board.
        force: True to accept a busy or throttled board.
    """
    location = hosts.locate_device(device, host, "profile")
    commands = ssh.RemoteCommands(time.monotonic() + timeout, hosts.file)
    board = MeasuredBoard(host, device, location)
    try:
        before = _probe_host(commands, location, check=True)
        figures = {key: before[key] for key in ("processors", "memory", "address")}
        board = replace(board, **figures, providers=tuple(before["providers"]))
        stamp = hashlib.sha256(b"".join(path.read_bytes() for path in files.values())).hexdigest()
        commands.copy_files(location, location.directory, files, stamp)
        options = ["-o", PROFILE_FILE, "--device", shlex.quote(device)]
        if location.threads is not None:
            options += ["--threads", str(location.threads)]
        _run_script(commands, location, RUN_COMMAND, [*_script_command(location), *options, *arguments])
        after = _probe_host(commands, location)
    except RunError as error:
        return replace(board, reason=str(error))
    board = replace(board, document=after["profile"])
    profile = board.profile
    assert profile is not None
    # Bits 0 to 3 say why the board is throttled now. Bits 16 to 19 stay set after the same events, so a newly set one
    # means that the board was throttled during the run.
    throttled = (before["throttled"] | after["throttled"]) & 15
    throttled |= (after["throttled"] & ~before["throttled"]) >> 16 & 15
    reason = profile.busy_message
    if throttled:
        causes = ", ".join(cause for bit, cause in enumerate(THROTTLE_REASONS) if throttled >> bit & 1)
        reason = f"{location.title}: the board throttles ({causes}): cool it, and use a sufficient power supply"
    return replace(board, reason=reason, document=None if reason and not force else board.document)


def _run_script(commands: ssh.RemoteCommands, location: DeviceLocation, script: str, words: Sequence[str]) -> None:
    """Run a shell script on a host; raise RunError with the last line of its output if it fails.

    `words` are its arguments, after the directory of the profile package.
    """
    result = commands.run(location, script, [ssh.quote_path(location.directory), *words])
    if result.exit_code:
        raise RunError(f"{location.title}: the measurement failed: {_last_line(result)}")


def _script_command(location: DeviceLocation) -> list[str]:
    cores = ["taskset", "-c", ",".join(map(str, location.cores))] if location.cores else []
    return [*cores, _python_word(location), "-B", SCRIPT_FILE]


def _measure_link(server: MeasuredBoard, client: MeasuredBoard, hosts: Hosts, timeout: float) -> Link:
    """Measure the link between two hosts; raise RunError if that fails."""
    commands = ssh.RemoteCommands(time.monotonic() + timeout, hosts.file)
    host, port = _find_link_address(server, client)
    port = port or int(_probe_host(commands, server.location)["port"])
    any_address = "::" if ":" in host else "0.0.0.0"
    serve = [_python_word(server.location), "-B", SCRIPT_FILE, "--serve", join_address(any_address, port)]
    serve += ["--name", shlex.quote(server.host)]
    connect = [_python_word(client.location), "-B", SCRIPT_FILE, "-o", PROFILE_FILE]
    connect += ["--connect", shlex.quote(join_address(host, port))]
    connect += ["--name", shlex.quote(client.host), "--megabytes", "4", "--repeat", "3"]
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(_run_script, commands, server.location, SERVE_COMMAND, serve)
        try:
            _run_script(commands, client.location, CONNECT_COMMAND, connect)
        except BaseException:
            commands.kill_all()
            raise
        serving.result()
    links = (_probe_host(commands, client.location)["profile"] or {}).get("links", [])
    link = next(link for link in links if set(link["hosts"]) == {server.host, client.host})
    return Link((server.host, client.host), link["bandwidth"], link["latency"])


def _find_link_address(server: MeasuredBoard, client: MeasuredBoard) -> tuple[str, int]:
    """Return the IP address or name at which the client reaches the server, and the port; 0 for any free port."""
    address = server.location.resolve_address() or (server.address or ssh.get_address(server.location), 0)
    host, zone = address[0].partition("%")[0], client.address.partition("%")[2]
    # A link-local address is valid only with the client's name of the network interface (zone).
    is_link_local = is_ip_address(host) and ipaddress.ip_address(host).is_link_local
    return f"{host}%{zone}" if is_link_local and zone else host, address[1]


def apply_measurements(measurements: BoardMeasurements, platform: Platform | None) -> Platform:
    """Return the platform with measured rates and links. Values that were not measured are kept.

    Args:
        measurements: The measurements of all boards.
        platform: The platform; None for a new one, of measured boards at a switch with one device each.
    """
    boards = measurements.profiled_boards
    rates = {board.device: _compute_rate(board) for board in boards}
    if platform is None:
        hosts = tuple(Host(board.host, board.memory) for board in boards)
        devices = tuple(
            Device(board.device, board.host, rates[board.device], board.processors, engine_rates=_engine_rates(board))
            for board in boards
        )
        platform = Platform("measured", hosts, devices, Network("switch", 1e9))
    else:
        engine_rates = {board.device: _engine_rates(board) for board in boards}
        devices = tuple(
            replace(
                device,
                rate=rates.get(device.name, device.rate),
                engine_rates=engine_rates.get(device.name, device.engine_rates),
            )
            for device in platform.devices
        )
        platform = replace(platform, devices=devices)
    description = (platform.description.removesuffix(MEASURED_NOTE) + MEASURED_NOTE).strip()
    return replace(platform, network=_merge_links(platform.network, measurements.links), description=description)


def _engine_rates(board: MeasuredBoard) -> tuple[EngineRate, ...]:
    """Return the compute rate of a board with each measured engine. A rate is for all kinds of layers."""
    assert board.profile is not None
    return tuple(EngineRate(name, OTHER_KINDS, _compute_rate(board, name)) for name in board.profile.engines)


def _compute_rate(board: MeasuredBoard, engine: str = DEFAULT_ENGINE) -> float:
    profile = board.profile
    assert profile is not None
    profile = profile.of_engine(engine)
    flops = sum(layer.whole.flops * len(layer.names) for layer in profile.layers.values())
    seconds = profile.isolated_s if profile.whole_model_s is None else profile.whole_model_s - profile.call_s
    if seconds <= 0 or not flops:
        raise DicompilerError(f"profile: {board.host}: the layers take no measurable time: measure a larger network")
    return round_to_4_digits(flops / seconds)


def _merge_links(network: Network, links: Sequence[Link]) -> Network:
    """Return the network with the median bandwidth and latency, and an entry for each link that deviates from them."""
    if not links:
        return network
    bandwidth = round_to_4_digits(statistics.median(link.bandwidth for link in links))
    latency = round_to_4_digits(statistics.median(link.latency for link in links))
    measured_ends = {frozenset(link.hosts) for link in links}
    entries = [link for link in network.links if frozenset(link.hosts) not in measured_ends]
    if network.kind == "switch":
        for link in links:
            link = replace(link, bandwidth=round_to_4_digits(link.bandwidth), latency=round_to_4_digits(link.latency))
            if abs(link.bandwidth / bandwidth - 1) > MIN_LINK_DEVIATION_SHARE:
                entries.append(link)
    return replace(network, bandwidth=bandwidth, latency=latency, links=tuple(entries))
