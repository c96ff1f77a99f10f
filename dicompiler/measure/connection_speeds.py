"""Speeds of connections between devices: their prediction, and bandwidths of hosts that follow from measured speeds.

workload + platform ──predict_byte_seconds──► seconds per byte of each connection
measured seconds per byte ──fit_bandwidths──► platform with other bandwidths of hosts
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dicompiler.cost.simulator import simulate
from dicompiler.cost.workload import Workload
from dicompiler.ir.cluster import Host
from dicompiler.ir.platform import Platform

ARROW = " → "
"""Separator of sender and receiver in the name of a connection (`pi01 → pi02`)."""
MIN_MESSAGE_BYTES = 16384
"""Connections with messages of fewer bytes on average are not compared, because little of their time is sending."""
MAX_SIMULATED_FRAMES = 32
MAX_CORRECTIONS = 5
MAX_TIME_ERROR = 0.1
"""Largest relative difference between measured and predicted seconds of a connection after the correction."""


def name_connection(sender: str, receiver: str) -> str:
    """Return the name of the connection from one device to another, such as `pi01 → pi02`."""
    return f"{sender}{ARROW}{receiver}"


def predict_byte_seconds(workload: Workload, platform: Platform, in_flight: int) -> dict[str, float]:
    """Return the predicted seconds per byte of each connection between hosts while it sends a message.

    Args:
        workload: The workload of one frame.
        platform: The platform, whose links send the messages.
        in_flight: Number of frames in flight. Their messages share the links.

    Returns:
        The mean over all bytes of a connection, by connection name. Connections with messages of fewer than
        `MIN_MESSAGE_BYTES` bytes on average are omitted.
    """
    replicas, names = workload.replicas, [device.device for device in workload.devices]
    rounds = math.ceil(min(2 * in_flight, MAX_SIMULATED_FRAMES) / len(replicas))
    seconds, nbytes, counts = Counter[str](), Counter[str](), Counter[str]()
    for span in simulate(workload, platform, rounds * len(replicas), in_flight).spans:
        if span.kind == "message":
            seconds[name_connection(span.device, span.peer)] += span.seconds  # type: ignore[assignment]
    for replica in replicas:
        for message in replica.messages:
            name = name_connection(names[message.sender], names[message.receiver])
            nbytes[name] += message.nbytes
            counts[name] += 1
    return {
        name: total / (rounds * nbytes[name])
        for name, total in seconds.items()
        if nbytes[name] >= MIN_MESSAGE_BYTES * counts[name]
    }


def fit_bandwidths(
    platform: Platform,
    stated: Platform,
    measured_s: Mapping[str, float],
    predict: Callable[[Platform], Mapping[str, float]],
) -> Platform:
    """Change bandwidths of hosts until the predicted seconds per byte equal the measured ones.

    If connections are slower than predicted, the bandwidths of a few hosts are lowered. Each slow connection begins or
    ends at one of these hosts. If all hosts share a medium or a gateway and all connections are slow, the bandwidth
    of the medium or gateway is lowered instead. Bandwidths that were lowered before are raised if their connections are
    faster than predicted, up to those of `stated`.

    Args:
        platform: The platform to correct.
        stated: The platform with the highest bandwidths that are allowed.
        measured_s: Measured seconds per byte by connection. Other keys are ignored.
        predict: Function that returns the predicted seconds per byte by connection for a platform.

    Returns:
        The corrected platform.
    """
    for _ in range(MAX_CORRECTIONS):
        predicted_s = predict(platform)
        ratios = {name: measured_s[name] / predicted_s[name] for name in predicted_s if name in measured_s}
        fit = _BandwidthFit(platform, stated, ratios)
        # Bandwidths are raised before others are lowered: a link that has become faster again takes bandwidth from
        # other connections, which may explain why these have become slower.
        corrected = fit.raise_bandwidths()
        if corrected == platform:
            corrected = fit.lower_bandwidths()
        if corrected == platform:
            break
        platform = corrected
    return platform


@dataclass(frozen=True)
class _BandwidthFit:
    """One step of `fit_bandwidths`, which corrects the bandwidths of hosts.

    Attributes:
        platform: The platform before the step.
        stated: The platform with the highest bandwidths that are allowed.
        ratios: Measured seconds per byte divided by the predicted ones, by connection name.
    """

    platform: Platform
    stated: Platform
    ratios: Mapping[str, float]

    def raise_bandwidths(self) -> Platform:
        """Raise bandwidths that were lowered before, if their connections are faster than predicted."""
        platform, stated = self.platform, self.stated
        if platform.network.bandwidth < stated.network.bandwidth and _is_faster(list(self.ratios.values())):
            return self._scale_network()
        hosts = [
            self._scale_host(host, found)
            if host.bandwidth != stated.host(host.name).bandwidth
            and _is_faster(found := [self.ratios[name] for name in self._connections(host)])
            else host
            for host in platform.hosts
        ]
        return replace(platform, hosts=tuple(hosts))

    def lower_bandwidths(self) -> Platform:
        """Lower the bandwidths of a few hosts that explain all connections that are slower than predicted."""
        slower = {name for name, ratio in self.ratios.items() if ratio > 1 + MAX_TIME_ERROR}
        if self.platform.network.kind != "switch" and slower and slower == self.ratios.keys():
            return self._scale_network()
        hosts = {host.name: host for host in self.platform.hosts}
        connections = {host.name: self._connections(host) for host in self.platform.hosts}
        while slower:
            # A slow host makes all of its connections slow. The most likely slow host therefore has many slow
            # connections that no host chosen before explains, and few connections that are not slow.
            name = max(hosts, key=lambda name: 2 * len(connections[name] & slower) - len(connections[name]))
            hosts[name] = self._scale_host(hosts[name], [self.ratios[found] for found in connections[name] & slower])
            slower -= connections[name]
        return replace(self.platform, hosts=tuple(hosts.values()))

    def _connections(self, host: Host) -> set[str]:
        host_of = self.platform.host_of
        return {name for name in self.ratios if host.name in (host_of[device] for device in name.split(ARROW))}

    def _scale_network(self) -> Platform:
        network, limit = self.platform.network, self.stated.network.bandwidth
        bandwidth = _correct_bandwidth(network.bandwidth, list(self.ratios.values()), limit)
        return replace(self.platform, network=replace(network, bandwidth=bandwidth))

    def _scale_host(self, host: Host, ratios: Sequence[float]) -> Host:
        own_limit = self.stated.host(host.name).bandwidth
        limit = own_limit or self.stated.network.bandwidth
        bandwidth = _correct_bandwidth(host.bandwidth or self.platform.network.bandwidth, ratios, limit)
        return replace(host, bandwidth=own_limit if bandwidth == limit else bandwidth)


def _is_faster(ratios: Sequence[float]) -> bool:
    return bool(ratios) and statistics.median(ratios) < 1 - MAX_TIME_ERROR / 2


def _correct_bandwidth(bandwidth: float, ratios: Sequence[float], limit: float) -> float:
    """Return a corrected bandwidth; `limit` if the result is near or above it.

    `ratios` are measured seconds divided by predicted seconds, one for each connection. If their median is above 1,
    the bandwidth is divided by the median. Otherwise it is raised: it is divided by the smallest ratio. If this is too
    high, the next step lowers it.
    """
    median = statistics.median(ratios)
    scaled = bandwidth / (median if median > 1 else min(ratios))
    return limit if scaled > (1 - MAX_TIME_ERROR) * limit else scaled
