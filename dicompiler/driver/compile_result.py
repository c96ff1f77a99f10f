"""What `compile` gives: a compilation that is whole, with a line and a table that say what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dicompiler.base.errors import UsageError
from dicompiler.driver.compile_summary import CompileSummary, format_milliseconds, summarize
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.metrics import Metrics
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import Decision, PipelineState
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.ir.routing import Routing
from dicompiler.search.problem import Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.verify.comparison import Verification

MAX_TABLE_DEVICES = 16
"""Devices of which a notebook shows a row."""


@dataclass(frozen=True, kw_only=True, repr=False)
class CompileResult(PipelineState):
    """What `compile` gives: a compilation with all but the artifact, which `artifacts` names where one was written.
    problem: what was solved."""

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

    @classmethod
    def from_state(cls, compilation: PipelineState, problem: Problem) -> CompileResult:
        return cls(**{entry.name: getattr(compilation, entry.name) for entry in fields(PipelineState)}, problem=problem)

    @property
    def artifacts(self) -> Path:
        """The directory that the target wrote. UsageError where none was asked for."""
        if self.artifact_directory is None:
            raise UsageError("nothing was written: compile with output=…")
        return self.artifact_directory

    @property
    def summary(self) -> CompileSummary:
        """What was decided by whom, what it is predicted to come to, what holds it back, and what to try next."""
        return summarize(self, self.decision, self.metrics, self.single_device_metrics)

    def verify(self, inputs: Mapping[str, NDArray[Any]] | None = None, timeout: float | None = None) -> Verification:
        """Verifies the artifact that was written, see `driver.artifact.verify`. UsageError where none was."""
        from dicompiler.driver.artifact import verify

        return verify(self.artifacts, inputs, timeout)

    def __repr__(self) -> str:
        told = self.summary
        where = "" if self.artifact_directory is None else f", in {self.artifact_directory}"
        return (
            f"<Compiled: {len(self.layers.layers)} layers on {told.device_count} of {len(self.platform.devices)} devices of "
            f"{self.platform.name}, {told.plan_origin}: a frame {format_milliseconds(told.latency_s)} predicted, "
            f"{format_milliseconds(told.single_device_s)} on one device{where}>"
        )

    def _repr_html_(self) -> str:
        """For notebooks: what it comes to beside one device alone, a row for each of at most SHOWN devices, and the
        sentences of `summary`."""
        devices = self.metrics.devices
        rows = [
            (
                one.device,
                format_milliseconds(one.compute_s),
                format_milliseconds(one.wait_s),
                f"{one.memory / 2**20:.1f} MiB",
                one.sent,
            )
            for one in devices[:MAX_TABLE_DEVICES]
        ]
        more = (
            f"<p>… and {len(devices) - MAX_TABLE_DEVICES} devices more</p>" if len(devices) > MAX_TABLE_DEVICES else ""
        )
        heads = ("device", "computing", "waiting", "memory", "bytes sent")
        lines = "".join(f"<p>{escape(line)}</p>" for line in self.summary.lines)
        place = "" if self.artifact_directory is None else f"<p>written: {escape(str(self.artifact_directory))}</p>"
        return f"<table>{_table_row('th', heads)}{''.join(_table_row('td', row) for row in rows)}</table>{more}{lines}{place}"


def _table_row(kind: str, cells: tuple[object, ...]) -> str:
    return "<tr>" + "".join(f"<{kind}>{escape(str(cell))}</{kind}>" for cell in cells) + "</tr>"
