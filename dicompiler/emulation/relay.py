"""Carries packets between the two routers of an emulated network, later and slower as its links say: kernels without
netem delay nothing, and tbf knows no pairs of hosts.

In: rules on stdin. Out: packets, until it is killed. A process of its own: it carries some 500 Mbit/s in all.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.platform import Platform

MAX_QUEUE_S = 0.05
"""Seconds for which packets of a link that is slower than its hosts wait for it; what comes then is dropped."""
CLONE_NEWNET = 0x40000000
_TUN_REQUEST = (0x400454CA, 0x0001 | 0x1000)  # TUNSETIFF; IFF_TUN | IFF_NO_PI

RelayRule = tuple[str, str, float, float | None]
"""Addresses of sender and receiver, seconds of latency, bit/s (None: as fast as the lines are)."""


def make_relay_rules(platform: Platform, addresses: Mapping[str, str]) -> list[RelayRule]:
    """What links of the platform ask beyond their hosts' lines; empty where nothing is to be delayed or limited."""
    network, found = platform.network, []
    for a in platform.hosts:
        for b in platform.hosts:
            link = network.link(a.name, b.name)
            if link is None:
                continue
            limit = link.bandwidth if network.links and network.kind == "switch" else None
            found.append((addresses[a.name], addresses[b.name], link.latency, limit))
    return found if any(rule[2] > 0 or rule[3] is not None for rule in found) else []


def start_relay(rules: Sequence[RelayRule], up: str, down: str) -> subprocess.Popen[bytes]:
    """Starts the relay between the namespaces `up` and `down`, in each of which it has a device `medium`."""
    places = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    places["PATH"] = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    words = [sys.executable, "-P", "-m", __name__, up, down]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | places
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(json.dumps(list(rules)).encode() + b"\n")
    process.stdin.flush()
    if not process.stdout.readline():
        said = process.stderr.read().decode(errors="replace").strip().splitlines() or ["it says nothing"]
        process.wait()
        raise DicompilerError(f"emulate: links with latency or rates of their own need /dev/net/tun: {said[-1]}")
    return process


def main() -> None:
    """The process: the rules on stdin, the namespaces as arguments; it says when it is ready."""
    up, down = sys.argv[1:]
    table: dict[bytes, tuple[float, float | None]] = {}
    for sender, receiver, latency, rate in json.loads(sys.stdin.readline()):
        table[socket.inet_aton(sender) + socket.inet_aton(receiver)] = latency, rate
    ends = _open_tun(up), _open_tun(down)
    print("ready", flush=True)
    forward_packets(*ends, table)


def enter_namespace(space: int) -> None:
    """Puts this thread into the network namespace of that descriptor. OSError where it may not."""
    if ctypes.CDLL(None, use_errno=True).setns(space, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _open_tun(space: str) -> int:
    """Makes the device `medium` in a namespace; its descriptor."""
    with open(f"/run/netns/{space}") as there:
        enter_namespace(there.fileno())
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUN_REQUEST[0], struct.pack("16sH22x", b"medium", _TUN_REQUEST[1]))
    subprocess.run(["ip", "link", "set", "medium", "up", "txqueuelen", "5000"], check=True)
    return descriptor


def forward_packets(source: int, sink: int, table: Mapping[bytes, tuple[float, float | None]]) -> None:
    """Moves packets from `source` to `sink`; each pair of addresses has its latency, and its line if it has a rate."""
    free: dict[bytes, float] = {}
    waiting: list[tuple[float, int, bytes]] = []
    count = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            os.write(sink, heapq.heappop(waiting)[2])
        ready, _, _ = select.select([source], [], [], max(0.0, waiting[0][0] - now) if waiting else None)
        while ready:
            try:
                packet = os.read(source, 1 << 16)
            except BlockingIOError:
                break
            now, pair = time.monotonic(), packet[12:20]
            latency, rate = table.get(pair, (0.0, None))
            if rate is not None:
                begin = max(now, free.get(pair, 0.0))
                if begin - now > MAX_QUEUE_S:
                    continue
                now = free[pair] = begin + 8 * (len(packet) + 14) / rate
            count += 1
            heapq.heappush(waiting, (now + latency, count, packet))
            if waiting[0][0] <= now:
                break


if __name__ == "__main__":
    main()
