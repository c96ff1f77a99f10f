"""The second level by real runs: a plan is compiled, its programs run on this host, and what they measured comes back.

Plan → Measurement, whose times are measured; with a reader of the boards' power the energy is measured too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dicompiler.plugin_api import DeviceReport, Plan, Problem, RunOptions
from dicompiler.plugin_api.costs import DeviceMetrics
from dicompiler.plugin_api.search import MeasuredMetrics

PowerReader = Callable[[str, float], float]
"""Device name, seconds that the run took → the mean power in W that its board drew meanwhile. It is called once for
each device right after the run, so that a sampling reader (AutoDiCE's samples its boards' monitors) can look back."""


@dataclass(frozen=True)
class OnThisHost:
    """Compiles a plan for `target` and runs a stream of `frames` frames on this host, a process for each device.

    An instance is a `Measure` of the exploration. model: the file that `problem` was made from. power: see
    PowerReader; without one the platform's figures count. The processes share this host, so that times say something
    of the boards only where a device is a core or a GPU of it.
    """

    problem: Problem
    model: Path
    frames: int = 20
    target: str = "sockets"
    power: PowerReader | None = None

    def __call__(self, plan: Plan) -> MeasuredMetrics:
        """What was measured, averaged over the frames; bytes are those of the estimate, which are exact. Raises
        DicompilerError where the plan cannot be compiled, RunError where a run fails."""
        import dicompiler

        with tempfile.TemporaryDirectory(prefix="dicompiler-") as temporary:
            directory = Path(temporary, "artifact")
            dicompiler.compile(self.model, self.problem.platform, plan=plan, target=self.target, output=directory)
            result = dicompiler.run(directory, frames=self.frames, options=RunOptions(in_flight=0, kept_frames=1))
        estimate, period = self.problem.estimate(plan), result.total_s / self.frames
        reports = {report.device: report for report in result.reports}
        devices = tuple(_measured(entry, reports.get(entry.device), self.frames) for entry in estimate.devices)
        energy = {entry.device: self._energy(entry, period) for entry in devices}
        return MeasuredMetrics(
            devices=devices,
            latency_s=min(result.frames_s, default=period),
            period_s=period,
            energy_j=sum(energy.values()),
            memory=estimate.memory,
            total_bytes=estimate.total_bytes,
            device_energy_j=energy,
        )

    def _energy(self, entry: DeviceMetrics, period: float) -> float:
        """J of a device for one frame of the stream."""
        if self.power is not None:
            return self.power(entry.device, period * self.frames) * period
        device = self.problem.platform.device(entry.device)
        return device.power_active * entry.compute_s + device.power_idle * max(0.0, period - entry.compute_s)


def _measured(entry: DeviceMetrics, report: DeviceReport | None, frames: int) -> DeviceMetrics:
    return entry if report is None else replace(entry, compute_s=report.compute_s / frames)
