"""Boards for tests: network namespaces on a bridge, each with its own address, sshd and home directory.

Needs root, ip (iproute2) and sshd (openssh-server), which `tests/run` installs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.caching import CCACHE_VARIABLES
from support.running import wait_until

NET = "10.77.0"
HUB = f"{NET}.1"
"""The address of the coordinator, whose namespace holds the bridge."""
NOWHERE = "10.78.0.1"
"""An address without a route."""
CLONE_NEWNET = 0x40000000


def call(*words: str) -> str:
    """Run a command that must succeed; return its output."""
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
    return done.stdout


@dataclass
class Board:
    """A board.

    Attributes:
        name: Its name.
        space: Its network namespace.
        address: Its address.
        place: The directory with its home directory.
        sshd: Its server, which a test can kill.
    """

    name: str
    space: str
    address: str
    place: Path
    sshd: subprocess.Popen[bytes] | None = None

    @property
    def home(self) -> Path:
        return self.place / "home"

    def start(self) -> None:
        """Start its sshd, which accepts the cluster's key."""
        root = self.place.parent
        config = self.place / "sshd_config"
        variables = {"HOME": self.home, "OMP_WAIT_POLICY": os.environ["OMP_WAIT_POLICY"], **CCACHE_VARIABLES}
        config.write_text(
            f"ListenAddress {self.address}\nHostKey {root}/host_key\nAuthorizedKeysFile {root}/key.pub\n"
            "StrictModes no\nPermitRootLogin yes\nPasswordAuthentication no\nUsePAM no\nPidFile none\n"
            f"SetEnv {' '.join(f'{name}={value}' for name, value in variables.items())}\n"
        )
        self.home.mkdir(exist_ok=True)
        self.sshd = subprocess.Popen(
            ["ip", "netns", "exec", self.space, str(shutil.which("sshd")), "-D", "-f", str(config)],
            stderr=subprocess.DEVNULL,
        )

    def answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.address, 22), 1):
            return True
        return False

    def stop(self) -> None:
        """Kill its sshd and all connections."""
        if self.sshd is not None:
            for pid in descendants(self.sshd.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            self.sshd.kill()
            self.sshd.wait()
            self.sshd = None

    def link(self, state: str) -> None:
        """Set its end of the cable "down" or "up"."""
        call("ip", "-n", self.space, "link", "set", "net", state)


def descendants(pid: int) -> list[int]:
    """Return the processes below an sshd, which serve one connection each."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # The process may have ended already.
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if "sshd" in Path(f"/proc/{child}/comm").read_text():
                found += [int(child), *descendants(int(child))]
    return found


@dataclass
class Cluster:
    """The boards of a cluster.

    Attributes:
        root: The directory with keys and home directories.
        space: The hub's network namespace.
        boards: The boards by name.
    """

    root: Path
    space: str
    boards: dict[str, Board] = field(default_factory=dict)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Move this thread, and threads and processes that it starts, to the boards' network.

        ssh uses the cluster's key and host keys, and not the user's configuration.
        """
        paths = os.environ["PATH"]
        with Path("/proc/thread-self/ns/net").open() as before, Path("/run/netns", self.space).open() as space:
            enter(space.fileno())
            os.environ["PATH"] = f"{self.root / 'bin'}:{paths}"
            try:
                yield
            finally:
                os.environ["PATH"] = paths
                enter(before.fileno())

    def hosts(self, path: Path, extra: str = "", python: str = sys.executable) -> Path:
        """Write a hosts.toml with all boards."""
        text = f'[defaults]\npython = "{python}"\n'
        for board in self.boards.values():
            text += f'[[host]]\nname = "{board.name}"\nssh = "root@{board.address}"\n'
        path.write_text(text + extra)
        return path

    def known(self, addresses: Sequence[str]) -> None:
        """Write the host keys of these boards only to the known hosts."""
        key = (self.root / "host_key.pub").read_text()
        (self.root / "known_hosts").write_text("".join(f"{address} {key}" for address in addresses))


def shape(boards: Cluster, rate: str, queue: str) -> None:
    """Limit both ends of each cable to `rate` with a queue of `queue` bytes, in the notation of tc."""
    words = ("root", "tbf", "rate", rate, "burst", "8kb", "limit", queue)
    for board in boards.boards.values():
        call("ip", "netns", "exec", board.space, "tc", "qdisc", "add", "dev", "net", *words)
        call("ip", "netns", "exec", boards.space, "tc", "qdisc", "add", "dev", board.space, *words)


def enter(space: int) -> None:
    """Move this thread to the network namespace of a file descriptor."""
    assert ctypes.CDLL(None, use_errno=True).setns(space, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


@contextlib.contextmanager
def cluster(root: Path, names: Sequence[str]) -> Iterator[Cluster]:
    """Start the boards; remove them at the end in any case."""
    paths = os.environ["PATH"]
    os.environ["PATH"] = f"{paths}:/usr/sbin:/sbin"
    if os.getuid() or not all(map(shutil.which, ("ip", "ssh", "sshd"))):
        pytest.fail("boards need root, ip, ssh and sshd (Debian: iproute2, openssh-client, openssh-server)")
    mark = f"dc{os.getpid()}"
    made = Cluster(root, f"{mark}hub")
    try:
        prepare(made)
        for index, name in enumerate(names):
            made.boards[name] = add(made, name, f"{mark}b{index}", f"{NET}.{index + 2}")
        made.known([board.address for board in made.boards.values()])
        with made.inside():
            wait_until(lambda: all(board.answers() for board in made.boards.values()))
        yield made
    finally:
        for board in made.boards.values():
            board.stop()
        for space in call("ip", "netns", "list").split():
            if space.startswith(mark):
                call("ip", "netns", "del", space)
        os.environ["PATH"] = paths


def prepare(made: Cluster) -> None:
    """Create the hub with its bridge, the keys, and an ssh that uses them."""
    root = made.root
    Path("/run/sshd").mkdir(exist_ok=True)  # If root starts sshd, it needs this directory for privilege separation.
    for name in ("key", "host_key"):
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(root / name))
    config = f"Host *\nIdentityFile {root}/key\nIdentitiesOnly yes\nUserKnownHostsFile {root}/known_hosts\n"
    (root / "ssh_config").write_text(config + "GlobalKnownHostsFile /dev/null\n")
    (root / "bin").mkdir()
    wrapper = root / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {root}/ssh_config "$@"\n')
    wrapper.chmod(0o755)
    call("ip", "netns", "add", made.space)
    call("ip", "-n", made.space, "link", "set", "lo", "up")
    call("ip", "-n", made.space, "link", "add", "bridge", "type", "bridge")
    call("ip", "-n", made.space, "address", "add", f"{HUB}/24", "dev", "bridge")
    call("ip", "-n", made.space, "link", "set", "bridge", "up")
    call("ip", "-n", made.space, "route", "add", "unreachable", f"{NOWHERE}/32")


def add(made: Cluster, name: str, space: str, address: str) -> Board:
    """Create a board with a cable to the hub."""
    call("ip", "netns", "add", space)
    call("ip", "-n", space, "link", "add", "net", "type", "veth", "peer", "name", space, "netns", made.space)
    call("ip", "-n", made.space, "link", "set", space, "master", "bridge", "up")
    call("ip", "-n", space, "address", "add", f"{address}/24", "dev", "net")
    for link in ("lo", "net"):
        call("ip", "-n", space, "link", "set", link, "up")
    place = made.root / name
    place.mkdir()
    board = Board(name, space, address, place)
    board.start()
    return board
