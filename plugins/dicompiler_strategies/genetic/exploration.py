"""The exploration: a search for the Pareto front of plans, in stages on more and more devices.

Each stage begins with the front of the previous one. It evaluates many plans with a fast model (first level), and then
the best ones one by one (second level). In `genetic`, only the last stage has a second level. Method: Guo et al.,
"Automated Exploration and Implementation of Distributed CNN Inference at the Edge" (2022), section IV-B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import ClassVar, Literal

import numpy as np

from dicompiler.plugin_api import DicompilerError, Problem, UsageError
from dicompiler.plugin_api.search import (
    AUTODICE_OBJECTIVES,
    ParetoFront,
    ParetoPoint,
    ProgressCallback,
    check_objectives,
    describe_missing_memory,
)
from dicompiler_strategies.genetic.batched_model import build_batched_model
from dicompiler_strategies.genetic.encoding import Encoding, PlanRows
from dicompiler_strategies.genetic.evaluators import (
    UNMEASURED_VALUE,
    MeasureFunction,
    PlanSpace,
    TiledLayerSpace,
    WholeLayerSpace,
    build_measuring_evaluator,
)
from dicompiler_strategies.genetic.nsga2 import Array, Evaluate, EvolutionSettings, EvolvedFront, evolve, select_spread

MAX_SEED_SHARE = 1 / 4
"""Largest fraction of a stage's first population that is copied from the front of the previous stage.

