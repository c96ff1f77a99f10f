"""Detects failed hosts and stopped ranks (MPI processes) by heartbeats over ssh.

Open MPI does not report unreachable hosts and stopped ranks. Therefore, a script on each host prints a line (the
heartbeat) at regular intervals, with the states of the host's ranks.
"""

from __future__ import annotations

import shlex
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from dicompiler.plugin_api.artifacts import DeviceLocation, ssh

DEFAULT_HEARTBEAT_S = 2.0
"""Default seconds between two heartbeats. A restart of mpirun takes seconds, so earlier detection would gain little."""
MAX_MISSED_HEARTBEATS = 3
"""Number of heartbeats in a row that a host may miss, or that may report a stopped rank, before it counts as failed."""
START_SCRIPT = 'echo $$ >"$0"; exec "$@"'
"""A shell script that writes the rank's process ID to a file and starts it. Arguments: the file, the rank's command."""
HEARTBEAT_SCRIPT = f"""
cd "$1" || exit 1; pause=$2; shift 2;
while :; do line=;
for name; do if read -r pid <".$name.pid" && read -r _ _ state _ <"/proc/$pid/stat"; then
line="$line $name=$state"; fi 2>/dev/null; done 2>/dev/null;
echo "{ssh.LINE_PREFIX}$line" || exit; sleep "$pause"; done
"""
"""A shell script that prints heartbeats, such as " d0=S d1=R" with the process states of devices d0 and d1.

Arguments: the directory of the process ID files, the seconds between heartbeats, the names of the devices. The script
starts no process but `sleep`, because processes would take time from the ranks.
"""


class FailedDevices(NamedTuple):
    """Devices that have failed at the same time.

    Attributes:
        devices: Names of the devices.
        reason: The reason, as the end of an error message.
        silent_s: Seconds between the last sign that they worked and the detection of the failure; 0 if unknown.
    """

    devices: tuple[str, ...]
    reason: str
    silent_s: float = 0.0


class MonitoredHost(NamedTuple):
    """A host that HostMonitor monitors by heartbeats.

    Attributes:
        host: Name of the host.
        location: How to reach the host by ssh.
        directory: The directory on the host in which START_SCRIPT writes process ID files.
        devices: Names of the host's devices that take part in the run.
    """

    host: str
    location: DeviceLocation
    directory: str
    devices: tuple[str, ...]


class HostMonitor:
    """Receives the heartbeats of hosts every `heartbeat_s` seconds and finds failed devices."""

    def __init__(self, hosts: Iterable[MonitoredHost], heartbeat_s: float) -> None:
        self._heartbeat_s, self._hosts = heartbeat_s, tuple(hosts)
        # The ssh connection must be established before the first heartbeat.
        first_due_s = time.monotonic() + ssh.CONNECT_TIMEOUT_S
        self._last_heartbeat_s = dict.fromkeys((host.host for host in self._hosts), first_due_s)
        self._stopped_counts, self._closed_hosts = Counter[str](), set[str]()
        self._processes = [self._start_heartbeat(host) for host in self._hosts]

    def find_failure(self) -> FailedDevices | None:
        """Return the devices of an unreachable host, or a device with a stopped process; None if there are none."""
        now = time.monotonic()
        for host in self._hosts:
            if host.host in self._closed_hosts:
                return FailedDevices(host.devices, f"the connection to host {host.host!r} was closed")
            silent_s = now - self._last_heartbeat_s[host.host]
            if silent_s > MAX_MISSED_HEARTBEATS * self._heartbeat_s:
                return FailedDevices(host.devices, f"host {host.host!r} sends no heartbeat", silent_s)
            for device in host.devices:
                if self._stopped_counts[device] > MAX_MISSED_HEARTBEATS:
                    stopped_s = self._stopped_counts[device] * self._heartbeat_s
                    return FailedDevices((device,), "its process is stopped", stopped_s)
        return None

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _start_heartbeat(self, host: MonitoredHost) -> subprocess.Popen[bytes]:
        arguments = [ssh.quote_path(host.directory), f"{self._heartbeat_s:g}", *map(shlex.quote, host.devices)]
        process = subprocess.Popen(
            ssh.build_command(host.location, HEARTBEAT_SCRIPT, arguments), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ssh.english_environment(), start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._read_heartbeats, args=(host.host, process), daemon=True).start()
        return process

    def _read_heartbeats(self, host: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._last_heartbeat_s[host] = time.monotonic()
                for word in line.decode(errors="replace").split():
                    device, _, state = word.partition("=")
                    self._stopped_counts[device] = self._stopped_counts[device] + 1 if state == "T" else 0
        self._closed_hosts.add(host)
