"""Times of transfers as arrays: how long the network's links and the devices' runtimes are busy.

Some arrays have an axis of choices. A choice is one way to split a layer over devices.
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
    """Costs of the devices' runtimes: arrays with one value for each device in platform order.

    Attributes:
        send: Seconds of a sender for each message.
        receive: Seconds of a receiver for each message.
        byte: Seconds of a sender, and also of a receiver, for each byte.
        calling: Seconds of a receiver to call the segment (piece of the model) that waited for messages.
        slice: Seconds of a receiver to prepare the joining of received pieces.
        copy: Seconds for each byte that a receiver copies to join pieces.
        coalesced_share: Fraction of `send` and `receive` that a message costs if it is sent together with others.
    """

    send: Floats
    receive: Floats
    byte: Floats
    calling: Floats
    slice: Floats
    copy: Floats
    coalesced_share: Floats

    @cached_property
    def coalesced(self) -> RuntimeArrays:
        """Costs of messages that are sent together with another message to the same receiver."""
        send, receive = self.send * self.coalesced_share, self.receive * self.coalesced_share
        return replace(self, send=send, receive=receive, calling=0 * self.calling)

    def handling_seconds(self, sent: Ints | Floats, needed: Ints | Floats | None = None) -> Floats:
        """Return the seconds that the runtimes spend on messages: busiest sender plus busiest receiver, shape (…).

        Args:
            sent: Bytes from sender to receiver, shape (…, senders, receivers).
            needed: Bytes that each receiver joins from received pieces, shape (…, receivers); None if nothing is
                joined.
        """
        messages = sent > 0
        sending = messages.sum(axis=-1) * self.send + sent.sum(axis=-1) * self.byte
        receiving = self._receiving_seconds(sent.sum(axis=-2), messages.sum(axis=-2), needed)
        return np.asarray(sending.max(axis=-1) + receiving.max(axis=-1))

    def gathering_seconds(self, missing: Ints, holders: Ints, largest: Ints, needed: Ints) -> Floats:
        """Return a lower bound on the seconds that runtimes spend on a transfer, if its senders are unknown.

        A choice is one way to split a layer. The result has the shape (producer choices, consumer choices).

        Args:
            missing: Bytes that each receiver lacks, shape (producer choices, consumer choices, receivers).
            holders: Number of devices that may send elements of the tensor, for each producer choice.
            largest: Most bytes that one device may send, for each producer choice.
            needed: Bytes that each receiver joins from pieces, shape (consumer choices, receivers).
        """
        messages = -(-missing // np.maximum(largest, 1)[:, None, None])
        sending = messages.sum(axis=-1) * self.send.max() + missing.sum(axis=-1) * self.byte.max()
        receiving = self._receiving_seconds(missing, messages, needed).max(axis=-1)
        return np.asarray(sending / np.maximum(holders, 1)[:, None] + receiving)

    def _receiving_seconds(self, received: Ints | Floats, messages: Ints, needed: Ints | Floats | None) -> Floats:
        seconds = messages * self.receive + received * self.byte + (messages > 0) * self.calling
        if needed is None or not (self.copy.any() or self.slice.any()):
            return seconds
        joins = (messages > 1) | ((received > 0) & (received < needed))
        return seconds + joins * (self.slice + needed * self.copy)


@dataclass(frozen=True, eq=False)
class LinkLoads:
    """The links of the network, and for how many seconds bytes and messages keep each link busy.

    A shared medium or a gateway is one link. A switch has two links for each host, one in each direction. Pairs of
    devices have the index sender · number of devices + receiver.

    Attributes:
        byte_seconds: Seconds for each byte, shape (pairs, links); 0 within a host.
        message_seconds: Seconds for each message, shape (pairs, links); 0 within a host.
        pair_latency: Latency in seconds of each pair, including the latency of the receiver's runtime.
        is_uniform: True if there is one link on which every byte costs the same, so that the senders do not matter.
        runtime: Costs of the runtimes; None if they are free.
    """

    byte_seconds: Floats
    message_seconds: Floats
    pair_latency: Floats
    is_uniform: bool
    runtime: RuntimeArrays | None = None

    def busy_seconds(self, sent: Ints | Floats) -> Floats:
        """Return the seconds for which sent bytes keep each link busy, shape (…, links).

        `sent` are the bytes that each device sends to each other device, shape (…, senders, receivers).
        """
        flat = sent.reshape(*sent.shape[:-2], -1)
        busy: Floats = flat.astype(np.float64, copy=False) @ self.byte_seconds
        return busy + (flat > 0).astype(np.float64) @ self.message_seconds if self.has_message_cost else busy

    def transfer_seconds(self, sent: Ints | Floats, needed: Ints | Floats | None = None) -> Floats:
        """Return the seconds until all sent bytes have been received, shape (…).

        Args:
            sent: Bytes from sender to receiver, shape (…, senders, receivers).
            needed: Bytes that each receiver joins from received pieces, shape (…, receivers); None if nothing is
                joined.
        """
        seconds = self._network_seconds(sent)
        return seconds if self.runtime is None else seconds + self.runtime.handling_seconds(sent, needed)

    def _network_seconds(self, sent: Ints | Floats) -> Floats:
        if self.is_uniform:
            return self.uniform_seconds(sent.sum(axis=(-2, -1)))
        busy: Floats = self.busy_seconds(sent).max(axis=-1)
        if self.common_latency is not None:
            return busy + self.common_latency * (busy > 0) if self.common_latency else busy
        latency = self.pair_latency * (sent.reshape(*sent.shape[:-2], -1) > 0)
        return np.asarray(busy + latency.max(axis=-1))

    def uniform_seconds(self, nbytes: Ints | Floats) -> Floats:
        """Return the seconds until `nbytes` bytes have arrived, if `is_uniform` is True."""
        return np.asarray(nbytes * self.byte_seconds.max() + self.pair_latency.max(initial=0.0) * (nbytes > 0))

    @cached_property
    def coalesced(self) -> LinkLoads:
        """The costs of messages that are sent together with others: no latency, and lower runtime costs."""
        if self.runtime is None:
            return self
        return replace(self, pair_latency=0 * self.pair_latency, runtime=self.runtime.coalesced)

    @cached_property
    def has_message_cost(self) -> bool:
        return bool(self.message_seconds.any())

    @cached_property
    def common_latency(self) -> float | None:
        """The latency in seconds between devices on different hosts.

        None if it is not the same for all, or if there is also a latency within a host.
        """
        is_linked = self.byte_seconds.any(axis=1)
        latencies = set(self.pair_latency[is_linked].tolist())
        return latencies.pop() if len(latencies) == 1 and not self.pair_latency[~is_linked].any() else None


def build_link_loads(problem: Problem) -> LinkLoads:
    """Return how long bytes and messages keep the network's links and the devices' runtimes busy."""
    platform = problem.platform
    devices = platform.devices
    hosts = {host.name: i for i, host in enumerate(platform.hosts)}
    switch = platform.network.kind == "switch"
    link_count = 2 * len(hosts) if switch else 1
    # For each pair (sender, receiver) and each link: 1 if the pair sends over the link, else 0.
    uses_link = np.zeros((len(devices) ** 2, link_count))
    for pair, (sender, receiver) in enumerate((a, b) for a in devices for b in devices):
        if sender.host != receiver.host:
            uses_link[pair, (2 * hosts[sender.host], 2 * hosts[receiver.host] + 1) if switch else 0] = 1.0
    byte_s, message_s, latency = pair_times(problem)
    seconds, message = uses_link * byte_s[:, None], uses_link * message_s[:, None]
    is_other_device = ~np.eye(len(devices), dtype=bool).ravel()
    is_single_rate = link_count == 1 and not message.any() and len(set(seconds[is_other_device, 0])) <= 1
    uniform = bool(is_single_rate and len(set(latency[is_other_device])) <= 1)
    runtime = build_runtime_arrays(problem) if problem.runtime_costs else None
    return LinkLoads(seconds, message, latency, uniform, runtime)


def build_runtime_arrays(problem: Problem) -> RuntimeArrays:
    names = ("send", "receive", "per_byte", "segment_call_s", "per_copy", "per_copied_byte", "coalesced_share")
    return RuntimeArrays(*(_runtime_cost_array(problem, name) for name in names))


def pair_times(problem: Problem) -> tuple[Floats, Floats, Floats]:
    """Return the seconds per byte, the seconds per message and the latency in seconds of each pair of devices.

    The index of a pair is sender · number of devices + receiver. Message headers and the latency of the receiver's
    runtime are included.
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