The rest of the population are changed copies of these plans.
"""


def _help_metadata(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True)
class ExplorationOptions:
    """Options of the genetic search for a Pareto front of plans."""

    as_printed: ClassVar[bool] = False
    """True for the paper's method: begin with random plans, and evaluate the best plans of every stage one by one."""
    default_generations: ClassVar[int] = 150
    """Default of the option `generations`."""

    objectives: tuple[str, ...] = field(
        default=AUTODICE_OBJECTIVES,
        metadata=_help_metadata(
            "axes of the front: latency, throughput, energy, memory, communication, device-memory, device-energy"
        ),
    )
    encoding: Literal["split", "naive", "tiles"] = field(
        default="split",
        metadata=_help_metadata(
            "split: a run of layers for each device; naive: a device for each layer; tiles: a split for each layer"
        ),
    )
    population: int = field(default=100, metadata=_help_metadata("number of plans in a generation"))
    generations: int | None = field(
        default=None,
        metadata=_help_metadata("number of generations of all stages together; by default 150 (autodice: 400)"),
    )
    mutation: float = field(
        default=0.2,
        metadata=_help_metadata("probability that a new plan is mutated; one that equals a parent always is"),
    )
    crossover: float = field(default=0.5, metadata=_help_metadata("probability that a new plan has two parents"))
    stages: int = field(
        default=0,
        metadata=_help_metadata(
            "number of stages (each searches on twice as many devices); 0: log2 of the number of devices, rounded up"
        ),
    )
    measured: int = field(
        default=16,
        metadata=_help_metadata(
            "number of plans of the front that the simulator then evaluates (the second level); 0: none"
        ),
    )
    measured_generations: int = field(
        default=0, metadata=_help_metadata("number of further generations in the second level")
    )
    seed: int = field(default=0, metadata=_help_metadata("seed of the random numbers"))

    def __post_init__(self) -> None:
        check_objectives(self.objectives)
        least = {"population": 2, "generations": 1, "stages": 0, "measured": 0, "measured_generations": 0, "seed": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise UsageError(f"genetic: {name} is {value}: use at least {low}")
        for name in ("mutation", "crossover"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"genetic: {name} is {getattr(self, name)}: use a probability between 0 and 1")

    @property
    def total_generations(self) -> int:
        return self.generations or self.default_generations


def explore(
    problem: Problem,
    options: ExplorationOptions,
    measure: MeasureFunction | None = None,
    progress: ProgressCallback | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> ParetoFront:
    """Return the Pareto front of the plans of a problem. Ctrl-C ends the search with the front so far.

    There are K = ⌈log2 N⌉ stages for N computing devices, unless the options give another number. Stage k searches on
    the ⌈N / 2^(K − k)⌉ fastest devices, and begins with the front of stage k − 1.

    Args:
        problem: The problem.
        options: Options of the search.
        measure: Function that evaluates each of the best plans. Default: the simulator (`Problem.evaluate_all`).
        progress: Called with a text about the current step.
        should_stop: If it returns True, each remaining stage has one generation.
    """
    space: PlanSpace
    if options.encoding == "tiles":
        space = TiledLayerSpace.from_problem(problem)
    else:
        space = WholeLayerSpace(build_batched_model(problem), options.encoding == "naive")
    evaluate_measured = None
    if options.measured:
        evaluate_measured = build_measuring_evaluator(problem, options.objectives, space.plan, measure)
    search = _StagedSearch(problem, options, space, evaluate_measured, progress or (lambda _: None), should_stop)
    return _build_front(problem, options, space, *search.run())


def plan_stages(devices: int, count: int, generations: int) -> tuple[tuple[int, int], ...]:
    """Return (number of devices, number of generations) of each stage of the search.

    Each stage has half as many devices as the next. The generations are divided in proportion to the cube of the number
    of devices, because there are few plans on few devices. Stages without a generation are omitted.

    Args:
        devices: Number of computing devices.
        count: Number of stages; 0 for the rounded-up logarithm to base 2 of `devices`.
        generations: Number of generations of all stages together.
    """
    count = count or max(1, (devices - 1).bit_length())
    sizes = [max(1, -(-devices // 2**k)) for k in reversed(range(count))]
    weights = list(accumulate(size**3 for size in sizes))
    ends = [round(generations * weight / weights[-1]) for weight in weights]
    pairs = zip(sizes, (end - start for start, end in pairwise((0, *ends))), strict=True)
    return tuple((size, share) for size, share in pairs if share)


@dataclass
class _StagedSearch:
    problem: Problem
    options: ExplorationOptions
    space: PlanSpace
    measure: Evaluate | None
    progress: Callable[[str], None]
    should_stop: Callable[[], bool]

    def run(self) -> tuple[EvolvedFront, str, int]:
        """Search stage by stage.

        Returns:
            The last Pareto front; the source of its values, "analytic" (fast model) or "measured" (one by one); the
            number of evaluated plans.
        """
        options = self.options
        plan = plan_stages(len(self.problem.platform.computing_devices), options.stages, options.total_generations)
        front, level, evaluations, unused_evaluations = None, "analytic", 0, 0
        for k, (devices, generations) in enumerate(plan):
            name = f"stage {k + 1} of {len(plan)}"
            encoding = self.space.encoding(devices)
            seeds = np.empty((0, encoding.layers), np.intp)
            if front is not None:
                seeds = self._seed_population(front, devices, k)
            if not options.as_printed:
                seeds = np.concatenate((self.space.seed_plans(devices), seeds))
            generations += unused_evaluations // options.population
            settings = EvolutionSettings(options.population, generations, options.mutation, options.crossover)
            try:
                front = self._run_level(encoding, self._evaluate_fast, settings, seeds, (k, 1), name)
            except KeyboardInterrupt:
                if front is None:
                    raise
                return replace(front, interrupted=True), level, evaluations
            level, evaluations = "analytic", evaluations + front.evaluations
            unused_evaluations = max(0, options.population * generations - front.evaluations)
            is_last = k == len(plan) - 1
            if self.measure is not None and (is_last or options.as_printed) and not front.interrupted:
                front, level = self._run_measured_level(encoding, front, k, f"{name}, measuring")
                evaluations += front.evaluations if level == "measured" else 0
            if front.interrupted:
                break
        assert front is not None
        return front, level, evaluations

    def _seed_population(self, front: EvolvedFront, devices: int, stage: int) -> PlanRows:
        """Return the first plans of a stage: plans of the previous stage's front, and changed copies of them.

        Args:
            front: The front, of which plans with very different objectives are chosen.
            devices: Number of devices that the changed copies may use.
            stage: Index of the stage that begins.
        """
        rows = front.plans[select_spread(front.objectives, max(1, round(self.options.population * MAX_SEED_SHARE)))]
        rng = np.random.default_rng([self.options.seed, stage, 0])
        return np.concatenate((rows, self.space.grow_plans(rng, rows, devices, self.options.population - len(rows))))

    def _run_measured_level(
        self, encoding: Encoding, front: EvolvedFront, stage: int, name: str
    ) -> tuple[EvolvedFront, str]:
        """Evaluate plans with very different objectives one by one, and continue the search from them.

        Returns:
            The new front and "measured"; after Ctrl-C, the given front and "analytic".
        """
        assert self.measure is not None
        options = self.options
        seeds = front.plans[select_spread(front.objectives, options.measured)]
        settings = EvolutionSettings(len(seeds), 1 + options.measured_generations, options.mutation, options.crossover)
        self.progress(f"{name}: {len(seeds)} plans")
        try:
            return self._run_level(encoding, self.measure, settings, seeds, (stage, 2), name), "measured"
        except KeyboardInterrupt:
            return replace(front, interrupted=True), "analytic"

    def _run_level(
        self,
        encoding: Encoding,
        evaluate: Evaluate,
        settings: EvolutionSettings,
        seeds: PlanRows,
        stage_and_level: tuple[int, int],
        name: str,
    ) -> EvolvedFront:
        rng = np.random.default_rng([self.options.seed, *stage_and_level])

        def report(generation: int, count: int) -> None:
            self.progress(f"{name}: generation {generation} of {settings.generations}, {count} plans in the front")

        return evolve(encoding, evaluate, settings, seeds, rng, report, self.should_stop)

    def _evaluate_fast(self, rows: PlanRows) -> tuple[Array, Array]:
        return self.space.evaluate(rows, self.options.objectives)


def _build_front(
    problem: Problem, options: ExplorationOptions, space: PlanSpace, front: EvolvedFront, level: str, evaluations: int
) -> ParetoFront:
    fitting = [i for i in range(len(front.plans)) if front.violations[i] <= 0]
    if not fitting and min(front.violations) >= UNMEASURED_VALUE:
        raise DicompilerError("genetic: none of the plans could be measured: see the warnings")
    if not fitting:
        need = describe_missing_memory(problem, space.plan(front.plans[0]))
        raise DicompilerError(
            f"genetic: no plan was found that fits into memory: the best one needs {need}: use more devices or more "
            "generations"
        )
    note = "the search was interrupted" if front.interrupted else ""
    points = [
        ParetoPoint(
            replace(space.plan(front.plans[i]), note=note),
            dict(zip(options.objectives, map(float, front.objectives[i]), strict=True)),
        )
        for i in fitting
    ]
    return ParetoFront(options.objectives, tuple(points), level, evaluations, front.interrupted)
