"""Models of loads: the memory of each host, or the seconds of each device and link, for many plans at once.

    CostTables → SentTensors → PeriodModel or HostMemoryModel
    model + selections → loads

A selection is a plan, as one choice (way to split the layer) for each layer.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import LayerGraph, Problem
from dicompiler.plugin_api.onnx import raw_nbytes
from dicompiler_strategies.tables.choice_footprints import (
    Floats,
    device_host_matrix,
    needed_bytes,
    output_bytes,
    source_and_sink,
    state_bytes,
)
from dicompiler_strategies.tables.cost_tables import (
    BoxFlow,
    CostTables,
    LayerEdge,
    bytes_between_devices,
    find_edges,
    find_state_edges,
    flows_at_ends,
    flows_on_edge,
)
from dicompiler_strategies.tables.link_loads import RuntimeArrays, build_link_loads
from dicompiler_strategies.teams.value_groups import ValueGroups

Selections = NDArray[np.intp]
"""One plan or several: the index of each layer's choice (way to split it). The last axis is the layers."""


@dataclass(frozen=True, eq=False)
class TensorBytes:
    """The bytes of one tensor that devices send to each other.

    Attributes:
        last_reader: Position of the last layer that reads the tensor.
        edges: The bytes by edge (pair of connected layers). Those of the edge from layer i to reader j have the shape
            (choices of i, choices of j, senders, receivers). A receiver gets each element of a tensor only once, and
            the tensor's readers mostly read the same region. For each pair of devices (or each receiver), only the
            largest number of bytes over the edges therefore counts.
    """

    last_reader: int
    edges: Mapping[LayerEdge, Floats]


@dataclass(frozen=True, eq=False)
class SentTensors:
    """The bytes that devices send to each other, by the choices (ways to split a layer) of the layers.

    After `received()`, the arrays have no axis of senders.

    Attributes:
        tensors: The tensors that other layers read.
        inputs: For each layer, the bytes of network inputs that it reads, shape (choices, senders, receivers).
        outputs: For each layer, the bytes of network outputs that it sends to sinks, of the same shape.
    """

    tensors: Sequence[TensorBytes]
    inputs: Sequence[Floats]
    outputs: Sequence[Floats]

    def received(self) -> SentTensors:
        """Return the bytes that each device receives. The arrays have no axis of senders."""
        known: dict[int, Floats] = {}

        def sum_over_senders(sent: Floats) -> Floats:
            if id(sent) not in known:
                known[id(sent)] = sent.sum(axis=-2)
            return known[id(sent)]

        tensors = [
            replace(tensor, edges={edge: sum_over_senders(sent) for edge, sent in tensor.edges.items()})
            for tensor in self.tensors
        ]
        return SentTensors(tensors, [*map(sum_over_senders, self.inputs)], [*map(sum_over_senders, self.outputs)])


def find_sent_tensors(tables: CostTables) -> SentTensors:
    """Return the bytes that are sent for each tensor, by the choices (ways to split) of its layers."""
    problem, graph, footprints = tables.problem, tables.problem.layers, tables.footprints
    known: dict[object, Floats] = {}
    by_tensor: dict[str, dict[LayerEdge, Floats]] = {}
    for (i, j), slots in find_edges(graph).items():
        for out in sorted({out for out, _ in slots}):
            read = tuple(slot for slot in slots if slot[0] == out)
            key = footprints[i], footprints[j], read
            if key not in known:
                shape = len(tables.choices[i]), len(tables.choices[j])
                known[key] = _sum_flows(tables, flows_on_edge(graph, (i, j), read, footprints), shape)
            by_tensor.setdefault(graph.layers[i].outputs[out], {})[i, j] = known[key]
    inputs, outputs = [], []
    for layer, footprint, choices in zip(graph.layers, footprints, tables.choices, strict=True):
        flows_in, flows_out = flows_at_ends(problem, layer, footprint)
        inputs.append(_sum_flows(tables, flows_in, (1, len(choices)))[0])
        outputs.append(_sum_flows(tables, flows_out, (len(choices), 1))[:, 0])
    tensors = [TensorBytes(max(j for _, j in edges), edges) for edges in by_tensor.values()]
    return SentTensors(tensors, inputs, outputs)


