"""Suspicions that a device has failed, and the choice of the devices without which the run continues.

The two devices at the ends of a cut link report each other. Only reports of several devices show which device is cut
off. The end of a device's process with an error is a suspicion too. The device's error message may still be in transit,
and it may name another device as the cause.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from dicompiler_targets.sockets.failures import CAUSE_WAIT_S, DeviceFailure

LINK_WAIT_S, LINK_WAIT_HEARTBEATS, MAX_LINK_WAIT_S = 0.15, 1.25, 10.0
"""Time to wait for further reports after the first report about a link.

The time is LINK_WAIT_S plus LINK_WAIT_HEARTBEATS heartbeat intervals, but at most MAX_LINK_WAIT_S. The two ends of a
cut link notice the cut at different times, because their last heartbeats arrived at different times.
"""
MAX_CANDIDATES, MAX_LEFT_OUT = 12, 3
"""Only the first MAX_CANDIDATES suspects may be left out, and at most MAX_LEFT_OUT of them at a time."""


class Suspicions:
    """The unresolved suspicions of a run: reports that a device may have failed.

    `ClusterState` adds suspicions. When they are due, `ClusterState` continues the run without some of the suspected
    devices.
    """

    def __init__(self, heartbeat_s: float, peers: Mapping[str, Collection[str]]) -> None:
        """Create an empty collection. `peers` has the devices with which each device exchanges tensors."""
        self._peers = peers
        self._link_wait_s = min(LINK_WAIT_S + LINK_WAIT_HEARTBEATS * heartbeat_s, MAX_LINK_WAIT_S)
        self._exits: dict[str, tuple[DeviceFailure, float]] = {}
        self._links: dict[tuple[str, str], DeviceFailure] = {}
        self._links_due_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._exits or self._links)

    def add(self, failure: DeviceFailure) -> None:
        """Add a suspicion. Only the first report of a device about a certain other device counts."""
        if failure.device == failure.reporter:
            self._exits.setdefault(failure.device, (failure, time.monotonic() + CAUSE_WAIT_S))
            return
        if not self._links:
            self._links_due_at = time.monotonic() + self._link_wait_s
        self._links.setdefault((failure.reporter, failure.device), failure)

    def forget(self, name: str) -> None:
        """Remove all suspicions that the device has reported, and all about the device."""
        self._exits.pop(name, None)
        self._links = {pair: failure for pair, failure in self._links.items() if name not in pair}

    def find_due(self, up: Collection[str]) -> list[DeviceFailure]:
        """Return the suspicions that must be resolved now, in the order of their arrival.

        `up` has the names of the devices that are up. If the end of a process was added more than CAUSE_WAIT_S ago,
        only such suspicions are returned. Otherwise all reports about links are returned in two cases:

        - The first of them is old enough: LINK_WAIT_S plus LINK_WAIT_HEARTBEATS heartbeat intervals have passed.
        - At least two devices have reported the same device, and they are all of its peers that are up.
        """
        now = time.monotonic()
        if due_exits := [failure for failure, due_at in self._exits.values() if now > due_at]:
            return due_exits
        is_due = now > self._links_due_at or any(self._is_cut_off(name, up) for name in up)
        return list(self._links.values()) if is_due else []

    def _is_cut_off(self, name: str, up: Collection[str]) -> bool:
        reporters = {reporter for reporter, device in self._links if device == name}
        return len(reporters) > 1 and reporters.issuperset(set(self._peers[name]) & set(up))


def choose_left_out(
    suspicions: Sequence[DeviceFailure], is_covered: Callable[[Collection[str]], bool]
) -> tuple[str, ...]:
    """Return the devices without which the run continues, so that all remaining devices reach each other.

    The result has as few devices as possible, and preferably those that are cut off from the most others. `is_covered`
    returns True if a failure plan covers the failure of the given devices. Return () if no devices that a failure plan
    covers are sufficient.
    """
    links = {frozenset((suspicion.device, suspicion.reporter)) for suspicion in suspicions}
    candidates = rank_suspects(suspicions)[:MAX_CANDIDATES]
    for count in range(1, MAX_LEFT_OUT + 1):
        for chosen in itertools.combinations(candidates, count):
            if all(link.intersection(chosen) for link in links) and is_covered(chosen):
                return chosen
    return ()


def rank_suspects(suspicions: Sequence[DeviceFailure]) -> list[str]:
    """Return all devices in the suspicions; the device that is cut off from the most others is first.

    Among equal devices, the one with the most reports about it comes first, and then the one that was named first.
    """
    links = {frozenset((suspicion.device, suspicion.reporter)) for suspicion in suspicions}
    link_counts = Counter(name for link in links for name in link)
    report_counts = Counter(suspicion.device for suspicion in suspicions)
    names = dict.fromkeys(name for suspicion in suspicions for name in (suspicion.device, suspicion.reporter))
    return sorted(names, key=lambda name: (-link_counts[name], -report_counts[name]))
