"""Partition opportunities (POs) of DIAPASON: ways to compute a layer whole, in slices, or fused with a later one.

    Problem → OpportunitySpace: the POs of every layer, the cost of their sublayers on each device, and the bytes that
    sublayers send to each other

A PO splits a layer into sublayers, each of which is computed on one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import Device, Interval, Layer, LayerShare, Part, Problem, Region
from dicompiler.plugin_api.regions import (
    align_region,
    bounding_region,
    cuttable_axes,
    full_region,
    is_empty,
    make_share_task,
    output_shape,
    split_axis,
    with_interval,
)
from dicompiler_strategies.tables.choice_footprints import (
    Floats,
    Ints,
    common_boxes,
    element_bytes,
    region_to_box,
    source_and_sink,
)
from dicompiler_strategies.tables.choices import find_cuttable_axis
from dicompiler_strategies.tables.cost_tables import LayerEdge, TensorSlots, common_elements, find_edges

MILLI_PER_UNIT = 1e3
"""Factor from s to ms and from J to mJ. In these units, the paper's learning rate of 0.8 works well."""


@dataclass(frozen=True)
class PartitionOpportunity:
    """A way to split one layer into sublayers (one p ∈ P in the paper).

    A fused PO is derived from its parent, a PO of a layer that reads this layer's output.

    Attributes:
        group: Number of the matrix W_dev (logits of the sublayers' devices) that it uses. A fused PO uses that of its
            parent.
        regions: Region of the layer's output that each sublayer computes; None if it computes nothing.
        shares: The regions made disjoint. A sublayer sends all its elements to the next layer's sublayer with the same
            number, and only its share to all others.
        depth: Number of later layers that the layer is fused with; 0 if it is not fused.
    """

    group: int
    regions: tuple[Region | None, ...]
    shares: tuple[Region | None, ...]
    depth: int = 0


@dataclass(frozen=True, eq=False)
class OpportunitySpace:
    """All partition opportunities (POs, ways to split a layer) of a problem, as arrays.

    A layer has P POs. A PO splits it into up to S sublayers, each on one of D devices. A group has a PO and the fused
    POs that are derived from it, which share one matrix of logits, W_dev.

    Attributes:
        problem: The problem whose layers are split.
        devices: The devices that compute, in platform order.
        opportunities: POs of each layer.
        group: For each layer, the number of the group of each PO, shape (P,).
        has_sublayer: For each layer, True if the PO has the sublayer, shape (P, S).
        cost: For each layer, the cost of computing each sublayer on each device in ms or mJ (L_dev of the DIAPASON
            paper's eq. 3), shape (P, S, D).
        overlap: For each pair of layers (i, j), the bytes of eq. (9) that each sublayer of j needs of each sublayer of
            i, shape (P, S, P', S'). P' and S' are the P and S of layer j.
        inputs: For each layer that reads network inputs, the bytes of these inputs that each sublayer reads (overlap_in
            of eq. 12), shape (P, S).
        outputs: For each layer that computes network outputs, the bytes of these outputs that each sublayer sends
            (overlap_out of eq. 14), shape (P, S).
        B: Cost in ms or mJ of sending a byte from each device to each other one, shape (D, D).
        B_in: Cost in ms or mJ of sending a byte of network input from the source to each device, shape (D,).
        B_out: Cost in ms or mJ of sending a byte of network output from each device to all sinks, shape (D,).
        group_sizes: Number of sublayers of each group.
    """

    problem: Problem
    devices: tuple[Device, ...]
    opportunities: tuple[tuple[PartitionOpportunity, ...], ...]
    group: tuple[Ints, ...]
    has_sublayer: tuple[NDArray[np.bool_], ...]
    cost: tuple[Floats, ...]
    overlap: Mapping[LayerEdge, Floats]
    inputs: Mapping[int, Floats]
    outputs: Mapping[int, Floats]
    B: Floats
    B_in: Floats
    B_out: Floats
    group_sizes: tuple[int, ...]

    def sublayer_parts(self, layer: int, chosen: int, places: Sequence[int]) -> tuple[Part, ...]:
        """Return the different parts of a layer that is split by the PO number `chosen`.

        Sublayer s (piece of the layer) is on the device with the index places[s] in `devices`.
        """
        parts = [
            Part(self.devices[place].name, region)
            for region, place in zip(self.opportunities[layer][chosen].regions, places, strict=False)
            if region is not None
        ]
        whole = self.problem.layers.layers[layer]
        if whole.whole_reason:
            return (Part(self.devices[places[0]].name),)
        return tuple(dict.fromkeys(parts))


