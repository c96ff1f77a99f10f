"""Devices in network namespaces whose links can be cut in one direction, and sessions with these devices.

The coordinator is in the hub's namespace, which has a bridge. Each device has a namespace with a cable to the bridge.
Needs root and ip (iproute2), which `tests/run` installs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.boards import call, enter

from dicompiler.target.run_records import RunOptions
from dicompiler_targets.sockets.artifact import Manifest, SocketsArtifact
from dicompiler_targets.sockets.device_connections import DeviceProcess, launch_process
from dicompiler_targets.sockets.session import ClusterSession

NET = "10.79.0"
HUB = f"{NET}.1"
"""The address of the coordinator."""


@dataclass
class PartitionedNetwork:
    """The namespaces of the devices.

    Attributes:
        prefix: Start of the names of all namespaces.
        addresses: Addresses of the devices, and of the coordinator under the name "".
    """

    prefix: str
    addresses: dict[str, str] = field(default_factory=lambda: {"": HUB})

    def space(self, name: str) -> str:
        return f"{self.prefix}{name or 'hub'}"

    @contextlib.contextmanager
    def inside(self, name: str = "") -> Iterator[None]:
        """Move this thread, and the threads and processes that it starts, to the namespace of a device."""
        with Path("/proc/thread-self/ns/net").open() as before, Path("/run/netns", self.space(name)).open() as space:
            enter(space.fileno())
            try:
                yield
            finally:
                enter(before.fileno())

    def connect(self, directory: Path, **options: Any) -> ClusterSession:
        """Open a session with a process in the namespace of each device. Call it `inside` the hub."""

        def start(manifest: Manifest, arguments: Sequence[str]) -> DeviceProcess:
            with self.inside(manifest["device"]):
                return launch_process(directory, manifest, [*arguments, "--threads", "1"])

        run_options = RunOptions(**{"in_flight": 4, "timeout_s": 60, "listen": f"{HUB}:0", "insecure": True, **options})
        return ClusterSession(SocketsArtifact.load(directory), run_options, start)

    def cut(self, sender: str, receiver: str) -> None:
        """Drop all packets from one device to another device."""
        call("ip", "-n", self.space(receiver), "rule", "add", "pref", "50", *self._drop(sender))

    def mend(self, sender: str, receiver: str) -> None:
        call("ip", "-n", self.space(receiver), "rule", "del", "pref", "50", *self._drop(sender))

    def _drop(self, sender: str) -> tuple[str, ...]:
        return "from", self.addresses[sender], "blackhole"

    def set_cable(self, name: str, state: str) -> None:
        """Set the end of a device's cable "down" or "up"."""
        call("ip", "-n", self.space(name), "link", "set", "net", state)

    @contextlib.contextmanager
    def losing(self, links: Iterable[tuple[str, str]], rng: Random, longest_s: float) -> Iterator[None]:
        """Drop bursts of packets during the block, on links given as pairs of sender and receiver."""
        over, pairs = threading.Event(), list(links)

        def lose() -> None:
            while not over.wait(rng.uniform(0.05, longest_s)):
                pair = rng.choice(pairs)
                self.cut(*pair)
                over.wait(rng.uniform(0.05, longest_s))
                self.mend(*pair)

        thread = threading.Thread(target=lose)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@contextlib.contextmanager
def partitioned_network(names: Sequence[str]) -> Iterator[PartitionedNetwork]:
    """Create the namespaces; remove them at the end in any case."""
    if os.getuid() or not shutil.which("ip"):
        pytest.fail("network namespaces need root and ip (Debian: iproute2)")
    network = PartitionedNetwork(f"dp{os.getpid()}")
    hub = network.space("")
    try:
        call("ip", "netns", "add", hub)
        for words in ("link set lo up", "link add bridge type bridge", f"address add {HUB}/24 dev bridge"):
            call("ip", "-n", hub, *words.split())
        call("ip", "-n", hub, "link", "set", "bridge", "up")
        for index, name in enumerate(names):
            space = network.space(name)
            network.addresses[name] = f"{NET}.{index + 2}"
            call("ip", "netns", "add", space)
            call("ip", "-n", space, "link", "add", "net", "type", "veth", "peer", "name", space, "netns", hub)
            call("ip", "-n", hub, "link", "set", space, "master", "bridge", "up")
            call("ip", "-n", space, "address", "add", f"{network.addresses[name]}/24", "dev", "net")
            # The rule for local addresses is the first routing rule by default. It is moved back, because rules that
            # drop packets must precede it.
            call("ip", "-n", space, "rule", "add", "pref", "100", "lookup", "local")
            call("ip", "-n", space, "rule", "del", "pref", "0")
            for link in ("lo", "net"):
                call("ip", "-n", space, "link", "set", link, "up")
        yield network
    finally:
        for space in call("ip", "netns", "list").split():
            if space.startswith(network.prefix):
                call("ip", "netns", "del", space)
