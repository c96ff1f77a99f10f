"""Monitors the hosts of a run by heartbeats over ssh.

Open MPI reports neither that a host is unreachable nor that a rank is stopped. A script on each host prints a heartbeat
with the states of its ranks.
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

MAX_MISSED_HEARTBEATS = 3
"""A host has failed if it misses more heartbeats, and a rank if it is stopped in more of them."""
START_SCRIPT = 'echo $$ >"$0"; exec "$@"'
"""The sh script that starts a rank and writes its process ID to a file. Arguments: the file, the rank's command."""
# Arguments: the directory of the process ID files, the seconds between heartbeats, the devices. It starts no process
# other than `sleep`.
HEARTBEAT_SCRIPT = f"""
cd "$1" || exit 1; pause=$2; shift 2;
while :; do line=;
for name; do if read -r pid <".$name.pid" && read -r _ _ state _ <"/proc/$pid/stat"; then
line="$line $name=$state"; fi 2>/dev/null; done 2>/dev/null;
echo "{ssh.LINE_PREFIX}$line" || exit; sleep "$pause"; done
"""


class FailedDevices(NamedTuple):
    """Devices that have failed together, and the reason."""

    devices: tuple[str, ...]
    reason: str


class MonitoredHost(NamedTuple):
    """A host to be monitored.

    Attributes:
        host: Name of the host.
        location: How to reach it.
        directory: Directory of its ranks' process ID files.
        devices: Its devices.
    """

    host: str
    location: DeviceLocation
    directory: str
    devices: tuple[str, ...]


class HostMonitor:
    """Receives the heartbeats of hosts, and finds failed devices.

    Attributes:
        hosts: The hosts to be monitored.
        heartbeat_s: Seconds between two heartbeats.
    """

    def __init__(self, hosts: Iterable[MonitoredHost], heartbeat_s: float) -> None:
        self._heartbeat_s, self._hosts = heartbeat_s, tuple(hosts)
        # The first heartbeat may take as long as the ssh connection.
        first_due_s = time.monotonic() + ssh.CONNECT_TIMEOUT_S
        self._last_heartbeat_s = dict.fromkeys((host.host for host in self._hosts), first_due_s)
        self._stopped_counts, self._closed_hosts = Counter[str](), set[str]()
        self._processes = [self._start_heartbeat(host) for host in self._hosts]

    def find_failure(self) -> FailedDevices | None:
        """Return the first host that is unreachable, or device that is stopped; None if there is none."""
        now = time.monotonic()
        for host in self._hosts:
            if host.host in self._closed_hosts:
                return FailedDevices(host.devices, f"the connection to host {host.host!r} was closed")
            if now - self._last_heartbeat_s[host.host] > MAX_MISSED_HEARTBEATS * self._heartbeat_s:
                return FailedDevices(host.devices, f"host {host.host!r} sends no heartbeat")
            for device in host.devices:
                if self._stopped_counts[device] > MAX_MISSED_HEARTBEATS:
                    return FailedDevices((device,), "its process is stopped")
        return None

    def stop(self) -> None:
        """End the monitoring."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _start_heartbeat(self, host: MonitoredHost) -> subprocess.Popen[bytes]:
        words = [ssh.quote_path(host.directory), f"{self._heartbeat_s:g}", *map(shlex.quote, host.devices)]
        process = subprocess.Popen(
            ssh.build_command(host.location, HEARTBEAT_SCRIPT, words), stdin=subprocess.DEVNULL,
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