def build_space(problem: Problem, kinds: Sequence[str], limit: int, energy: bool) -> OpportunitySpace:
    """Return the partition opportunities (ways to split) of every layer: whole, in slices of the height, and fused.

    Args:
        problem: The problem.
        kinds: Kinds of slices: "equal", or "proportional" to the devices' rates.
        limit: Largest number of later layers that a layer is fused with.
        energy: True for costs in mJ, False for ms.
    """
    return _SpaceBuilder(problem, tuple(kinds), limit, energy).build()


class _SpaceBuilder:
    def __init__(self, problem: Problem, kinds: tuple[str, ...], limit: int, energy: bool) -> None:
        self.problem, self.kinds, self.limit, self.energy = problem, kinds, limit, energy
        self.layers = problem.layers
        self.devices = problem.platform.computing_devices
        self.group_sizes: list[int] = []

    def build(self) -> OpportunitySpace:
        joined = find_edges(self.layers)
        opportunities = self._opportunities(joined)
        count = len(self.devices)
        real = tuple(np.array([_sublayer_mask(po, count) for po in pos]) for pos in opportunities)
        taken = input_and_output_layers(self.problem)
        moved = {edge: self._overlap_bytes(opportunities, edge, slots) for edge, slots in joined.items()}
        return OpportunitySpace(
            self.problem,
            self.devices,
            opportunities,
            tuple(np.array([po.group for po in pos]) for pos in opportunities),
            real,
            tuple(self._device_costs(i, pos) for i, pos in enumerate(opportunities)),
            moved,
            {i: self._input_bytes(i, opportunities[i]) for i in taken[0]},
            {i: self._output_bytes(i, opportunities[i]) for i in taken[1]},
            *self._byte_costs(),
            tuple(self.group_sizes),
        )

    def _opportunities(self, joined: Mapping[LayerEdge, object]) -> tuple[tuple[PartitionOpportunity, ...], ...]:
        """Return the partition opportunities (ways to split) of each layer. `joined` has pairs of connected layers."""
        before: dict[int, list[int]] = {}
        for i, j in joined:
            before.setdefault(j, []).append(i)
        opportunities: list[dict[PartitionOpportunity, None]] = [{} for _ in self.layers.layers]
        # From the last layer to the first, because a fused opportunity is derived from one of a later layer.
        for at in range(len(opportunities) - 1, -1, -1):
            layer = self.layers.layers[at]
            handed = list(opportunities[at])
            opportunities[at] = dict.fromkeys((*self._basic_opportunities(layer), *handed))
            for parent in opportunities[at]:
                if parent.depth < self.limit and len(parent.regions) > 1:
                    for i in before.get(at, ()):
                        child = self._fusion_opportunity(layer, parent, self.layers.layers[i])
                        if child is not None:
                            opportunities[i].setdefault(child)
        return tuple(map(tuple, opportunities))

    def _basic_opportunities(self, layer: Layer) -> Iterator[PartitionOpportunity]:
        whole = None if layer.whole_reason else full_region(output_shape(self.layers, layer))
        yield PartitionOpportunity(self._new_group(1), (whole,), (whole,))
        axis = find_cuttable_axis(self.layers, layer, "height")
        if axis is None or whole is None or len(self.devices) < 2:
            return
        for kind in self.kinds:
            weights = [device.rate if kind == "proportional" else 1.0 for device in self.devices]
            cuts = split_axis(self.layers, layer, axis, weights)
            regions = tuple(with_interval(whole, axis, cut) if cut[0] < cut[1] else None for cut in cuts)
            yield PartitionOpportunity(self._new_group(len(regions)), regions, regions)

    def _new_group(self, width: int) -> int:
        self.group_sizes.append(width)
        return len(self.group_sizes) - 1

    def _fusion_opportunity(
        self, layer: Layer, parent: PartitionOpportunity, before: Layer
    ) -> PartitionOpportunity | None:
        """Return the partition opportunity that fuses layer `before` with its reader `layer`.

        `parent` splits `layer` into slices. The result splits `before` into the rows that each of these slices reads.
        It is None if that is not possible.
        """
        axis = find_cuttable_axis(self.layers, before, "height")
        if axis is None:
            return None
        whole = full_region(output_shape(self.layers, before))
        allowed = cuttable_axes(self.layers, before)
        needs: list[Region | None] = []
        for region in parent.regions:
            need = None if region is None else self._needed_regions(layer, region).get(before.output)
            if need is not None:
                need = tuple(n if a in allowed else w for a, (n, w) in enumerate(zip(need, whole, strict=True)))
            needs.append(None if need is None or is_empty(need) else need)
        if sum(need is not None for need in needs) < 2:
            return None
        # With a large stride, `layer` reads no rows between two slices. They are added to the first slice, because
        # other readers may need them.
        cuts = cover_extent([None if need is None else need[axis] for need in needs], whole[axis][1])
        shares = tuple(None if cut is None else with_interval(whole, axis, cut) for cut in cuts)
        regions = tuple(
            None if need is None else bounding_region((need, share)) for need, share in zip(needs, shares, strict=True)
        )
        return PartitionOpportunity(parent.group, regions, shares, parent.depth + 1)

    def _needed_regions(self, layer: Layer, region: Region | None) -> dict[str, Region]:
        task = make_share_task(self.layers, layer, LayerShare(region))
        return {key.tensor: need for key, need in task.needs.items()}

    def _device_costs(self, at: int, pos: Sequence[PartitionOpportunity]) -> Floats:
        """Return the cost of each sublayer of a layer on each device, shape (P, S, D): L_dev of the paper's eq. (3).

        `at` is the position of the layer, and `pos` are its P opportunities (ways to split it into at most S
        sublayers).
        """
        layer, count = self.layers.layers[at], len(self.devices)
        computed_regions = [
            (p, s, region)
            for p, po in enumerate(pos)
            for s, region in enumerate(po.regions)
            if region is not None or layer.whole_reason
        ]
        shares = [LayerShare(region) for _, _, region in computed_regions]
        seconds = self.problem.cost_model.seconds_table(self.layers, layer, shares, self.devices)
        power = np.array([device.power_active if self.energy else 1.0 for device in self.devices])
        costs = np.zeros((len(pos), count, count))
        for (p, s, _), row in zip(computed_regions, seconds, strict=True):
            costs[p, s] = MILLI_PER_UNIT * power * row
        return costs

    def _produced_boxes(self, at: int, pos: Sequence[PartitionOpportunity], slot: int, shares: bool) -> Ints | None:
        """Return the box of an output that each sublayer computes, shape (P, S, axes + 1, 2).

        A box has a start and an end on each axis. On the additional axis, it is 0..1, or 0..0 if the sublayer computes
        nothing. The result is None if the output has no static shape.

        Args:
            at: Position of the layer.
            pos: Its P opportunities (ways to split it into at most S sublayers).
            slot: Index of the output.
            shares: True for the disjoint boxes from which sublayers send.
        """
        layer = self.layers.layers[at]
        shape = self.layers.tensors[layer.outputs[slot]].shape
        if shape is None:
            return None
        boxes = np.zeros((len(pos), len(self.devices), len(shape) + 1, 2), np.int64)
        for p, po in enumerate(pos):
            for s, region in enumerate(po.shares if shares else po.regions):
                if layer.whole_reason:
                    boxes[p, s] = region_to_box(full_region(shape))
                # Without a region, the sublayer computes nothing, so its box stays empty (0..0).
                elif region is not None:
                    boxes[p, s] = region_to_box(region if shares else align_region(self.layers, layer, region))
        return boxes

    def _needed_boxes(self, at: int, pos: Sequence[PartitionOpportunity], tensor: str) -> Ints:
        """Return the box of `tensor` that each sublayer of a layer reads, shape (P, S, axes + 1, 2).

        A box has a start and an end on each axis. On the additional axis, it is 0..1, or 0..0 if the sublayer does not
        read the tensor. `at` is the position of the layer, and `pos` are its P opportunities.
        """
        layer = self.layers.layers[at]
        rank = len(self.layers.tensors[tensor].shape or ())
        boxes = np.zeros((len(pos), len(self.devices), rank + 1, 2), np.int64)
        for p, po in enumerate(pos):
            for s, region in enumerate(po.regions):
                if region is not None or layer.whole_reason:
                    need = self._needed_regions(layer, region).get(tensor)
                    if need is not None:
                        boxes[p, s] = region_to_box(need)
        return boxes

    def _overlap_bytes(
        self, opportunities: Sequence[Sequence[PartitionOpportunity]], edge: LayerEdge, slots: TensorSlots
    ) -> Floats:
        i, j = edge
        senders, receivers = opportunities[i], opportunities[j]
        count = len(self.devices)
        total = np.zeros((len(senders), count, len(receivers), count))
        for out, slot in slots:
            tensor = self.layers.layers[j].inputs[slot]
            produced, shares = (self._produced_boxes(i, senders, out, kind) for kind in (False, True))
            if produced is not None and shares is not None:
                wanted = self._needed_boxes(j, receivers, tensor)
                total += element_bytes(self.layers, tensor) * overlap_elements(produced, shares, wanted)
        return total

    def _input_bytes(self, at: int, pos: Sequence[PartitionOpportunity]) -> Floats:
        total = np.zeros((len(pos), len(self.devices)))
        for tensor in self.layers.layers[at].inputs:
            if tensor in self.layers.inputs and self.layers.tensors[tensor].shape is not None:
                wanted = self._needed_boxes(at, pos, tensor)
                total += element_bytes(self.layers, tensor) * common_elements(wanted, wanted)
        return total

    def _output_bytes(self, at: int, pos: Sequence[PartitionOpportunity]) -> Floats:
        total = np.zeros((len(pos), len(self.devices)))
        for slot, tensor in enumerate(self.layers.layers[at].outputs):
            shares = self._produced_boxes(at, pos, slot, True)
            if tensor in self.layers.delivered_outputs and shares is not None:
                total += element_bytes(self.layers, tensor) * common_elements(shares, shares)
        return total

    def _byte_costs(self) -> tuple[Floats, Floats, Floats]:
        """Return the costs B, B_in and B_out of sending a byte in ms or mJ (see OpportunitySpace)."""
        # Every sink receives all outputs. Inputs come from the first source, unless the device is a source itself.
        source, sink = source_and_sink(self.problem)
        names = [device.name for device in self.devices]
        between = np.array([[self._byte_cost(a, b) for b in names] for a in names])
        into = np.array([0.0 if name in source else self._byte_cost(source[0], name) for name in names])
        out = np.array([sum(self._byte_cost(name, wanting) for wanting in sink) for name in names])
        return between, into, out

    def _byte_cost(self, a: str, b: str) -> float:
        platform = self.problem.platform
        link = None if a == b else platform.link(a, b)
        if link is None:
            return 0.0
        power = platform.device(a).power_network + platform.device(b).power_network if self.energy else 1.0
        return link.transfer_s(MILLI_PER_UNIT * power)


