"""Cost tables: the costs of all choices of all layers, as arrays.

A choice is one way to split a layer. There is one array for each layer, and one for each edge (pair of connected
layers). A selection has one choice (by number) for each layer; it determines the plan. Costs follow the barrier model:
a layer starts when all devices have everything that they need for it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import DicompilerError, Layer, LayerGraph, Plan, Problem
from dicompiler.plugin_api.costs import count_macs
from dicompiler.plugin_api.search import BudgetExceeded, WorkBudget
from dicompiler_strategies.tables.choice_footprints import (
    ChoiceFootprint,
    Floats,
    Ints,
    NeededBoxes,
    box_elements,
    build_footprint,
    common_boxes,
    element_bytes,
    footprint_key,
    source_and_sink,
    state_slots,
    whole_tensor_boxes,
)
from dicompiler_strategies.tables.choices import Choice, ChoiceSet, list_choices
from dicompiler_strategies.tables.link_loads import LinkLoads, build_link_loads

LayerEdge = tuple[int, int]
"""Positions in layer order of a layer that produces a tensor and of a layer that reads it."""
TensorSlots = tuple[tuple[int, int], ...]
"""For each tensor between two connected layers: its index among the producer's outputs and the consumer's inputs."""
BoxFlow = tuple[Ints, Ints, Sequence[NeededBoxes], int]
"""One tensor between two connected layers, as four values.

They are the regions that devices store, the regions that devices send (these do not overlap), the regions that devices
need, and the bytes of an element.
"""
_MAX_BLOCK_ELEMENTS = (
    1 << 17
)  # Number of elements of a block. Large tables are computed in blocks that fit into the processor's cache.
FILLED_PARTS_PER_S: Mapping[bool, int] = {True: 16_000, False: 11_000}
"""Parts (pieces of layers) for which tables are filled in one second of the reference computer.

The key is True for a network of one link on which every byte costs the same. For other networks, 13 600 parts per
second were measured on DenseNet-121 with 4 devices.
"""


@dataclass(frozen=True, eq=False)
class CostTables:
    """The seconds and bytes of each choice (way to split it) of each layer, if layers do not overlap (barrier model).

        T(selection) = Σ_l node_seconds[l][c_l] + Σ_(i,j) edge_seconds[i,j][c_i, c_j]

    A selection has the number c_l of a choice for each layer l. T is the latency of a frame in seconds. Assumptions:

    - Nothing overlaps. Only if the problem has runtime costs, the source computes while the network's inputs are sent.
    - On a shared medium or a gateway, transfers go one after another. On a switch, all transfers of an edge go at the
      same time until the busiest link is done.
    - If several devices store an element, only the device with this element in its sent region sends it.
    - Keys and values of an attention are sent in one message.
    - A tensor that two layers read is sent for each of the two, even if the receiver has it already.
    - A part is computed even if nothing reads it.

    Attributes:
        problem: The problem.
        options: The choice set.
        choices: Choices of each layer.
        node_seconds: For each layer, the seconds of each choice: computing on the slowest device, the exchange of
            partial sums, and the transfers of network inputs and outputs.
        edge_seconds: For each edge (i, j), the seconds to send missing elements of layer i's output to the devices that
            need them for layer j, shape (choices of i, choices of j).
        compute_seconds: For each layer, the seconds of computing, shape (choices, devices) in platform order.
        weight_bytes: For each layer, the bytes of weights, shape (choices, devices).
        node_bytes: For each layer, the bytes that are sent in the transfers of `node_seconds`, shape (choices,).
        edge_bytes: For each edge, the bytes that are sent in the transfers of `edge_seconds`, in the same shapes.
        footprints: Regions, seconds and bytes of the choices of each layer.
    """

    problem: Problem
    options: ChoiceSet
    choices: tuple[tuple[Choice, ...], ...]
    node_seconds: tuple[Floats, ...]
    edge_seconds: Mapping[LayerEdge, Floats]
    compute_seconds: tuple[Floats, ...]
    weight_bytes: tuple[Ints, ...]
    node_bytes: tuple[Floats, ...]
    edge_bytes: Mapping[LayerEdge, Floats]
    footprints: tuple[ChoiceFootprint, ...] = field(repr=False)

    def total_seconds(self, selection: Sequence[int]) -> float:
        return float(self.total_seconds_of(np.asarray([selection]))[0])

    def total_seconds_of(self, selections: NDArray[np.integer]) -> Floats:
        """Return the seconds of a frame for each row of `selections`: the number of each layer's choice."""
        return sum_tables(self.node_seconds, self.edge_seconds, selections)

    def plan(self, selection: Sequence[int]) -> Plan:
        chosen = zip(self.problem.layers.layers, self.choices, selection, strict=True)
        return self.problem.build_plan({layer.name: choices[number].parts for layer, choices, number in chosen})

    def find_selection(self, plan: Plan) -> tuple[int, ...] | None:
        """Return the number of each layer's split in the plan; None if the tables do not have one of the splits."""
        numbers = [
            next((number for number, choice in enumerate(choices) if choice.parts == plan.layers[layer.name]), None)
            for layer, choices in zip(self.problem.layers.layers, self.choices, strict=True)
        ]
        selection = tuple(number for number in numbers if number is not None)
        return selection if len(selection) == len(numbers) else None

    @cached_property
    def choice_counts(self) -> tuple[int, ...]:
        return tuple(map(len, self.choices))


