"""A team: the devices among which layers are split, with the region that each device computes and its seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from dicompiler.plugin_api import Device, Interval, Layer, LayerGraph, LayerShare, Problem, Region
from dicompiler.plugin_api.costs import count_macs
from dicompiler.plugin_api.onnx import raw_nbytes
from dicompiler.plugin_api.regions import (
    full_region,
    make_share_task,
    output_shape,
    reduction_length,
    region_shape,
    split_axis,
    split_proportionally,
    with_interval,
)
from dicompiler.plugin_api.utilities import Memoizing, memoized
from dicompiler_strategies.dp.box_arrays import DeviceBoxes
from dicompiler_strategies.dp.row_maps import RowMap, build_row_maps, find_height_axis, measure_row_seconds
from dicompiler_strategies.tables.choice_footprints import Floats, source_and_sink
from dicompiler_strategies.tables.choices import find_cuttable_axis
from dicompiler_strategies.tables.link_loads import LinkLoads, build_link_loads

TensorForm = Literal["rows", "channels", "everywhere", "whole", "source"]
"""How a tensor is distributed over the devices.

- "rows", "channels": each member of the team has a range of the rows or channels.
- "everywhere": each member has the whole tensor.
- "whole": only one member, the leader, has the tensor.
- "source": the sources have the whole tensor, which is an input of the network.
"""

_PROBED_LAYERS = 8
"""Largest number of layers by which the speeds of devices are compared."""


@dataclass(frozen=True, eq=False)
class ProblemFacts:
    """Facts about a problem that are the same for all teams (sets of devices). Each fact is computed once.

    Attributes:
        problem: The problem.
        row_seconds: Cache of `row_seconds_of`, by layer name and number of the device's speed class.
    """

    problem: Problem
    row_seconds: dict[tuple[str, int], Floats] = field(default_factory=dict, repr=False)

    @cached_property
    def _probe_seconds(self) -> Mapping[str, tuple[float, ...]]:
        """By device name, the seconds of each of up to _PROBED_LAYERS layers, computed whole on this device.

        The layers are at equal distances in the network. All seconds of a device without compute are infinite.
        """
        layers, cost = self.problem.layers, self.problem.cost_model
        probed = layers.layers[:: -(-len(layers.layers) // _PROBED_LAYERS)]
        return {
            device.name: tuple(
                cost.seconds(layers, layer, LayerShare(), device) if device.can_compute else math.inf
                for layer in probed
            )
            for device in self.problem.platform.devices
        }

    @cached_property
    def speed_classes(self) -> Mapping[str, int]:
        """Number of each device's speed class, by device name. The devices of a class are equally fast."""
        seen: dict[tuple[float, ...], int] = {}
        return {name: seen.setdefault(seconds, len(seen)) for name, seconds in self._probe_seconds.items()}

    @cached_property
    def speeds(self) -> Mapping[str, float]:
        """Speed of each device by name: 1 / (sum of its `_probe_seconds`); 0 for a device without compute."""
        most = max(
            (seconds for row in self._probe_seconds.values() for seconds in row if seconds < math.inf), default=0.0
        )
        return {
            name: 0.0 if math.inf in row else 1 / max(sum(row), most * 1e-12, 1e-30)
            for name, row in self._probe_seconds.items()
        }

    @cached_property
    def devices_by_speed(self) -> tuple[str, ...]:
        """Names of the devices that compute, the fastest first."""
        names = [device.name for device in self.problem.platform.computing_devices]
        return tuple(sorted(names, key=lambda name: -self.speeds[name]))

    @cached_property
    def row_maps(self) -> Mapping[str, RowMap]:
        return build_row_maps(self.problem.layers)

    @cached_property
    def macs(self) -> Mapping[str, int]:
        return {layer.name: count_macs(self.problem.layers, layer) for layer in self.problem.layers.layers}

    @cached_property
    def weight_bytes(self) -> Mapping[str, int]:
        """Bytes of constants by layer name. A constant that several layers read counts only for the first one."""
        seen: set[str] = set()
        result = {}
        for layer in self.problem.layers.layers:
            names = dict.fromkeys(name for node in layer.nodes for name in node.inputs if name and name not in seen)
            constants = [self.problem.layers.tensors[name] for name in names]
            constants = [tensor for tensor in constants if tensor.is_constant]
            result[layer.name] = sum(raw_nbytes(tensor.dtype, tensor.shape or ()) for tensor in constants)
            seen.update(tensor.name for tensor in constants)
        return result

    def row_seconds_of(self, layer: Layer, device: Device) -> Floats:
        """Return the seconds of a device for 0, 1, … rows of a layer, shape (rows + 1,)."""
        key = (layer.name, self.speed_classes[device.name])
        if key not in self.row_seconds:
            problem, row_map = self.problem, self.row_maps[layer.name]
            self.row_seconds[key] = measure_row_seconds(problem.layers, layer, row_map, problem.cost_model, device)
        return self.row_seconds[key]


