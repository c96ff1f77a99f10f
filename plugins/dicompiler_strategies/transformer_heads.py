"""The strategy `heads` for transformers: split attention by heads, and matrix products by columns or rows of weights.

After Megatron-LM (Shoeybi et al., arXiv 1909.08053), Galaxy (Ye et al., arXiv 2405.17245) and TPI-LLM (Li et al., arXiv
2410.00531). As in Galaxy, the other layers may be split by rows of the token sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import DicompilerError, Layer, LayerGraph, Plan, Problem, Strategy
from dicompiler.plugin_api.costs import count_macs
from dicompiler.plugin_api.search import DEFAULT_BUDGET_S, WorkBudget
from dicompiler_strategies.candidate_search import SENDING_FACTORS, CandidateSearch
from dicompiler_strategies.joint.variable_elimination import (
    MAX_TABLE_ELEMENTS,
    build_elimination_order,
    minimise_exactly,
)
from dicompiler_strategies.tables.choices import SOURCE_SHARE, ChoiceSet
from dicompiler_strategies.tables.cost_tables import CostTables, build_cost_tables, restrict_edges, to_original_numbers
from dicompiler_strategies.trim_parts import trim_parts

HEADS_KINDS = ("whole", "height", "lop", "lip")
"""Not split, split by rows of the token sequence, by output channels (LOP), and by input channels (LIP)."""
KeptChoices = Sequence[NDArray[np.intp]]
"""For each layer, the numbers of the choices (ways to split the layer) among which the search selects."""
TIE_BREAK_S = 1e-7
"""Seconds that are added to the cost of splitting a layer without multiplications by rows.

