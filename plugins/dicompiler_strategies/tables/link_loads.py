"""Times of transfers as arrays: how long the network's links and the runtimes at their ends are busy.

Problem → LinkLoads
LinkLoads + bytes from device to device → seconds until everything has arrived
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
    """Costs of the devices' runtimes, each an array (devices,) in platform order; see `RuntimeCosts`.

    Attributes:
        send: Seconds of a sender for each message.
        receive: Seconds of a receiver for each message.
        byte: Seconds for each byte, at either end.
        calling: Seconds of a receiver to call the segment that waited for messages.
        slice: Seconds of a receiver to prepare the joining of pieces.
        copy: Seconds for each byte that a receiver copies to join pieces.
        joined: Share of a message's cost if it is coalesced with others.
    """

    send: Floats
    receive: Floats
    byte: Floats
    calling: Floats
    slice: Floats
    copy: Floats
    joined: Floats

    @cached_property
    def coalesced(self) -> RuntimeArrays:
        """Costs of messages that are coalesced with others for the same receiver, which is called anyway."""
        return replace(self, send=self.send * self.joined, receive=self.receive * self.joined, calling=0 * self.calling)

    def handling_seconds(self, sent: Ints | Floats, needed: Ints | Floats | None = None) -> Floats:
        """Return the seconds (…) of the busiest sender plus those of the busiest receiver.

        Args:
            sent: Bytes (…, senders, receivers).
            needed: Bytes (…, receivers) that the receiver joins the pieces to; None if nothing is joined.
        """
        messages = sent > 0
        sending = messages.sum(axis=-1) * self.send + sent.sum(axis=-1) * self.byte
        taken: Floats = self._receiving_seconds(sent.sum(axis=-2), messages.sum(axis=-2), needed).max(axis=-1)
        seconds: Floats = sending.max(axis=-1) + taken
        return seconds

    def gathering_seconds(self, missing: Ints, holders: Ints, largest: Ints, needed: Ints) -> Floats:
        """Return the handling seconds (P, C) if the senders are unknown; as few as possible are assumed.

        Args:
            missing: Bytes (P, C, receivers) that each receiver lacks, for P producer and C consumer choices.
            holders: Number (P,) of devices that hold a share.
            largest: Bytes (P,) of the largest share.
            needed: Bytes (C, receivers) that the receiver joins the pieces to.
        """
        messages = -(-missing // np.maximum(largest, 1)[:, None, None])
        senders = np.maximum(holders, 1)[:, None]
        sending = messages.sum(axis=-1) * self.send.max() + missing.sum(axis=-1) * self.byte.max()
        taken: Floats = self._receiving_seconds(missing, messages, needed).max(axis=-1)
        seconds: Floats = sending / senders + taken
        return seconds

    def _receiving_seconds(self, missing: Ints | Floats, messages: Ints, needed: Ints | Floats | None) -> Floats:
        taken = messages * self.receive + missing * self.byte + (messages > 0) * self.calling
        if needed is None or not (self.copy.any() or self.slice.any()):
            return taken
        joins = (messages > 1) | ((missing > 0) & (missing < needed))
        return taken + joins * (self.slice + needed * self.copy)


@dataclass(frozen=True, eq=False)
class LinkLoads:
    """The network as links that carry bytes.

    A shared medium or a gateway is one link; a switch has two links for each host.

    Attributes:
        byte_seconds: Seconds (device pairs, links) for each byte; pairs are numbered sender · devices + receiver. 0
            within a host.
        message_seconds: Seconds (device pairs, links) for each message; 0 within a host.
        pair_latency: Latency (device pairs,) in seconds, with that of the receiver's runtime.
        is_uniform: True if there is one link on which every byte costs the same, so that the senders do not matter.
        runtime: Costs of the runtimes; None if they cost nothing.
    """

    byte_seconds: Floats
    message_seconds: Floats
    pair_latency: Floats
    is_uniform: bool
    runtime: RuntimeArrays | None = None

    def busy_seconds(self, sent: Ints | Floats) -> Floats:
        """Return the seconds (…, links) that each link is busy with these bytes (…, senders, receivers)."""
        flat = sent.reshape(*sent.shape[:-2], -1)
        busy: Floats = flat.astype(np.float64, copy=False) @ self.byte_seconds
        return busy + (flat > 0).astype(np.float64) @ self.message_seconds if self.has_message_cost else busy

    def transfer_seconds(self, sent: Ints | Floats, needed: Ints | Floats | None = None) -> Floats:
        """Return the seconds (…) until all bytes (…, senders, receivers) have arrived and are received.

        The latency is counted once. For `needed` see `RuntimeArrays.handling_seconds`.
        """
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
        """Return the seconds until this many bytes have arrived on a uniform network, the sender them."""
        rate, latency = self._rate_and_latency
        return count * rate + latency * (count > 0)

    @cached_property
    def coalesced(self) -> LinkLoads:
        """The loads of messages that are coalesced with others: no latency, and cheaper handling."""
        if self.runtime is None:
            return self
        return replace(self, pair_latency=0 * self.pair_latency, runtime=self.runtime.coalesced)

    @cached_property
    def _rate_and_latency(self) -> tuple[float, float]:
        return self.byte_seconds.max(), self.pair_latency.max(initial=0.0)

    @cached_property
    def has_message_cost(self) -> bool:
        """True if a message takes time in addition to its bytes."""
        return bool(self.message_seconds.any())

    @cached_property
    def common_latency(self) -> float | None:
        """The latency of all pairs on different hosts if it is equal, and 0 within hosts; otherwise None."""
        joined = self.byte_seconds.any(axis=1)
        latencies = set(self.pair_latency[joined].tolist())
        return latencies.pop() if len(latencies) == 1 and not self.pair_latency[~joined].any() else None


def build_link_loads(problem: Problem) -> LinkLoads:
    """Return the links of the problem's network with the costs of its runtimes."""
    platform = problem.platform
    devices = platform.devices
    hosts = {host.name: i for i, host in enumerate(platform.hosts)}
    switch = platform.network.kind == "switch"
    link_count = 2 * len(hosts) if switch else 1
    uses_link = np.zeros((len(devices) ** 2, link_count))  # 1 if the pair uses the link.
    for pair, (sender, receiver) in enumerate((a, b) for a in devices for b in devices):
        if sender.host != receiver.host:
            uses_link[pair, (2 * hosts[sender.host], 2 * hosts[receiver.host] + 1) if switch else 0] = 1.0
    byte_s, message_s, latency = pair_times(problem)
    seconds, message = uses_link * byte_s[:, None], uses_link * message_s[:, None]
    is_other_device = ~np.eye(len(devices), dtype=bool).ravel()
    is_single_rate = link_count == 1 and not message.any() and len(set(seconds[is_other_device, 0])) <= 1
    uniform = bool(is_single_rate and len(set(latency[is_other_device])) <= 1)
    return LinkLoads(
        seconds, message, latency, uniform, build_runtime_arrays(problem) if problem.runtime_costs else None
    )


def build_runtime_arrays(problem: Problem) -> RuntimeArrays:
    """Return the runtime costs of the problem's devices."""
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
    """Return seconds per byte, seconds per message, and latency of each device pair.

    Pairs are numbered sender · devices + receiver. Bytes include the message headers. The latency includes that of the
    receiver's runtime, which is all there is within a host.
    """
    byte_s, message_s, latency = problem.platform.transfer_times.reshape(3, -1)
    count = len(problem.platform.devices)
    headers, gap = (np.repeat(_runtime_cost_array(problem, name), count) for name in ("header_share", "gap"))
    runtime_latency = (_runtime_cost_array(problem, "latency") * ~np.eye(count, dtype=bool)).ravel()
    return (
        byte_s * (1 + headers),
        np.where(byte_s > 0, message_s + gap, 0.0),
        np.where(byte_s > 0, latency, 0.0) + runtime_latency,
    )


def _runtime_cost_array(problem: Problem, name: str) -> Floats:
    return np.array(
        [getattr(problem.runtime_costs.get(device.name, FREE_RUNTIME), name) for device in problem.platform.devices]
    )