def _sum_flows(tables: CostTables, flows: Sequence[BoxFlow], shape: tuple[int, int]) -> Floats:
    devices = len(tables.problem.platform.devices)
    nbytes = np.zeros((*shape, devices, devices))
    for flow in flows:
        nbytes += bytes_between_devices(*flow)
    return nbytes


def find_sent_states(tables: CostTables) -> dict[LayerEdge, NDArray[np.bool_]]:
    """Return, for each pair of layers that compute and read a state, the pairs of choices that would send the state.

    A state is an output that is an input of the next frame, and must stay on its device. A choice is one way to split a
    layer. The arrays have the shape (choices of the computing layer, choices of the reader).
    """
    graph, sent = tables.problem.layers, {}
    for (i, j), slots in find_state_edges(graph).items():
        shape = len(tables.choices[i]), len(tables.choices[j])
        nbytes = _sum_flows(tables, flows_on_edge(graph, (i, j), slots, tables.footprints), shape)
        sent[i, j] = np.asarray(nbytes.any(axis=(2, 3)))
    return sent


@dataclass(frozen=True, eq=False)
class StackedTables:
    """Tables one below the other in one array, so that many tables are read at once.

    Attributes:
        array: All tables, shape (length of all tables, width). Tables that are the same object are stored once.
        table_starts: For each table, the index in `array` at which it begins.
    """

    array: Floats
    table_starts: NDArray[np.intp]

    @classmethod
    def stack(cls, tables: Sequence[Floats], width: int) -> StackedTables:
        unique = {id(table): table.reshape(-1, width) for table in tables}
        ends = np.cumsum([len(table) for table in unique.values()], dtype=np.intp)
        starts = {key: int(end) - len(table) for (key, table), end in zip(unique.items(), ends, strict=True)}
        array = np.concatenate([np.zeros((0, width)), *unique.values()])
        return cls(array, np.array([starts[id(table)] for table in tables], np.intp))


@dataclass(frozen=True, eq=False)
class LayerTerms:
    """Terms (summands) of loads that depend on one layer's choice (way to split it).

    The terms are added up in rows with several columns (see `LoadModel`).

    Attributes:
        layer_positions: The position of the layer of each term.
        target_rows: For each term, the row to which it is added, in ascending order.
        tables: For each term, its values by choice, shape (choices, columns).
    """

    layer_positions: NDArray[np.intp]
    target_rows: NDArray[np.intp]
    tables: StackedTables

    @classmethod
    def build(cls, terms: Sequence[tuple[int, int, Floats]]) -> LayerTerms:
        """Return the terms (target row, position of the layer, table) as arrays.

        A table has the values of a term by choice (way to split the layer), shape (choices, columns).
        """
        ordered = sorted(terms, key=lambda term: term[:2])
        target_rows, layer_positions, tables = zip(*ordered, strict=True)
        stacked = StackedTables.stack(tables, tables[0].shape[1])
        return cls(np.array(layer_positions, np.intp), np.array(target_rows, np.intp), stacked)


