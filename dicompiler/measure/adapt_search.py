"""Search for a better plan for boards and links that have changed their speed.

The module runs as a process that reads requests from stdin and prints answers, as lines of JSON:

- {"search": SearchRequest} ⇒ SearchAnswer or an error;
- {"prepare": SearchRequest} ⇒ {}, after all that a search needs was loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dicompiler.analysis.prediction_error import segment_seconds
from dicompiler.base.errors import DicompilerError
from dicompiler.cost.workload import Workload
from dicompiler.driver.artifact import reopen_artifact
from dicompiler.driver.compiler import compile
from dicompiler.driver.problem_setup import on_platform
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.platform import Platform, platform_from_toml, platform_to_toml
from dicompiler.measure.calibrate import fit_rates
from dicompiler.measure.connection_speeds import ARROW, fit_bandwidths, predict_byte_seconds
from dicompiler.search.problem import Problem, plan_workload
from dicompiler.target.manifest import PLAN_FILE, PLATFORM_FILE, REFERENCE_FILE
from dicompiler.target.target_base import Target

SEARCH_NICENESS = 5
"""Niceness of the search process, so that it does not slow down the devices on this host.

On a busy core, it gets a quarter of the time. With niceness 15 it would get 3 %, and searches did not end.
"""
FIRST_TOLERANCE = 0.02
"""The user's artifact is preferred to the best one if its predicted objective is worse by at most this fraction."""


@dataclass(frozen=True)
class SearchRequest:
    """The input of a search for a better plan.

    Attributes:
        artifact: Directory of the artifact in use, which may be the result of an earlier search.
        first: Directory of the user's artifact: the one with which the session began, or to which the user swapped
            last. The search compiles its model, assumes no link to be faster than in its platform, and prefers it to
            artifacts that are hardly better.
        platform: The platform before the correction by the measured seconds, as TOML.
        measured_s: Measured seconds of computing by device name, and measured seconds per byte by connection name.
        in_flight: Number of frames in flight.
        strategy: The strategy that searches.
        output: Directory for the new artifact.
    """

    artifact: str
    first: str
    platform: str
    measured_s: Mapping[str, float]
    in_flight: int
    strategy: str
    output: str


@dataclass(frozen=True)
class SearchAnswer:
    """The result of a search for a better plan.

    Attributes:
        platform: The corrected platform, as TOML.
        artifact: Directory of the best artifact: the new one, the user's, or the one in use.
        value: Predicted value of the objective with the artifact in use, on the corrected platform.
        new_value: Predicted value of the objective with the best artifact, on the corrected platform.
        objective: The objective of the artifact in use.
        expected_s: Predicted seconds of computing by device name, and predicted seconds per byte by connection name,
            for the best artifact.
        replica_count: Number of replicas (copies of the plan on other devices) of the best artifact.
    """

    platform: str
    artifact: str
    value: float
    new_value: float
    objective: str
    expected_s: Mapping[str, float]
    replica_count: int


def expected_seconds(compilation: PipelineState, problem: Problem, in_flight: int) -> dict[str, float]:
    """Return predicted seconds of computing by device name, and predicted seconds per byte by connection name.

    The seconds of computing are summed over one frame of each replica (copy of the plan on other devices).

    Args:
        compilation: The compilation, with its plan.
        problem: The problem, with the platform.
        in_flight: Number of frames in flight. Their messages share the links.
    """
    assert compilation.plan is not None
    workload = plan_workload(problem, compilation.plan)[1]
    return {**_computing_seconds(workload), **predict_byte_seconds(workload, problem.platform, in_flight)}


def _computing_seconds(workload: Workload) -> dict[str, float]:
    totals = {name: sum(seconds) for name, seconds in segment_seconds(workload).items()}
    return {name: seconds for name, seconds in totals.items() if seconds}


