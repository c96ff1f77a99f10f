"""Small workloads with times that follow by hand on a link of 1 Mbit/s."""

from __future__ import annotations

from dataclasses import replace

from dicompiler.cost.workload import DeviceWork, Job, Message, Workload
from dicompiler.ir.cluster import Device, Host, Network, NetworkKind
from dicompiler.ir.platform import Platform

MEGABIT = 10**6 // 8  # Bytes that are sent in one second on a link of 1 Mbit/s.


def cluster(count: int, kind: NetworkKind = "switch", **network: float) -> Platform:
    """Return devices d0, d1, … on their own hosts, with 1 Mbit/s."""
    hosts = tuple(Host(f"d{i}", 2**30) for i in range(count))
    devices = tuple(Device(f"d{i}", f"d{i}", 1e9) for i in range(count))
    return Platform("test", hosts, devices, replace(Network(kind, 1e6), **network))  # type: ignore[arg-type]


def work(messages: list[tuple[int, int, float]], *devices: tuple[tuple[int, ...], list[Job]]) -> Workload:
    """Return a workload of messages (sender, receiver, seconds on a link of 1 Mbit/s)."""
    made = tuple(Message(a, b, round(s * MEGABIT), f"m{i}") for i, (a, b, s) in enumerate(messages))
    return Workload(tuple(DeviceWork(f"d{i}", f"d{i}", f, tuple(j)) for i, (f, j) in enumerate(devices)), made)


def job(seconds: float, needs: tuple[int, ...] = (), sends: tuple[int, ...] = (), outputs: int = 0) -> Job:
    """Return a job of this many seconds; needs and sends are indices of messages."""
    return Job("job", seconds, needs, sends, outputs)


def fan() -> Workload:
    """Return a workload in which d0 computes for 1 s, and sends for 2 s to each of d1 and d2.

    They compute for 3 s, and send for 2 s back to d0.
    """
    return work(
        [(0, 1, 2), (0, 2, 2), (1, 0, 2), (2, 0, 2)],
        ((), [job(1, sends=(0, 1)), job(1, needs=(2, 3), outputs=1)]),
        ((), [job(3, needs=(0,), sends=(2,))]),
        ((), [job(3, needs=(1,), sends=(3,))]),
    )
