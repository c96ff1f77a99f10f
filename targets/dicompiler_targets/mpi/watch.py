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

from dicompiler.plugin_api import Place, ssh

MISSED = 3
"""Signs of life that a host may owe before it counts as lost, and signs that may find a rank stopped."""
START = 'echo $$ >"$0"; exec "$@"'
"""What starts a rank (sh): its process goes into a file. Arguments: the file, the rank's command."""
# Arguments: the directory of these files, seconds between signs, the devices. Starts no process but `sleep`.
SIGNS = f"""
cd "$1" || exit 1; pause=$2; shift 2;
while :; do line=;
for name; do if read -r pid <".$name.pid" && read -r _ _ state _ <"/proc/$pid/stat"; then
line="$line $name=$state"; fi 2>/dev/null; done 2>/dev/null;
echo "{ssh.MARK}$line" || exit; sleep "$pause"; done
"""


class Gone(NamedTuple):
    """Devices that are lost together, and why."""

    devices: tuple[str, ...]
    why: str


class Watched(NamedTuple):
    """A host: how it is reached, where the files of its ranks' processes are, and its devices."""

    host: str
    place: Place
    directory: str
    devices: tuple[str, ...]


class Watch:
    """`lost` tells who is; `end` ends the watch. heartbeat_s: seconds between signs of life."""

    def __init__(self, hosts: Iterable[Watched], heartbeat_s: float) -> None:
        self._heartbeat_s, self._hosts = heartbeat_s, tuple(hosts)
        self._heard = dict.fromkeys((one.host for one in self._hosts), time.monotonic() + ssh.CONNECT_S)
        self._stopped, self._ended = Counter[str](), set[str]()
        self._running = [self._begin(one) for one in self._hosts]

    def lost(self) -> Gone | None:
        """The first host that gave no sign for too long or closed the connection, or device that is stopped."""
        now = time.monotonic()
        for one in self._hosts:
            if one.host in self._ended:
                return Gone(one.devices, f"the connection to host {one.host!r} was closed")
            if now - self._heard[one.host] > MISSED * self._heartbeat_s:
                return Gone(one.devices, f"host {one.host!r} gives no sign of life")
            for device in one.devices:
                if self._stopped[device] > MISSED:
                    return Gone((device,), "its process is stopped")
        return None

    def end(self) -> None:
        for popen in self._running:
            popen.kill()
            popen.wait()

    def _begin(self, one: Watched) -> subprocess.Popen[bytes]:
        words = [ssh.path_word(one.directory), f"{self._heartbeat_s:g}", *map(shlex.quote, one.devices)]
        popen = subprocess.Popen(
            ssh.command(one.place, SIGNS, words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=ssh.environment(), start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._listen, args=(one.host, popen), daemon=True).start()
        return popen

    def _listen(self, host: str, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None
        with popen.stdout as lines:
            for line in lines:
                self._heard[host] = time.monotonic()
                for word in line.decode(errors="replace").split():
                    device, _, state = word.partition("=")
                    self._stopped[device] = self._stopped[device] + 1 if state == "T" else 0
        self._ended.add(host)
