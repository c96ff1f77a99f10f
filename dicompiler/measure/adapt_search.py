"""The search for a better plan for boards whose speed has changed. `measure.adapt` runs it in a process of its own.

artifact + measured seconds of computing ⇒ corrected platform ⇒ another artifact, if one is predicted to be better

The process reads a `SearchRequest` from stdin as JSON, and prints a `SearchAnswer` or an error as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from dicompiler.analysis.prediction_error import segment_seconds
from dicompiler.base.errors import DicompilerError
from dicompiler.driver.artifact import reopen_artifact
from dicompiler.driver.compiler import compile
from dicompiler.driver.prepare import on_platform
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.platform import Platform, platform_from_toml, platform_to_toml
from dicompiler.measure.calibrate import fit_rates
from dicompiler.search.problem import Problem
from dicompiler.target.manifest import REFERENCE_FILE
from dicompiler.target.target_base import Target

NICENESS = 15
"""Niceness of the process, so that it does not slow down the devices on this host."""
FIRST_TOLERANCE = 0.02
"""The first artifact is preferred if it is predicted to be slower than the new one by at most this share."""


@dataclass(frozen=True)
class SearchRequest:
    """The input of a search.

    Attributes:
        artifact: The artifact in force.
        first: The artifact with which the session began.
        platform: The platform before the correction by the measured seconds, as TOML.
        measured_s: Measured seconds of computing by device, summed over one frame of each replica.
        strategy: The strategy that searches.
        output: Directory for the new artifact.
    """

    artifact: str
    first: str
    platform: str
    measured_s: Mapping[str, float]
    strategy: str
    output: str


@dataclass(frozen=True)
class SearchAnswer:
    """The result of a search.

    Attributes:
        platform: The corrected platform, as TOML.
        artifact: The better artifact: a new one, or the first one; the artifact in force if none is better.
        value: Predicted value of the objective with the artifact in force, on the corrected platform.
        new_value: Predicted value of the objective with the better artifact, on the corrected platform.
        expected_s: Predicted seconds of computing with the better artifact by device, summed over one frame of each
            replica.
        replica_count: Number of replicas of the better artifact.
    """

    platform: str
    artifact: str
    value: float
    new_value: float
    expected_s: Mapping[str, float]
    replica_count: int


def expected_seconds(compilation: PipelineState, problem: Problem) -> dict[str, float]:
    """Return the predicted seconds of computing of each device, summed over one frame of each replica.

    Args:
        compilation: The compilation, with its plan.
        problem: The problem, with the platform.

    Returns:
        Seconds by device; devices that do not compute are omitted.
    """
    assert compilation.plan is not None
    totals = {name: sum(seconds) for name, seconds in segment_seconds(problem.workload(compilation.plan)[1]).items()}
    return {name: seconds for name, seconds in totals.items() if seconds}


def search_again(request: SearchRequest) -> SearchAnswer:
    """Search for a better plan for the measured speeds, and write its artifact.

    Args:
        request: The artifact in force and the measured seconds.

    Returns:
        The corrected platform and the better artifact.

    Raises:
        DicompilerError: No plan was found, or an artifact cannot be read.
    """
    compilation, target, problem = reopen_artifact(request.artifact)
    plan, provenance = compilation.plan, compilation.decision
    assert plan is not None and provenance is not None
    platform = platform_from_toml(request.platform).with_engines(plan.engines)
    platform = correct_rates(compilation, on_platform(problem, platform, target), target, request.measured_s)
    candidates = {name: _predicted_value(name, platform) for name in (request.artifact, request.first)}
    result = compile(
        str(Path(request.first) / REFERENCE_FILE),
        platform,
        request.strategy,
        objective=provenance.objective,
        cost=problem.cost_model,
        target=target,
        state="none",
        wire_dtype=plan.wire_format if plan.wire_format.dtypes else None,
        tolerate_failures=max((len(failure.failed) for failure in plan.failures), default=0),
        allow_worse=True,
        output=request.output,
    )
    assert result.metrics is not None
    candidates[request.output] = result.metrics.objective_value(provenance.objective)
    best = min(candidates, key=lambda name: candidates[name])
    if candidates[request.first] <= (1 + FIRST_TOLERANCE) * candidates[best]:
        best = request.first
    chosen, _, chosen_problem = reopen_artifact(best, platform=platform)
    assert chosen.plan is not None
    return SearchAnswer(
        platform_to_toml(platform),
        best,
        candidates[request.artifact],
        candidates[best],
        expected_seconds(chosen, chosen_problem),
        len(chosen.plan.replica_roles),
    )


def correct_rates(
    compilation: PipelineState, problem: Problem, target: Target, measured_s: Mapping[str, float]
) -> Platform:
    """Return the problem's platform with rates for which the measured seconds of computing are predicted.

    Args:
        compilation: The compilation that was measured.
        problem: The problem, with the platform to correct.
        target: The target.
        measured_s: Measured seconds, as `expected_seconds` predicts them.

    Returns:
        The corrected platform.
    """

    def predict(platform: Platform) -> Mapping[str, float]:
        return expected_seconds(compilation, on_platform(problem, platform, target))

    return fit_rates(problem.platform, measured_s, predict)[0]


def _predicted_value(artifact: str, platform: Platform) -> float:
    compilation, _, problem = reopen_artifact(artifact, platform=platform)
    assert compilation.metrics is not None
    return compilation.metrics.objective_value(problem.objective)


def main() -> int:
    """Read a request, print the answer, and return the exit code."""
    os.nice(NICENESS)
    try:
        answer = asdict(search_again(SearchRequest(**json.load(sys.stdin))))
    except DicompilerError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
