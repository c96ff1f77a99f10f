"""What a pass is, and what watches passes: each maps a Compilation to a new one, as a small frozen dataclass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

from dicompiler.base.option_specs import Spec, spec_of
from dicompiler.ir.pipeline_state import PipelineState


@dataclass(frozen=True)
class Pass(ABC):
    """The base of all passes. A subclass is a frozen dataclass too: its fields are its options on the command line.

    The first line of its docstring is its summary in `dicompiler list passes`. `name` is its name in pipelines;
    `requires` names the fields of Compilation that must not be None before it, `provides` those that it sets (so
    that an error about a missing one can name the pass that makes it). `preserves`: whether the model computes the
    same after it. `provenance` says of a third party's pass, as the registry hands it out, where it is from.
    """

    name: ClassVar[str]
    provenance: ClassVar[str] = ""
    requires: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[tuple[str, ...]] = ()
    preserves_outputs: ClassVar[bool] = True

    @abstractmethod
    def run(self, compilation: PipelineState) -> PipelineState:
        """The next compilation; `compilation` and its model stay as they are. DicompilerError where it cannot be."""

    @property
    def spec(self) -> Spec:
        """The text form: name and the options that differ from their defaults."""
        return spec_of(self)


class Instrument(Protocol):
    """What watches a pipeline. `index` counts the passes from 1."""

    def before(self, index: int, step: Pass, compilation: PipelineState) -> None:
        """Called before the pass, with what it is given."""

    def after(self, index: int, step: Pass, compilation: PipelineState) -> None:
        """Called after the pass and its legality check, with what it returned."""

    def failed(self, index: int, step: Pass, compilation: PipelineState, error: Exception) -> None:
        """Called instead of `after` when the pass, or the check after it, failed; with what it was given."""


class PassError(Exception):
    """A built-in pass broke inside: our mistake, not the user's. The message names the pass and its distribution. (What
    breaks in a third party's pass is a PluginError.)"""