@dataclass(frozen=True, eq=False)
class DeviceTeam(Memoizing):
    """The devices (members of the team) among which layers are split.

    Attributes:
        problem: The problem on a platform that has only the members, sources and sinks.
        members: Positions of the members in this platform.
        leader: Position of the member that computes the layers that are not split.
        weights: Weight of each member. The size of its part of a layer is proportional to it.
        facts: Facts about the original problem, on the whole platform.
    """

    problem: Problem
    members: tuple[int, ...]
    leader: int
    weights: tuple[float, ...]
    facts: ProblemFacts

    @staticmethod
    def build(facts: ProblemFacts, names: Sequence[str], has_equal_parts: bool = False) -> DeviceTeam:
        """Return the team of the devices `names`. The first one, the leader, computes the layers that are not split.

        Args:
            facts: Facts about the problem.
            names: Names of the devices.
            has_equal_parts: Split layers into equal parts, instead of in proportion to the speed of the devices.
        """
        problem = facts.problem
        source, sink = source_and_sink(problem)
        devices = [device for device in problem.platform.devices if device.name in {*names, *source, *sink}]
        platform = replace(problem.platform, devices=tuple(devices))
        members = tuple(i for i, device in enumerate(devices) if device.name in names)
        return DeviceTeam(
            replace(problem, platform=platform, source=source, sink=sink),
            members,
            next(i for i in members if devices[i].name == names[0]),
            tuple(1.0 if has_equal_parts else facts.speeds[devices[i].name] for i in members),
            facts,
        )

    @property
    def layers(self) -> LayerGraph:
        return self.problem.layers

    @cached_property
    def member_names(self) -> tuple[str, ...]:
        return tuple(self.problem.platform.devices[i].name for i in self.members)

    @property
    def row_maps(self) -> Mapping[str, RowMap]:
        return self.facts.row_maps

    @cached_property
    def link_loads(self) -> LinkLoads:
        return build_link_loads(self.problem)

    def device_indices(self, names: Sequence[str]) -> list[int]:
        order = [device.name for device in self.problem.platform.devices]
        return [order.index(name) for name in names]

    def spread_over_devices(self, values: Sequence[Region | None]) -> list[Region | None]:
        """Return one entry for each device of the platform: a member's entry of `values`, else None."""
        spread: list[Region | None] = [None] * len(self.problem.platform.devices)
        for i, value in zip(self.members, values, strict=True):
            spread[i] = value
        return spread

    def boxes_on(self, region: Region, indices: Sequence[int]) -> list[Region | None]:
        """Return one entry for each device of the platform: `region` at `indices`, else None."""
        return [region if i in indices else None for i in range(len(self.problem.platform.devices))]

    def cut_axis_of(self, layer: Layer, form: TensorForm) -> int | None:
        """Return the axis of a layer's output that the form "rows" or "channels" splits; None if there is none."""
        return (
            find_height_axis(self.layers, layer)
            if form == "rows"
            else find_cuttable_axis(self.layers, layer, "channel")
        )

    def member_regions(self, layer: Layer, form: TensorForm) -> list[Region | None]:
        """Return each member's region of the layer's output, split by "rows" or "channels"; None if it is empty."""
        axis = self.cut_axis_of(layer, form)
        assert axis is not None
        whole = full_region(output_shape(self.layers, layer))
        if form == "rows":
            cuts = self.row_maps[layer.name].proportional_rows(self.weights)
        else:
            cuts = split_axis(self.layers, layer, axis, self.weights)
        return [with_interval(whole, axis, cut) if cut[0] < cut[1] else None for cut in cuts]

    @memoized
    def stored_boxes(self, tensor: str, form: TensorForm) -> DeviceBoxes:
        """Return the region of a tensor that each device stores if the tensor is distributed as `form`."""
        shape = self.layers.tensors[tensor].shape
        assert shape is not None
        if form == "source":
            return DeviceBoxes.from_regions(
                shape, self.boxes_on(full_region(shape), self.device_indices(self.problem.source))
            )
        if form == "whole":
            return DeviceBoxes.from_regions(shape, self.boxes_on(full_region(shape), [self.leader]))
        if form == "everywhere":
            return DeviceBoxes.from_regions(shape, self.boxes_on(full_region(shape), self.members))
        return DeviceBoxes.from_regions(
            shape, self.spread_over_devices(self.member_regions(self.layers.producer[tensor], form))
        )

    def needed_boxes(self, layer: Layer, shares: Sequence[LayerShare | None]) -> dict[str, DeviceBoxes]:
        """Return, for each input tensor of a layer, the region that each device needs.

        `shares` has the piece of the layer that each member of the team computes; None if it computes nothing.
        """
        count = len(self.problem.platform.devices)
        wanted: dict[str, list[Region | None]] = {}
        for index, share in zip(self.members, shares, strict=True):
            if share is not None:
                for key, need in make_share_task(self.layers, layer, share).needs.items():
                    wanted.setdefault(key.tensor, [None] * count)[index] = need
        return {
            name: DeviceBoxes.from_regions(self.layers.tensors[name].shape or (), regions)
            for name, regions in wanted.items()
        }

    def share_seconds(self, layer: Layer, shares: Sequence[LayerShare | None]) -> Floats:
        """Return the seconds that each device of the platform computes on a layer, shape (n devices,).

        `shares` has the piece of the layer that each member of the team computes; None if it computes nothing.
        """
        total = np.zeros(len(self.problem.platform.devices))
        known: dict[tuple[int, object, object], float] = {}
        for index, share in zip(self.members, shares, strict=True):
            if share is not None:
                device = self.problem.platform.devices[index]
                kind = self.facts.speed_classes[device.name]
                size = None if share.region is None else region_shape(share.region)
                key = (kind, size, share.reduce and share.reduce[1] - share.reduce[0])
                if key not in known:
                    known[key] = self.problem.cost_model.seconds(self.layers, layer, share, device)
                total[index] = known[key]
        return total

    def member_row_seconds(self, layer: Layer, counts: Sequence[int]) -> Floats:
        """Return the seconds in which each member computes its number of rows (`counts`) of a layer."""
        devices = self.problem.platform.devices
        return np.array(
            [self.facts.row_seconds_of(layer, devices[i])[n] for i, n in zip(self.members, counts, strict=True)]
        )

    def reduction_ranges(self, layer: Layer) -> tuple[Interval, ...]:
        """Return the range of a layer's input channels that each member of the team sums over.

        If possible, they are the channels that the member computes in the previous layer, so that nothing is sent
        (FUSE).
        """
        length = reduction_length(self.layers, layer)
        assert length is not None
        previous = self.layers.producer.get(layer.inputs[0])
        axis = None if previous is None else self.cut_axis_of(previous, "channels")
        if previous is not None and axis is not None and output_shape(self.layers, previous)[axis] == length:
            return split_axis(self.layers, previous, axis, self.weights)
        return split_proportionally(length, self.weights)
