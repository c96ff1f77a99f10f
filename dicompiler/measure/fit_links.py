"""A fit of the network's figures to the pauses between segments in measured runs.

Platform + workloads with measured segments + pauses ──fit_links──► Platform

The fit minimizes absolute deviations by iteratively reweighted least squares, in the seconds per byte and per message:
pauses are linear in both, as long as the devices wait for the same messages.
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
"""A few steps are usually enough."""
MIN_BYTES_SHARE = 0.05
"""A bandwidth is undetermined if the bytes that depend on it take less than this share of all pauses."""
TYPICAL_FRAME_WEIGHT = 4.0
"""Weight of a typical frame relative to a pause: it is a median of many frames, but a pause is from one."""
MAX_COLLINEARITY = 0.98
"""A latency is undetermined if its effect on the pauses has at least this cosine with the effect of a bandwidth."""

Pauses = Mapping[str, Sequence[float]]
"""Device ⇒ seconds before each of its segments, since the end of the previous one."""
SegmentSpans = Mapping[str, Sequence[tuple[float, float]]]
"""Device ⇒ start and end of each of its segments."""


def round_figure(value: float) -> float:
    """Return a measured figure with its four significant digits."""
    return float(f"{value:.4g}")


@dataclass(frozen=True)
class NetworkFigure:
    """A figure of a platform's network.

    The fit moves a figure along a coordinate on which pauses are linear: for a bandwidth, the seconds per byte as a
    multiple of those at the start; for a latency, milliseconds.

    Attributes:
        name: Name for messages.
        unit: "bit/s" or "s".
        value: Returns the figure of a platform.
        with_value: Returns a platform with another figure.
    """

    name: str
    unit: str
    value: Callable[[Platform], float]
    with_value: Callable[[Platform, float], Platform]

    @staticmethod
    def of_platform(platform: Platform) -> tuple[NetworkFigure, ...]:
        """Return the figures that a platform states: of the network, of its links, and bandwidths of hosts."""
        figures = [_network_figure("bandwidth", "bit/s"), _network_figure("latency", "s")]
        for i, link in enumerate(platform.network.links):
            figures += [_link_figure(i, " and ".join(link.hosts), key) for key in ("bandwidth", "latency")]
        figures += [_host_figure(i, host.name) for i, host in enumerate(platform.hosts) if host.bandwidth is not None]
        return tuple(figures)

    def moved_to(self, platform: Platform, start: float, coordinate: float) -> Platform:
        """Return the platform with the figure at a coordinate. start: the figure at coordinate 1."""
        return self.with_value(platform, round_figure(coordinate / 1000 if self.unit == "s" else start / coordinate))


def _network_figure(key: str, unit: str) -> NetworkFigure:
    def with_value(platform: Platform, value: float) -> Platform:
        changed: dict[str, Any] = {key: value}
        return replace(platform, network=replace(platform.network, **changed))

    return NetworkFigure(f"network {key}", unit, lambda platform: float(getattr(platform.network, key)), with_value)


def _link_figure(i: int, hosts: str, key: str) -> NetworkFigure:
    def get_value(platform: Platform) -> float:
        return float(getattr(platform.network.links[i], key))

    def with_value(platform: Platform, value: float) -> Platform:
        links, changed = list(platform.network.links), dict[str, Any]({key: value})
        links[i] = replace(links[i], **changed)
        return replace(platform, network=replace(platform.network, links=tuple(links)))

    return NetworkFigure(f"link of {hosts} {key}", "bit/s" if key == "bandwidth" else "s", get_value, with_value)


def _host_figure(i: int, name: str) -> NetworkFigure:
    def with_value(platform: Platform, value: float) -> Platform:
        hosts = list(platform.hosts)
        hosts[i] = replace(hosts[i], bandwidth=value)
        return replace(platform, hosts=tuple(hosts))

    return NetworkFigure(f"{name} bandwidth", "bit/s", lambda platform: platform.hosts[i].bandwidth or 0.0, with_value)


def find_pauses(spans: SegmentSpans, inputs_s: float = 0.0) -> Pauses:
    """Return the pauses before all segments. inputs_s: time at which the frame's inputs had arrived."""
    pauses = {}
    for name, own in spans.items():
        previous_ends = [min([inputs_s, *(start for start, _ in own[:1])]), *(end for _, end in own)]
        pauses[name] = [max(0.0, start - end) for (start, _), end in zip(own, previous_ends, strict=False)]
    return pauses


