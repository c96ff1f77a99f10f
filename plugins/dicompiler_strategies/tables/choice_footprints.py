"""Footprints: the regions, seconds and bytes of each choice of a layer on each device, as arrays.

    Problem + Layer + Choices → ChoiceFootprint

A box is a region as an array of [start, stop) intervals, one for each axis, followed by the presence interval 0..1. A
missing box is 0..0 on every axis. The presence interval lets a scalar, which has no axes, be present or missing.
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
from dicompiler.plugin_api.regions import ShareTask, TensorKey, full_region, make_share_task, named_axes, volume
from dicompiler_strategies.tables.channel_runs import find_run_before, find_run_of, layer_signature
from dicompiler_strategies.tables.choices import Choice

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class NeededBoxes:
    """Regions that a layer reads of one tensor.

    Attributes:
        boxes: Boxes (choices, devices, axes + 1, 2) in elements.
        sign: 1; or -1 for the overlap of two boxes of one device, so that no element counts twice.
    """

    boxes: Ints
    sign: int = 1


@dataclass(frozen=True, eq=False)
class ChoiceFootprint:
    """Regions, seconds and bytes of the C choices of a layer on D devices in platform order.

    Attributes:
        produced: Index of a layer output → box (C, D, axes + 1, 2) that each device holds after computing.
        shares: The same without overlaps: the elements that each device sends if several devices hold them.
        needs: Index of a layer input → boxes that are read. States have negative indices, see `state_slots`.
        partial_seconds: Seconds (C, D) of partial sums.
        final_seconds: Seconds (C, D) of everything else.
        weight_bytes: Bytes (C, D) of weights.
        merged_bytes: Bytes (C, D, D) of partial sums from sender to receiver.
    """

    produced: Mapping[int, Ints]
    shares: Mapping[int, Ints]
    needs: Mapping[int, tuple[NeededBoxes, ...]]
    partial_seconds: Floats
    final_seconds: Floats
    weight_bytes: Ints
    merged_bytes: Ints


def build_footprint(problem: Problem, layer: Layer, choices: Sequence[Choice]) -> ChoiceFootprint:
    """Return the footprint of a layer's choices."""
    return _FootprintBuilder(problem, layer, choices).build()


def footprint_key(problem: Problem, layer: Layer) -> Hashable:
    """Return a key such that layers with equal keys have equal choices and footprints.

    It holds the layer's structure, the runs that contain it and that it ends, and the labels of its axes. If a cost
    model may know layers by name, it also holds the name.
    """
    layers = problem.layers
    inside, ended = find_run_of(layers, layer), find_run_before(layers, layer)
    labels = tuple(sorted(named_axes(layers).get(layer.output, {}).items()))
    structure = layer_signature(layers, layer), inside and (inside[0].key, inside[1]), ended and ended.key, labels
    return structure if type(problem.cost_model) is AnalyticModel else (layer.name, structure)


@dataclass(frozen=True, eq=False)
class _PartProbe:
    """One part without its device: the task, the regions it needs, and the bytes of its weights."""

    task: ShareTask
    region: Region | None
    needs: tuple[tuple[int, Region], ...]
    weights: Mapping[tuple[str, Region], int]


