"""What a target's runtime takes of devices and lines beside the engine, in the letters of LogGP (Alexandrov 1995).

A message costs its sender o and each of its bytes a share of G, holds its line for g beside its bytes, comes L later,
and costs its receiver o again. The line's part of G and of L are the network's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from dicompiler.ir.devices import Device, Line

REFERENCE_RATE = 128e9
"""FLOP/s that a core of the host sustained (ResNet-50 in onnxruntime) on which the targets' costs were measured."""


@dataclass(frozen=True)
class RuntimeCosts:
    """Seconds, on one device. latency: from when a message has come until the device, which waits for it, is awake (L);
    send, receive: of its processor for a message (o of both ends); byte: for each byte of it, at each end; gap: for
    which a message that it sends holds its line beside its bytes (g). call: of a segment's call beside its computing;
    cold: of that where the device has computed others since: its code and what it reads have left the caches;
    slice, copy: of a slice, a join or a cast for the wire, and for each byte that it copies; end: for each byte of the
    network's inputs and outputs between the device and whoever gives the frames, at both ends together; tls: for each
    byte at each end, beside `byte`, in TLS. headers: what travels beside a message's bytes, as a share of them; no
    time. joined: the share of `send` and of `receive` that a message takes which leaves together with an earlier one
    for the same device. in_order: messages leave in the order in which they were ready, not the oldest frame's first.
    ValueError for one below 0."""

    latency: float = 0.0
    send: float = 0.0
    receive: float = 0.0
    byte: float = 0.0
    gap: float = 0.0
    call: float = 0.0
    cold: float = 0.0
    slice: float = 0.0
    copy: float = 0.0
    end: float = 0.0
    tls: float = 0.0
    headers: float = 0.0
    joined: float = 1.0
    in_order: bool = False

    def __post_init__(self) -> None:
        for entry in fields(self):
            if not 0 <= getattr(self, entry.name) < float("inf"):
                raise ValueError(f"{entry.name} must be at least 0, not {getattr(self, entry.name)!r}")

    def sending(self, nbytes: int, joined: bool = False) -> float:
        """Seconds of the sender's processor for a message; joined: it leaves together with an earlier one."""
        return self.send * (self.joined if joined else 1.0) + nbytes * self.byte

    def receiving(self, nbytes: int, joined: bool = False) -> float:
        """Seconds of the receiver's processor for a message; joined: it left together with an earlier one."""
        return self.receive * (self.joined if joined else 1.0) + nbytes * self.byte

    def copying(self, times: int, nbytes: int) -> float:
        """Seconds of so many slices, joins and casts, which copy so many bytes in all."""
        return times * self.slice + nbytes * self.copy

    def on_line(self, line: Line, nbytes: int, message: float) -> float:
        """Seconds for which a message that the device sends occupies a line, where each takes `message` beside."""
        return line.seconds(nbytes * (1 + self.headers), message + self.gap)

    @property
    def calling(self) -> float:
        """Seconds of a segment's call, beside its computing, where the device computes several."""
        return self.calls(2) / 2

    def calls(self, segments: int) -> float:
        """Seconds that calls take beside computing on a device with so many segments: a single one is never cold."""
        return segments * (self.call + (self.cold if segments > 1 else 0.0))

    @property
    def secured(self) -> RuntimeCosts:
        """Those of the same device where messages are in TLS."""
        return replace(self, byte=self.byte + self.tls, end=self.end + 2 * self.tls, tls=0.0)

    def times(self, factor: float) -> RuntimeCosts:
        """Those of a device that takes `factor` times as long; nothing at all where that is 0."""
        if not factor:
            return replace(FREE, in_order=self.in_order)
        seconds = {entry.name: factor * getattr(self, entry.name) for entry in fields(self)}
        kept = {"headers": self.headers, "joined": self.joined, "in_order": self.in_order}
        return RuntimeCosts(**{**seconds, **kept})


FREE = RuntimeCosts()
"""Of a runtime that costs nothing, as the papers have it."""
NONE: Mapping[str, RuntimeCosts] = MappingProxyType({})
"""Device → costs, where no runtime is known."""


def scaled(stated: RuntimeCosts, device: Device) -> RuntimeCosts:
    """What a runtime costs on a device, by what it costs on the reference host. A slice is plain code of the engine's,
    for which nothing is awoken: see `slowness`. A byte that is copied is read and written, for which the memory's
    bandwidth is the limit where it is known."""
    slower = slowness(device)
    costs = replace(stated.times(slower), slice=stated.slice * slower**2)
    if not costs.copy or not device.memory_bandwidth:
        return costs
    return replace(costs, copy=max(costs.copy, 2 / device.memory_bandwidth))


def slowness(device: Device) -> float:
    """How many times as long as the reference host a device takes for what a runtime does: the fourth root of how many
    times slower its cores compute, and at least once as long: 2.5 times on a Raspberry Pi 4, 3.4 on a Pi 3.

    Between two facts (docs/prediction.md): plain code takes 6 times as long on a Pi 4 (Geekbench 5 of one core: about
    1 500 and 270 points), and what C++ over TCP is reported to take for an exchange there is no more than here, where
    waking a processor and calling the system go through a hypervisor. A profile that was made on the board is better.
    """
    cores = REFERENCE_RATE * device.cores / device.rate if device.computes else 1.0
    return float(max(1.0, cores**0.25))
