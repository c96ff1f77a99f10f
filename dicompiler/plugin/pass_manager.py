"""The pass manager runs a pipeline of passes. Each pass maps the state of the compilation to a new state.

Before a pass, the manager checks that the state has all fields that the pass requires. After a pass, it checks that the
ONNX model is valid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dicompiler.base.errors import DicompilerError, PluginError, UsageError
from dicompiler.base.option_specs import parse_pipeline
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.plugin.pass_base import Instrument, Pass, PassError
from dicompiler.plugin.registry import registry


def make_pipeline(text: str) -> tuple[Pass, ...]:
    """Create the passes of a pipeline from its text.

    Args:
        text: The pipeline, such as "infer-shapes,form-layers,tile-height{parts=2}".

    Returns:
        The passes, with their options set.

    Raises:
        UsageError: A pass, option or value is unknown.
    """
    known = registry()
    return tuple(known.make("passes", spec) for spec in parse_pipeline(text))


@dataclass(frozen=True)
class PassManager:
    """Runs passes in order.

    Attributes:
        passes: The passes, in the order in which they run.
        instruments: Observers that are called before and after each pass.
        first_index: Number of the first pass, for the instruments.
    """

    passes: Sequence[Pass]
    instruments: Sequence[Instrument] = ()
    first_index: int = 1

    def run(self, state: PipelineState) -> PipelineState:
        """Run all passes of the pipeline, in order.

        Args:
            state: The state before the first pass. It is not changed.

        Returns:
            The state after the last pass.

        Raises:
            UsageError: A pass requires a field that no pass before it has set.
            DicompilerError: A pass reports an error, or computes an invalid model.
            PluginError: A third-party pass fails in another way.
            PassError: A built-in pass fails in another way.
        """
        for index, step in enumerate(self.passes, self.first_index):
            for instrument in self.instruments:
                instrument.before(index, step, state)
            try:
                following = _run_pass(step, state)
            except Exception as error:
                for instrument in self.instruments:
                    instrument.failed(index, step, state, error)
                raise
            state = following
            for instrument in self.instruments:
                instrument.after(index, step, state)
        return state


def _run_pass(step: Pass, state: PipelineState) -> PipelineState:
    for field in step.requires:
        if getattr(state, field) is None:
            raise UsageError(f"pass {step.name!r} needs {field}{_provider_hint(field)}")
    is_third_party = bool(step.provenance)
    nodes = _node_digest(state) if is_third_party else b""
    try:
        result: Any = step.run(state)
        if not isinstance(result, PipelineState):
            raise TypeError(f"run() returned {type(result).__name__} instead of a PipelineState")
        if is_third_party and _node_digest(state) != nodes:
            place = registry().describe("passes", step)
            raise PluginError(f"{place}: run() changed the model of the state that it got: change a copy")
        # The check of the model takes milliseconds, so it is skipped for passes that change only the plan.
        if result.model is not state.model:
            _check_model(step, state, result)
    except DicompilerError:
        raise
    except Exception as error:
        raise PassError(f"{registry().describe('passes', step)}: {type(error).__name__}: {error}") from error
    return _keep_loaded_graph(result, state)


def _node_digest(state: PipelineState) -> bytes:
    """Return a digest of the model's nodes without weights, which shows whether a pass changed the model in place."""
    digest = hashlib.sha256()
    for node in state.model.proto.graph.node:
        digest.update(node.SerializeToString(deterministic=True))
    return digest.digest()


def _keep_loaded_graph(result: PipelineState, before: PipelineState) -> PipelineState:
    """Return `result`, the state after a pass, with the graph as it was loaded in its field `loaded_graph`."""
    loaded = before.model.proto.graph if before.loaded_graph is None else before.loaded_graph
    return result if result.loaded_graph is loaded else replace(result, loaded_graph=loaded)


def _check_model(step: Pass, before: PipelineState, result: PipelineState) -> None:
    """Raise DicompilerError if the model is invalid after a pass; blame the pass only if it was valid before."""
    try:
        result.model.check(f"after pass {step.name!r} {step.provenance}".rstrip())
    except DicompilerError:
        before.model.check(before.model.display_name)
        raise


# Remedies for missing fields of PipelineState that users supply. For other fields, the error lists the passes that set
# them.
_INPUT_REMEDIES = {"platform": "give a platform", "plan": "give a plan or run a pass that sets one before it"}


def _provider_hint(field: str) -> str:
    """Return advice for a missing field of PipelineState: passes that set it, or another way to supply it."""
    makers = [n for n, provided in sorted(registry().passes.items()) if field in provided.value.provides]
    if field in _INPUT_REMEDIES:
        return f": {_INPUT_REMEDIES[field]}"
    return f": run {' or '.join(map(repr, makers))} before it" if makers else ", which no pass provides"
