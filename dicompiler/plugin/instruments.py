"""Instruments for the pass manager: Timing, Dump and PrintAfter. They watch the compilation between passes, no more."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from dicompiler.ir.pipeline_state import PipelineState
    from dicompiler.plugin.pass_base import Pass


class NoOpInstrument:
    """The instrument that does nothing: a base for those that want some of the three calls only."""

    def before(self, index: int, step: Pass, compilation: PipelineState) -> None:
        """Nothing."""

    def after(self, index: int, step: Pass, compilation: PipelineState) -> None:
        """Nothing."""

    def failed(self, index: int, step: Pass, compilation: PipelineState, error: Exception) -> None:
        """Nothing."""


@dataclass
class PassTiming(NoOpInstrument):
    """Measures every pass, legality check included. `rows`: (pass as text, seconds, whether it failed)."""

    rows: list[tuple[str, float, bool]] = field(default_factory=list)
    _start: float = 0.0

    def before(self, index: int, step: Pass, compilation: PipelineState) -> None:  # noqa: ARG002
        self._start = time.perf_counter()

    def after(self, index: int, step: Pass, compilation: PipelineState) -> None:  # noqa: ARG002
        self.rows.append((str(step.spec), time.perf_counter() - self._start, False))

    def failed(self, index: int, step: Pass, compilation: PipelineState, error: Exception) -> None:  # noqa: ARG002
        self.rows.append((str(step.spec), time.perf_counter() - self._start, True))


@dataclass(frozen=True)
class DumpAfterPass(NoOpInstrument):
    """After every pass writes `NNN_name.onnx`, the graph without its large weights (they stand there as graph inputs,
    which viewers and shape inference take), and `NNN_name.plan.json` where there is a plan. NNN counts from 001."""

    directory: Path

    def after(self, index: int, step: Pass, compilation: PipelineState) -> None:
        """OSError where a file cannot be written."""
        from dicompiler.ir.plan import dumps

        self.directory.mkdir(parents=True, exist_ok=True)
        stem = self.directory / f"{index:03d}_{step.name}"
        stem.with_name(f"{stem.name}.onnx").write_bytes(
            compilation.model.without_weights().SerializeToString(deterministic=True)
        )
        if compilation.plan is not None:
            stem.with_name(f"{stem.name}.plan.json").write_text(dumps(compilation.plan), encoding="utf-8")


@dataclass(frozen=True)
class PrintAfterPass(NoOpInstrument):
    """After every pass prints the graph in ONNX's text syntax, large weights left out. `stream`: None is stderr."""

    stream: TextIO | None = None

    def after(self, index: int, step: Pass, compilation: PipelineState) -> None:
        import onnx.printer

        text = onnx.printer.to_text(compilation.model.without_weights())
        print(f"// after pass {index}: {step.spec}\n{text}", file=self.stream or sys.stderr)
