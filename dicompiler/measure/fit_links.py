"""The bandwidths and latencies with which the simulator makes the pauses between segments that a run showed.

Platform + workloads with measured segments + pauses → Platform.   Least deviations, by weighted least squares in the
seconds of a byte and of a message: pauses follow both in straight lines, as long as nobody else is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dicompiler.cost.simulator import simulate
from dicompiler.cost.workload import Workload
from dicompiler.ir.platform import Platform

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_FIT_STEPS = 20
"""Improvements at most; a few are enough."""
MIN_BYTES_SHARE = 0.05
"""Of all pauses the bytes on a line must be this share, or the run does not tell its bandwidth."""
TYPICAL_FRAME_WEIGHT = 4.0
"""So many pauses the usual frame counts for: it is the median of many, they are of one."""
MAX_COLLINEARITY = 0.98
"""From this cosine on between what a latency and what a bandwidth does to the pauses, they cannot be told apart."""

Pauses = Mapping[str, Sequence[float]]
"""Device → seconds before each of its segments, from the end of the one before."""
SegmentSpans = Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class NetworkFigure:
    """A figure of the network. unit: bit/s or s; value: of a platform; put: a platform with another."""

    name: str
    unit: str
    value: Callable[[Platform], float]
    with_value: Callable[[Platform, float], Platform]

    @staticmethod
    def of_platform(platform: Platform) -> tuple[NetworkFigure, ...]:
        """Those that a platform states: of its network, of its links, and hosts' own bandwidths."""
        found = [_network_figure("bandwidth", "bit/s"), _network_figure("latency", "s")]
        for i, link in enumerate(platform.network.links):
            found += [_link_figure(i, " and ".join(link.hosts), key) for key in ("bandwidth", "latency")]
        return (
            *found,
            *(_host_figure(i, one.name) for i, one in enumerate(platform.hosts) if one.bandwidth is not None),
        )

    def moved_to(self, platform: Platform, start: float, place: float) -> Platform:
        """At `place`: how many times as long as at `start` a byte takes, or milliseconds of latency."""
        return self.with_value(platform, float(f"{place / 1000 if self.unit == 's' else start / place:.4g}"))


def _network_figure(key: str, unit: str) -> NetworkFigure:
    def put(platform: Platform, value: float) -> Platform:
        changed: dict[str, Any] = {key: value}
        return replace(platform, network=replace(platform.network, **changed))

    return NetworkFigure(f"network {key}", unit, lambda platform: float(getattr(platform.network, key)), put)


def _link_figure(i: int, hosts: str, key: str) -> NetworkFigure:
    def put(platform: Platform, value: float) -> Platform:
        links, changed = list(platform.network.links), dict[str, Any]({key: value})
        links[i] = replace(links[i], **changed)
        return replace(platform, network=replace(platform.network, links=tuple(links)))

    unit = "bit/s" if key == "bandwidth" else "s"
    return NetworkFigure(
        f"link of {hosts} {key}", unit, lambda platform: float(getattr(platform.network.links[i], key)), put
    )


def _host_figure(i: int, name: str) -> NetworkFigure:
    def put(platform: Platform, value: float) -> Platform:
        hosts = list(platform.hosts)
        hosts[i] = replace(hosts[i], bandwidth=value)
        return replace(platform, hosts=tuple(hosts))

    return NetworkFigure(f"{name} bandwidth", "bit/s", lambda platform: platform.hosts[i].bandwidth or 0.0, put)


def find_pauses(spans: SegmentSpans, late: float = 0.0) -> Pauses:
    """Before each segment, of when they ran; late: seconds until the frame's inputs were there."""
    made = {}
    for name, own in spans.items():
        ends = [min([late, *(start for start, _ in own[:1])]), *(end for _, end in own)]
        made[name] = [max(0.0, start - end) for (start, _), end in zip(own, ends, strict=False)]
    return made


def fit_links(
    platform: Platform,
    figures: Sequence[NetworkFigure],
    workloads: Sequence[Workload],
    observed: Sequence[Pauses],
    typical: Sequence[tuple[Workload, float]] = (),
) -> tuple[Platform, Mapping[str, str], list[dict[str, float]]]:
    """(The platform with fitted lines; line → why it could not be told; for each run by device the seconds of pauses
    that are left unexplained.) works: of a frame of each run, with the seconds that its segments took; seen: its
    pauses; usual: workloads with the seconds that they take in all, as a rule."""
    import numpy as np

    whole = np.array([TYPICAL_FRAME_WEIGHT * seconds for _, seconds in typical])
    fit = _LinkFit(
        platform, figures, workloads, [work for work, _ in typical], np.concatenate([*map(_flatten, observed), whole])
    )
    place = np.array([1000 * one.value(platform) if one.unit == "s" else 1.0 for one in figures])
    reasons = fit.find_undetermined(place)
    found = fit.fit(place, reasons)
    lost = {one.name for one in figures if one.unit != "s"} & fit.find_undetermined(found).keys() - reasons.keys()
    if lost:  # they became so fast that they no longer count
        reasons |= dict.fromkeys(lost, "messages are too short to tell it")
        found = fit.fit(place, reasons)
    fitted = fit.platform_at(found)
    left = [
        {name: abs(sum(own[name]) - sum(made[name])) for name in own}
        for own, made in zip(observed, (_simulated_pauses(work, fitted) for work in workloads), strict=True)
    ]
    return fitted, reasons, left


