"""The pass manager: runs a pipeline of passes, each of which maps a PipelineState to a new one.

It checks the required fields before a pass and the validity of the ONNX model after it.
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
    """Make the passes of a pipeline.

    Args:
        text: The pipeline, such as "infer-shapes,form-layers,tile-height{parts=2}".

    Returns:
        The passes, with their options.

    Raises:
        UsageError: A pass, option or value is unknown.
    """
    known = registry()
    return tuple(known.make("passes", spec) for spec in parse_pipeline(text))


@dataclass(frozen=True)
class PassManager:
    """Runs passes in order.

    Attributes:
        passes: The passes.
        instruments: Observers, which are called before and after each pass.
        first_index: Number of the first pass, for instruments.
    """

    passes: Sequence[Pass]
    instruments: Sequence[Instrument] = ()
    first_index: int = 1

    def run(self, compilation: PipelineState) -> PipelineState:
        """Run the passes.

        Args:
            compilation: The input of the first pass. It is not changed.

        Returns:
            The result of the last pass.

        Raises:
            DicompilerError: A pass reports an error, requires a missing field, or makes an invalid model. It is a
                PluginError if a third-party pass fails in another way.
            PassError: A built-in pass fails in another way.
        """
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
            raise TypeError(f"run() returned {type(result).__name__} instead of a PipelineState")
        # Most passes only annotate the plan, and the check takes milliseconds.
        if result.model is not compilation.model:
            _check_model(step, compilation, result)
    except DicompilerError:
        raise
    except Exception as error:
        raise PassError(f"{registry().describe('passes', step)}: {type(error).__name__}: {error}") from error
    return _keep_loaded_graph(result, compilation)


def _keep_loaded_graph(result: PipelineState, before: PipelineState) -> PipelineState:
    """Return `result` with the graph that the first of all passes received."""
    loaded = before.model.proto.graph if before.loaded_graph is None else before.loaded_graph
    return result if result.loaded_graph is loaded else replace(result, loaded_graph=loaded)


def _check_model(step: Pass, before: PipelineState, result: PipelineState) -> None:
    """Check the model after a pass; blame the pass only if its input was valid."""
    try:
        result.model.check(f"after pass {step.name!r} {step.provenance}".rstrip())
    except DicompilerError:
        before.model.check(before.model.display_name)
        raise


# Fields that are inputs, so that no pass sets them.
_INPUT_REMEDIES = {"platform": "give a platform", "plan": "give a plan or run an annotating pass before it"}


def _provider_hint(field: str) -> str:
    """Return the end of an error message: how to get a missing field of PipelineState."""
    makers = [n for n, provided in sorted(registry().passes.items()) if field in provided.value.provides]
    if field in _INPUT_REMEDIES:
        return f": {_INPUT_REMEDIES[field]}"
    return f": run {' or '.join(map(repr, makers))} before it" if makers else ", which no pass provides"
