"""Footprints: the regions, seconds and bytes of each choice of a layer (way to split it) on each device, as arrays.

A box is a region as an array: one interval [start, stop) for each axis of the tensor, then the interval 0..1. A missing
box is 0..0 on every axis. The last interval tells a scalar, which has no axes, from a missing box.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dicompiler.plugin_api import Layer, LayerGraph, LayerShare, Part, Platform, Problem, Region
from dicompiler.plugin_api.costs import FREE_RUNTIME, AnalyticModel, count_lookup_copies, sent_nbytes, weight_regions
from dicompiler.plugin_api.onnx import raw_nbytes
from dicompiler.plugin_api.regions import ShareTask, TensorKey, full_region, make_share_task, named_axes, volume
from dicompiler_strategies.tables.channel_runs import find_run_before, find_run_of, layer_signature
from dicompiler_strategies.tables.choices import Choice

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class NeededBoxes:
    """The region of one input tensor that a layer reads, for each choice (way to split the layer) and each device.

    Attributes:
        boxes: Boxes (see the docstring of the module), shape (choices, devices, axes + 1, 2).
        sign: 1 if the elements of the boxes are added, −1 if they are subtracted. Elements that a device reads both for
            its partial sum and for its output are added twice, so a third array subtracts them once.
    """

    boxes: Ints
    sign: int = 1


@dataclass(frozen=True, eq=False)
class ChoiceFootprint:
    """Regions, seconds and bytes of each choice of a layer (way to split it) on each device.

    The arrays have the shape (choices, devices, …), with devices in platform order. Regions are boxes (see the
    docstring of the module), shape (choices, devices, axes + 1, 2).

    Attributes:
        produced: By index of a layer output: the region of this output that each device computes.
        sent_regions: By index of a layer output: the region that a device sends to others. These regions do not
            overlap, and together they cover the regions of `produced`.
        needs: By index of a layer input: the regions of this input that each device reads. States (inputs that the
            previous frame computed) have the indices −1, −2, ….
        partial_seconds: Seconds to compute partial sums.
        final_seconds: Seconds to compute everything but partial sums.
        weight_bytes: Bytes of weights that a device stores.
        merged_bytes: Bytes of partial sums, of shape (choices, senders, receivers).
    """

    produced: Mapping[int, Ints]
    sent_regions: Mapping[int, Ints]
    needs: Mapping[int, tuple[NeededBoxes, ...]]
    partial_seconds: Floats
    final_seconds: Floats
    weight_bytes: Ints
    merged_bytes: Ints


def build_footprint(problem: Problem, layer: Layer, choices: Sequence[Choice]) -> ChoiceFootprint:
    return _FootprintBuilder(problem, layer, choices).build()


def footprint_key(problem: Problem, layer: Layer) -> Hashable:
    """Return a key such that layers with equal keys have equal choices (ways to split a layer) and equal costs."""
    layers = problem.layers
    inside, ended = find_run_of(layers, layer), find_run_before(layers, layer)
    labels = tuple(sorted(named_axes(layers).get(layer.output, {}).items()))
    structure = layer_signature(layers, layer), inside and (inside[0].key, inside[1]), ended and ended.key, labels
    return structure if type(problem.cost_model) is AnalyticModel else (layer.name, structure)


@dataclass(frozen=True, eq=False)
class _PartRegions:
    """The regions of one part of a layer. They do not depend on the device of the part.

    Attributes:
        task: The computation of the part.
        region: The region of the first output that the part computes.
        needs: Pairs of the index of a layer input, and the region that the part reads of this input.
        weights: Bytes of each weight region that the part reads, by name of the weight and region.
    """

    task: ShareTask
    region: Region | None
    needs: tuple[tuple[int, Region], ...]
    weights: Mapping[tuple[str, Region], int]


class _FootprintBuilder:
    """A builder of the arrays of a footprint, choice by choice. Equal parts are computed once."""

    def __init__(self, problem: Problem, layer: Layer, choices: Sequence[Choice]) -> None:
        self.problem, self.layer, self.choices = problem, layer, choices
        self.index = {device.name: i for i, device in enumerate(problem.platform.devices)}
        self.known_regions: dict[LayerShare, _PartRegions] = {}
        self.known_seconds: dict[tuple[Any, ...], float] = {}
        self.array_shape = size = (len(choices), len(self.index))
        self.produced = {
            slot: _empty_boxes(size, shape)
            for slot, name in enumerate(layer.outputs)
            if (shape := problem.layers.tensors[name].shape) is not None and (slot == 0 or layer.whole_reason)
        }
        self.sent_regions = {slot: array.copy() for slot, array in self.produced.items()}
        # Regions of the layer's inputs, by (index of the input, 1 if read for partial sums, else 0).
        self.reads: dict[tuple[int, int], Ints] = {}
        self.partial_seconds, self.final_seconds = np.zeros(size), np.zeros(size)
        self.weight_bytes, self.merged_bytes = np.zeros(size, np.int64), np.zeros((*size, len(self.index)), np.int64)

    def build(self) -> ChoiceFootprint:
        for c, choice in enumerate(self.choices):
            senders = [self.index[part.device] for part in choice.parts if part.reduce is not None]
            weights: dict[int, dict[tuple[str, Region], int]] = {}
            for i, part in enumerate(choice.parts):
                share = LayerShare(part.region, part.reduce, len(senders) if part.reduce is None else 0)
                regions = self._find_regions(share)
                self._add_work(c, part, regions, share.merge_count)
                weights.setdefault(self.index[part.device], {}).update(regions.weights)
                if part.reduce is None:
                    sent_region = choice.sent_regions[i] if choice.sent_regions else None
                    self._add_output(c, part, regions, sent_region, senders)
            for d, bytes_by_region in weights.items():
                self.weight_bytes[c, d] = sum(bytes_by_region.values())
        return ChoiceFootprint(
            self.produced,
            self.sent_regions,
            _build_needs(self.reads),
            self.partial_seconds,
            self.final_seconds,
            self.weight_bytes,
            self.merged_bytes,
        )

    def _add_work(self, c: int, part: Part, regions: _PartRegions, merge_count: int) -> None:
        d = self.index[part.device]
        seconds = self.final_seconds if part.reduce is None else self.partial_seconds
        seconds[c, d] += self._part_seconds(regions, part, merge_count)
        for slot, region in regions.needs:
            key = slot, int(part.reduce is not None)
            if key not in self.reads:
                self.reads[key] = _empty_boxes(self.array_shape, region)
            self.reads[key][c, d] = region_to_box(region)

    def _add_output(
        self, c: int, part: Part, regions: _PartRegions, sent_region: Region | None, senders: Sequence[int]
    ) -> None:
        """Add the output region of a part to the arrays of choice number `c`.

        Args:
            c: Index of the choice (way to split the layer).
            part: The part, which is not a partial sum.
            regions: The regions of the part.
            sent_region: The region that the device sends to others; None for its whole output region.
            senders: Indices of the devices that send partial sums to this one.
        """
        d = self.index[part.device]
        for slot in self.produced:
            region = regions.task.outputs[TensorKey(self.layer.outputs[slot])]
            # `produced` has only outputs with a static shape. Every task has a region of each of them.
            assert region is not None
            self.produced[slot][c, d] = region_to_box(region)
            self.sent_regions[slot][c, d] = region_to_box(region if sent_region is None or slot else sent_region)
        for s in senders:
            if s != d and regions.region is not None:
                self.merged_bytes[c, s, d] += volume(regions.region) * self._partial_element_bytes

    def _find_regions(self, share: LayerShare) -> _PartRegions:
        if share not in self.known_regions:
            layers, layer = self.problem.layers, self.layer
            task = make_share_task(layers, layer, share)
            (region, *_) = task.outputs.values()
            slots = {name: slot for slot, name in enumerate(layer.inputs)} | state_slots(layers, layer)
            needs = tuple((slots[key.tensor], need) for key, need in (*task.needs.items(), *task.state_needs.items()))
            self.known_regions[share] = _PartRegions(task, region, needs, weight_regions(layers, task))
        return self.known_regions[share]

    def _part_seconds(self, regions: _PartRegions, part: Part, merge_count: int) -> float:
        device = self.problem.platform.device(part.device)
        share = LayerShare(None if self.layer.whole_reason else regions.region, part.reduce, merge_count)
        # The analytic cost model uses only these properties, so devices with equal properties share an entry.
        is_analytic = type(self.problem.cost_model) is AnalyticModel
        rates = device.rate, device.memory_bandwidth, device.engine, device.engine_rates
        key = share, rates if is_analytic else device.name
        if key not in self.known_seconds:
            self.known_seconds[key] = self.problem.cost_model.seconds(self.problem.layers, self.layer, share, device)
        # A partial sum of a table lookup needs additional nodes that copy data. Their seconds are added here.
        if part.reduce is None:
            return self.known_seconds[key]
        copied = count_lookup_copies(self.problem.layers, regions.task)
        return self.known_seconds[key] + self.problem.runtime_costs.get(part.device, FREE_RUNTIME).copy_seconds(*copied)

    @cached_property
    def _partial_element_bytes(self) -> int:
        layers = self.problem.layers
        return element_bytes(layers, layers.cut_output(self.layer.nodes[self.layer.anchor]))


def state_slots(layers: LayerGraph, layer: Layer) -> dict[str, int]:
    """Return the number −1, −2, … of each state that a layer reads, by the state's model input.

    A state is an output of the model that becomes an input of the next frame. No number is the index of a layer input.
    """
    names = dict.fromkeys(name for node in layer.nodes for name in node.inputs if name in layers.state_output_of)
    return {name: -1 - place for place, name in enumerate(names)}


def element_bytes(layers: LayerGraph, tensor: str) -> int:
    """Return the bytes that one element of a tensor takes in a message, rounded to whole bytes and at least 1."""
    return max(1, round(sent_nbytes(layers, tensor, (32,)) / 32))


def _empty_boxes(size: tuple[int, int], shape: Sequence[Any]) -> Ints:
    return np.zeros((*size, len(shape) + 1, 2), np.int64)


def region_to_box(region: Region) -> Region:
    """Return the box of a region: its intervals, then the interval 0..1, which marks it as present."""
    return (*region, (0, 1))


def _build_needs(reads: Mapping[tuple[int, int], Ints]) -> dict[int, tuple[NeededBoxes, ...]]:
    """Return the regions that devices need of each input of a layer, by index of the input.

    `reads` has the regions by (index of the input, 1 if read for partial sums, else 0). Elements that a device reads
    for both are counted once.
    """
    by_slot: dict[int, tuple[NeededBoxes, ...]] = {}
    for slot in sorted({slot for slot, _ in reads}):
        boxes = [reads[slot, kind] for kind in (0, 1) if (slot, kind) in reads]
        needs = [NeededBoxes(b) for b in boxes]
        if len(boxes) == 2:
            common = common_boxes(boxes[0], boxes[1])
            if common.any():
                needs.append(NeededBoxes(common, -1))
        by_slot[slot] = tuple(needs)
    return by_slot


def common_boxes(a: Ints, b: Ints) -> Ints:
    """Return the intersections of two arrays of intervals on each axis, shape (…, axes, 2).

    An empty intersection is 0..0 on every axis.
    """
    low, high = np.maximum(a[..., 0], b[..., 0]), np.minimum(a[..., 1], b[..., 1])
    is_present = (low < high).all(axis=-1, keepdims=True)
    return np.stack((np.where(is_present, low, 0), np.where(is_present, high, 0)), axis=-1)


def box_elements(boxes: Ints) -> Ints:
    """Return the number of elements of each box (start and end on each axis) in an array of shape (…, axes, 2)."""
    elements: Ints = np.maximum(boxes[..., 1] - boxes[..., 0], 0).prod(axis=-1)
    return elements


def output_bytes(layers: LayerGraph, layer: Layer, footprint: ChoiceFootprint) -> dict[str, Floats]:
    """Return the bytes of each of a layer's outputs that each device computes, shape (ways to split it, devices).

    Outputs without known regions are omitted.
    """
    nbytes: dict[str, Floats] = {}
    for slot, boxes in footprint.produced.items():
        item_bytes = raw_nbytes(layers.tensors[layer.outputs[slot]].dtype, (1,))
        nbytes[layer.outputs[slot]] = (item_bytes * box_elements(boxes)).astype(np.float64)
    return nbytes


def state_bytes(layers: LayerGraph, layer: Layer, footprint: ChoiceFootprint) -> Floats:
    """Return the bytes of the states that each device reads in a layer, shape (ways to split the layer, devices).

    A state is an output of the model that becomes an input of the next frame.
    """
    nbytes = np.zeros(footprint.final_seconds.shape)
    for name, slot in state_slots(layers, layer).items():
        nbytes += needed_bytes(layers, name, footprint, slot)
    return nbytes


def needed_bytes(layers: LayerGraph, tensor: str, footprint: ChoiceFootprint, slot: int) -> Floats:
    """Return the bytes of an input of a layer that each device reads, shape (ways to split the layer, devices).

    Args:
        layers: The layers.
        tensor: Name of the input.
        footprint: The footprint of the layer.
        slot: Index of the input in `footprint.needs`.

    Returns:
        Numbers of bytes in memory; 0 if the regions are not known.
    """
    elements = np.zeros(footprint.final_seconds.shape)
    for need in footprint.needs.get(slot, ()):
        elements += need.sign * box_elements(need.boxes)
    return raw_nbytes(layers.tensors[tensor].dtype, (1,)) * elements


def source_and_sink(problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the devices that have the network's inputs, and those that receive its outputs.

    The default for both is the first device of the platform.
    """
    first = (problem.platform.devices[0].name,)
    return problem.source or first, problem.sink or first


def device_host_matrix(platform: Platform) -> Floats:
    """Return a matrix of shape (devices, hosts): entry [d, h] is 1 if device d is on host h, else 0."""
    return np.array([[device.host == host.name for host in platform.hosts] for device in platform.devices], np.float64)


def whole_tensor_boxes(problem: Problem, tensor: str, names: Sequence[str]) -> Ints:
    """Return the whole tensor as a region of the named devices, and no region for all others.

    The result has boxes (see the docstring of the module), shape (1, devices, axes + 1, 2).
    """
    shape = problem.layers.tensors[tensor].shape or ()
    boxes = _empty_boxes((1, len(problem.platform.devices)), shape)
    boxes[0, [device.name in names for device in problem.platform.devices]] = region_to_box(full_region(shape))
    return boxes