@dataclass(frozen=True, eq=False)
class TensorTerms:
    """Terms (summands) of loads that depend on the choices of two connected layers: the bytes of sent tensors.

    An edge joins the layer that computes a tensor and a layer that reads it. A receiver gets each element of a tensor
    only once, and the tensor's readers mostly read the same region. For each pair of devices (or each receiver), only
    the largest number of bytes over the edges therefore counts.

    Attributes:
        producers: For each edge, the position of the layer that computes the tensor.
        readers: For each edge, the position of the layer that reads the tensor.
        reader_choices: For each edge, how many choices (ways to split it) the reader has.
        tensor_indices: For each edge, the index of its tensor in the order of `target_rows`; ascending.
        target_rows: For each tensor, the row (see `LoadModel`) to which its term is added, in ascending order.
        tables: For each edge, the bytes by the choices of both layers, shape (choices · choices, pairs of devices), or
            (choices · choices, receivers).
    """

    producers: NDArray[np.intp]
    readers: NDArray[np.intp]
    reader_choices: NDArray[np.intp]
    tensor_indices: NDArray[np.intp]
    target_rows: NDArray[np.intp]
    tables: StackedTables

    @classmethod
    def build(cls, sent: SentTensors, target_rows: Sequence[int]) -> TensorTerms:
        """Return the terms (summands of loads) of the sent tensors.

        `target_rows` has, for each tensor, the row to which its bytes are added.
        """
        order = sorted(range(len(target_rows)), key=target_rows.__getitem__)
        edges = [
            (i, j, new_index, table)
            for new_index, old_index in enumerate(order)
            for (i, j), table in sent.tensors[old_index].edges.items()
        ]
        return cls(
            np.array([i for i, _, _, _ in edges], np.intp),
            np.array([j for _, j, _, _ in edges], np.intp),
            np.array([table.shape[1] for _, _, _, table in edges], np.intp),
            np.array([new_index for _, _, new_index, _ in edges], np.intp),
            np.array([target_rows[old_index] for old_index in order], np.intp),
            StackedTables.stack([table for _, _, _, table in edges], math.prod(sent.inputs[0].shape[1:])),
        )


@dataclass(frozen=True, eq=False)
class TermGroups:
    """Groups of consecutive terms (summands of loads) that are added to the same row.

    The rows (see `LoadModel`) are evaluated for several changed plans at once. In each of them, one run (sequence of
    consecutive layers) is split in another way. Each run has its own rows.

    Attributes:
        run_indices: For each group, the index of the run.
        target_rows: For each group, the row of this run to which its terms are added.
        terms: The terms of each group.
    """

    run_indices: NDArray[np.intp]
    target_rows: NDArray[np.intp]
    terms: ValueGroups

    @classmethod
    def find(cls, run_indices: NDArray[np.intp], target_rows: NDArray[np.intp]) -> TermGroups:
        """Return groups of consecutive terms (summands of loads) with the same run and the same row.

        Terms of one run and row must be neighbours, because `add_to` adds only one group to each row of a run.

        Args:
            run_indices: For each term, the index of the run of layers for which it is evaluated.
            target_rows: For each term, the row of this run to which it is added.
        """
        terms = ValueGroups.find(run_indices, target_rows)
        return cls(run_indices[terms.starts], target_rows[terms.starts], terms)

    def add_to(self, rows: Floats, values: Floats) -> None:
        """Add the values of terms (summands of loads) to the rows, in place.

        `values` has the shape (terms, plans, columns), and `rows` (rows, runs, plans, columns).
        """
        rows[self.target_rows, self.run_indices] += self.terms.combine(np.add, values)

    def renumber_rows(self, span_starts: NDArray[np.intp]) -> TermGroups:
        """Return the groups with other row numbers: row 0 stays 0, and the span of a run becomes 1, 2, and so on."""
        return replace(self, target_rows=np.maximum(self.target_rows + 1 - span_starts[self.run_indices], 0))


