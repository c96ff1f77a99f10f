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

STEPS = 20
"""Improvements at most; a few are enough."""
LEAST = 0.05
"""Of all pauses the bytes on a line must be this share, or the run does not tell its bandwidth."""
FRAME = 4.0
"""So many pauses the usual frame counts for: it is the median of many, they are of one."""
ALIKE = 0.98
"""From this cosine on between what a latency and what a bandwidth does to the pauses, they cannot be told apart."""

Pauses = Mapping[str, Sequence[float]]
"""Device → seconds before each of its segments, from the end of the one before."""
Spans = Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Line:
    """A figure of the network. unit: bit/s or s; value: of a platform; put: a platform with another."""

    name: str
    unit: str
    value: Callable[[Platform], float]
    put: Callable[[Platform, float], Platform]

    @staticmethod
    def of(platform: Platform) -> tuple[Line, ...]:
        """Those that a platform states: of its network, of its links, and hosts' own bandwidths."""
        found = [_network("bandwidth", "bit/s"), _network("latency", "s")]
        for i, link in enumerate(platform.network.links):
            found += [_link(i, " and ".join(link.hosts), key) for key in ("bandwidth", "latency")]
        return (*found, *(_host(i, one.name) for i, one in enumerate(platform.hosts) if one.bandwidth is not None))

    def moved(self, platform: Platform, start: float, place: float) -> Platform:
        """At `place`: how many times as long as at `start` a byte takes, or milliseconds of latency."""
        return self.put(platform, float(f"{place / 1000 if self.unit == 's' else start / place:.4g}"))


def _network(key: str, unit: str) -> Line:
    def put(platform: Platform, value: float) -> Platform:
        changed: dict[str, Any] = {key: value}
        return replace(platform, network=replace(platform.network, **changed))

    return Line(f"network {key}", unit, lambda platform: float(getattr(platform.network, key)), put)


def _link(i: int, hosts: str, key: str) -> Line:
    def put(platform: Platform, value: float) -> Platform:
        links, changed = list(platform.network.links), dict[str, Any]({key: value})
        links[i] = replace(links[i], **changed)
        return replace(platform, network=replace(platform.network, links=tuple(links)))

    unit = "bit/s" if key == "bandwidth" else "s"
    return Line(f"link of {hosts} {key}", unit, lambda platform: float(getattr(platform.network.links[i], key)), put)


def _host(i: int, name: str) -> Line:
    def put(platform: Platform, value: float) -> Platform:
        hosts = list(platform.hosts)
        hosts[i] = replace(hosts[i], bandwidth=value)
        return replace(platform, hosts=tuple(hosts))

    return Line(f"{name} bandwidth", "bit/s", lambda platform: platform.hosts[i].bandwidth or 0.0, put)


def pauses(spans: Spans, late: float = 0.0) -> Pauses:
    """Before each segment, of when they ran; late: seconds until the frame's inputs were there."""
    made = {}
    for name, own in spans.items():
        ends = [min([late, *(start for start, _ in own[:1])]), *(end for _, end in own)]
        made[name] = [max(0.0, start - end) for (start, _), end in zip(own, ends, strict=False)]
    return made


def fit_lines(
    platform: Platform,
    lines: Sequence[Line],
    works: Sequence[Workload],
    seen: Sequence[Pauses],
    usual: Sequence[tuple[Workload, float]] = (),
) -> tuple[Platform, Mapping[str, str], list[dict[str, float]]]:
    """(The platform with fitted lines; line → why it could not be told; for each run by device the seconds of pauses
    that are left unexplained.) works: of a frame of each run, with the seconds that its segments took; seen: its
    pauses; usual: workloads with the seconds that they take in all, as a rule."""
    import numpy as np

    whole = np.array([FRAME * seconds for _, seconds in usual])
    fit = _Fit(platform, lines, works, [work for work, _ in usual], np.concatenate([*map(_flat, seen), whole]))
    place = np.array([1000 * one.value(platform) if one.unit == "s" else 1.0 for one in lines])
    reasons = fit.untold(place)
    found = fit.best(place, reasons)
    lost = {one.name for one in lines if one.unit != "s"} & fit.untold(found).keys() - reasons.keys()
    if lost:  # they became so fast that they no longer count
        reasons |= dict.fromkeys(lost, "messages are too short to tell it")
        found = fit.best(place, reasons)
    fitted = fit.at(found)
    left = [
        {name: abs(sum(own[name]) - sum(made[name])) for name in own}
        for own, made in zip(seen, (_simulated(work, fitted) for work in works), strict=True)
    ]
    return fitted, reasons, left


