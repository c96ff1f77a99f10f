"""Looks after the hosts of a run, as Open MPI does not tell of a host that is gone, nor of a rank that is stopped: each
host gives signs of life over ssh, with the states of its ranks.

In: hosts and the devices on each. Out: who is lost, and why.
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
"""Signs of life that a host may owe before it counts as lost, and signs that may find a rank stopped."""
START_SCRIPT = 'echo $$ >"$0"; exec "$@"'
"""What starts a rank (sh): its process goes into a file. Arguments: the file, the rank's command."""
# Arguments: the directory of these files, seconds between signs, the devices. Starts no process but `sleep`.
HEARTBEAT_SCRIPT = f"""
cd "$1" || exit 1; pause=$2; shift 2;
while :; do line=;
for name; do if read -r pid <".$name.pid" && read -r _ _ state _ <"/proc/$pid/stat"; then
line="$line $name=$state"; fi 2>/dev/null; done 2>/dev/null;
echo "{ssh.LINE_PREFIX}$line" || exit; sleep "$pause"; done
"""


class FailedDevices(NamedTuple):
    """Devices that are lost together, and why."""

    devices: tuple[str, ...]
    reason: str


class MonitoredHost(NamedTuple):
    """A host: how it is reached, where the files of its ranks' processes are, and its devices."""

    host: str
    location: DeviceLocation
    directory: str
    devices: tuple[str, ...]


class HostMonitor:
    """`lost` tells who is; `end` ends the watch. heartbeat_s: seconds between signs of life."""

    def __init__(self, hosts: Iterable[MonitoredHost], heartbeat_s: float) -> None:
        self._heartbeat_s, self._hosts = heartbeat_s, tuple(hosts)
        self._last_heartbeat_s = dict.fromkeys(
            (one.host for one in self._hosts), time.monotonic() + ssh.CONNECT_TIMEOUT_S
        )
        self._stopped_counts, self._closed_hosts = Counter[str](), set[str]()
        self._processes = [self._start_heartbeat(one) for one in self._hosts]

    def find_failure(self) -> FailedDevices | None:
        """The first host that gave no sign for too long or closed the connection, or device that is stopped."""
        now = time.monotonic()
        for one in self._hosts:
            if one.host in self._closed_hosts:
                return FailedDevices(one.devices, f"the connection to host {one.host!r} was closed")
            if now - self._last_heartbeat_s[one.host] > MAX_MISSED_HEARTBEATS * self._heartbeat_s:
                return FailedDevices(one.devices, f"host {one.host!r} gives no sign of life")
            for device in one.devices:
                if self._stopped_counts[device] > MAX_MISSED_HEARTBEATS:
                    return FailedDevices((device,), "its process is stopped")
        return None

    def stop(self) -> None:
        for popen in self._processes:
            popen.kill()
            popen.wait()

    def _start_heartbeat(self, one: MonitoredHost) -> subprocess.Popen[bytes]:
        words = [ssh.quote_path(one.directory), f"{self._heartbeat_s:g}", *map(shlex.quote, one.devices)]
        popen = subprocess.Popen(
            ssh.build_command(one.location, HEARTBEAT_SCRIPT, words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=ssh.english_environment(), start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._read_heartbeats, args=(one.host, popen), daemon=True).start()
        return popen

    def _read_heartbeats(self, host: str, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None
        with popen.stdout as lines:
            for line in lines:
                self._last_heartbeat_s[host] = time.monotonic()
                for word in line.decode(errors="replace").split():
                    device, _, state = word.partition("=")
                    self._stopped_counts[device] = self._stopped_counts[device] + 1 if state == "T" else 0
        self._closed_hosts.add(host)
