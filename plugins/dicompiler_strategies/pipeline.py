"""The strategy `pipeline`: consecutive whole layers on each device, with the least time between frames."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from dicompiler.plugin_api import Device, DicompilerError, Part, Plan, Problem, Strategy, UsageError
from dicompiler.plugin_api.search import fits_constraints, objective_terms
from dicompiler_strategies.stages.stage_model import StageRules, build_stage_model
from dicompiler_strategies.stages.stage_search import Stage, StageSolution, find_best_stages

log = logging.getLogger("dicompiler")
SERVED_OBJECTIVES = ("throughput", "memory")
"""Objectives that the strategy can minimise; for others, it minimises the time between frames."""


@dataclass(frozen=True)
class Pipeline(Strategy):
    """Stages of consecutive whole layers, such that a stream has the least time between frames.

        conv1 conv2 | conv3 conv4 conv5 | fc6 fc7     on pi01 | pi02 and pi03, which take frames in turn | pi04

    The time between frames includes computing, messages and links. A device may get no stage. If the objective is
    memory, the fullest host stores as few bytes as possible instead.

    With the objective throughput, devices of a stage may take frames in turn: each computes every n-th frame. For
    objectives other than throughput and memory, the plan has the least time between frames.
    """

    name: ClassVar[str] = "pipeline"
    devices: tuple[str, ...] = field(
        default=(),
        metadata={"help": "devices in the order of their stages, at most one stage each; by default the best order"},
    )
    turns: bool = field(
        default=True,
        metadata={
            "help": "devices of a stage may take frames in turn; only for throughput, and if `devices` is not given"
        },
    )

    def plan(self, problem: Problem) -> Plan:
        """Return the plan with the least time between frames, or with the least memory if that is the objective.

        Raises:
            UsageError: A device is unknown, cannot compute or is named twice.
        """
        devices = self._check_devices(problem)
        # If nothing fits into memory, the limits are ignored. The check of the plan then fails with an error that names
        # the host and the layer that need the most.
        plans = list(self._stage_plans(problem, devices, True)) or list(self._stage_plans(problem, devices, False))
        objective = problem.objective
        if not set(objective_terms(objective)) & set(SERVED_OBJECTIVES):
            log.info("pipeline: it minimises the time between frames, because it cannot minimise %s", objective)
            objective = "throughput"
        elif not devices:
            plans.append(problem.best_single_device[0])
        rate = problem.estimate if problem.model is None else problem.evaluate
        rated = [(plan, rate(plan)) for plan in plans]
        fitting = [entry for entry in rated if fits_constraints(problem, *entry)]
        return min(fitting or rated, key=lambda entry: entry[1].objective_value(objective))[0]

    def _check_devices(self, problem: Problem) -> tuple[Device, ...]:
        try:
            devices = tuple(problem.platform.device(name) for name in self.devices)
        except DicompilerError as error:
            raise UsageError(str(error)) from error
        for index, device in enumerate(devices):
            if not device.can_compute:
                raise UsageError(f"pipeline: device {device.name!r} has no compute: remove it from 'devices'")
            if device.name in self.devices[:index]:
                raise UsageError(f"pipeline: device {device.name!r} is named twice in 'devices': remove one")
        return devices

    def _stage_plans(self, problem: Problem, order: tuple[Device, ...], limits_memory: bool) -> Iterator[Plan]:
        """Yield the plans with the best stages (consecutive layers on a device) for throughput and for memory.

        Nothing is yielded if no stages fit.

        Args:
            problem: The problem. Without throughput and memory in its objective, stages are optimised for throughput.
            order: The devices in the order of their stages; () for the best order.
            limits_memory: True if each stage must fit into the memory of its host.
        """
        terms = [name for name in objective_terms(problem.objective) if name in SERVED_OBJECTIVES]
        can_turn = problem.target is None or problem.target.can_run_replicas
        for term in terms or ["throughput"]:
            takes_turns = self.turns and can_turn and term in terms
            found: list[StageSolution] = []
            depends_on_sender = term == "throughput" and problem.platform.network.kind == "switch"
            for counts_readers in (False, True) if depends_on_sender else (False,):
                rules = StageRules(takes_turns, order, limits_memory, counts_readers)
                solution = find_best_stages(build_stage_model(replace(problem, objective=term), rules), bool(order))
                if solution is not None and solution.stages not in [other.stages for other in found]:
                    found.append(solution)
            for solution in found:
                yield build_stage_plan(problem, solution.stages)
            if found:
                log.info("pipeline: %s", found[0].describe(term))


def build_stage_plan(problem: Problem, stages: Sequence[Stage]) -> Plan:
    """Return the plan of the stages (consecutive layers on one device, or on several that compute frames in turn).

    Several devices become replicas of the plan, which rename the stage's first device.
    """
    layers = problem.layers.layers
    plan = problem.build_plan(
        {layer.name: (Part(stage.turns[0]),) for stage in stages for layer in layers[stage.start : stage.stop]}
    )
    count = math.lcm(*(len(stage.turns) for stage in stages))
    renamings = [
        {stage.turns[0]: stage.turns[i % len(stage.turns)] for stage in stages if len(stage.turns) > 1}
        for i in range(count)
    ]
    changes = tuple({old: new for old, new in renaming.items() if old != new} for renaming in renamings)
    return plan if count == 1 else replace(plan, replicas=changes)
