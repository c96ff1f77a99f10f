"""What a target's runtime takes of devices and lines beside the engine, in the letters of LogGP (Alexandrov 1995).

A message costs its sender o and each of its bytes a share of G, holds its line for g beside its bytes, comes L later,
and costs its receiver o again. The line's part of G and of L are the network's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from dicompiler.ir.cluster import Device, TransferMedium

REFERENCE_FLOPS_PER_S = 128e9
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
    per_byte: float = 0.0
    gap: float = 0.0
    call: float = 0.0
    cold_call: float = 0.0
    per_copy: float = 0.0
    per_copied_byte: float = 0.0
    per_io_byte: float = 0.0
    per_tls_byte: float = 0.0
    header_share: float = 0.0
    coalesced_share: float = 1.0
    in_order: bool = False

    def __post_init__(self) -> None:
        for entry in fields(self):
            if not 0 <= getattr(self, entry.name) < float("inf"):
                raise ValueError(f"{entry.name} must be at least 0, not {getattr(self, entry.name)!r}")

    def send_seconds(self, nbytes: int, is_coalesced: bool = False) -> float:
        """Seconds of the sender's processor for a message; joined: it leaves together with an earlier one."""
        return self.send * (self.coalesced_share if is_coalesced else 1.0) + nbytes * self.per_byte

    def receive_seconds(self, nbytes: int, is_coalesced: bool = False) -> float:
        """Seconds of the receiver's processor for a message; joined: it left together with an earlier one."""
        return self.receive * (self.coalesced_share if is_coalesced else 1.0) + nbytes * self.per_byte

    def copy_seconds(self, times: int, nbytes: int) -> float:
        """Seconds of so many slices, joins and casts, which copy so many bytes in all."""
        return times * self.per_copy + nbytes * self.per_copied_byte

    def link_seconds(self, link: TransferMedium, nbytes: int, message_s: float) -> float:
        """Seconds for which a message that the device sends occupies a line, where each takes `message` beside."""
        return link.transfer_s(nbytes * (1 + self.header_share), message_s + self.gap)

    @property
    def segment_call_s(self) -> float:
        """Seconds of a segment's call, beside its computing, where the device computes several."""
        return self.call_seconds(2) / 2

    def call_seconds(self, segments: int) -> float:
        """Seconds that calls take beside computing on a device with so many segments: a single one is never cold."""
        return segments * (self.call + (self.cold_call if segments > 1 else 0.0))

    @property
    def with_tls(self) -> RuntimeCosts:
        """Those of the same device where messages are in TLS."""
        return replace(
            self,
            per_byte=self.per_byte + self.per_tls_byte,
            per_io_byte=self.per_io_byte + 2 * self.per_tls_byte,
            per_tls_byte=0.0,
        )

    def scaled_by(self, factor: float) -> RuntimeCosts:
        """Those of a device that takes `factor` times as long; nothing at all where that is 0."""
        if not factor:
            return replace(FREE_RUNTIME, in_order=self.in_order)
        seconds = {entry.name: factor * getattr(self, entry.name) for entry in fields(self)}
        kept = {"header_share": self.header_share, "coalesced_share": self.coalesced_share, "in_order": self.in_order}
        return RuntimeCosts(**{**seconds, **kept})


FREE_RUNTIME = RuntimeCosts()
"""Of a runtime that costs nothing, as the papers have it."""
NO_RUNTIMES: Mapping[str, RuntimeCosts] = MappingProxyType({})
"""Device → costs, where no runtime is known."""


def scale_to_device(stated: RuntimeCosts, device: Device) -> RuntimeCosts:
    """What a runtime costs on a device, by what it costs on the reference host. A slice is plain code of the engine's,
    for which nothing is awoken: see `slowness`. A byte that is copied is read and written, for which the memory's
    bandwidth is the limit where it is known."""
    slower = runtime_slowdown(device)
    costs = replace(stated.scaled_by(slower), per_copy=stated.per_copy * slower**2)
    if not costs.per_copied_byte or not device.memory_bandwidth:
        return costs
    return replace(costs, per_copied_byte=max(costs.per_copied_byte, 2 / device.memory_bandwidth))


def runtime_slowdown(device: Device) -> float:
    """How many times as long as the reference host a device takes for what a runtime does: the fourth root of how many
    times slower its cores compute, and at least once as long: 2.5 times on a Raspberry Pi 4, 3.4 on a Pi 3.

    Between two facts (docs/prediction.md): plain code takes 6 times as long on a Pi 4 (Geekbench 5 of one core: about
    1 500 and 270 points), and what C++ over TCP is reported to take for an exchange there is no more than here, where
    waking a processor and calling the system go through a hypervisor. A profile that was made on the board is better.
    """
    cores = REFERENCE_FLOPS_PER_S * device.cores / device.rate if device.can_compute else 1.0
    return float(max(1.0, cores**0.25))
