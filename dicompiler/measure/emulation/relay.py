"""Relay between the two routers of an emulated network: it delays packets, and limits the rate of pairs of hosts.

It is a process that replaces Linux's netem, which some kernels lack, and tbf, which cannot limit pairs of hosts. It
forwards about 500 Mbit/s at most.
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
import threading
import time
from collections.abc import Mapping, Sequence

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.platform import Platform

MAX_QUEUE_S = 0.05
"""Seconds that a packet may wait because of a rate limit. Packets that would wait longer are dropped."""
CLONE_NEWNET = 0x40000000
_TUN_REQUEST = (0x400454CA, 0x0001 | 0x1000)  # The Linux constants are TUNSETIFF, and IFF_TUN | IFF_NO_PI.

RelayRule = tuple[str, str, float, float | None]
"""IP addresses of sender and receiver, latency of packets in seconds, and rate in bit/s (None: no limit)."""


def make_relay_rules(platform: Platform, addresses: Mapping[str, str]) -> list[RelayRule]:
    """Return a rule with latency and rate limit for each pair of hosts; [] if all links are unlimited and immediate.

    Args:
        platform: The platform with the links.
        addresses: IP addresses by host name.
    """
    network, rules = platform.network, []
    for sender in platform.hosts:
        for receiver in platform.hosts:
            link = network.link(sender.name, receiver.name)
            if link is None:
                continue
            rate = link.bandwidth if network.links and network.kind == "switch" else None
            rules.append((addresses[sender.name], addresses[receiver.name], link.latency, rate))
    return rules if any(latency > 0 or rate is not None for _, _, latency, rate in rules) else []


def start_relay(rules: Sequence[RelayRule], uplink: str, downlink: str) -> subprocess.Popen[bytes]:
    """Start the relay process between two network namespaces, and pass it the rules.

    It creates a network device `medium` in each of the two namespaces.
    """
    variables = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    variables["PATH"] = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    command = [sys.executable, "-P", "-m", __name__, uplink, downlink]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=os.environ | variables)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(json.dumps(list(rules)).encode() + b"\n")
    process.stdin.flush()
    if not process.stdout.readline():
        lines = process.stderr.read().decode(errors="replace").strip().splitlines() or ["no error message"]
        process.wait()
        cause = f"links with latency or with rates of their own need /dev/net/tun ({lines[-1]})"
        raise DicompilerError(f"emulate: {cause}: load the kernel module 'tun'")
    return process


def main() -> None:
    """Forward packets from one network namespace to another until stdin is closed.

    The names of the namespaces are the command-line arguments. The first line of stdin has the rules as JSON.
    """
    uplink, downlink = sys.argv[1:]
    table: dict[bytes, tuple[float, float | None]] = {}
    for sender, receiver, latency, rate in json.loads(sys.stdin.readline()):
        table[socket.inet_aton(sender) + socket.inet_aton(receiver)] = latency, rate
    source, sink = _open_tun(uplink), _open_tun(downlink)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    print("ready", flush=True)
    forward_packets(source, sink, table)


def _end_with_stdin() -> None:
    # Stdin is closed when the process that has started the relay ends.
    while os.read(0, 4096):
        continue
    os._exit(1)


def enter_namespace(descriptor: int) -> None:
    """Move this thread to the network namespace of a file descriptor.

    Raises:
        OSError: This is not permitted.
    """
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _open_tun(namespace: str) -> int:
    """Create the network device `medium` in a namespace, and return its file descriptor."""
    with open(f"/run/netns/{namespace}") as file:
        enter_namespace(file.fileno())
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUN_REQUEST[0], struct.pack("16sH22x", b"medium", _TUN_REQUEST[1]))
    subprocess.run(["ip", "link", "set", "medium", "up", "txqueuelen", "5000"], check=True)
    return descriptor


def forward_packets(source: int, sink: int, table: Mapping[bytes, tuple[float, float | None]]) -> None:
    """Forward packets from the file descriptor `source` to the file descriptor `sink`, forever.

    Args:
        source: File descriptor of a tun device.
        sink: File descriptor of another tun device.
        table: Latency in seconds and rate in bit/s (None: unlimited), by the packed IP addresses of sender and
            receiver.
    """
    free_at: dict[bytes, float] = {}
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
                begin = max(now, free_at.get(pair, 0.0))
                if begin - now > MAX_QUEUE_S:
                    continue
                now = free_at[pair] = begin + 8 * (len(packet) + 14) / rate
            count += 1
            heapq.heappush(waiting, (now + latency, count, packet))
            if waiting[0][0] <= now:
                break


if __name__ == "__main__":
    main()