@dataclass(frozen=True, eq=False)
class TermSet:
    """The terms (summands of loads) that depend on the layers of some runs (sequences of consecutive layers).

    The terms of a run are added to row 0 and to some rows of its span. The span is the `span_length` rows that begin
    with row `span_starts[run]`. The groups number row 0 and the span as 0, 1, …, `span_length`.

    Attributes:
        layer_term_indices: Indices of the terms of single layers.
        layer_runs: For each of these terms, the index of the run that contains its layer.
        layer_groups: The rows to which these terms are added.
        edge_indices: Indices of the edges (pairs of connected layers) of sent tensors.
        edge_runs: For each edge, the index of the run that changes its tensor.
        tensor_indices: Indices of the sent tensors, which are the tensors of these edges.
        tensor_edges: The edges of each tensor.
        tensor_groups: The rows to which the terms of the tensors are added.
        span_starts: For each run, the first row of its span; near the last row it begins earlier, so that it fits.
        span_length: Number of rows of each span: as many as the run with the longest span needs.
    """

    layer_term_indices: NDArray[np.intp]
    layer_runs: NDArray[np.intp]
    layer_groups: TermGroups
    edge_indices: NDArray[np.intp]
    edge_runs: NDArray[np.intp]
    tensor_indices: NDArray[np.intp]
    tensor_edges: ValueGroups
    tensor_groups: TermGroups
    span_starts: NDArray[np.intp]
    span_length: int

    @classmethod
    def find(cls, layer_terms: LayerTerms, tensor_terms: TensorTerms, runs: Sequence[range], row_count: int) -> TermSet:
        """Return the terms (summands of loads) that depend on the layers of each run (consecutive layers)."""
        first, last = np.array([(run.start, run.stop - 1) for run in runs]).T[:, :, None]
        positions, producers, readers = layer_terms.layer_positions, tensor_terms.producers, tensor_terms.readers
        layer_runs, layer_term_indices = np.nonzero((first <= positions) & (positions <= last))
        is_edge_touched = (first <= producers) & (producers <= last) | (first <= readers) & (readers <= last)
        # If a run touches one edge of a tensor, all edges of the tensor are needed, because their maximum counts.
        is_tensor_touched = np.zeros((len(runs), len(tensor_terms.target_rows)), np.bool_)
        touched_runs, touched_edges = np.nonzero(is_edge_touched)
        is_tensor_touched[touched_runs, tensor_terms.tensor_indices[touched_edges]] = True
        edge_runs, edge_indices = np.nonzero(is_tensor_touched[:, tensor_terms.tensor_indices])
        edge_tensors = tensor_terms.tensor_indices[edge_indices]
        tensor_edges = ValueGroups.find(edge_runs, edge_tensors)
        tensor_indices = edge_tensors[tensor_edges.starts]
        layer_groups = TermGroups.find(layer_runs, layer_terms.target_rows[layer_term_indices])
        tensor_groups = TermGroups.find(edge_runs[tensor_edges.starts], tensor_terms.target_rows[tensor_indices])
        span_starts, span_length = _find_spans((layer_groups, tensor_groups), len(runs), row_count)
        return cls(
            layer_term_indices,
            layer_runs,
            layer_groups.renumber_rows(span_starts),
            edge_indices,
            edge_runs,
            tensor_indices,
            tensor_edges,
            tensor_groups.renumber_rows(span_starts),
            span_starts,
            span_length,
        )

    def add_to(self, rows: Floats, of_layers: Floats, of_tensors: Floats) -> None:
        """Add the values of the terms to the rows, in place.

        The values are those of single layers and of sent tensors, shape (terms, plans, columns). `rows` has the
        shape (rows, runs, plans, columns).
        """
        self.layer_groups.add_to(rows, of_layers)
        self.tensor_groups.add_to(rows, of_tensors)


def _find_spans(groups: Sequence[TermGroups], run_count: int, row_count: int) -> tuple[NDArray[np.intp], int]:
    """Return `TermSet.span_starts` and `TermSet.span_length`."""
    first, last = np.full(run_count, row_count), np.zeros(run_count, np.intp)
    for group in groups:
        is_in_span = group.target_rows > 0
        np.minimum.at(first, group.run_indices[is_in_span], group.target_rows[is_in_span])
        np.maximum.at(last, group.run_indices[is_in_span], group.target_rows[is_in_span])
    span_length = max(0, int((last + 1 - first).max()))
    return np.minimum(first, row_count - span_length), span_length