Of equally good plans, the search then takes the one that sends outputs of matrix products, because those of parallel
products are sent in one message.
"""


@dataclass(frozen=True)
class Heads(Strategy):
    """Layers of a transformer, split by channels (heads) or by rows of the token sequence, or whole on each device.

        Q, K, V by columns → attention by heads → the output by rows of its weights → partial sums, added up in rows

    All layers use the same number of devices, with parts that are equal or in proportion to the devices' rates. The
    best combination of splits is computed exactly, for several factors on the time of sending. The simulator then
    selects one of these plans. If the objective is memory, only the splits with the fewest weights on the fullest
    device are used.
    """

    name: ClassVar[str] = "heads"
    device_counts: tuple[int, ...] = field(
        default=(),
        metadata={"help": "numbers of devices over which layers may be split; by default all, and half of them"},
    )
    waves: bool = field(
        default=True, metadata={"help": "order parts in waves: parts that other devices wait for come first"}
    )
    budget: float = field(
        default=DEFAULT_BUDGET_S, metadata={"help": "limit of the search's work, in seconds of a reference computer"}
    )

    def __post_init__(self) -> None:
        if any(count < 2 for count in self.device_counts):
            raise ValueError(f"device_counts must be at least 2, not {min(self.device_counts)}")
        if not self.budget > 0:
            raise ValueError(f"budget must be more than 0 s, not {self.budget:g}")

    def plan(self, problem: Problem) -> Plan:
        """Return the best plan found, or the plan of the best single device if that is better.

        Raises:
            DicompilerError: The network has no attention, or no plan fits into memory.
        """
        return self._plan(problem, WorkBudget(self.budget), self.waves)

    def plan_within(self, problem: Problem, budget: WorkBudget) -> Plan:
        """Return the best plan found, without the final step that computes rows for other devices first.

        The caller does this step for its best plan only.
        """
        return self._plan(problem, budget, waves=False)

    def _plan(self, problem: Problem, budget: WorkBudget, waves: bool) -> Plan:
        if not has_attention(problem):
            raise DicompilerError(f"heads: {_explain_no_attention(problem)}: use another strategy")
        devices = len(problem.platform.computing_devices)
        if devices < 2:
            raise DicompilerError(
                "heads: only one device of the platform computes: use strategy single, or more devices"
            )
        search = CandidateSearch(problem, self.name, budget)
        has_equal_rates = len({device.rate for device in problem.platform.computing_devices}) == 1
        for count in self.device_counts or sorted({devices, -(-devices // 2)} - {1}, reverse=True):
            for shares in ("equal",) if has_equal_rates else ("equal", "rate"):
                if search.best is not None and budget.is_exceeded():
                    break
                table_budget = WorkBudget()
                cost_tables = reduced_choices(problem, count, shares, table_budget)
                budget.spend(table_budget.spent_s)
                if search.try_plans((plan, "heads") for plan in _candidate_plans(cost_tables)):
                    best = cost_tables
        if search.best is None:
            raise DicompilerError("heads: no plan fits into memory: use hosts with more memory, or more hosts")
        search.reduce_weights(best)
        search.try_sliced_sums()
        search.best = replace(search.best, plan=trim_parts(problem, search.best.plan))
        if waves:
            search.try_waves(best_row_plans(best))
        search.try_plans([(problem.best_single_device[0], self.name)], ignores_budget=True)
        return replace(search.best.plan, note=budget.note())


def reduced_choices(problem: Problem, count: int, shares: str, budget: WorkBudget | None = None) -> CostTables:
    """Return cost tables with few ways to split each layer, all on `count` devices.

    `shares` is "equal" for parts of equal size, and "rate" for parts in proportion to the devices' rates.
    """
    options = ChoiceSet(
        HEADS_KINDS, (count,), 0, (shares, SOURCE_SHARE), ("balanced",), ("rows", "all"), each_device=False
    )
    return build_cost_tables(problem, options, budget)


def has_attention(problem: Problem) -> bool:
    """Return True if some layer multiplies two computed tensors, as attention does, and can be split."""
    return any(not layer.whole_reason for layer in _attention_layers(problem.layers))


def _attention_layers(layers: LayerGraph) -> Iterator[Layer]:
    """Yield the layers that multiply two computed tensors, as attention does."""
    for layer in layers.layers:
        names = [name for name in layer.nodes[layer.anchor].inputs if name]
        if sum(not layers.tensors[name].is_constant for name in names) > 1 and count_macs(layers, layer):
            yield layer


def _explain_no_attention(problem: Problem) -> str:
    for layer in _attention_layers(problem.layers):
        return f"attention layer {layer.name!r} cannot be cut: {layer.whole_reason}"
    return "the network has no attention (no layer multiplies two computed tensors)"


def best_row_plans(cost_tables: CostTables) -> list[Plan]:
    """Return a list with the best plan that splits layers only by rows.

    If rows for other devices are computed first, this plan may be better than all others. The list is empty if the
    network has too many parallel branches for an exact search.
    """
    return list(itertools.islice(_optimal_plans(cost_tables, _row_choices(cost_tables)), 1))


def _candidate_plans(cost_tables: CostTables) -> Iterator[Plan]:
    """Yield the best plan for each factor on the times of sending, for several sets of ways to split layers."""
    fewest_weights = [
        np.flatnonzero(layer_weights.max(axis=1) == layer_weights.max(axis=1).min())
        for layer_weights in cost_tables.weight_bytes
    ]
    all_choices = [np.arange(count) for count in cost_tables.choice_counts]
    is_memory = cost_tables.problem.objective == "memory"
    for kept in (fewest_weights,) if is_memory else (fewest_weights, _row_choices(cost_tables), all_choices):
        yield from _optimal_plans(cost_tables, kept)


def _row_choices(cost_tables: CostTables) -> KeptChoices:
    """Return, for each layer, the numbers of the choices that split it by rows or keep it whole."""
    return [
        np.array([i for i, choice in enumerate(choices) if choice.kind in ("whole", "height")])
        for choices in cost_tables.choices
    ]


def _optimal_plans(cost_tables: CostTables, kept: KeptChoices) -> Iterator[Plan]:
    """Yield the best plan for each factor on the times of sending, over the choices (ways to split a layer) `kept`.

    Nothing is yielded if the layer graph has too many parallel branches for the exact search.
    """
    layers = cost_tables.problem.layers
    nodes = [
        seconds
        + TIE_BREAK_S * (not count_macs(layers, layer)) * np.array([choice.kind == "height" for choice in choices])
        for layer, seconds, choices in zip(layers.layers, cost_tables.node_seconds, cost_tables.choices, strict=True)
    ]
    order = build_elimination_order([len(numbers) for numbers in kept], list(cost_tables.edge_seconds))
    if order.largest_table > MAX_TABLE_ELEMENTS:
        return
    node = [seconds[numbers] for seconds, numbers in zip(nodes, kept, strict=True)]
    edge = restrict_edges(cost_tables.edge_seconds, kept)
    for scale in SENDING_FACTORS:
        _, selection = minimise_exactly(order, node, {key: scale * table for key, table in edge.items()})
        yield cost_tables.plan(to_original_numbers(kept, selection))
