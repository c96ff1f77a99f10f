"""The pass manager: runs a pipeline of passes, each of which maps a Compilation to a new one.

It checks what a pass needs before it, and that the model is legal ONNX after it; instruments watch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dicompiler.base.errors import DicompilerError
from dicompiler.base.option_specs import parse_pipeline
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.plugin.pass_base import Instrument, Pass, PassError
from dicompiler.plugin.registry import registry


def make_pipeline(text: str) -> tuple[Pass, ...]:
    """The passes that a pipeline's text names, with their options. UsageError for an unknown pass, option or value."""
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
    first_index: int = 1

    def run(self, compilation: PipelineState) -> PipelineState:
        """The compilation after the last pass."""
        for index, step in enumerate(self.passes, self.first_index):
            for instrument in self.instruments:
                instrument.before(index, step, compilation)
            try:
                following = _run_pass(step, compilation)
            except Exception as error:
                for instrument in self.instruments:
                    instrument.failed(index, step, compilation, error)
                raise
            compilation = following
            for instrument in self.instruments:
                instrument.after(index, step, compilation)
        return compilation


def _run_pass(step: Pass, compilation: PipelineState) -> PipelineState:
    for field in step.requires:
        if getattr(compilation, field) is None:
            raise DicompilerError(f"pass {step.name!r} needs {field}{_provider_hint(field)}")
    try:
        result: Any = step.run(compilation)
        if not isinstance(result, PipelineState):
            raise TypeError(f"run() returned {type(result).__name__} instead of a Compilation")
        # The check costs milliseconds, yet most passes only annotate.
        if result.model is not compilation.model:
            _check_model(step, compilation, result)
    except DicompilerError:
        raise
    except Exception as error:
        raise PassError(f"{registry().describe('passes', step)}: {type(error).__name__}: {error}") from error
    return _keep_loaded_graph(result, compilation)


def _keep_loaded_graph(result: PipelineState, given: PipelineState) -> PipelineState:
    """`result`, which knows the graph that the first of all passes was given, even if a pass made it from nothing."""
    loaded = given.model.proto.graph if given.loaded_graph is None else given.loaded_graph
    return result if result.loaded_graph is loaded else replace(result, loaded_graph=loaded)


def _check_model(step: Pass, given: PipelineState, result: PipelineState) -> None:
    """DicompilerError where the model is not legal any more, or never was: then it is not the pass's fault."""
    try:
        result.model.check(f"after pass {step.name!r} {step.provenance}".rstrip())
    except DicompilerError:
        given.model.check(given.model.display_name)
        raise


# What no pass makes, because it is an input.
_INPUT_REMEDIES = {"platform": "give a platform", "plan": "give a plan or run an annotating pass before it"}


def _provider_hint(field: str) -> str:
    """Where a field of Compilation comes from, as the end of an error."""
    makers = [n for n, provided in sorted(registry().passes.items()) if field in provided.value.provides]
    if field in _INPUT_REMEDIES:
        return f": {_INPUT_REMEDIES[field]}"
    return f": run {' or '.join(map(repr, makers))} before it" if makers else ", which no known pass makes"