@dataclass(frozen=True, eq=False)
class PlanTerms:
    """The terms (summands of loads) of one plan.

    Attributes:
        of_layers: The values of the terms of single layers, shape (terms, 1, columns).
        of_tensors: The values of the terms of sent tensors, shape (tensors, 1, columns).
        row_0: Row 0, shape (columns,).
        totals_without_row_0: For each k, row 1 + … + row k (0 for k = 0), shape (rows, columns).
        largest_up_to: For each k, the largest of `totals_without_row_0` 0 to k, shape (rows, columns).
        largest_from: For each k, the largest of `totals_without_row_0` k, k + 1, …, shape (rows + 1, columns). The last
            one is −∞.
    """

    of_layers: Floats
    of_tensors: Floats
    row_0: Floats
    totals_without_row_0: Floats
    largest_up_to: Floats
    largest_from: Floats


@dataclass(frozen=True, eq=False)
class LoadModel(ABC):
    """A model that predicts the loads of plans: bytes of each host, or seconds of each device and link.

    A term depends on one layer, or on the layers that compute and read a tensor. Each term has a target *row*. The
    value of a row is the sum of its terms, and *running total* k is row 0 + row 1 + … + row k. A row has one column for
    each device and link, or for memory one for each device. The result has one load for each device and link, or for
    memory one for each host.

    For seconds, a load is the largest running total of its column. There is only one row, so this is the sum of all
    terms. For memory, the load of a host is the sum of the largest running totals of its devices.

    The terms of a run (sequence of consecutive layers) are in row 0 and in a short span of rows. If a plan changes in a
    run, only the running totals of its span are calculated again. All running totals before the span change by the same
    value, so only the largest of them is needed. The same holds for the running totals after the span.

    Attributes:
        layer_count: Number of layers.
        row_count: Number of rows.
        layer_terms: The terms of single layers.
        tensor_terms: The terms of sent tensors.
    """

    layer_count: int
    row_count: int
    layer_terms: LayerTerms
    tensor_terms: TensorTerms
    _term_sets: dict[Sequence[range], TermSet] = field(default_factory=dict, init=False, repr=False)
    # Only the plan of the last call of `moved_loads` is stored, because consecutive calls mostly have the same plan.
    _plan_terms: dict[bytes, PlanTerms] = field(default_factory=dict, init=False, repr=False)

    @abstractmethod
    def values_of_tensors(self, sent: Floats) -> Floats:
        """Return the values that sent tensors add to the rows, shape (tensors, plans, columns).

        `sent` has the bytes of each tensor for each plan, shape (tensors, plans, pairs of devices), or (tensors, plans,
        receivers).
        """

    def loads_of_largest_totals(self, totals: Floats) -> Floats:
        """Return the loads if the largest running totals are `totals`.

        The last axis of `totals` is the columns of the rows, and that of the result is the loads.
        """
        return totals

    def loads(self, selections: Selections) -> Floats:
        """Return the loads (seconds or bytes) of each plan, shape (plans, loads)."""
        terms = self._get_term_set((range(self.layer_count),))
        rows = np.zeros((self.row_count, 1, len(selections), self._widths[0]))
        terms.add_to(rows, *self._read_term_values(selections[None], terms))
        return self.loads_of_largest_totals(_add_up_rows(rows[:, 0]).max(axis=0))

    def moved_loads(self, current: Selections, moved: Selections, runs: Sequence[range]) -> Floats:
        """Return the loads (seconds or bytes) of plans that differ from `current` in a run of layers.

        The shape is (runs · plans, loads).

        Args:
            current: One plan as choice indices, shape (layers,).
            moved: The changed plans, shape (runs, plans, layers). moved[r] differs from `current` in the layers
                runs[r].
            runs: Ranges of consecutive layers.
        """
        terms, current_terms = self._get_term_set(tuple(runs)), self._get_plan_terms(current)
        of_layers, of_tensors = self._read_term_values(moved, terms)
        of_layers -= current_terms.of_layers[terms.layer_term_indices]
        of_tensors -= current_terms.of_tensors[terms.tensor_indices]
        row_0_and_changes = np.zeros((1 + terms.span_length, *moved.shape[:2], self._widths[0]))
        row_0_and_changes[0] = current_terms.row_0
        terms.add_to(row_0_and_changes, of_layers, of_tensors)
        totals = _largest_changed_totals(current_terms, _add_up_rows(row_0_and_changes), terms.span_starts)
        return self.loads_of_largest_totals(totals.reshape(-1, totals.shape[-1]))

    def count_entries(self, runs: Sequence[range]) -> int:
        """Return the number of array entries that are read to evaluate one changed plan for each run of layers."""
        terms = self._get_term_set(tuple(runs))
        layer_width, tensor_width = self._widths
        row_entries = (1 + terms.span_length) * len(runs) * layer_width
        return row_entries + len(terms.layer_term_indices) * layer_width + len(terms.edge_indices) * tensor_width

    @property
    def _widths(self) -> tuple[int, int]:
        return self.layer_terms.tables.array.shape[1], self.tensor_terms.tables.array.shape[1]

    def _get_term_set(self, runs: tuple[range, ...]) -> TermSet:
        if runs not in self._term_sets:
            self._term_sets[runs] = TermSet.find(self.layer_terms, self.tensor_terms, runs, self.row_count)
        return self._term_sets[runs]

    def _get_plan_terms(self, plan: Selections) -> PlanTerms:
        key = plan.tobytes()
        if key not in self._plan_terms:
            terms = self._get_term_set((range(self.layer_count),))
            values = self._read_term_values(plan[None, None], terms)
            # `terms` numbers the rows of its span from 1. These are the numbers of the model's rows too, because the
            # span of all layers begins at row 1. In a model of memory, this is the row of the last layer: it has the
            # layer's output, or a tensor that the layer reads.
            rows = np.zeros((self.row_count, 1, 1, self._widths[0]))
            terms.add_to(rows, *values)
            row_0, rows[0] = rows[0, 0, 0].copy(), 0
            totals = _add_up_rows(rows[:, 0, 0])
            nothing = np.full_like(totals[:1], -np.inf)
            largest_from = np.maximum.accumulate(np.append(nothing, totals[::-1], axis=0))[::-1]
            self._plan_terms.clear()
            self._plan_terms[key] = PlanTerms(*values, row_0, totals, np.maximum.accumulate(totals), largest_from)
        return self._plan_terms[key]

    def _read_term_values(self, selections: Selections, terms: TermSet) -> tuple[Floats, Floats]:
        """Return the values of the terms of single layers, and those of sent tensors, shape (terms, plans, columns).

        `selections` are plans as choice indices, shape (runs, plans, layers).
        """
        tables, term_indices = self.layer_terms.tables, terms.layer_term_indices
        choices = selections[terms.layer_runs, :, self.layer_terms.layer_positions[term_indices]]
        of_layers = tables.array[tables.table_starts[term_indices, None] + choices]
        tables, edges = self.tensor_terms.tables, terms.edge_indices
        choices = selections[terms.edge_runs, :, self.tensor_terms.producers[edges]]
        pairs = choices * self.tensor_terms.reader_choices[edges, None] + tables.table_starts[edges, None]
        sent = tables.array[pairs + selections[terms.edge_runs, :, self.tensor_terms.readers[edges]]]
        return of_layers, self.values_of_tensors(terms.tensor_edges.combine(np.maximum, sent))