def search_again(request: SearchRequest) -> SearchAnswer:
    """Search for a better plan at the measured speeds, and write its artifact.

    Raises:
        DicompilerError: No plan was found, or an artifact cannot be read.
    """
    compilation, target, problem = reopen_artifact(request.artifact)
    plan, provenance = compilation.plan, compilation.decision
    assert plan is not None and provenance is not None
    platform = platform_from_toml(request.platform).with_engines(plan.engines)
    case = _MeasuredCase(compilation, target, on_platform(problem, platform, target), request.in_flight)
    platform = case.correct_rates(request.measured_s)
    stated = Platform.load(Path(request.first) / PLATFORM_FILE)
    platform = replace(case, problem=case.with_platform(platform)).correct_links(request.measured_s, stated)
    candidates: dict[str, tuple[PipelineState, Problem]] = {}
    for name in dict.fromkeys((request.artifact, request.first)):
        known, _, known_problem = reopen_artifact(name, platform=platform)
        candidates[name] = known, known_problem
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
    candidates[request.output] = result, result.problem
    values = {name: _predicted_value(state, provenance.objective) for name, (state, _) in candidates.items()}
    best = choose_best(values, request.first)
    chosen, chosen_problem = candidates[best]
    assert chosen.plan is not None
    return SearchAnswer(
        platform_to_toml(platform),
        best,
        values[request.artifact],
        values[best],
        provenance.objective,
        expected_seconds(chosen, chosen_problem, request.in_flight),
        len(chosen.plan.replica_roles),
    )


def prepare_search(request: SearchRequest) -> None:
    """Load the modules, plugins and files that a search needs, by compiling the artifact's own plan.

    Args:
        request: An example of the later searches.

    Raises:
        DicompilerError: The artifact cannot be read.
    """
    compilation, target, problem = reopen_artifact(request.artifact)
    assert compilation.plan is not None
    expected_seconds(compilation, problem, request.in_flight)
    with tempfile.TemporaryDirectory() as place:
        compile(
            str(Path(request.first) / REFERENCE_FILE),
            platform_from_toml(request.platform).with_engines(compilation.plan.engines),
            plan=Path(request.artifact) / PLAN_FILE,
            cost=problem.cost_model,
            target=target,
            state="none",
            allow_worse=True,
            output=Path(place) / "artifact",
        )


def choose_best(values: Mapping[str, float], first: str) -> str:
    """Return the candidate with the lowest value, or `first` if that one is nearly as good.

    Args:
        values: Predicted value of the objective by candidate.
        first: Name of the preferred candidate.
    """
    best = min(values, key=lambda name: values[name])
    return first if values[first] <= (1 + FIRST_TOLERANCE) * values[best] else best


@dataclass(frozen=True)
class _MeasuredCase:
    """A compiled plan with the problem that predicts its seconds, to be compared with the measured seconds.

    Attributes:
        compilation: The compilation that made the plan.
        target: The target that wrote the artifact of the plan.
        problem: The problem, with the platform to correct.
        in_flight: Number of frames in flight.
    """

    compilation: PipelineState
    target: Target
    problem: Problem
    in_flight: int

    def with_platform(self, platform: Platform) -> Problem:
        return on_platform(self.problem, platform, self.target)

    def make_workload(self, platform: Platform) -> Workload:
        assert self.compilation.plan is not None
        return plan_workload(self.with_platform(platform), self.compilation.plan)[1]

    def correct_rates(self, measured_s: Mapping[str, float]) -> Platform:
        """Return the platform with device rates at which the cost model predicts the measured seconds of computing."""
        computing = {name: seconds for name, seconds in measured_s.items() if ARROW not in name}
        return fit_rates(
            self.problem.platform, computing, lambda platform: _computing_seconds(self.make_workload(platform))
        )[0]

    def correct_links(self, measured_s: Mapping[str, float], stated: Platform) -> Platform:
        """Return the platform with the bandwidths at which a byte takes as long in a simulation as was measured.

        Args:
            measured_s: Measured seconds per byte by connection name.
            stated: A platform whose bandwidths are upper limits of the new ones.
        """
        return fit_bandwidths(
            self.problem.platform,
            stated,
            measured_s,
            lambda platform: predict_byte_seconds(self.make_workload(platform), platform, self.in_flight),
        )


def _predicted_value(compilation: PipelineState, objective: str) -> float:
    assert compilation.metrics is not None
    return compilation.metrics.objective_value(objective)


def main() -> int:
    """Read requests from stdin as lines of JSON, and print the answers as lines of JSON."""
    os.nice(SEARCH_NICENESS)
    for line in sys.stdin:
        message = json.loads(line)
        if "prepare" in message:
            # An error is ignored here, because the first search will report it.
            with contextlib.suppress(DicompilerError):
                prepare_search(SearchRequest(**message["prepare"]))
            print("{}", flush=True)
            continue
        try:
            answer = asdict(search_again(SearchRequest(**message["search"])))
        except DicompilerError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
