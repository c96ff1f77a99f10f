"""The network as lines that carry bytes, and the runtimes at their ends, for models that count time in arrays.

Problem → Lines;   Lines + bytes from device to device → seconds until all of it has arrived and is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dicompiler.plugin_api import Problem
from dicompiler.plugin_api.costs import FREE_RUNTIME
from dicompiler_strategies.tables.choice_footprints import Floats, Ints


@dataclass(frozen=True, eq=False)
class RuntimeArrays:
    """What the devices' runtimes cost, each (devices,) in platform order, see `RuntimeCosts`."""

    send: Floats
    receive: Floats
    byte: Floats
    calling: Floats
    slice: Floats
    copy: Floats
    joined: Floats

    @cached_property
    def coalesced(self) -> RuntimeArrays:
        """Of messages that leave together with others for the same devices, for whom the receiver is called anyway."""
        return replace(self, send=self.send * self.joined, receive=self.receive * self.joined, calling=0 * self.calling)

    def handling_seconds(self, sent: Ints | Floats, needed: Ints | Floats | None = None) -> Floats:
        """Bytes (…, senders, receivers) → seconds (…) of the busiest sender, then of the busiest receiver, which calls
        what waited for them. needed: bytes (…, receivers) that it joins them to (None: nothing to join)."""
        messages = sent > 0
        sending = messages.sum(axis=-1) * self.send + sent.sum(axis=-1) * self.byte
        taken: Floats = self._receiving_seconds(sent.sum(axis=-2), messages.sum(axis=-2), needed).max(axis=-1)
        seconds: Floats = sending.max(axis=-1) + taken
        return seconds

    def gathering_seconds(self, missing: Ints, holders: Ints, largest: Ints, needed: Ints) -> Floats:
        """The same where it is not known who sends: bytes (P, C, receivers) that each lacks. holders: how many devices
        have a share (P,), and the bytes of the largest one (P,): of so few as can be comes what is missing."""
        messages = -(-missing // np.maximum(largest, 1)[:, None, None])
        senders = np.maximum(holders, 1)[:, None]
        sending = messages.sum(axis=-1) * self.send.max() + missing.sum(axis=-1) * self.byte.max()
        taken: Floats = self._receiving_seconds(missing, messages, needed).max(axis=-1)
        seconds: Floats = sending / senders + taken
        return seconds

    def _receiving_seconds(self, missing: Ints | Floats, messages: Ints, needed: Ints | Floats | None) -> Floats:
        """Seconds (…, receivers) of receivers."""
        taken = messages * self.receive + missing * self.byte + (messages > 0) * self.calling
        if needed is None or not (self.copy.any() or self.slice.any()):
            return taken
        joins = (messages > 1) | ((missing > 0) & (missing < needed))
        return taken + joins * (self.slice + needed * self.copy)


@dataclass(frozen=True, eq=False)
class LinkLoads:
    """The network as lines that carry bytes: one on a shared medium or a gateway, two for each host on a switch.

    seconds: (sender · receiver pairs, lines) for each byte; message: the same for each transfer; latency: (pairs,).
    Between devices of one host all are 0, but for the latency of the receiver's runtime. uniform: whether the lines are
    one and every byte costs the same on it, so that senders do not matter. runtime: None where runtimes cost nothing.
    """

    byte_seconds: Floats
    message_seconds: Floats
    pair_latency: Floats
    is_uniform: bool
    runtime: RuntimeArrays | None = None

    def busy_seconds(self, sent: Ints | Floats) -> Floats:
        """Bytes (…, senders, receivers) → seconds (…, lines) that each line is busy."""
        flat = sent.reshape(*sent.shape[:-2], -1)
        busy: Floats = flat.astype(np.float64, copy=False) @ self.byte_seconds
        return busy + (flat > 0).astype(np.float64) @ self.message_seconds if self.has_message_cost else busy

    def transfer_seconds(self, sent: Ints | Floats, needed: Ints | Floats | None = None) -> Floats:
        """Bytes (…, senders, receivers) → seconds (…) until all of it has arrived and is taken; the latency is waited
        for once. needed: see `Runtimes.handled`."""
        carried = self._network_seconds(sent)
        return carried if self.runtime is None else carried + self.runtime.handling_seconds(sent, needed)

    def _network_seconds(self, sent: Ints | Floats) -> Floats:
        if self.is_uniform:
            return self.uniform_seconds(sent.sum(axis=(-2, -1)))
        busy: Floats = self.busy_seconds(sent).max(axis=-1)
        if self.common_latency is not None:
            return busy + self.common_latency * (busy > 0) if self.common_latency else busy
        waited: Floats = (self.pair_latency * (sent.reshape(*sent.shape[:-2], -1) > 0)).max(axis=-1)
        return busy + waited

    def uniform_seconds(self, count: Ints | Floats) -> Floats:
        """Seconds until so many bytes have arrived, whoever sends them, where lines are uniform."""
        rate, latency = self._rate_and_latency
        return count * rate + latency * (count > 0)

    @cached_property
    def coalesced(self) -> LinkLoads:
        """Of messages that leave together with others for the same devices: what comes once has come with these."""
        if self.runtime is None:
            return self
        return replace(self, pair_latency=0 * self.pair_latency, runtime=self.runtime.coalesced)

    @cached_property
    def _rate_and_latency(self) -> tuple[float, float]:
        return self.byte_seconds.max(), self.pair_latency.max(initial=0.0)

    @cached_property
    def has_message_cost(self) -> bool:
        """Whether a transfer takes time beside that of its bytes."""
        return bool(self.message_seconds.any())

    @cached_property
    def common_latency(self) -> float | None:
        """The latency where all joined pairs have the same, so that it does not matter who sends, and those of one host
        none; else None."""
        joined = self.byte_seconds.any(axis=1)
        latencies = set(self.pair_latency[joined].tolist())
        return latencies.pop() if len(latencies) == 1 and not self.pair_latency[~joined].any() else None


def build_link_loads(problem: Problem) -> LinkLoads:
    """The lines of the problem's network, with what its runtimes cost."""
    platform = problem.platform
    devices = platform.devices
    hosts = {host.name: i for i, host in enumerate(platform.hosts)}
    switch = platform.network.kind == "switch"
    count = 2 * len(hosts) if switch else 1
    taken = np.zeros((len(devices) ** 2, count))  # 1 where a pair takes a line
    for pair, (sender, receiver) in enumerate((a, b) for a in devices for b in devices):
        if sender.host != receiver.host:
            taken[pair, (2 * hosts[sender.host], 2 * hosts[receiver.host] + 1) if switch else 0] = 1.0
    byte, once, latency = pair_times(problem)
    seconds, message = taken * byte[:, None], taken * once[:, None]
    apart = ~np.eye(len(devices), dtype=bool).ravel()
    same = count == 1 and not message.any() and len(set(seconds[apart, 0])) <= 1
    uniform = bool(same and len(set(latency[apart])) <= 1)
    return LinkLoads(
        seconds, message, latency, uniform, build_runtime_arrays(problem) if problem.runtime_costs else None
    )


def build_runtime_arrays(problem: Problem) -> RuntimeArrays:
    """What the problem's runtimes cost."""
    return RuntimeArrays(
        *(
            _runtime_cost_array(problem, name)
            for name in (
                "send",
                "receive",
                "per_byte",
                "segment_call_s",
                "per_copy",
                "per_copied_byte",
                "coalesced_share",
            )
        )
    )


def pair_times(problem: Problem) -> tuple[Floats, Floats, Floats]:
    """Seconds (sender · receiver pairs,) on the lines: that a byte takes, with what travels beside it; that a message
    takes beside its bytes; of latency, with that of the receiver's runtime, all there is on one host."""
    byte, once, latency = problem.platform.transfer_times.reshape(3, -1)
    count = len(problem.platform.devices)
    headers, gap = (np.repeat(_runtime_cost_array(problem, name), count) for name in ("header_share", "gap"))
    woken = (_runtime_cost_array(problem, "latency") * ~np.eye(count, dtype=bool)).ravel()
    return byte * (1 + headers), np.where(byte > 0, once + gap, 0.0), np.where(byte > 0, latency, 0.0) + woken


def _runtime_cost_array(problem: Problem, name: str) -> Floats:
    """(devices,): one of the costs."""
    return np.array(
        [getattr(problem.runtime_costs.get(device.name, FREE_RUNTIME), name) for device in problem.platform.devices]
    )