def _add_up_rows(rows: Floats) -> Floats:
    """Replace each row by its running total (the sum of all rows up to it), in place."""
    # np.cumsum is several times slower, because it adds up the columns one after the other.
    for before, row in itertools.pairwise(rows):
        row += before
    return rows


def _largest_changed_totals(
    current_terms: PlanTerms, row_0_and_changes: Floats, span_starts: NDArray[np.intp]
) -> Floats:
    """Return the largest running totals of changed plans, shape (runs, plans, columns): see `LoadModel`.

    Args:
        current_terms: The terms of the current plan.
        row_0_and_changes: Entry 0 is the new value of row 0. Entry k is entry 0 plus the changes of the first k rows of
            the run's span. The shape is (1 + span length, runs, plans, columns). The function overwrites the array.
        span_starts: For each run, the first row of its span.
    """
    span_length = len(row_0_and_changes) - 1
    unchanged = np.empty((1 + span_length, len(span_starts), 1, current_terms.row_0.shape[-1]))
    unchanged[0, :, 0] = current_terms.largest_up_to[span_starts - 1]
    unchanged[1:, :, 0] = current_terms.totals_without_row_0[span_starts + np.arange(span_length)[:, None]]
    after = row_0_and_changes[-1] + current_terms.largest_from[span_starts + span_length][:, None]
    row_0_and_changes += unchanged
    largest: Floats = np.maximum(row_0_and_changes.max(axis=0), after)
    return largest


