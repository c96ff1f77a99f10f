"""Instruments of the pass manager: observers that see the state of a compilation before and after each pass."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from dicompiler.ir.pipeline_state import PipelineState
    from dicompiler.plugin.pass_base import Pass


class NoOpInstrument:
    """An instrument that does nothing. Derive from it to implement only some methods."""

    def before(self, index: int, step: Pass, state: PipelineState) -> None: ...

    def after(self, index: int, step: Pass, state: PipelineState) -> None: ...

    def failed(self, index: int, step: Pass, state: PipelineState, error: Exception) -> None: ...


@dataclass
class PassTiming(NoOpInstrument):
    """An instrument that measures the time of every pass, including the check of the model after it.

    Attributes:
        rows: For each pass: its text in a pipeline, its seconds, and whether it failed.
    """

    rows: list[tuple[str, float, bool]] = field(default_factory=list)
    _start: float = 0.0

    def before(self, index: int, step: Pass, state: PipelineState) -> None:  # noqa: ARG002
        self._start = time.perf_counter()

    def after(self, index: int, step: Pass, state: PipelineState) -> None:  # noqa: ARG002
        self.rows.append((str(step.spec), time.perf_counter() - self._start, False))

    def failed(self, index: int, step: Pass, state: PipelineState, error: Exception) -> None:  # noqa: ARG002
        self.rows.append((str(step.spec), time.perf_counter() - self._start, True))


@dataclass(frozen=True)
class DumpAfterPass(NoOpInstrument):
    """An instrument that writes the graph and the plan after every pass.

    The files are `NNN_name.onnx`, with large weights as graph inputs, and `NNN_name.plan.json` if there is a plan. NNN
    counts from 001.

    Attributes:
        directory: The directory for the files.
    """

    directory: Path

    def after(self, index: int, step: Pass, state: PipelineState) -> None:
        """Write the model and the plan after a pass to files.

        Raises:
            OSError: A file cannot be written.
        """
        from dicompiler.ir.plan import plan_to_text

        self.directory.mkdir(parents=True, exist_ok=True)
        stem = self.directory / f"{index:03d}_{step.name}"
        stem.with_name(f"{stem.name}.onnx").write_bytes(
            state.model.without_weights().SerializeToString(deterministic=True)
        )
        if state.plan is not None:
            stem.with_name(f"{stem.name}.plan.json").write_text(plan_to_text(state.plan), encoding="utf-8")


_LONG_LIST = re.compile(r"([{\[](?:[-+.\w]+, ?){8})[-+.\w, ]+(?=[}\]])")
"""Text of a tensor or attribute with more than 8 numbers. The group is the text of the first 8."""


@dataclass(frozen=True)
class PrintAfterPass(NoOpInstrument):
    """An instrument that prints the graph after every pass in ONNX's text syntax, without large weights.

    Of constants and attributes with more than 8 numbers, only the first 8 are printed.

    Attributes:
        stream: The stream to print to; None for stderr.
    """

    stream: TextIO | None = None

    def after(self, index: int, step: Pass, state: PipelineState) -> None:
        import onnx.printer

        text = _LONG_LIST.sub(r"\1…", onnx.printer.to_text(state.model.without_weights()))
        print(f"// after pass {index}: {step.spec}\n{text}", file=self.stream or sys.stderr)