@dataclass(frozen=True)
class _Fit:
    """platform: where it starts; whole: the usual frames; seen: all pauses of all runs, and those frames."""

    platform: Platform
    lines: Sequence[Line]
    works: Sequence[Workload]
    whole: Sequence[Workload]
    seen: NDArray[np.float64]

    def at(self, place: NDArray[np.float64]) -> Platform:
        platform = self.platform
        for line, value in zip(self.lines, place, strict=True):
            platform = line.moved(platform, line.value(self.platform), float(value))
        return platform

    def made(self, place: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the simulator makes of it."""
        import numpy as np

        platform = self.at(place)
        frames = np.array([FRAME * simulate(work, platform, spans=False).latency_s for work in self.whole])
        return np.concatenate([*(_flat(_simulated(work, platform)) for work in self.works), frames])

    def change(self, place: NDArray[np.float64], i: int) -> NDArray[np.float64]:
        """What one more of a line's unit, see `Line.moved`, does to each pause."""
        step = place.copy()
        step[i] += (h := 0.05 * (place[i] if self.lines[i].unit != "s" else max(place[i], 1.0)))
        difference: NDArray[np.float64] = (self.made(step) - self.made(place)) / h
        return difference

    def untold(self, place: NDArray[np.float64]) -> dict[str, str]:
        """Line → why these runs do not tell it, near `place`."""
        import numpy as np

        pauses = len(self.seen) - len(self.whole)
        changes = [self.change(place, i)[:pauses] for i in range(len(self.lines))]
        total, reasons = self.made(place)[:pauses].sum(), dict[str, str]()
        for line, change, value in zip(self.lines, changes, place, strict=True):
            moved = np.abs(change).sum()
            if moved < 1e-6 if line.unit == "s" else moved * value < LEAST * total:
                reasons[line.name] = "no message is held up by it"
        told = [i for i, line in enumerate(self.lines) if line.name not in reasons]
        for i in told:
            for k in told:
                norms = np.linalg.norm(changes[i]) * np.linalg.norm(changes[k])
                if self.lines[i].unit == "s" != self.lines[k].unit and changes[i] @ changes[k] > ALIKE * norms:
                    reasons[self.lines[i].name] = "messages are too alike in size to tell it from the bandwidth"
        return reasons

    def best(self, place: NDArray[np.float64], fixed: Container[str]) -> NDArray[np.float64]:
        """Where the lines but for the `fixed` ones make the pauses differ least."""
        import numpy as np

        free = [i for i, one in enumerate(self.lines) if one.name not in fixed]
        floor = 0.001 * np.abs(self.seen).sum() + 1e-9
        rest = self.seen - self.made(place)
        for _ in range(STEPS if free else 0):
            weight = 1 / np.sqrt(np.maximum(np.abs(rest), floor))
            changes = np.stack([self.change(place, i) for i in free], axis=1)
            step = np.linalg.lstsq(changes * weight[:, None], rest * weight, rcond=None)[0]
            for _ in range(8):
                tried = place.copy()
                for i, more in zip(free, step, strict=True):
                    tried[i] = max(0.0 if self.lines[i].unit == "s" else place[i] / 4, place[i] + more)
                left = self.seen - self.made(tried)
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


def _simulated(work: Workload, platform: Platform) -> Pauses:
    """What the runtime takes for a call belongs to the pause."""
    calls = {one.device: one.runtime.call for one in work.devices}
    spans: dict[str, list[tuple[float, float]]] = {one.device: [] for one in work.devices}
    for span in simulate(work, platform).spans:
        if span.kind == "compute":
            spans[span.device].append((span.start + calls[span.device], span.end))
    return pauses(spans)


def _flat(own: Pauses) -> NDArray[np.float64]:
    import numpy as np

    return np.array([seconds for name in sorted(own) for seconds in own[name]])
