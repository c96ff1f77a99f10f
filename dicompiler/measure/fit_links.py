"""A fit of the network's bandwidths and latencies to the pauses between segments in measured runs.

A segment is a submodel that a device runs. In a pause between segments, the device mostly waits for messages.

The fit minimizes absolute deviations by iteratively reweighted least squares. Its unknowns are seconds per byte and
seconds per message. Pauses depend linearly on both, while each device waits for the same messages.
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
"""Maximum number of steps of the fit; a few are usually enough."""
MIN_BYTES_SHARE = 0.05
"""A bandwidth is undetermined if it causes less than this fraction of all pauses."""
TYPICAL_FRAME_WEIGHT = 4.0
"""Weight of a median frame time in the fit. A pause has weight 1, because it is measured in only one frame."""
MAX_COLLINEARITY = 0.98
"""A latency is undetermined if it affects all pauses almost as a bandwidth does.

The effects of both on the pauses are vectors. The value is the largest allowed cosine of their angle.
"""

Pauses = Mapping[str, Sequence[float]]
"""For each segment (submodel) of a device, the seconds since the end of the previous one; by device name."""
SegmentSpans = Mapping[str, Sequence[tuple[float, float]]]
"""Start and end in seconds of each segment (submodel) of a device, by device name."""


def round_to_4_digits(value: float) -> float:
    return float(f"{value:.4g}")


@dataclass(frozen=True)
class NetworkParameter:
    """A bandwidth or latency of a platform's network, and how to read and replace it.

    Attributes:
        name: Name for messages, such as "network bandwidth".
        unit: "bit/s" for a bandwidth, "s" for a latency.
        value: Function that returns the bandwidth or latency of a platform.
        with_value: Function that returns a platform with another bandwidth or latency.
    """

    name: str
    unit: str
    value: Callable[[Platform], float]
    with_value: Callable[[Platform, float], Platform]

    @staticmethod
    def of_platform(platform: Platform) -> tuple[NetworkParameter, ...]:
        """Return the bandwidths and latencies that a platform states for its network, links and hosts."""
        parameters = [_network_parameter("bandwidth", "bit/s"), _network_parameter("latency", "s")]
        for i, link in enumerate(platform.network.links):
            parameters += [_link_parameter(i, " and ".join(link.hosts), key) for key in ("bandwidth", "latency")]
        parameters += [
            _host_parameter(i, host.name) for i, host in enumerate(platform.hosts) if host.bandwidth is not None
        ]
        return tuple(parameters)

    def moved_to(self, platform: Platform, start: float, coordinate: float) -> Platform:
        """Return the platform with another value of this parameter.

        Args:
            platform: The platform to change.
            start: The value before the fit, in bit/s or seconds.
            coordinate: The new value in the unit of the fit. For a latency, this is milliseconds. For a bandwidth, it
                is seconds per byte, divided by those before the fit.
        """
        return self.with_value(
            platform, round_to_4_digits(coordinate / 1000 if self.unit == "s" else start / coordinate)
        )


def _network_parameter(key: str, unit: str) -> NetworkParameter:
    def with_value(platform: Platform, value: float) -> Platform:
        changed: dict[str, Any] = {key: value}
        return replace(platform, network=replace(platform.network, **changed))

    return NetworkParameter(f"network {key}", unit, lambda platform: float(getattr(platform.network, key)), with_value)


def _link_parameter(index: int, hosts: str, key: str) -> NetworkParameter:
    def get_value(platform: Platform) -> float:
        return float(getattr(platform.network.links[index], key))

    def with_value(platform: Platform, value: float) -> Platform:
        links, changed = list(platform.network.links), dict[str, Any]({key: value})
        links[index] = replace(links[index], **changed)
        return replace(platform, network=replace(platform.network, links=tuple(links)))

    return NetworkParameter(f"link of {hosts} {key}", "bit/s" if key == "bandwidth" else "s", get_value, with_value)


def _host_parameter(index: int, name: str) -> NetworkParameter:
    def get_value(platform: Platform) -> float:
        return platform.hosts[index].bandwidth or 0.0

    def with_value(platform: Platform, value: float) -> Platform:
        hosts = list(platform.hosts)
        hosts[index] = replace(hosts[index], bandwidth=value)
        return replace(platform, hosts=tuple(hosts))

    return NetworkParameter(f"{name} bandwidth", "bit/s", get_value, with_value)


def find_pauses(spans: SegmentSpans, inputs_s: float = 0.0) -> Pauses:
    """Return for each device the seconds from the end of a segment (submodel) to the start of the next one.

    Args:
        spans: Start and end of each segment, by device name.
        inputs_s: Time at which the inputs of the frame had arrived, from which the first pause counts.
    """
    pauses = {}
    for device, segments in spans.items():
        previous_ends = [min([inputs_s, *(start for start, _ in segments[:1])]), *(end for _, end in segments)]
        pauses[device] = [max(0.0, start - end) for (start, _), end in zip(segments, previous_ends, strict=False)]
    return pauses


def fit_links(
    platform: Platform,
    parameters: Sequence[NetworkParameter],
    workloads: Sequence[Workload],
    observed: Sequence[Pauses],
    typical: Sequence[tuple[Workload, float]] = (),
) -> tuple[Platform, Mapping[str, str], list[dict[str, float]]]:
    """Fit bandwidths and latencies of a platform to observed pauses between segments (submodels).

    Args:
        platform: The platform before the fit.
        parameters: The bandwidths and latencies to fit.
        workloads: For each run, the workload of one frame with the measured seconds of its segments.
        observed: For each run, the pauses in this frame.
        typical: Workloads of one frame, each with the median of the measured seconds of many frames.

    Returns:
        The platform with the fitted values; the reasons why values are undetermined, by their names; and for each run,
        the difference between observed and simulated seconds of all pauses, by device name.
    """
    import numpy as np

    typical_s = np.array([TYPICAL_FRAME_WEIGHT * seconds for _, seconds in typical])
    measured = np.concatenate([*map(_flatten_pauses, observed), typical_s])
    fit = _LinkFit(platform, parameters, workloads, [workload for workload, _ in typical], measured)
    start = np.array([1000 * parameter.value(platform) if parameter.unit == "s" else 1.0 for parameter in parameters])
    reasons = fit.find_undetermined(start)
    coordinates = fit.fit_coordinates(start, reasons)
    bandwidths = {parameter.name for parameter in parameters if parameter.unit != "s"}
    too_fast = bandwidths & fit.find_undetermined(coordinates).keys() - reasons.keys()
    if too_fast:
        # The first fit made these bandwidths so large that they no longer affect pauses. The second fit leaves them at
        # their values from before.
        reasons |= dict.fromkeys(too_fast, "messages are too short to determine it")
        coordinates = fit.fit_coordinates(start, reasons)
    fitted = fit.platform_at(coordinates)
    unexplained = []
    for pauses, workload in zip(observed, workloads, strict=True):
        simulated = _simulated_pauses(workload, fitted)
        unexplained.append({name: abs(sum(pauses[name]) - sum(simulated[name])) for name in pauses})
    return fitted, reasons, unexplained


@dataclass(frozen=True)
class _LinkFit:
    """A fit of parameters (bandwidths and latencies) to observed pauses between segments.

    Arrays `coordinates` have the value of each parameter in the unit of the fit (see `NetworkParameter.moved_to`).

    Attributes:
        platform: The platform before the fit.
        parameters: The bandwidths and latencies to fit.
        workloads: Workloads of frames of which the pauses were observed.
        typical_frames: Workloads of frames of which only the total seconds were observed.
        observed: Measured seconds: all pauses of all runs, then the total of each typical frame times its weight.
    """

    platform: Platform
    parameters: Sequence[NetworkParameter]
    workloads: Sequence[Workload]
    typical_frames: Sequence[Workload]
    observed: NDArray[np.float64]

    def platform_at(self, coordinates: NDArray[np.float64]) -> Platform:
        platform = self.platform
        for parameter, coordinate in zip(self.parameters, coordinates, strict=True):
            platform = parameter.moved_to(platform, parameter.value(self.platform), float(coordinate))
        return platform

    def simulate_pauses(self, coordinates: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the simulated seconds that correspond to `observed`, in the same order."""
        import numpy as np

        platform = self.platform_at(coordinates)
        latencies_s = [simulate(workload, platform, keep_spans=False).latency_s for workload in self.typical_frames]
        frames = TYPICAL_FRAME_WEIGHT * np.array(latencies_s)
        return np.concatenate(
            [*(_flatten_pauses(_simulated_pauses(work, platform)) for work in self.workloads), frames]
        )

    def compute_sensitivity(self, coordinates: NDArray[np.float64], index: int) -> NDArray[np.float64]:
        """Return the derivatives of all simulated seconds with respect to the bandwidth or latency number `index`."""
        moved = coordinates.copy()
        step = 0.05 * (coordinates[index] if self.parameters[index].unit != "s" else max(coordinates[index], 1.0))
        moved[index] += step
        difference: NDArray[np.float64] = (self.simulate_pauses(moved) - self.simulate_pauses(coordinates)) / step
        return difference

    def find_undetermined(self, coordinates: NDArray[np.float64]) -> dict[str, str]:
        """Return the reasons why observed pauses do not determine some bandwidths and latencies, by their names.

        A value is undetermined if it hardly affects the simulated pauses at the point `coordinates`, or if it is a
        latency that affects them as a bandwidth does.
        """
        import numpy as np

        count = len(self.observed) - len(self.typical_frames)
        effects = [self.compute_sensitivity(coordinates, i)[:count] for i in range(len(self.parameters))]
        total, reasons = self.simulate_pauses(coordinates)[:count].sum(), dict[str, str]()
        for parameter, effect, coordinate in zip(self.parameters, effects, coordinates, strict=True):
            size = np.abs(effect).sum()
            if size < 1e-6 if parameter.unit == "s" else size * coordinate < MIN_BYTES_SHARE * total:
                reasons[parameter.name] = "it delays no message"
        determined = [i for i, parameter in enumerate(self.parameters) if parameter.name not in reasons]
        for i in determined:
            for k in determined:
                norms = np.linalg.norm(effects[i]) * np.linalg.norm(effects[k])
                is_latency_and_bandwidth = self.parameters[i].unit == "s" != self.parameters[k].unit
                if is_latency_and_bandwidth and effects[i] @ effects[k] > MAX_COLLINEARITY * norms:
                    reasons[self.parameters[i].name] = (
                        "messages differ too little in size to separate it from the bandwidth"
                    )
        return reasons

    def fit_coordinates(self, coordinates: NDArray[np.float64], fixed: Container[str]) -> NDArray[np.float64]:
        """Return the coordinates that minimize the sum of absolute deviations of simulated from measured seconds.

        Args:
            coordinates: Start of the search: one number for each bandwidth or latency.
            fixed: Names of bandwidths and latencies that do not change.
        """
        import numpy as np

        free = [i for i, parameter in enumerate(self.parameters) if parameter.name not in fixed]
        min_residual = 0.001 * np.abs(self.observed).sum() + 1e-9
        residuals = self.observed - self.simulate_pauses(coordinates)
        for _ in range(MAX_FIT_STEPS if free else 0):
            weights = 1 / np.sqrt(np.maximum(np.abs(residuals), min_residual))
            effects = np.stack([self.compute_sensitivity(coordinates, i) for i in free], axis=1)
            step = np.linalg.lstsq(effects * weights[:, None], residuals * weights, rcond=None)[0]
            for _ in range(8):
                candidate = coordinates.copy()
                for i, change in zip(free, step, strict=True):
                    lowest = 0.0 if self.parameters[i].unit == "s" else coordinates[i] / 4
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
    """Return the pauses of each device between its segments (submodels) in a simulation of one frame."""
    call_s = {device.device: device.runtime.call for device in workload.devices}
    spans: dict[str, list[tuple[float, float]]] = {device.device: [] for device in workload.devices}
    for span in simulate(workload, platform).spans:
        if span.kind == "compute":
            # Measured pauses include the time of calling the next segment, so simulated ones include it too.
            spans[span.device].append((span.start + call_s[span.device], span.end))
    return find_pauses(spans)


def _flatten_pauses(pauses: Pauses) -> NDArray[np.float64]:
    import numpy as np

    return np.array([seconds for name in sorted(pauses) for seconds in pauses[name]])