class _FootprintBuilder:
    """Fills the arrays choice by choice and part by part; equal parts are computed once."""

    def __init__(self, problem: Problem, layer: Layer, choices: Sequence[Choice]) -> None:
        self.problem, self.layer, self.choices = problem, layer, choices
        self.index = {device.name: i for i, device in enumerate(problem.platform.devices)}
        self.known_probes: dict[LayerShare, _PartProbe] = {}
        self.known_seconds: dict[tuple[Any, ...], float] = {}
        self.array_shape = size = (len(choices), len(self.index))
        self.produced = {
            slot: _empty_boxes(size, shape)
            for slot, name in enumerate(layer.outputs)
            if (shape := problem.layers.tensors[name].shape) is not None and (slot == 0 or layer.whole_reason)
        }
        self.shares = {slot: array.copy() for slot, array in self.produced.items()}
        self.reads: dict[tuple[int, int], Ints] = {}  # (index of the input, 1 for a partial sum or else 0) → boxes
        self.partial_seconds, self.final_seconds = np.zeros(size), np.zeros(size)
        self.weight_bytes, self.merged_bytes = np.zeros(size, np.int64), np.zeros((*size, len(self.index)), np.int64)

    def build(self) -> ChoiceFootprint:
        for c, choice in enumerate(self.choices):
            senders = [self.index[part.device] for part in choice.parts if part.reduce is not None]
            held: dict[int, dict[tuple[str, Region], int]] = {}
            for i, part in enumerate(choice.parts):
                share = LayerShare(part.region, part.reduce, len(senders) if part.reduce is None else 0)
                probe = self._probe_share(share)
                self._add_work(c, part, probe, share.merge_count)
                held.setdefault(self.index[part.device], {}).update(probe.weights)
                if part.reduce is None:
                    self._add_output(c, part, probe, choice.shares[i] if choice.shares else None, senders)
            for d, pieces in held.items():
                self.weight_bytes[c, d] = sum(pieces.values())
        return ChoiceFootprint(
            self.produced,
            self.shares,
            _build_needs(self.reads),
            self.partial_seconds,
            self.final_seconds,
            self.weight_bytes,
            self.merged_bytes,
        )

    def _add_work(self, c: int, part: Part, probe: _PartProbe, merge: int) -> None:
        """Add the seconds of a part and the regions that it reads."""
        d = self.index[part.device]
        (self.final_seconds if part.reduce is None else self.partial_seconds)[c, d] += self._part_seconds(
            probe, part, merge
        )
        for slot, region in probe.needs:
            key = slot, int(part.reduce is not None)
            if key not in self.reads:
                self.reads[key] = _empty_boxes(self.array_shape, region)
            self.reads[key][c, d] = region_to_box(region)

    def _add_output(self, c: int, part: Part, probe: _PartProbe, share: Region | None, senders: Sequence[int]) -> None:
        """Add the regions that a part produces and the partial sums that are sent to it."""
        d = self.index[part.device]
        for slot in self.produced:
            region = probe.task.outputs[TensorKey(self.layer.outputs[slot])]
            assert region is not None  # Only tensors with a static shape have boxes.
            self.produced[slot][c, d] = region_to_box(region)
            self.shares[slot][c, d] = region_to_box(region if share is None or slot else share)
        for s in senders:
            if s != d and probe.region is not None:
                self.merged_bytes[c, s, d] += volume(probe.region) * self._partial_element_bytes

    def _probe_share(self, share: LayerShare) -> _PartProbe:
        if share not in self.known_probes:
            layers, layer = self.problem.layers, self.layer
            task = make_share_task(layers, layer, share)
            (region, *_) = task.outputs.values()
            slots = {name: slot for slot, name in enumerate(layer.inputs)} | state_slots(layers, layer)
            needs = tuple((slots[key.tensor], need) for key, need in (*task.needs.items(), *task.state_needs.items()))
            self.known_probes[share] = _PartProbe(task, region, needs, weight_regions(layers, task))
        return self.known_probes[share]

    def _part_seconds(self, probe: _PartProbe, part: Part, merge: int) -> float:
        device = self.problem.platform.device(part.device)
        region = None if self.layer.whole_reason else probe.region
        # The analytic model depends on these two properties only, so that equal devices share an entry.
        device_key = (
            (device.rate, device.memory_bandwidth) if type(self.problem.cost_model) is AnalyticModel else device.name
        )
        key = region, part.reduce, merge, device_key
        if key not in self.known_seconds:
            share = LayerShare(region, part.reduce, merge)
            self.known_seconds[key] = self.problem.cost_model.seconds(self.problem.layers, self.layer, share, device)
        if part.reduce is None:  # A lookup in the whole table needs no copies.
            return self.known_seconds[key]
        copied = count_lookup_copies(self.problem.layers, probe.task)
        return self.known_seconds[key] + self.problem.runtime_costs.get(part.device, FREE_RUNTIME).copy_seconds(*copied)

    @cached_property
    def _partial_element_bytes(self) -> int:
        """Bytes of one element of a partial sum."""
        layers = self.problem.layers
        return element_bytes(layers, layers.cut_output(self.layer.nodes[self.layer.anchor]))


def state_slots(layers: LayerGraph, layer: Layer) -> dict[str, int]:
    """Return the states that a layer reads, with negative indices from -1 down.

    Negative indices do not collide with those of its inputs.
    """
    names = dict.fromkeys(name for node in layer.nodes for name in node.inputs if name in layers.state_output_of)
    return {name: -1 - place for place, name in enumerate(names)}


def element_bytes(layers: LayerGraph, tensor: str) -> int:
    """Return the bytes of one element on the wire, rounded up to whole bytes."""
    return sent_nbytes(layers, tensor, (1,))


def _empty_boxes(size: tuple[int, int], shape: Sequence[Any]) -> Ints:
    return np.zeros((*size, len(shape) + 1, 2), np.int64)


def region_to_box(region: Region) -> Region:
    """Return a region with the presence interval appended."""
    return (*region, (0, 1))


def _build_needs(reads: Mapping[tuple[int, int], Ints]) -> dict[int, tuple[NeededBoxes, ...]]:
    """Return the needed boxes by input; what a device reads for both kinds of parts counts once."""
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
    """Return the intersections of two arrays of boxes (…, axes, 2); 0..0 on every axis if empty."""
    low, high = np.maximum(a[..., 0], b[..., 0]), np.minimum(a[..., 1], b[..., 1])
    there = (low < high).all(axis=-1, keepdims=True)
    return np.stack((np.where(there, low, 0), np.where(there, high, 0)), axis=-1)


def box_elements(boxes: Ints) -> Ints:
    """Return the number of elements (…) of boxes (…, axes, 2)."""
    elements: Ints = np.maximum(boxes[..., 1] - boxes[..., 0], 0).prod(axis=-1)
    return elements


def source_and_sink(problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the devices that hold the inputs and those that receive the outputs, or the defaults."""
    first = (problem.platform.devices[0].name,)
    return problem.source or first, problem.sink or first


def device_host_matrix(platform: Platform) -> Floats:
    """Return a matrix (devices, hosts) that is 1 if the device is on the host."""
    return np.array([[device.host == host.name for host in platform.hosts] for device in platform.devices], np.float64)


def whole_tensor_boxes(problem: Problem, tensor: str, names: Sequence[str]) -> Ints:
    """Return boxes (1, devices, axes + 1, 2) with the whole tensor on the named devices."""
    shape = problem.layers.tensors[tensor].shape or ()
    boxes = _empty_boxes((1, len(problem.platform.devices)), shape)
    for i, device in enumerate(problem.platform.devices):
        if device.name in names:
            boxes[0, i] = region_to_box(full_region(shape))
    return boxes
