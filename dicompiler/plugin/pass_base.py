"""Base classes of passes and instruments. A pass maps a PipelineState to a new one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

from dicompiler.base.option_specs import Spec, spec_of
from dicompiler.ir.pipeline_state import PipelineState


@dataclass(frozen=True)
class Pass(ABC):
    """Base class of all passes. A subclass is a frozen dataclass; its fields are its options.

    The first line of its docstring is its summary in `dicompiler list passes`.

    Attributes:
        name: Name in pipelines.
        provenance: Origin of a third-party pass, set by the registry.
        requires: Fields of PipelineState that must not be None before the pass.
        provides: Fields of PipelineState that the pass sets, for error messages about missing ones.
        preserves_outputs: Whether the model computes the same outputs after the pass.
    """

    name: ClassVar[str]
    provenance: ClassVar[str] = ""
    requires: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[tuple[str, ...]] = ()
    preserves_outputs: ClassVar[bool] = True

    @abstractmethod
    def run(self, compilation: PipelineState) -> PipelineState:
        """Return the next compilation.

        Args:
            compilation: The input. It must not be changed, nor its model.

        Returns:
            A new compilation.

        Raises:
            DicompilerError: The pass cannot be applied.
        """

    @property
    def spec(self) -> Spec:
        """The text form: the name, and the options that differ from their defaults."""
        return spec_of(self)


class Instrument(Protocol):
    """Observer of a pipeline."""

    def before(self, index: int, step: Pass, compilation: PipelineState) -> None:
        """Observe the input of a pass.

        Args:
            index: Number of the pass, from 1.
            step: The pass.
            compilation: The input of the pass.
        """

    def after(self, index: int, step: Pass, compilation: PipelineState) -> None:
        """Observe the result of a pass, after its validity check.

        Args:
            index: Number of the pass, from 1.
            step: The pass.
            compilation: The result of the pass.
        """

    def failed(self, index: int, step: Pass, compilation: PipelineState, error: Exception) -> None:
        """Observe the failure of a pass, or of the check after it. `after` is not called then.

        Args:
            index: Number of the pass, from 1.
            step: The pass.
            compilation: The input of the pass.
            error: The exception.
        """


class PassError(Exception):
    """A built-in pass failed because of a bug in dicompiler.

    The message names the pass and its distribution. Failures of third-party passes are PluginErrors.
    """