def sum_tables(node: Sequence[Floats], edge: Mapping[LayerEdge, Floats], selections: NDArray[np.integer]) -> Floats:
    """Return the cost of each selection (one way to split each layer), shape (selections,).

    Args:
        node: For each layer, the cost of each of its choices.
        edge: For two connected layers, the cost of each pair of their choices.
        selections: The number of the choice of each layer, shape (selections, layers).
    """
    columns = np.ascontiguousarray(np.asarray(selections).T)
    sums = np.zeros(columns.shape[1])
    for layer_costs, column in zip(node, columns, strict=True):
        sums += layer_costs[column]
    for (i, j), table in edge.items():
        # NumPy looks up a flat index faster than a pair of indices.
        sums += table.ravel()[columns[i] * table.shape[1] + columns[j]]
    return sums


def to_original_numbers(kept: Sequence[NDArray[np.intp]], selection: Sequence[int]) -> tuple[int, ...]:
    """Translate the number of each layer's choice among the `kept` choices to its original number.

    A choice is one way to split a layer. `kept` has the original numbers.
    """
    return tuple(int(numbers[chosen]) for numbers, chosen in zip(kept, selection, strict=True))


def to_kept_numbers(kept: Sequence[NDArray[np.intp]], selection: Sequence[int]) -> tuple[int, ...] | None:
    """Translate the original number of each layer's choice to its number among the `kept` choices.

    A choice is one way to split a layer. `kept` has the original numbers. The result is None if a choice is not kept.
    """
    matches = [np.flatnonzero(numbers == chosen) for numbers, chosen in zip(kept, selection, strict=True)]
    return tuple(int(match[0]) for match in matches) if all(map(len, matches)) else None


def restrict_edges(edge: Mapping[LayerEdge, Floats], kept: Sequence[NDArray[np.intp]]) -> dict[LayerEdge, Floats]:
    """Return the tables of pairs of connected layers, with only the `kept` choices (ways to split) of each layer."""
    return {(i, j): table[np.ix_(kept[i], kept[j])] for (i, j), table in edge.items()}


def build_cost_tables(
    problem: Problem,
    options: ChoiceSet = ChoiceSet(),  # noqa: B008
    budget: WorkBudget | None = None,
) -> CostTables:
    """Return the costs of all `options` (ways to split) of every layer and of every pair of connected layers.

    Raises:
        DicompilerError: The budget is exceeded before the tables are filled.
    """
    try:
        return _TableFiller(problem, options, budget or WorkBudget()).fill()
    except BudgetExceeded:
        message = "cost tables: the budget is used up before they are filled: use a larger budget"
        raise DicompilerError(message) from None


def find_edges(layers: LayerGraph) -> dict[LayerEdge, TensorSlots]:
    """Return the edges (pairs of connected layers) of the layer graph, with the tensors of each edge."""
    joined: dict[LayerEdge, list[tuple[int, int]]] = {}
    for j, layer in enumerate(layers.layers):
        for slot, tensor in enumerate(layer.inputs):
            producer = layers.producer.get(tensor)
            if producer is not None:
                i = layers.position[producer.name]
                joined.setdefault((i, j), []).append((producer.outputs.index(tensor), slot))
    return {edge: tuple(slots) for edge, slots in sorted(joined.items())}


