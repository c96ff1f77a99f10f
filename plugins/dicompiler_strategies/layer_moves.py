"""Local search over plans of whole layers: move runs (sequences) of consecutive layers to other devices.

In each step, a fast model (`BatchedModel`) evaluates thousands of changed plans at once, and the best one is taken. The
search ends when no change improves the current plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import Plan, Problem
from dicompiler.plugin_api.search import WorkBudget, free_memory, objective_terms
from dicompiler_strategies.genetic.batched_model import BatchedModel, build_batched_model

MAX_MOVED_LAYERS = 32
"""Largest number of layers that are moved at once."""
MAX_RUNS = 2500
"""Largest number of runs (sequences of consecutive layers) that are considered in a step."""
PLAN_LAYER_DEVICE_S = 2.2e-8
"""Seconds of the reference computer to evaluate a plan, divided by the numbers of layers and of devices."""
MIN_GAIN = 1e-6
"""Smallest relative gain in the objective for which the search goes on."""

Rows = NDArray[np.intp]
"""Plans; a row has the platform position of each layer's device."""


def is_plan_of_whole_layers(plan: Plan) -> bool:
    """Return True if each layer is whole on one device, and the plan has no replicas."""
    return not plan.replicas and all(
        len(parts) == 1 and parts[0].region is None and parts[0].reduce is None for parts in plan.layers.values()
    )


def improve_by_moves(problem: Problem, plan: Plan, budget: WorkBudget) -> Plan:
    """Return the best plan that is found by moving runs of consecutive layers to other devices.

    If no plan is better, the layers stay on the devices of `plan`. The plan must have each layer whole on one device,
    and no replicas. The objective is that of the problem, as `BatchedModel` estimates it.
    """
    model = build_batched_model(problem)
    position = {device.name: i for i, device in enumerate(problem.platform.devices)}
    row = np.array([position[plan.layers[layer.name][0].device] for layer in problem.layers.layers], np.intp)
    (value,) = _objective_values(model, row[None])
    runs = list(_runs(len(row)))
    step_s = len(runs) * len(row) * len(position) ** 2 * PLAN_LAYER_DEVICE_S
    while budget.try_spend(step_s):
        moved = _moved_rows(problem, row, runs)
        if not len(moved):
            break
        values = _objective_values(model, moved)
        best = int(values.argmin())
        if not values[best] < value * (1 - MIN_GAIN):
            break
        row, value = moved[best], values[best]
    return model.plan(row)


def _objective_values(model: BatchedModel, rows: Rows) -> NDArray[np.float64]:
    """Return the value of the objective of each plan, shape (plans,); infinite if the plan does not fit into memory."""
    estimates = model.evaluate(rows)
    terms = objective_terms(model.problem.objective)
    values = np.sum([weight * estimates.objective(name) for name, weight in terms.items()], axis=0)
    limits = np.array(list(free_memory(model.problem).values()), np.float64)
    return np.where((estimates.host_memory > limits).any(axis=1), np.inf, values)


def _moved_rows(problem: Problem, row: Rows, runs: Sequence[tuple[int, int]]) -> Rows:
    """Return all plans that differ from `row` in one way: a run of consecutive layers is on another device."""
    devices = [i for i, device in enumerate(problem.platform.devices) if device.can_compute]
    changed = []
    for start, stop in runs:
        for device in devices:
            if (row[start:stop] != device).any():
                other = row.copy()
                other[start:stop] = device
                changed.append(other)
    return np.array(changed, np.intp).reshape(-1, len(row))


def _runs(layers: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of runs of 1, 2, 3, 4, 6, 8, … layers, at most about MAX_RUNS in all.

    Runs begin at every layer; in a large network, at every second, third, … layer.
    """
    lengths = [length for k in range(MAX_MOVED_LAYERS.bit_length()) for length in (2**k, 3 * 2**k // 2)]
    chosen = sorted({length for length in lengths if length <= min(layers, MAX_MOVED_LAYERS)})
    step = -(-layers * len(chosen) // MAX_RUNS)
    for length in chosen:
        yield from ((start, start + length) for start in range(0, layers - length + 1, step))
