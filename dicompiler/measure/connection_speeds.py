"""Speeds of connections between devices: their prediction, and bandwidths of hosts that explain measured speeds.

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
MIN_MESSAGE_S = 0.0005
"""Connections with shorter messages (seconds on average) are not compared, because other delays are as long."""
MAX_SIMULATED_FRAMES = 32
MAX_CORRECTIONS = 5
MAX_TIME_ERROR = 0.1
"""Largest relative difference between measured and predicted seconds of a connection after the correction."""


def name_connection(sender: str, receiver: str) -> str:
    return f"{sender}{ARROW}{receiver}"


def predict_byte_seconds(workload: Workload, platform: Platform, in_flight: int) -> dict[str, float]:
    """Return the predicted seconds per byte of each connection between hosts while it sends a message.

    Args:
        workload: The workload of one frame.
        platform: The platform with the links.
        in_flight: Number of frames in flight. Their messages share the links.

    Returns:
        The mean over all bytes, by connection name. Connections with short messages (MIN_MESSAGE_S) are omitted.
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
        if total >= MIN_MESSAGE_S * rounds * counts[name]
    }


def fit_bandwidths(
    platform: Platform,
    stated: Platform,
    measured_s: Mapping[str, float],
    predict: Callable[[Platform], Mapping[str, float]],
) -> Platform:
    """Change bandwidths of hosts, or of a medium that they share, until predicted seconds per byte equal measured ones.

    Bandwidths are lowered for a few hosts that explain all slow connections. They are raised again for fast
    connections.

    Args:
        platform: The platform to correct.
        stated: The platform with the largest allowed bandwidths.
        measured_s: Measured seconds per byte by connection name. Other keys are ignored.
        predict: Function that returns the predicted seconds per byte by connection name for a platform.
    """
    for _ in range(MAX_CORRECTIONS):
        predicted_s = predict(platform)
        ratios = {name: measured_s[name] / predicted_s[name] for name in predicted_s if name in measured_s}
        fit = _BandwidthFit(platform, stated, ratios)
        # Raising comes first, because a link that is fast again may be the reason why others, which share a medium with
        # it, have become slow.
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
        stated: The platform with the largest allowed bandwidths.
        ratios: Measured seconds per byte divided by the predicted ones, by connection name.
    """

    platform: Platform
    stated: Platform
    ratios: Mapping[str, float]

    def raise_bandwidths(self) -> Platform:
        """Raise bandwidths that earlier fits lowered, if their connections are faster than predicted."""
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
            # A slow host makes all of its connections slow. The most likely one has many slow connections that are not
            # yet explained, and few fast ones.
            possible = [name for name in hosts if connections[name] & slower]
            name = max(possible, key=lambda name: 2 * len(connections[name] & slower) - len(connections[name]))
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
    """Return a corrected bandwidth in bit/s; `limit` if the result is near or above it.

    Args:
        bandwidth: The bandwidth to correct.
        ratios: Measured seconds divided by predicted seconds, one for each connection.
        limit: The largest allowed bandwidth.
    """
    median = statistics.median(ratios)
    # The smallest ratio may raise the bandwidth too much. The next step then lowers it.
    scaled = bandwidth / (median if median > 1 else min(ratios))
    return limit if scaled > (1 - MAX_TIME_ERROR) * limit else scaled