def find_state_edges(layers: LayerGraph) -> dict[LayerEdge, TensorSlots]:
    """Return the edges from the layer that computes a state to the layers that read it in the next frame.

    A state is an output of the network that becomes an input of the next frame. The reader may come before the producer
    in layer order, or be the same layer.
    """
    joined: dict[LayerEdge, list[tuple[int, int]]] = {}
    for j, layer in enumerate(layers.layers if layers.states else ()):
        for name, slot in state_slots(layers, layer).items():
            maker = layers.producer[layers.state_output_of[name]]
            out = maker.outputs.index(layers.state_output_of[name])
            joined.setdefault((layers.position[maker.name], j), []).append((out, slot))
    return {edge: tuple(slots) for edge, slots in joined.items()}


def coalesced_layers(layers: LayerGraph) -> frozenset[int]:
    """Return the positions of layers whose output is sent in one message with another layer's output.

    Matrix products with the same input tensor send their outputs in one message, which is counted for only one of them.
    This is not the product that computes the queries of an attention, because queries are rarely sent.
    """
    products: dict[str, list[int]] = {}
    for i, layer in enumerate(layers.layers):
        node = layer.nodes[layer.anchor]
        if not layer.whole_reason and node.op in ("MatMul", "Gemm"):
            products.setdefault(node.inputs[0], []).append(i)
    queries = _find_queries(layers)
    ordered = [sorted(group, key=lambda i: (layers.layers[i].name in queries, i)) for group in products.values()]
    return frozenset(i for group in ordered for i in group[1:])


def _find_queries(layers: LayerGraph) -> set[str]:
    """Return the names of the layers that compute the queries of an attention.

    The result of such a matrix product is the first operand of a product of two computed tensors (such as QKᵀ).
    """
    found, seen = set[str](), set[str]()
    waiting = [layer.nodes[layer.anchor].inputs[0] for layer in layers.layers if _multiplies_two_tensors(layers, layer)]
    while waiting:
        tensor = waiting.pop()
        layer = layers.producer.get(tensor)
        if layer is None or tensor in seen:
            continue
        seen.add(tensor)
        if count_macs(layers, layer):
            found.add(layer.name)
        else:
            waiting.extend(layer.inputs)
    return found


def _multiplies_two_tensors(layers: LayerGraph, layer: Layer) -> bool:
    inputs = layer.nodes[layer.anchor].inputs
    tensors = sum(bool(name) and not layers.tensors[name].is_constant for name in inputs)
    return tensors > 1 and not layer.whole_reason and bool(count_macs(layers, layer))


