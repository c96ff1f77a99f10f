"""Changes of the speed of boards during a stream, as a hot board computes more slowly for some time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dicompiler.base.errors import DicompilerError, UsageError, did_you_mean
from dicompiler.base.units import parse_period

Speeds = Sequence[tuple[float, float]]
"""Times in seconds, in ascending order, and the speed of a device from each time on, as a multiple of its own speed."""


@dataclass(frozen=True)
class SpeedChange:
    """A period in which a board computes with another speed.

    Attributes:
        device: Name of the device.
        speed: The speed as a multiple of the board's own speed.
        start_s: Seconds from the start of the stream to the change.
        end_s: Seconds from the start of the stream to the recovery; infinite without recovery.
    """

    device: str
    speed: float
    start_s: float
    end_s: float = float("inf")

    @staticmethod
    def parse(text: str) -> SpeedChange:
        """Return the change that a text describes: `pi03=0.4@20s` or, with a recovery, `pi03=0.4@20s-60s`.

        Raises:
            UsageError: The text has another form.
        """
        device, _, rest = text.partition("=")
        speed, _, period_text = rest.partition("@")
        try:
            period = parse_period(period_text, "slow")
            change = None if period is None else SpeedChange(device, float(speed), *period)
        except (ValueError, DicompilerError):
            change = None
        if not (change and device and 0 < change.speed < float("inf") and change.start_s < change.end_s):
            raise UsageError(
                f"slow: {text!r} is not of the form DEVICE=SPEED@START or DEVICE=SPEED@START-END, such as "
                "'pi03=0.4@20s-60s', with a speed above 0"
            )
        return change


def list_speeds(changes: Sequence[SpeedChange], devices: Sequence[str], start_s: float = 0.0) -> Mapping[str, Speeds]:
    """Return the speeds of the devices that change their speed.

    If changes of a device overlap, the one that began last applies.

    Args:
        changes: The changes.
        devices: Names of all devices.
        start_s: Time of the start of the stream, which is added to the times of the changes.

    Returns:
        Speeds by device name.

    Raises:
        UsageError: A change names an unknown device.
    """
    for change in changes:
        if change.device not in devices:
            raise UsageError(f"slow: there is no device {change.device!r}{did_you_mean(change.device, devices)}")
    return {
        name: _speeds_of_device([change for change in changes if change.device == name], start_s)
        for name in dict.fromkeys(change.device for change in changes)
    }


def _speeds_of_device(changes: Sequence[SpeedChange], start_s: float) -> Speeds:
    times = {time_s for change in changes for time_s in (change.start_s, change.end_s) if time_s < float("inf")}
    speeds = []
    for time_s in sorted(times):
        current = [change for change in changes if change.start_s <= time_s < change.end_s]
        speed = max(current, key=lambda change: change.start_s).speed if current else 1.0
        speeds.append((start_s + time_s, speed))
    return speeds


def end_of_computing(start_s: float, seconds: float, speeds: Speeds) -> float:
    """Return when a computation ends.

    Args:
        start_s: Time of its start.
        seconds: Its duration at the device's own speed.
        speeds: The speeds of the device.

    Returns:
        The time of its end.
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
    """Return the frames of each interval of a stream.

    Args:
        finished_s: For each frame, the time at which it was finished, in ascending order.
        interval_s: Length of an interval in seconds.

    Returns:
        For each interval with frames: its start in seconds, the number of frames that were finished in it, and the mean
        seconds between two of these frames (0 if there was only one).
    """
    intervals: dict[int, list[float]] = {}
    for seconds in finished_s:
        intervals.setdefault(int(seconds // interval_s), []).append(seconds)
    return [
        (i * interval_s, len(found), (found[-1] - found[0]) / (len(found) - 1) if len(found) > 1 else 0.0)
        for i, found in sorted(intervals.items())
    ]