@dataclass(frozen=True, eq=False)
class PeriodModel(LoadModel):
    """Seconds for which each device and each link is busy for one frame.

    Attributes:
        byte_seconds: Seconds that a byte from one device to another adds to each column, shape (pairs of devices,
            columns).
        message_seconds: Seconds that a message from one device to another adds to each column, of the same shape.
    """

    byte_seconds: Floats
    message_seconds: Floats

    def values_of_tensors(self, sent: Floats) -> Floats:
        return _sending_seconds(sent, self.byte_seconds, self.message_seconds)


def _sending_seconds(sent: Floats, byte_seconds: Floats, message_seconds: Floats) -> Floats:
    """Return the seconds that sent bytes, shape (…, pairs of devices), add to the time of each device and link."""
    seconds: Floats = sent @ byte_seconds + (sent > 0) @ message_seconds
    return seconds


def build_period_model(tables: CostTables, sent: SentTensors) -> PeriodModel:
    links = build_link_loads(tables.problem)
    devices = len(tables.problem.platform.devices)
    byte_seconds, message_seconds = np.zeros((2, devices, devices, devices + links.byte_seconds.shape[1]))
    byte_seconds[..., devices:] = links.byte_seconds.reshape(devices, devices, -1)
    message_seconds[..., devices:] = links.message_seconds.reshape(devices, devices, -1)
    if links.runtime is not None:
        _add_runtime_seconds(links.runtime, byte_seconds, message_seconds)
    byte_seconds, message_seconds = (array.reshape(devices**2, -1) for array in (byte_seconds, message_seconds))
    layer_seconds = [
        np.pad(seconds, ((0, 0), (0, links.byte_seconds.shape[1])))
        + _sending_seconds(inputs.reshape(len(inputs), -1), byte_seconds, message_seconds)
        + _sending_seconds(outputs.reshape(len(outputs), -1), byte_seconds, message_seconds)
        for seconds, inputs, outputs in zip(tables.compute_seconds, sent.inputs, sent.outputs, strict=True)
    ]
    return PeriodModel(
        len(layer_seconds),
        1,
        LayerTerms.build([(0, layer, seconds) for layer, seconds in enumerate(layer_seconds)]),
        TensorTerms.build(sent, [0] * len(sent.tensors)),
        byte_seconds,
        message_seconds,
    )


def _add_runtime_seconds(runtime: RuntimeArrays, byte_seconds: Floats, message_seconds: Floats) -> None:
    for device in range(len(byte_seconds)):
        byte_seconds[device, :, device] += runtime.byte[device]
        byte_seconds[:, device, device] += runtime.byte[device]
        message_seconds[device, :, device] += runtime.send[device]
        message_seconds[:, device, device] += runtime.receive[device]


