"""What `compile` gives: a compilation that is whole, with a line and a table that say what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dicompiler.base.errors import UsageError
from dicompiler.driver.summary import Summary, milliseconds, summarise
from dicompiler.ir.compilation import Compilation, Decision
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.metrics import Metrics
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.ir.routing import Routing
from dicompiler.search.problem import Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dicompiler.verify.comparison import Verification

SHOWN = 16
"""Devices of which a notebook shows a row."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Compiled(Compilation):
    """What `compile` gives: a compilation with all but the artifact, which `artifacts` names where one was written.
    problem: what was solved."""

    layers: LayerGraph
    platform: Platform
    plan: Plan
    routing: Routing
    reference: Model
    program: Program
    metrics: Metrics
    single: Metrics
    decision: Decision
    problem: Problem = field(compare=False)

    @classmethod
    def of(cls, compilation: Compilation, problem: Problem) -> Compiled:
        return cls(**{entry.name: getattr(compilation, entry.name) for entry in fields(Compilation)}, problem=problem)

    @property
    def artifacts(self) -> Path:
        """The directory that the target wrote. UsageError where none was asked for."""
        if self.written is None:
            raise UsageError("nothing was written: compile with output=…")
        return self.written

    @property
    def summary(self) -> Summary:
        """What was decided by whom, what it is predicted to come to, what holds it back, and what to try next."""
        return summarise(self, self.decision, self.metrics, self.single)

    def verify(self, inputs: Mapping[str, NDArray[Any]] | None = None, timeout: float | None = None) -> Verification:
        """Verifies the artifact that was written, see `driver.artifact.verify`. UsageError where none was."""
        from dicompiler.driver.artifact import verify

        return verify(self.artifacts, inputs, timeout)

    def __repr__(self) -> str:
        told = self.summary
        where = "" if self.written is None else f", in {self.written}"
        return (
            f"<Compiled: {len(self.layers.layers)} layers on {told.devices} of {len(self.platform.devices)} devices of "
            f"{self.platform.name}, {told.decided}: a frame {milliseconds(told.latency_s)} predicted, "
            f"{milliseconds(told.alone_s)} on one device{where}>"
        )

    def _repr_html_(self) -> str:
        """For notebooks: what it comes to beside one device alone, a row for each of at most SHOWN devices, and the
        sentences of `summary`."""
        devices = self.metrics.devices
        rows = [
            (
                one.device,
                milliseconds(one.compute_s),
                milliseconds(one.wait_s),
                f"{one.memory / 2**20:.1f} MiB",
                one.sent,
            )
            for one in devices[:SHOWN]
        ]
        more = f"<p>… and {len(devices) - SHOWN} devices more</p>" if len(devices) > SHOWN else ""
        heads = ("device", "computing", "waiting", "memory", "bytes sent")
        lines = "".join(f"<p>{escape(line)}</p>" for line in self.summary.lines)
        place = "" if self.written is None else f"<p>written: {escape(str(self.written))}</p>"
        return f"<table>{_row('th', heads)}{''.join(_row('td', row) for row in rows)}</table>{more}{lines}{place}"


def _row(kind: str, cells: tuple[object, ...]) -> str:
    return "<tr>" + "".join(f"<{kind}>{escape(str(cell))}</{kind}>" for cell in cells) + "</tr>"
