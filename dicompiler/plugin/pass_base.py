"""Base classes of passes and instruments. A pass maps the state of a compilation to a new state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

from dicompiler.base.option_specs import Spec, spec_of
from dicompiler.ir.pipeline_state import PipelineState


@dataclass(frozen=True)
class Pass(ABC):
    """Base class of all passes. A subclass is a frozen dataclass; its fields are the options of the pass.

    `dicompiler list passes` shows the first line of the docstring.

    Attributes:
        name: Name of the pass in the text of a pipeline, such as "tile-height".
        provenance: The plugin that provides the pass, for error messages. The registry sets it for third-party passes.
        requires: Fields of PipelineState that must not be None before the pass.
        provides: Fields of PipelineState that the pass sets. Errors about a missing field suggest passes that set it.
        preserves_outputs: True if the model computes the same outputs after the pass.
    """

    name: ClassVar[str]
    provenance: ClassVar[str] = ""
    requires: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[tuple[str, ...]] = ()
    preserves_outputs: ClassVar[bool] = True

    @abstractmethod
    def run(self, state: PipelineState) -> PipelineState:
        """Return the state of the compilation after the pass.

        Args:
            state: The state before the pass. The pass must not change it or its model.

        Returns:
            A new state.

        Raises:
            DicompilerError: The pass cannot be applied.
        """

    @property
    def spec(self) -> Spec:
        """The pass as text in a pipeline: its name, and the options that differ from their defaults."""
        return spec_of(self)


class Instrument(Protocol):
    """Observer of a pipeline. The pass manager calls its methods before and after each pass, and if a pass fails."""

    def before(self, index: int, step: Pass, state: PipelineState) -> None:
        """Observe the state before a pass.

        Args:
            index: Number of the pass in the pipeline, from 1.
            step: The pass that will run.
            state: The state before the pass.
        """

    def after(self, index: int, step: Pass, state: PipelineState) -> None:
        """Observe the state after a pass, after its model has been checked.

        Args:
            index: Number of the pass in the pipeline, from 1.
            step: The pass that has run.
            state: The state after the pass.
        """

    def failed(self, index: int, step: Pass, state: PipelineState, error: Exception) -> None:
        """Observe the failure of a pass, or of the check after it; `after` is not called.

        Args:
            index: Number of the pass in the pipeline, from 1.
            step: The pass that failed.
            state: The state before the pass.
            error: The exception of the pass or of the check.
        """


class PassError(Exception):
    """Raised if a built-in pass fails because of a bug in dicompiler. The message names the pass."""
