"""Transformers as people split them: attention by heads, the rest of a block by columns and then rows of its weights.

After Megatron-LM (Shoeybi et al., arXiv 1909.08053), Galaxy (Ye et al., arXiv 2405.17245: what lies between in rows)
and TPI-LLM (Li et al., arXiv 2410.00531).
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
from dicompiler_strategies.candidate_search import LAMBDAS, CandidateSearch
from dicompiler_strategies.joint.variable_elimination import (
    MAX_TABLE_ELEMENTS,
    build_elimination_order,
    minimise_exactly,
)
from dicompiler_strategies.tables.choices import SOURCE_SHARE, ChoiceSet
from dicompiler_strategies.tables.cost_tables import CostTables, build_cost_tables, restrict_edges, to_original_numbers
from dicompiler_strategies.trim_parts import trim_parts

HEADS_KINDS = ("whole", "height", "lop", "lip")
KeptChoices = Sequence[NDArray[np.intp]]
"""Of each layer the numbers of the choices that are looked at."""
TIE_BREAK_S = 1e-7
"""Seconds that rows of what multiplies nothing count beside: of equals a product's rows travel, not what is made of
them, so that those of products that stand side by side leave together."""


@dataclass(frozen=True)
class Heads(Strategy):
    """Runs of layers by channels (heads), rows of a sequence, or all of a layer on each device: the best of each.

    Q, K, V by columns → attention by heads → the output by rows of its weights → partial sums, added up in rows

    Every layer has few choices, all of them on as many devices, in equal shares or by rate: the best of all together is
    found exactly, for several prices of sending, and the simulator takes its pick. Where memory is to be small layers
    have only those choices with which the fullest device holds the fewest weights.
    """

    name: ClassVar[str] = "heads"
    device_counts: tuple[int, ...] = field(
        default=(), metadata={"help": "numbers of devices; by default all, and half"}
    )
    waves: bool = field(default=True, metadata={"help": "whether parts may go in waves, what others wait for first"})
    budget: float = field(
        default=DEFAULT_BUDGET_S, metadata={"help": "seconds of a common computer that its work may come to"}
    )

    def __post_init__(self) -> None:
        if any(count < 2 for count in self.device_counts):
            raise ValueError(f"counts are numbers of devices of at least 2, not {min(self.device_counts)}")
        if not self.budget > 0:
            raise ValueError(f"budget must be more than 0 s, not {self.budget:g}")

    def plan(self, problem: Problem) -> Plan:
        """The best plan found. Raises DicompilerError for a network without attention, and where none fits, or the
        budget is over before there is one."""
        return self._plan(problem, WorkBudget(self.budget), self.waves)

    def plan_within(self, problem: Problem, budget: WorkBudget) -> Plan:
        """The same of what is allowed, not in waves."""
        return self._plan(problem, budget, waves=False)

    def _plan(self, problem: Problem, allowance: WorkBudget, waves: bool) -> Plan:
        if not has_attention(problem):
            raise DicompilerError(f"heads: {_explain_no_attention(problem)}: take another strategy")
        search = CandidateSearch(problem, self.name, allowance)
        devices = len(problem.platform.computing_devices)
        alike = len({device.rate for device in problem.platform.computing_devices}) == 1
        for count in self.device_counts or sorted({devices, -(-devices // 2)} - {1}, reverse=True):
            for shares in ("equal",) if alike else ("equal", "rate"):
                if search.best is not None and allowance.is_exceeded():
                    break
                filled = WorkBudget()
                cost_tables = reduced_choices(problem, count, shares, filled)
                allowance.spend(filled.spent_s)
                if search.try_plans((plan, "heads") for plan in _candidate_plans(cost_tables)):
                    best = cost_tables
        if search.best is None:
            raise DicompilerError("heads: no plan fits into memory: give hosts more, or add some")
        search.reduce_weights(best)
        search.best = replace(search.best, plan=trim_parts(problem, search.best.plan))
        if waves:
            search.try_waves(best_row_plans(best))
        return replace(search.best.plan, note=allowance.note())


def reduced_choices(problem: Problem, count: int, shares: str, allowance: WorkBudget | None = None) -> CostTables:
    """The tables of the few choices that each layer has: all on so many devices, in such shares. DicompilerError where
    the allowance is over before they are filled."""
    options = ChoiceSet(
        HEADS_KINDS, (count,), 0, (shares, SOURCE_SHARE), ("balanced",), ("rows", "all"), each_device=False
    )
    return build_cost_tables(problem, options, allowance)


def has_attention(problem: Problem) -> bool:
    """Whether a layer that can be cut multiplies tensors, none of which is a weight."""
    return any(not layer.whole_reason for layer in _attention_layers(problem.layers))


def _attention_layers(layers: LayerGraph) -> Iterator[Layer]:
    """The layers that multiply tensors, none of which is a weight."""
    for layer in layers.layers:
        names = [name for name in layer.nodes[layer.anchor].inputs if name]
        if sum(not layers.tensors[name].is_constant for name in names) > 1 and count_macs(layers, layer):
            yield layer


def _explain_no_attention(problem: Problem) -> str:
    """Why a network has no attention that can be cut: what comes nearest to it."""
    for layer in _attention_layers(problem.layers):
        return f"layer {layer.name!r}, which attends, cannot be cut: {layer.whole_reason}"
    return "the network has no attention: no layer multiplies two tensors that are computed"


def best_row_plans(cost_tables: CostTables) -> list[Plan]:
    """The best plan of rows alone, if there is one: in waves it may be better than what is better without."""
    return list(itertools.islice(_optimal_plans(cost_tables, _row_choices(cost_tables)), 1))


def _candidate_plans(cost_tables: CostTables) -> Iterator[Plan]:
    """The best for each price of sending, first of the choices with the least weights on the fullest device; of rows
    alone and of all choices where memory is not what is asked for: without barriers rows may be better than these."""
    least = [np.flatnonzero(held.max(axis=1) == held.max(axis=1).min()) for held in cost_tables.weight_bytes]
    every = [np.arange(count) for count in cost_tables.choice_counts]
    memory = cost_tables.problem.objective == "memory"
    for kept in (least,) if memory else (least, _row_choices(cost_tables), every):
        yield from _optimal_plans(cost_tables, kept)


def _row_choices(cost_tables: CostTables) -> KeptChoices:
    """The choices that cut rows, or nothing."""
    return [
        np.array([i for i, choice in enumerate(choices) if choice.kind in ("whole", "height")])
        for choices in cost_tables.choices
    ]


def _optimal_plans(cost_tables: CostTables, kept: KeptChoices) -> Iterator[Plan]:
    """The best of the choices that are kept for each price of sending, the dearest first; nothing where the layers are
    too entangled."""
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
    for scale in LAMBDAS:
        _, chosen = minimise_exactly(order, node, {key: scale * table for key, table in edge.items()})
        yield cost_tables.plan(to_original_numbers(kept, chosen))