@dataclass(frozen=True)
class _LinkFit:
    """platform: where it starts; whole: the usual frames; seen: all pauses of all runs, and those frames."""

    platform: Platform
    figures: Sequence[NetworkFigure]
    workloads: Sequence[Workload]
    typical_frames: Sequence[Workload]
    observed: NDArray[np.float64]

    def platform_at(self, place: NDArray[np.float64]) -> Platform:
        platform = self.platform
        for line, value in zip(self.figures, place, strict=True):
            platform = line.moved_to(platform, line.value(self.platform), float(value))
        return platform

    def simulate_pauses(self, place: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the simulator makes of it."""
        import numpy as np

        platform = self.platform_at(place)
        frames = np.array(
            [
                TYPICAL_FRAME_WEIGHT * simulate(work, platform, keep_spans=False).latency_s
                for work in self.typical_frames
            ]
        )
        return np.concatenate([*(_flatten(_simulated_pauses(work, platform)) for work in self.workloads), frames])

    def sensitivity(self, place: NDArray[np.float64], i: int) -> NDArray[np.float64]:
        """What one more of a line's unit, see `Line.moved`, does to each pause."""
        step = place.copy()
        step[i] += (h := 0.05 * (place[i] if self.figures[i].unit != "s" else max(place[i], 1.0)))
        difference: NDArray[np.float64] = (self.simulate_pauses(step) - self.simulate_pauses(place)) / h
        return difference

    def find_undetermined(self, place: NDArray[np.float64]) -> dict[str, str]:
        """Line → why these runs do not tell it, near `place`."""
        import numpy as np

        pauses = len(self.observed) - len(self.typical_frames)
        changes = [self.sensitivity(place, i)[:pauses] for i in range(len(self.figures))]
        total, reasons = self.simulate_pauses(place)[:pauses].sum(), dict[str, str]()
        for line, change, value in zip(self.figures, changes, place, strict=True):
            moved = np.abs(change).sum()
            if moved < 1e-6 if line.unit == "s" else moved * value < MIN_BYTES_SHARE * total:
                reasons[line.name] = "no message is held up by it"
        told = [i for i, line in enumerate(self.figures) if line.name not in reasons]
        for i in told:
            for k in told:
                norms = np.linalg.norm(changes[i]) * np.linalg.norm(changes[k])
                if (
                    self.figures[i].unit == "s" != self.figures[k].unit
                    and changes[i] @ changes[k] > MAX_COLLINEARITY * norms
                ):
                    reasons[self.figures[i].name] = "messages are too alike in size to tell it from the bandwidth"
        return reasons

    def fit(self, place: NDArray[np.float64], fixed: Container[str]) -> NDArray[np.float64]:
        """Where the lines but for the `fixed` ones make the pauses differ least."""
        import numpy as np

        free = [i for i, one in enumerate(self.figures) if one.name not in fixed]
        floor = 0.001 * np.abs(self.observed).sum() + 1e-9
        rest = self.observed - self.simulate_pauses(place)
        for _ in range(MAX_FIT_STEPS if free else 0):
            weight = 1 / np.sqrt(np.maximum(np.abs(rest), floor))
            changes = np.stack([self.sensitivity(place, i) for i in free], axis=1)
            step = np.linalg.lstsq(changes * weight[:, None], rest * weight, rcond=None)[0]
            for _ in range(8):
                tried = place.copy()
                for i, more in zip(free, step, strict=True):
                    tried[i] = max(0.0 if self.figures[i].unit == "s" else place[i] / 4, place[i] + more)
                left = self.observed - self.simulate_pauses(tried)
                if np.abs(left).sum() < np.abs(rest).sum():
                    break
                step = step / 2
            else:
                return place
            gained = 1 - np.abs(left).sum() / np.abs(rest).sum()
            place, rest = tried, left
            if gained < 1e-4:
                return place
        return place


def _simulated_pauses(work: Workload, platform: Platform) -> Pauses:
    """What the runtime takes for a call belongs to the pause."""
    calls = {one.device: one.runtime.call for one in work.devices}
    spans: dict[str, list[tuple[float, float]]] = {one.device: [] for one in work.devices}
    for span in simulate(work, platform).spans:
        if span.kind == "compute":
            spans[span.device].append((span.start + calls[span.device], span.end))
    return find_pauses(spans)


def _flatten(own: Pauses) -> NDArray[np.float64]:
    import numpy as np

    return np.array([seconds for name in sorted(own) for seconds in own[name]])