def input_and_output_layers(problem: Problem) -> tuple[list[int], list[int]]:
    layers = problem.layers
    reading = [i for i, layer in enumerate(layers.layers) if set(layer.inputs) & set(layers.inputs)]
    making = [i for i, layer in enumerate(layers.layers) if set(layer.outputs) & set(layers.delivered_outputs)]
    return reading, making


def cover_extent(intervals: Sequence[Interval | None], extent: int) -> list[Interval | None]:
    """Return disjoint intervals that cover 0..extent, one for each given interval; an entry None stays None.

    Two neighbours are divided at the middle of their overlap, or at the start of the second one if there is a gap:

        cover_extent([(0, 5), (3, 8)], 8) → [(0, 4), (4, 8)]
    """
    present_indices = [k for k, interval in enumerate(intervals) if interval is not None]
    covered: list[Interval | None] = [None] * len(intervals)
    start = 0
    for k, after in zip(present_indices, [*present_indices[1:], None], strict=True):
        stop = extent
        if after is not None:
            (_, end), (begin, _) = intervals[k] or (0, 0), intervals[after] or (0, 0)
            stop = max(start, (begin + max(begin, end)) // 2)
        covered[k] = (start, stop)
        start = stop
    return covered


def overlap_elements(produced: Ints, shares: Ints, wanted: Ints) -> Floats:
    """Return how many elements each sublayer of a second layer receives from each sublayer of a first layer.

    A sublayer is the piece of a layer on one device. An element comes from the sublayer with the same number if that
    one computes it, and otherwise from the sublayer that has it in its share. The paper calls the result overlap_{i,j}.

    Args:
        produced: Boxes that the sublayers of the first layer compute, shape (P, S, axes + 1, 2) for P opportunities
            (ways to split it). A box has a start and an end on each axis; on the additional axis, it is 0..0 if it is
            missing.
        shares: The same boxes without overlap.
        wanted: Boxes that the sublayers of the second layer read, shape (P', S', axes + 1, 2).

    Returns:
        The numbers of elements, shape (P, S, P', S').
    """
    # Elements in the share of sublayer s that sublayer t also computes, shape (P, s, t, axes + 1, 2). Sublayer t of the
    # second layer gets them from t, and not from s.
    both = common_boxes(shares[:, :, None], produced[:, None, :])
    wide = wanted[None, None]
    moved = (common_elements(shares[:, :, None, None], wide) - common_elements(both[:, :, None], wide)).astype(
        np.float64
    )
    for s in range(produced.shape[1]):
        moved[:, s, :, s] = common_elements(produced[:, None, s], wanted[None, :, s])
    return moved


def _sublayer_mask(po: PartitionOpportunity, count: int) -> list[bool]:
    if po.regions == (None,):  # A layer that cannot be split has only the first sublayer.
        return [True] + [False] * (count - 1)
    return [s < len(po.regions) and po.regions[s] is not None for s in range(count)]