class _TableFiller:
    """A builder of cost tables. Equal layers and equal pairs of connected layers are computed only once."""

    def __init__(self, problem: Problem, options: ChoiceSet, budget: WorkBudget) -> None:
        self.problem, self.options, self.budget = problem, options, budget
        self.link_loads = build_link_loads(problem)
        self.footprints: dict[Hashable, tuple[tuple[Choice, ...], ChoiceFootprint]] = {}
        self.edge_arrays: dict[Hashable, tuple[Floats, Floats]] = {}
        self.coalesced_layers = coalesced_layers(problem.layers)
        # Cache: the seconds and bytes of the exchange of partial sums.
        self.node_arrays: dict[ChoiceFootprint, tuple[Floats, Floats]] = {}

    def fill(self) -> CostTables:
        layers = self.problem.layers
        pairs = [self._layer_footprint(i) for i in range(len(layers.layers))]
        footprints = tuple(footprint for _, footprint in pairs)
        edges = {edge: self._edge_arrays(footprints, edge, slots) for edge, slots in find_edges(layers).items()}
        nodes = [self._node_arrays(i, footprint) for i, footprint in enumerate(footprints)]
        # A state is an output that is an input of the next frame. Pieces of it that another device computed are sent
        # like tensors between two connected layers.
        for (i, j), slots in find_state_edges(layers).items():
            seconds, sent = self._edge_arrays(footprints, (i, j), slots)
            if i == j:
                nodes[i] = nodes[i][0] + seconds.diagonal(), nodes[i][1] + sent.diagonal()
            else:
                edge, arrays = ((i, j), (seconds, sent)) if i < j else ((j, i), (seconds.T, sent.T))
                known_seconds, known_bytes = edges.get(edge, (0.0, 0.0))
                edges[edge] = arrays[0] + known_seconds, arrays[1] + known_bytes
        return CostTables(
            self.problem,
            self.options,
            tuple(chosen for chosen, _ in pairs),
            tuple(seconds for seconds, _ in nodes),
            {edge: seconds for edge, (seconds, _) in edges.items()},
            tuple(footprint.partial_seconds + footprint.final_seconds for footprint in footprints),
            tuple(footprint.weight_bytes for footprint in footprints),
            tuple(sent for _, sent in nodes),
            {edge: sent for edge, (_, sent) in edges.items()},
            footprints,
        )

    def _layer_footprint(self, i: int) -> tuple[tuple[Choice, ...], ChoiceFootprint]:
        layer = self.problem.layers.layers[i]
        key = footprint_key(self.problem, layer)
        if key not in self.footprints:
            self.budget.spend_or_raise()
            layer_choices = list_choices(self.problem, layer, self.options)
            part_count = len(layer_choices) * len(self.problem.platform.devices)
            self.budget.spend(part_count / FILLED_PARTS_PER_S[self.link_loads.is_uniform])
            self.footprints[key] = layer_choices, build_footprint(self.problem, layer, layer_choices)
        return self.footprints[key]

    def _edge_arrays(
        self, footprints: Sequence[ChoiceFootprint], edge: LayerEdge, slots: TensorSlots
    ) -> tuple[Floats, Floats]:
        producer, consumer = footprints[edge[0]], footprints[edge[1]]
        links = self.link_loads.coalesced if edge[0] in self.coalesced_layers else self.link_loads
        key = producer, consumer, slots, links is self.link_loads
        if key not in self.edge_arrays:
            self.budget.spend_or_raise()
            flows = flows_on_edge(self.problem.layers, edge, slots, footprints)
            shape = len(producer.final_seconds), len(consumer.final_seconds)
            self.edge_arrays[key] = transfer_arrays(links, flows, shape)
        return self.edge_arrays[key]

    def _node_arrays(self, i: int, footprint: ChoiceFootprint) -> tuple[Floats, Floats]:
        """Return the seconds and the sent bytes of each choice (way to split it) of layer `i`.

        The seconds include computing. Transfers from other layers are not included.
        """
        if footprint not in self.node_arrays:
            merged = footprint.merged_bytes
            sums = merged.sum(axis=(1, 2)).astype(np.float64)
            self.node_arrays[footprint] = self.link_loads.transfer_seconds(merged), sums
        seconds, sent = self.node_arrays[footprint]
        inputs, outputs = flows_at_ends(self.problem, self.problem.layers.layers[i], footprint)
        arrival_s = np.zeros(len(seconds))
        for flow in inputs:
            transfer_s, nbytes = transfer_arrays(self.link_loads, [flow], (1, len(seconds)))
            arrival_s, sent = arrival_s + transfer_s[0], sent + nbytes[0]
        seconds = seconds + self._compute_seconds(footprint, arrival_s)
        for flow in outputs:
            transfer_s, nbytes = transfer_arrays(self.link_loads, [flow], (len(seconds), 1))
            seconds, sent = seconds + transfer_s[:, 0], sent + nbytes[:, 0]
        return seconds, sent

    def _compute_seconds(self, footprint: ChoiceFootprint, arrival_s: Floats) -> Floats:
        """Return, for each choice (way to split the layer), the seconds until the slowest device has computed its part.

        `arrival_s` has, for each choice, the seconds until the network's inputs have arrived.
        """
        is_waiting = np.ones(len(self.problem.platform.devices), bool)
        if arrival_s.any() and self.link_loads.runtime is not None:
            source, _ = source_and_sink(self.problem)
            is_waiting = np.array([device.name not in source for device in self.problem.platform.devices])

        def slowest(which: NDArray[np.bool_]) -> Floats:
            arrays = footprint.partial_seconds, footprint.final_seconds
            partial, final = (array[:, which].max(axis=1, initial=0.0) for array in arrays)
            return np.asarray(partial + final)

        return np.asarray(np.maximum(slowest(~is_waiting), arrival_s + slowest(is_waiting)))