def fit_links(
    platform: Platform,
    figures: Sequence[NetworkFigure],
    workloads: Sequence[Workload],
    observed: Sequence[Pauses],
    typical: Sequence[tuple[Workload, float]] = (),
) -> tuple[Platform, Mapping[str, str], list[dict[str, float]]]:
    """Fit figures of the network to observed pauses.

    Args:
        platform: The platform to start from.
        figures: The figures to fit.
        workloads: For each run, the workload of one frame with the measured seconds of its segments.
        observed: For each run, the pauses of this frame.
        typical: Workloads with the typical seconds of their frames.

    Returns:
        The platform with fitted figures; the names of undetermined figures with the reasons; and for each run, the
        unexplained seconds of pauses by device.
    """
    import numpy as np

    typical_s = np.array([TYPICAL_FRAME_WEIGHT * seconds for _, seconds in typical])
    measured = np.concatenate([*map(_flatten, observed), typical_s])
    fit = _LinkFit(platform, figures, workloads, [workload for workload, _ in typical], measured)
    start = np.array([1000 * figure.value(platform) if figure.unit == "s" else 1.0 for figure in figures])
    reasons = fit.find_undetermined(start)
    coordinates = fit.fit(start, reasons)
    bandwidths = {figure.name for figure in figures if figure.unit != "s"}
    too_fast = bandwidths & fit.find_undetermined(coordinates).keys() - reasons.keys()
    if too_fast:
        # These bandwidths became so large during the fit that they no longer affect the pauses.
        reasons |= dict.fromkeys(too_fast, "messages are too short to determine it")
        coordinates = fit.fit(start, reasons)
    fitted = fit.platform_at(coordinates)
    unexplained = []
    for pauses, workload in zip(observed, workloads, strict=True):
        simulated = _simulated_pauses(workload, fitted)
        unexplained.append({name: abs(sum(pauses[name]) - sum(simulated[name])) for name in pauses})
    return fitted, reasons, unexplained


