"""Tests of the emulated network: rates, latencies, and cleanup."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.running import WAIT_S, wait_until

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.cluster import Device, Host, Link, Network
from dicompiler.ir.platform import Platform
from dicompiler.measure.emulation.network import NAMESPACES, EmulatedNetwork, emulate_network

NAMES = ("a", "b", "c", "d")
SENT = 1_000_000


def platform(network: Network, widths: tuple[float | None, ...] = (None,) * 4) -> Platform:
    hosts = tuple(Host(name, 2**30, width) for name, width in zip(NAMES, widths, strict=True))
    return Platform("four", hosts, tuple(Device(name, name, 1e9) for name in NAMES), network)


def send(made: EmulatedNetwork, sender: str, receiver: str, seconds: dict[str, float]) -> None:
    """Send SENT bytes from one host to another and record the seconds."""
    with made.enter_host(receiver):
        listener = socket.create_server((made.addresses[receiver], 0))
    with listener:
        with made.enter_host(sender):
            connection = socket.create_connection(listener.getsockname())
        with connection, listener.accept()[0] as peer:
            begin = time.monotonic()
            threading.Thread(target=lambda: (connection.sendall(bytes(SENT)), connection.close())).start()
            while peer.recv(1 << 18):
                continue
            seconds[sender + receiver] = time.monotonic() - begin


def times(made: EmulatedNetwork, *pairs: str) -> dict[str, float]:
    """Return the seconds of each pair of hosts, all at once."""
    seconds: dict[str, float] = {}
    threads = [threading.Thread(target=send, args=(made, *pair, seconds)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(seconds) == len(pairs)
    return seconds


def least(rate: float, count: int = SENT) -> float:
    """Return the minimum seconds for bytes at `rate` bit/s, without the burst of a link."""
    return 8 * (count - 80_000) / rate


def meeting(made: EmulatedNetwork, a: str, b: str) -> float:
    """Return the seconds to connect from a to b: one round trip."""
    with made.enter_host(b), socket.create_server((made.addresses[b], 0)) as listener, made.enter_host(a):
        begin = time.monotonic()
        socket.create_connection(listener.getsockname()).close()
        return time.monotonic() - begin


def test_switch_gives_each_host_a_link_with_its_own_limit() -> None:
    with emulate_network(platform(Network("switch", 16e6), (None, None, 4e6, None))) as made:
        assert least(16e6) <= times(made, "ab")["ab"] < least(4e6)
        both = times(made, "ab", "da")  # The two messages use different directions of a's link.
        assert max(both.values()) < least(16e6, 2 * SENT)
        # Both messages are received by b, and share its link.
        assert max(times(made, "ab", "db").values()) >= least(16e6, 2 * SENT)
        assert times(made, "ac")["ac"] >= least(4e6)


@pytest.mark.slow
def test_rates_of_links_can_be_changed() -> None:
    with emulate_network(platform(Network("switch", 40e6))) as made:
        made.scale_links("a", 0.2)
        assert times(made, "ab", "ca")["ab"] >= least(8e6) > times(made, "cd")["cd"]
        assert times(made, "ca")["ca"] >= least(8e6)
        made.scale_links("a", 1.0)
        assert least(40e6) <= times(made, "ab")["ab"] < least(8e6)
    with emulate_network(platform(Network("gateway", 40e6))) as made:
        made.scale_links("*", 0.2)
        assert times(made, "ab")["ab"] >= least(8e6)


@pytest.mark.parametrize("kind", ["shared", "gateway"])
def test_shared_medium_sends_all_bytes_over_one_link(kind: str) -> None:
    with emulate_network(platform(Network(kind, 40e6))) as made:  # type: ignore[arg-type]
        assert max(times(made, "ab", "cd").values()) >= least(40e6, 2 * SENT)


def test_link_has_its_own_latency_and_rate() -> None:
    links = (Link(("a", "b"), 10e6, 0.02),)
    with emulate_network(platform(Network("switch", 40e6, 0.005, links))) as made:
        assert meeting(made, "a", "b") >= 0.04 > meeting(made, "c", "d") >= 0.01
        assert times(made, "ab")["ab"] >= least(10e6) > times(made, "cd")["cd"]
    with emulate_network(platform(Network("shared", 20e6, 0.005))) as made:
        assert meeting(made, "a", "b") >= 0.01
        assert max(times(made, "ab", "cd").values()) >= least(20e6, 2 * SENT)


def test_connections_use_the_same_congestion_control_on_every_host() -> None:
    with emulate_network(platform(Network("switch", 1e8))) as made, made.enter_host("a"), socket.socket() as one:
        name = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert name.rstrip(b"\0") == b"reno"


def relays(pid: int) -> list[str]:
    """Return the command lines of the relays of the networks that a process has created."""
    lines = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if "emulation.relay" in line and f" dc{pid}x" in line]


def test_removes_networks_of_killed_processes() -> None:
    code = (
        "import os, signal\n"
        "from dicompiler.measure.emulation.network import emulate_network\n"
        "from dicompiler.ir.platform import Platform\n"
        "with emulate_network(Platform.load('rpi4x2')):\n"
        "    print('ready', flush=True)\n"
        "    signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as killed:
        # A relay's output is a pipe to the process that is killed here. The pipe is then closed, so even a relay that
        # is still starting ends.
        assert killed.stdout is not None and killed.stdout.readline() == b"ready\n"
        assert relays(killed.pid)
        killed.kill()
    assert killed.returncode == -signal.SIGKILL
    assert wait_until(lambda: not relays(killed.pid))
    left = set(NAMESPACES.glob(f"dc{killed.pid}x*"))
    assert left
    with emulate_network(platform(Network("switch", 1e8))) as made:
        assert not left & set(NAMESPACES.iterdir()) and len(made.namespaces) == 4


def test_removes_network_after_an_error() -> None:
    def fail(rate: float) -> None:
        with emulate_network(platform(Network("switch", rate, 0.001))) as made, made.enter_host("a"):
            assert len(own_spaces()) == 6
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail(1e9)
    assert not own_spaces()
    with pytest.raises(DicompilerError, match=r"^emulate: this host cannot create the network \(.*tbf"):
        fail(1e-3)
    assert not own_spaces()


def own_spaces() -> list[Path]:
    """Return the network namespaces of this process; other tests have theirs at the same time."""
    return list(Path("/run/netns").glob(f"dc{os.getpid()}x*"))


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("os.setuid(65534)", "emulate: network namespaces and rate limits need root: run it as root"),
        ("os.environ['PATH'] = '/nowhere'; network.SBIN_PATH = ''", "emulate: 'ip' is missing: install iproute2"),
    ],
)
def test_reports_why_a_host_cannot_emulate(before: str, words: str) -> None:
    script = (
        "import os; from dicompiler.ir.platform import Platform; from dicompiler.measure.emulation import network\n"
        f"made = Platform.load('rpi4x2'); {before}\n"
        "try: network.emulate_network(made).__enter__()\n"
        "except Exception as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert said.stdout.strip() == words, said.stderr
