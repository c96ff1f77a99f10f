"""Changes of the speed of devices and links during a stream, such as a board that is throttled because it is hot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dicompiler.base.errors import DicompilerError, UsageError, did_you_mean
from dicompiler.base.units import parse_period
from dicompiler.ir.platform import Platform

Speeds = Sequence[tuple[float, float]]
"""(time in seconds, speed from this time on) of each change of a device or link, in ascending order of time.

A speed is a multiple of the device's or link's normal speed.
"""
LINK_PREFIX = "link:"
ALL_LINKS = "*"


@dataclass(frozen=True)
class SpeedChange:
    """A period in which a device computes at another speed, or in which a link has another bandwidth.

    Attributes:
        name: Name of the device, or `link:HOST` for the link of a host, or `link:*` for all links.
        speed: The speed as a multiple of the normal speed of the device or link.
        start_s: Seconds from the start of the stream to the change.
        end_s: Seconds from the start of the stream to the recovery; infinite without recovery.
    """

    name: str
    speed: float
    start_s: float
    end_s: float = float("inf")

    @property
    def link_host(self) -> str:
        """Name of the host if its link changes, or `*` for all links; empty if a device changes."""
        return self.name.removeprefix(LINK_PREFIX) if self.name.startswith(LINK_PREFIX) else ""

    @staticmethod
    def parse(text: str) -> SpeedChange:
        """Return the change that a text describes: `pi03=0.4@20s` or, with a recovery, `link:pi03=0.4@20s-60s`.

        Raises:
            UsageError: The text has another form.
        """
        name, _, rest = text.partition("=")
        speed, _, period_text = rest.partition("@")
        try:
            period = parse_period(period_text, f"slow {text!r}")
            change = None if period is None else SpeedChange(name, float(speed), *period)
        except DicompilerError as error:
            raise UsageError(str(error)) from None
        except ValueError:
            change = None
        if not (change and name and 0 < change.speed < float("inf") and change.start_s < change.end_s):
            raise UsageError(
                f"slow: {text!r} is not of the form NAME=SPEED@START or NAME=SPEED@START-END, such as "
                "'pi03=0.4@20s-60s' or 'link:pi03=0.3@20s', with a speed above 0"
            )
        return change


def list_speeds(changes: Sequence[SpeedChange], devices: Sequence[str], start_s: float = 0.0) -> Mapping[str, Speeds]:
    """Return the speed over time of each device that changes its speed. Changes of links are ignored.

    `start_s`, the start of the stream, is added to the times. If changes of a device overlap, the one that began last
    applies.

    Returns:
        By device name, the times of the changes, each with the new speed as a multiple of the device's normal speed.

    Raises:
        UsageError: A change names an unknown device.
    """
    changes = [change for change in changes if not change.link_host]
    for change in changes:
        if change.name not in devices:
            raise UsageError(f"slow: there is no device {change.name!r}{did_you_mean(change.name, devices)}")
    return {
        name: _combine_changes([change for change in changes if change.name == name], start_s)
        for name in dict.fromkeys(change.name for change in changes)
    }


def list_host_speeds(changes: Sequence[SpeedChange], platform: Platform, start_s: float = 0.0) -> Mapping[str, Speeds]:
    """Return the bandwidth over time of each host's link, if it changes.

    `start_s`, the start of the stream, is added to the times.

    Returns:
        By host name (`*` for a network that all hosts share), the times of the changes, each with the new bandwidth as
        a multiple of the link's normal bandwidth.

    Raises:
        UsageError: A change names an unknown host, or one that has no link of its own.
    """
    is_switch, hosts = platform.network.kind == "switch", [host.name for host in platform.hosts]
    changes = [change for change in changes if change.link_host]
    for host in (change.link_host for change in changes):
        if host != ALL_LINKS and host not in hosts:
            raise UsageError(f"slow: there is no host {host!r}{did_you_mean(host, hosts)}")
        if host != ALL_LINKS and not is_switch:
            raise UsageError(f"slow: all hosts share the {platform.network.kind} network: use link:* instead")
    affected = {
        name: [change for change in changes if change.link_host in (name, ALL_LINKS)]
        for name in (hosts if is_switch else (ALL_LINKS,))
    }
    return {name: _combine_changes(found, start_s) for name, found in affected.items() if found}


def list_link_speeds(changes: Sequence[SpeedChange], platform: Platform, start_s: float = 0.0) -> Mapping[str, Speeds]:
    """Return the bandwidth over time of each link that changes it, by the link's name in `Platform.occupied_links`.

    Arguments and errors are those of `list_host_speeds`.
    """
    return {
        link: speeds
        for host, speeds in list_host_speeds(changes, platform, start_s).items()
        for link in platform.host_links(host) or (platform.shared_link,)
    }


def _combine_changes(changes: Sequence[SpeedChange], start_s: float) -> Speeds:
    times = {time_s for change in changes for time_s in (change.start_s, change.end_s) if time_s < float("inf")}
    speeds = []
    for time_s in sorted(times):
        current = [change for change in changes if change.start_s <= time_s < change.end_s]
        speed = max(current, key=lambda change: change.start_s).speed if current else 1.0
        speeds.append((start_s + time_s, speed))
    return speeds


def end_of_computing(start_s: float, seconds: float, speeds: Speeds) -> float:
    """Return the time at which a computation ends on a device that changes its speed.

    Args:
        start_s: Time at which the computation starts.
        seconds: Duration of the computation at the device's normal speed.
        speeds: Times at which the device's speed changes, each with the new speed as a multiple of its normal speed.
    """
    now, speed = start_s, 1.0
    for time_s, next_speed in speeds:
        if time_s > now:
            if now + seconds / speed <= time_s:
                break
            seconds -= (time_s - now) * speed
            now = time_s
        speed = next_speed
    return now + seconds / speed


def mean_periods(finished_s: Sequence[float], interval_s: float) -> list[tuple[float, int, float]]:
    """Return the number of frames that finish in each interval of a stream, and the mean time between them.

    `finished_s` are the times of the frames in ascending order, and `interval_s` is the length of an interval.

    Returns:
        For each interval with frames: its start in seconds, the number of frames, and the mean seconds between two of
        them (0 if there was only one).
    """
    intervals: dict[int, list[float]] = {}
    for seconds in finished_s:
        intervals.setdefault(int(seconds // interval_s), []).append(seconds)
    return [
        (i * interval_s, len(found), (found[-1] - found[0]) / (len(found) - 1) if len(found) > 1 else 0.0)
        for i, found in sorted(intervals.items())
    ]