def flows_on_edge(
    layers: LayerGraph, edge: LayerEdge, slots: TensorSlots, footprints: Sequence[ChoiceFootprint]
) -> list[BoxFlow]:
    """Return, for each tensor between two layers, the regions that devices store and those that they need.

    Tensors without known regions are omitted.
    """
    producer, consumer, outputs = footprints[edge[0]], footprints[edge[1]], layers.layers[edge[0]].outputs
    return [
        (producer.produced[out], producer.sent_regions[out], consumer.needs[slot], element_bytes(layers, outputs[out]))
        for out, slot in slots
        if out in producer.produced and slot in consumer.needs
    ]


def flows_at_ends(problem: Problem, layer: Layer, footprint: ChoiceFootprint) -> tuple[list[BoxFlow], list[BoxFlow]]:
    """Return, for each network input and each network output of a layer, the regions that devices store and need."""
    layers, (source, sink) = problem.layers, source_and_sink(problem)
    inputs: list[BoxFlow] = []
    for slot, tensor in enumerate(layer.inputs):
        if tensor in layers.inputs and slot in footprint.needs:
            held, sent_regions = (whole_tensor_boxes(problem, tensor, names) for names in (source, source[:1]))
            inputs.append((held, sent_regions, footprint.needs[slot], element_bytes(layers, tensor)))
    outputs: list[BoxFlow] = []
    for slot, tensor in enumerate(layer.outputs):
        if tensor in layers.delivered_outputs and slot in footprint.produced:
            wanted = (NeededBoxes(whole_tensor_boxes(problem, tensor, sink)),)
            produced, sent_regions = footprint.produced[slot], footprint.sent_regions[slot]
            outputs.append((produced, sent_regions, wanted, element_bytes(layers, tensor)))
    return inputs, outputs