@dataclass(frozen=True, eq=False)
class HostMemoryModel(LoadModel):
    """Bytes that each host needs for one frame: the sum of the largest numbers of bytes of its devices.

    A device stores a received tensor from the start of the frame to the last layer that reads it, and a computed tensor
    from its layer to the last layer that reads it. While a device computes layer t, its tensors therefore take

        Σ_{i ≥ t} received_i + Σ (computed by layer t or before, and read by layer t or after).

    Here, received_i are the bytes of received tensors whose last reader is layer i. Row 0 of the model has the bytes
    that are stored during the whole frame: weights, and network outputs that sinks receive. The next rows go from the
    last layer to the first. Each has the bytes during a layer minus the bytes during the layer after it. With
    `count` layers, row `count − t` belongs to layer t, so running total `count − t` is the bytes while layer t is
    computed.

    Attributes:
        hosts: 1 for each device on its host, shape (devices, hosts).
    """

    hosts: Floats

    def values_of_tensors(self, sent: Floats) -> Floats:
        return sent

    def loads_of_largest_totals(self, totals: Floats) -> Floats:
        loads: Floats = totals @ self.hosts
        return loads


def build_memory_model(tables: CostTables, sent: SentTensors) -> HostMemoryModel:
    problem, received, count = tables.problem, sent.received(), len(tables.choices)
    graph, (sources, sinks) = problem.layers, source_and_sink(problem)
    terms: dict[tuple[int, int], Floats] = {}

    def add_stored_bytes(layer: int, nbytes: Floats, first: int, last: int) -> None:
        """Add the terms of bytes that are stored from layer `first` to layer `last`, by the choice of `layer`."""
        changes = [(count - last, nbytes)]
        if first > 0:
            changes.append((count - first + 1, -nbytes))
        for row, change in changes:
            terms[row, layer] = terms.get((row, layer), 0) + change

    for i, (layer, footprint) in enumerate(zip(graph.layers, tables.footprints, strict=True)):
        terms[0, i] = tables.weight_bytes[i] + received.outputs[i]
        add_stored_bytes(i, received.inputs[i] + state_bytes(graph, layer, footprint), 0, i)
        for name, nbytes in output_bytes(graph, layer, footprint).items():
            is_kept = _devices_that_keep(problem, name, sinks)
            add_stored_bytes(i, nbytes * is_kept, i, count - 1)
            add_stored_bytes(i, nbytes * ~is_kept, i, max([i, *_reader_positions(graph, name)]))
    is_source = _is_device_in(problem, sources)
    for name in graph.inputs:
        tensor, reader = graph.tensors[name], max(_reader_positions(graph, name), default=None)
        if reader is not None and tensor.shape is not None:
            slot = graph.layers[reader].inputs.index(name)
            is_read = needed_bytes(graph, name, tables.footprints[reader], slot) > 0
            whole: Floats = np.float64(raw_nbytes(tensor.dtype, tensor.shape)) * is_source
            add_stored_bytes(reader, whole * is_read, 0, reader)
            add_stored_bytes(reader, whole * ~is_read, 0, 0)
    return HostMemoryModel(
        count,
        count + 1,
        LayerTerms.build([(row, layer, nbytes) for (row, layer), nbytes in terms.items() if row == 0 or nbytes.any()]),
        TensorTerms.build(received, [count - tensor.last_reader for tensor in received.tensors]),
        device_host_matrix(problem.platform),
    )


def _reader_positions(graph: LayerGraph, tensor: str) -> list[int]:
    return [graph.position[layer.name] for layer in graph.consumers.get(tensor, ())]


def _is_device_in(problem: Problem, names: Sequence[str]) -> NDArray[np.bool_]:
    return np.array([device.name in names for device in problem.platform.devices])


def _devices_that_keep(problem: Problem, tensor: str, sinks: Sequence[str]) -> NDArray[np.bool_]:
    """Return which devices store their part of a tensor until the end of the frame: network outputs and states."""
    graph = problem.layers
    if tensor in graph.delivered_outputs:
        return _is_device_in(problem, sinks)
    return np.full(len(problem.platform.devices), tensor in graph.outputs)
