"""Passes and the pass manager: a pipeline of small frozen dataclasses, each mapping a Compilation to a new one.

The manager checks what a pass needs before it, and that the model is legal ONNX after it; instruments watch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dicompiler.base.errors import DicompilerError
from dicompiler.base.specs import Spec, parse_pipeline, spec_of

if TYPE_CHECKING:
    from dicompiler.ir.compilation import Compilation


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
    preserves: ClassVar[bool] = True

    @abstractmethod
    def run(self, compilation: Compilation) -> Compilation:
        """The next compilation; `compilation` and its model stay as they are. DicompilerError where it cannot be."""

    @property
    def spec(self) -> Spec:
        """The text form: name and the options that differ from their defaults."""
        return spec_of(self)


class Instrument(Protocol):
    """What watches a pipeline. `index` counts the passes from 1."""

    def before(self, index: int, step: Pass, compilation: Compilation) -> None:
        """Called before the pass, with what it is given."""

    def after(self, index: int, step: Pass, compilation: Compilation) -> None:
        """Called after the pass and its legality check, with what it returned."""

    def failed(self, index: int, step: Pass, compilation: Compilation, error: Exception) -> None:
        """Called instead of `after` when the pass, or the check after it, failed; with what it was given."""


class PassFailure(Exception):
    """A built-in pass broke inside: our mistake, not the user's. The message names the pass and its distribution. (What
    breaks in a third party's pass is a PluginError.)"""


def pipeline(text: str) -> tuple[Pass, ...]:
    """The passes that a pipeline's text names, with their options. UsageError for an unknown pass, option or value."""
    from dicompiler.plugin.registry import registry

    known = registry()
    return tuple(known.make("passes", spec) for spec in parse_pipeline(text))


@dataclass(frozen=True)
class PassManager:
    """Runs passes in order; instruments are told the number of each, counted from `first`.

    `run` raises DicompilerError (what a pass reports, or an illegal model after it; a PluginError names the third party
    whose pass broke) and PassFailure (anything else that a pass raises).
    """

    passes: Sequence[Pass]
    instruments: Sequence[Instrument] = ()
    first: int = 1

    def run(self, compilation: Compilation) -> Compilation:
        """The compilation after the last pass."""
        for index, step in enumerate(self.passes, self.first):
            for instrument in self.instruments:
                instrument.before(index, step, compilation)
            try:
                following = _run_one(step, compilation)
            except Exception as error:
                for instrument in self.instruments:
                    instrument.failed(index, step, compilation, error)
                raise
            compilation = following
            for instrument in self.instruments:
                instrument.after(index, step, compilation)
        return compilation


def _run_one(step: Pass, compilation: Compilation) -> Compilation:
    from dicompiler.ir.compilation import Compilation

    for field in step.requires:
        if getattr(compilation, field) is None:
            raise DicompilerError(f"pass {step.name!r} needs {field}{_maker(field)}")
    try:
        result: Any = step.run(compilation)
        if not isinstance(result, Compilation):
            raise TypeError(f"run() returned {type(result).__name__} instead of a Compilation")
        # The check costs milliseconds, yet most passes only annotate.
        if result.model is not compilation.model:
            _check(step, compilation, result)
    except DicompilerError:
        raise
    except Exception as error:
        from dicompiler.plugin.registry import registry

        raise PassFailure(f"{registry().named('passes', step)}: {type(error).__name__}: {error}") from error
    return _with_loaded(result, compilation)


def _with_loaded(result: Compilation, given: Compilation) -> Compilation:
    """`result`, which knows the graph that the first of all passes was given, even if a pass made it from nothing."""
    loaded = given.model.proto.graph if given.loaded is None else given.loaded
    return result if result.loaded is loaded else replace(result, loaded=loaded)


def _check(step: Pass, given: Compilation, result: Compilation) -> None:
    """DicompilerError where the model is not legal any more, or never was: then it is not the pass's fault."""
    try:
        result.model.check(f"after pass {step.name!r} {step.provenance}".rstrip())
    except DicompilerError:
        given.model.check("the model")
        raise


# What no pass makes, because it is an input.
_GIVEN = {"platform": "give a platform", "plan": "give a plan or run an annotating pass before it"}


def _maker(field: str) -> str:
    """Where a field of Compilation comes from, as the end of an error."""
    from dicompiler.plugin.registry import registry

    makers = [n for n, provided in sorted(registry().passes.items()) if field in provided.value.provides]
    if field in _GIVEN:
        return f": {_GIVEN[field]}"
    return f": run {' or '.join(map(repr, makers))} before it" if makers else ", which no known pass makes"