@dataclass(frozen=True)
class _LinkFit:
    """A fit of figures.

    Attributes:
        platform: The platform to start from.
        figures: The figures; their coordinates are an array in this order.
        workloads: Workloads with observed pauses.
        typical_frames: Workloads with known frame times.
        observed: All pauses of all runs, then the weighted typical frame times.
    """

    platform: Platform
    figures: Sequence[NetworkFigure]
    workloads: Sequence[Workload]
    typical_frames: Sequence[Workload]
    observed: NDArray[np.float64]

    def platform_at(self, coordinates: NDArray[np.float64]) -> Platform:
        """Return the platform with the figures at these coordinates."""
        platform = self.platform
        for figure, coordinate in zip(self.figures, coordinates, strict=True):
            platform = figure.moved_to(platform, figure.value(self.platform), float(coordinate))
        return platform

    def simulate_pauses(self, coordinates: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return simulated values in the order of `observed`."""
        import numpy as np

        platform = self.platform_at(coordinates)
        frames = np.array(
            [
                TYPICAL_FRAME_WEIGHT * simulate(workload, platform, keep_spans=False).latency_s
                for workload in self.typical_frames
            ]
        )
        return np.concatenate([*(_flatten(_simulated_pauses(work, platform)) for work in self.workloads), frames])

    def sensitivity(self, coordinates: NDArray[np.float64], i: int) -> NDArray[np.float64]:
        """Return the derivative of all values by the coordinate of figure i."""
        moved = coordinates.copy()
        step = 0.05 * (coordinates[i] if self.figures[i].unit != "s" else max(coordinates[i], 1.0))
        moved[i] += step
        difference: NDArray[np.float64] = (self.simulate_pauses(moved) - self.simulate_pauses(coordinates)) / step
        return difference

    def find_undetermined(self, coordinates: NDArray[np.float64]) -> dict[str, str]:
        """Return the figures that the pauses do not determine near these coordinates, with the reasons."""
        import numpy as np

        count = len(self.observed) - len(self.typical_frames)
        effects = [self.sensitivity(coordinates, i)[:count] for i in range(len(self.figures))]
        total, reasons = self.simulate_pauses(coordinates)[:count].sum(), dict[str, str]()
        for figure, effect, coordinate in zip(self.figures, effects, coordinates, strict=True):
            size = np.abs(effect).sum()
            if size < 1e-6 if figure.unit == "s" else size * coordinate < MIN_BYTES_SHARE * total:
                reasons[figure.name] = "it delays no message"
        determined = [i for i, figure in enumerate(self.figures) if figure.name not in reasons]
        for i in determined:
            for k in determined:
                norms = np.linalg.norm(effects[i]) * np.linalg.norm(effects[k])
                is_latency_and_bandwidth = self.figures[i].unit == "s" != self.figures[k].unit
                if is_latency_and_bandwidth and effects[i] @ effects[k] > MAX_COLLINEARITY * norms:
                    reasons[self.figures[i].name] = (
                        "messages differ too little in size to separate it from the bandwidth"
                    )
        return reasons

    def fit(self, coordinates: NDArray[np.float64], fixed: Container[str]) -> NDArray[np.float64]:
        """Return the coordinates with the least absolute deviations; those of `fixed` figures stay."""
        import numpy as np

        free = [i for i, figure in enumerate(self.figures) if figure.name not in fixed]
        min_residual = 0.001 * np.abs(self.observed).sum() + 1e-9
        residuals = self.observed - self.simulate_pauses(coordinates)
        for _ in range(MAX_FIT_STEPS if free else 0):
            weights = 1 / np.sqrt(np.maximum(np.abs(residuals), min_residual))
            effects = np.stack([self.sensitivity(coordinates, i) for i in free], axis=1)
            step = np.linalg.lstsq(effects * weights[:, None], residuals * weights, rcond=None)[0]
            for _ in range(8):
                candidate = coordinates.copy()
                for i, change in zip(free, step, strict=True):
                    lowest = 0.0 if self.figures[i].unit == "s" else coordinates[i] / 4
                    candidate[i] = max(lowest, coordinates[i] + change)
                new_residuals = self.observed - self.simulate_pauses(candidate)
                if np.abs(new_residuals).sum() < np.abs(residuals).sum():
                    break
                step = step / 2
            else:
                return coordinates
            gain = 1 - np.abs(new_residuals).sum() / np.abs(residuals).sum()
            coordinates, residuals = candidate, new_residuals
            if gain < 1e-4:
                return coordinates
        return coordinates


def _simulated_pauses(workload: Workload, platform: Platform) -> Pauses:
    """Return simulated pauses. As in measurements, they include the runtime's cost of a call."""
    call_s = {device.device: device.runtime.call for device in workload.devices}
    spans: dict[str, list[tuple[float, float]]] = {device.device: [] for device in workload.devices}
    for span in simulate(workload, platform).spans:
        if span.kind == "compute":
            spans[span.device].append((span.start + call_s[span.device], span.end))
    return find_pauses(spans)


def _flatten(pauses: Pauses) -> NDArray[np.float64]:
    import numpy as np

    return np.array([seconds for name in sorted(pauses) for seconds in pauses[name]])
