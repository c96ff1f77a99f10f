"""The result of `dicompiler.compile`, with its representation in a console and in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dicompiler.base.errors import UsageError
from dicompiler.base.units import format_seconds
from dicompiler.cost.memory import MemoryUse
from dicompiler.driver.compile_summary import CompileSummary, summarize
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.metrics import Metrics
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import Decision, PipelineState
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.ir.routing import Routing
from dicompiler.search.constraints import describe_memory_shares, host_memory_needs
from dicompiler.search.problem import Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.verify.comparison import Verification

MAX_TABLE_DEVICES = 16


@dataclass(frozen=True, kw_only=True, repr=False)
class CompileResult(PipelineState):
    """The result of `dicompiler.compile`: a `PipelineState` in which all fields below have values.

    A `PipelineState` is the record that each step of a compilation extends.

    Attributes:
        layers: The layers of the model.
        platform: The cluster.
        plan: The parts (regions that devices compute) of each layer.
        routing: The tasks that follow from the plan (the work of a device on a part), and the regions that they
            exchange.
        reference: The model with which outputs are compared: the one before the pass `trim` (which removes unread
            elements) or, if nothing was removed, before the pass `partition`.
        program: Steps of each device, and transfers between devices.
        metrics: Predicted metrics of the plan.
        single_device_metrics: Predicted metrics of the best single device.
        decision: Names of the strategy, the objective and the cost model with which the plan was chosen.
        problem: The problem that the strategy solved: layers, platform, cost model and objective.
        memory_use: Memory that the program needs for one frame, by device name; None if no artifact was written.
    """

    layers: LayerGraph
    platform: Platform
    plan: Plan
    routing: Routing
    reference: Model
    program: Program
    metrics: Metrics
    single_device_metrics: Metrics
    decision: Decision
    problem: Problem = field(compare=False)
    memory_use: Mapping[str, MemoryUse] | None = field(default=None, compare=False)

    @classmethod
    def from_state(
        cls, state: PipelineState, problem: Problem, memory_use: Mapping[str, MemoryUse] | None = None
    ) -> CompileResult:
        """Return a pipeline state as a result.

        Args:
            state: A state in which all steps are done; only the artifact may be missing.
            problem: The problem that the strategy solved.
            memory_use: Memory that the program needs, by device name, if it is known.

        Returns:
            The result.
        """
        values = {entry.name: getattr(state, entry.name) for entry in fields(PipelineState)}
        return cls(**values, problem=problem, memory_use=memory_use)

    @property
    def artifacts(self) -> Path:
        """The directory of the artifact.

        Raises:
            UsageError: No artifact was written.
        """
        if self.artifact_directory is None:
            raise UsageError("no artifact was written: compile with output=…")
        return self.artifact_directory

    @property
    def unused_devices(self) -> tuple[str, ...]:
        """Names of the devices that could compute, but compute nothing and handle no input or output of the network."""
        return tuple(d.name for d in self.platform.computing_devices if d.name not in self.plan.devices)

    @property
    def summary(self) -> CompileSummary:
        """A summary of the plan: its origin, its predicted times, its bottleneck, and advice."""
        return summarize(self, self.decision, self.metrics, self.single_device_metrics)

    @property
    def memory_summary(self) -> str:
        """The memory that the fullest host needs, by purpose, and the memory that it has; "" if it is not known."""
        target = self.problem.target
        if self.memory_use is None or target is None or self.footprints:
            return ""
        needs = tuple(host_memory_needs(self.platform, self.memory_use, include_sum=True))
        fullest = max(needs, key=lambda need: need.needed_bytes / need.limit_bytes)
        shares = describe_memory_shares(self.platform, self.memory_use, fullest.host, target.name)
        needed, _, limit = fullest.size_texts
        return f"{fullest.host} needs {needed} of {limit}: {shares}"

    def verify(self, inputs: Mapping[str, NDArray[Any]] | None = None, timeout: float | None = None) -> Verification:
        """Verify that the artifact computes what onnxruntime computes.

        Args:
            inputs: Arrays by the names of the graph inputs. Default: seeded random arrays.
            timeout: Seconds for all checks together. Default: the timeout of `RunOptions`.

        Returns:
            All checks, passed or failed.

        Raises:
            UsageError: No artifact was written.
        """
        from dicompiler.driver.artifact import verify

        return verify(self.artifacts, inputs, timeout)

    def __repr__(self) -> str:
        summary = self.summary
        written = "" if self.artifact_directory is None else f", in {self.artifact_directory}"
        devices = f"{summary.device_count} of {len(self.platform.devices)} devices of {self.platform.name}"
        latency, single = (format_seconds(frame.total_s) for frame in (summary.frame, summary.single_device_frame))
        return (
            f"<CompileResult: {len(self.layers.layers)} layers on {devices}, {summary.plan_origin}: "
            f"{latency} per frame predicted, {single} on one device{written}>"
        )

    def _repr_html_(self) -> str:
        devices = self.metrics.devices
        table = _table_row("th", ("device", "computing", "waiting", "memory", "bytes sent"))
        for metrics in devices[:MAX_TABLE_DEVICES]:
            times = (format_seconds(metrics.compute_s), format_seconds(metrics.wait_s))
            table += _table_row("td", (metrics.device, *times, f"{metrics.memory / 2**20:.1f} MiB", metrics.sent))
        lines = list(self.summary.lines)
        if self.artifact_directory is not None:
            lines.append(f"written: {self.artifact_directory}")
        if len(devices) > MAX_TABLE_DEVICES:
            lines.insert(0, f"… and {len(devices) - MAX_TABLE_DEVICES} more devices")
        return f"<table>{table}</table>" + "".join(f"<p>{escape(line)}</p>" for line in lines)


def _table_row(tag: str, cells: tuple[object, ...]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"