def transfer_arrays(links: LinkLoads, flows: Sequence[BoxFlow], shape: tuple[int, int]) -> tuple[Floats, Floats]:
    """Return the seconds and the bytes of transferring the tensors `flows` between two layers.

    Both arrays have the given `shape`: (ways to split the producer, ways to split the consumer).
    """
    seconds, sent_bytes = np.zeros(shape), np.zeros(shape)
    if not flows:
        return seconds, sent_bytes
    if links.is_uniform:
        missing = reduce(np.add, (missing_bytes(held, needs, item_bytes) for held, _, needs, item_bytes in flows))
        total = missing.sum(axis=-1)
        seconds = links.uniform_seconds(total)
        if links.runtime is not None:
            sendable_bytes = reduce(
                np.add, (item_bytes * box_elements(sent_regions) for _, sent_regions, _, item_bytes in flows)
            )
            holders, largest = (sendable_bytes > 0).sum(axis=1), sendable_bytes.max(axis=1)
            seconds = seconds + links.runtime.gathering_seconds(missing, holders, largest, _needed_bytes(flows))
        return seconds, total.astype(np.float64)
    devices = flows[0][0].shape[1]
    step = max(1, _MAX_BLOCK_ELEMENTS // (shape[1] * devices * devices))
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        block = [(held[start:stop], sent_regions[start:stop], needs, item) for held, sent_regions, needs, item in flows]
        between = reduce(np.add, (bytes_between_devices(*flow) for flow in block))
        seconds[start:stop] = links.transfer_seconds(between, _needed_bytes(flows))
        sent_bytes[start:stop] = between.sum(axis=(2, 3))
    return seconds, sent_bytes


def _needed_bytes(flows: Sequence[BoxFlow]) -> Ints:
    """Return the bytes that each device needs of the tensors `flows`, shape (ways to split the consumer, devices)."""
    return reduce(
        np.add, (item * need.sign * box_elements(need.boxes) for _, _, needs, item in flows for need in needs)
    )


def missing_bytes(held: Ints, needs: Sequence[NeededBoxes], item_bytes: int) -> Ints:
    """Return the bytes of a tensor that each device needs and does not store.

    The shape is (ways to split the producer, ways to split the consumer, devices).

    Args:
        held: Regions that devices store.
        needs: Regions that devices need.
        item_bytes: Bytes of an element.
    """
    (held, *wanted), factor = _drop_common_axes([held, *(need.boxes for need in needs)])
    # Devices come first, because NumPy is fast on arrays with long rows.
    missing = np.zeros((held.shape[1], len(held), len(wanted[0])), held.dtype)
    for need, boxes in zip(needs, wanted, strict=True):
        present = common_elements(held.swapaxes(0, 1)[:, :, None], boxes.swapaxes(0, 1)[:, None])
        missing += need.sign * (box_elements(boxes).astype(held.dtype).T[:, None] - present)
    return np.moveaxis(missing, 0, 2) * np.int64(factor * item_bytes)


def bytes_between_devices(held: Ints, sent_regions: Ints, needs: Sequence[NeededBoxes], item_bytes: int) -> Ints:
    """Return the bytes of a tensor that each device sends to each other device.

    The shape is (ways to split the producer, ways to split the consumer, senders, receivers).

    Args:
        held: Regions that devices store with each split of the layer that produces the tensor.
        sent_regions: Regions that devices send to others. They do not overlap, so only one device sends each element.
        needs: Regions that devices need with each split of the layer that consumes the tensor.
        item_bytes: Bytes of an element.
    """
    devices = held.shape[1]
    (held, sent_regions, *wanted), factor = _drop_common_axes([held, sent_regions, *(need.boxes for need in needs)])
    # Elements of a sender's region that the receiver stores too, so that they are not sent. The shape is (producer
    # choices, senders, receivers, axes, 2).
    both = common_boxes(sent_regions[:, :, None], held[:, None, :])
    # These elements exist only for few combinations (p: producer choice, s: sender, r: receiver), and are subtracted
    # only for these combinations.
    p, s, r = np.nonzero((both[..., 0, 0] < both[..., 0, 1]) & ~np.eye(devices, dtype=bool))
    # Numbers of sent elements, of shape (producer choices, senders, consumer choices, receivers).
    sent = np.zeros((len(held), devices, len(wanted[0]), devices), held.dtype)
    for need, boxes in zip(needs, wanted, strict=True):
        sent += need.sign * common_elements(sent_regions[:, :, None, None], boxes)
        sent[p, s, :, r] -= need.sign * common_elements(both[p, s, r][:, None], boxes[:, r].swapaxes(0, 1))
    sent[:, range(devices), :, range(devices)] = 0
    return sent.swapaxes(1, 2) * np.int64(factor * item_bytes)


def _drop_common_axes(arrays: Sequence[Ints]) -> tuple[list[Ints], int]:
    """Drop the axes on which all regions have the same interval, to make later computations faster.

    The second result is the product of the lengths of the dropped axes. At least one axis is kept.
    """
    rows = np.concatenate([boxes.reshape(-1, *boxes.shape[-2:]) for boxes in arrays])
    rows = rows[box_elements(rows) > 0]
    if not len(rows):
        return [boxes[..., :1, :] for boxes in arrays], 1
    same = (rows == rows[0]).all(axis=(0, 2))
    axes = np.flatnonzero(~same) if not same.all() else np.zeros(1, np.intp)
    dtype = np.int32 if math.prod(rows.max(axis=(0, 2)).tolist()) < 2**31 else np.int64
    extents = rows[0, :, 1] - rows[0, :, 0]
    factor = math.prod(int(extent) for axis, extent in enumerate(extents) if axis not in axes)
    return [boxes[..., axes, :].astype(dtype) for boxes in arrays], factor


def common_elements(a: Ints, b: Ints) -> Ints:
    """Return the number of elements that the regions of `a` and `b` have in common.

    The arrays have the shape (…, axes, 2), with the start and the end on each axis, and are broadcast.
    """
    # Contiguous arrays are many times faster to compare, so each bound of each axis is copied to its own array.
    a_bounds, b_bounds = (np.ascontiguousarray(np.moveaxis(boxes, (-2, -1), (0, 1))) for boxes in (a, b))
    elements: Ints | None = None
    for (a_low, a_high), (b_low, b_high) in zip(a_bounds, b_bounds, strict=True):
        extent = np.minimum(a_high, b_high)
        extent -= np.maximum(a_low, b_low)
        np.maximum(extent, 0, out=extent)
        elements = extent if elements is None else np.multiply(elements, extent, out=elements)
    assert elements is not None
    return elements
