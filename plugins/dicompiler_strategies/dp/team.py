"""A Team: the devices that layers are cut for, and what each form of a layer comes to on them.

Problem + k devices + shares → regions, needs and seconds for each form of each layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from dicompiler.plugin_api import (
    Device,
    Interval,
    Layer,
    LayerGraph,
    Problem,
    Region,
    Remembers,
    Share,
    cut_axis,
    full,
    macs,
    output_shape,
    raw_nbytes,
    reduction,
    remembered,
    shape_of,
    share_task,
    shares,
    with_interval,
)
from dicompiler_strategies.dp.boxes import Boxes
from dicompiler_strategies.dp.rows import RowMap, height_axis, row_maps, row_seconds
from dicompiler_strategies.named_axis import named_axis
from dicompiler_strategies.tables.footprints import Floats, source_and_sink
from dicompiler_strategies.tables.lines import Lines, lines

Form = Literal["rows", "channels", "everywhere", "whole", "source"]
"""How a tensor lies on the devices: a share of its rows or of its channels on each of the team, all of it on each of
the team, on its leader, or (the network's inputs) on the sources."""

_PROBED = 8


@dataclass(frozen=True, eq=False)
class Facts:
    """What all teams of a problem have in common, each thing asked for once."""

    problem: Problem
    row_seconds: dict[tuple[str, int], Floats] = field(default_factory=dict, repr=False)

    @cached_property
    def _probed(self) -> Mapping[str, tuple[float, ...]]:
        """Device → the seconds of up to eight whole layers; endless where it does not compute."""
        layers, cost = self.problem.layers, self.problem.cost
        probed = layers.layers[:: -(-len(layers.layers) // _PROBED)]
        return {
            device.name: tuple(
                cost.seconds(layers, layer, Share(), device) if device.computes else math.inf for layer in probed
            )
            for device in self.problem.platform.devices
        }

    @cached_property
    def classes(self) -> Mapping[str, int]:
        """Device → a number; devices of one number take as long as each other, so that the cost model is asked once
        for all of them."""
        seen: dict[tuple[float, ...], int] = {}
        return {name: seen.setdefault(seconds, len(seen)) for name, seconds in self._probed.items()}

    @cached_property
    def speeds(self) -> Mapping[str, float]:
        """Device → how fast it is, in layers per second; 0 where it does not compute."""
        most = max((seconds for row in self._probed.values() for seconds in row if seconds < math.inf), default=0.0)
        return {
            name: 0.0 if math.inf in row else 1 / max(sum(row), most * 1e-12, 1e-30)
            for name, row in self._probed.items()
        }

    @cached_property
    def maps(self) -> Mapping[str, RowMap]:
        """Layer name → row map."""
        return row_maps(self.problem.layers)

    @cached_property
    def macs(self) -> Mapping[str, int]:
        """Layer name → multiplications."""
        return {layer.name: macs(self.problem.layers, layer) for layer in self.problem.layers.layers}

    @cached_property
    def weights(self) -> Mapping[str, int]:
        """Layer name → bytes of its constants, each counted where it is first read."""
        seen: set[str] = set()
        result = {}
        for layer in self.problem.layers.layers:
            names = dict.fromkeys(name for node in layer.nodes for name in node.inputs if name and name not in seen)
            held = [self.problem.layers.tensors[name] for name in names]
            held = [tensor for tensor in held if tensor.constant]
            result[layer.name] = sum(raw_nbytes(tensor.dtype, tensor.shape or ()) for tensor in held)
            seen.update(tensor.name for tensor in held)
        return result

    def rows(self, layer: Layer, device: Device) -> Floats:
        """(rows + 1,) seconds by the count of rows, see `row_seconds`."""
        key = (layer.name, self.classes[device.name])
        if key not in self.row_seconds:
            problem, row_map = self.problem, self.maps[layer.name]
            self.row_seconds[key] = row_seconds(problem.layers, layer, row_map, problem.cost, device)
        return self.row_seconds[key]


@dataclass(frozen=True, eq=False)
class Team(Remembers):
    """`members`: indices of devices of the problem's platform, in its order, with their `weights` (shares are in
    proportion); `leader`: the member that computes what stays whole. n below counts that platform's devices; it has
    no others than the members, the sources and the sinks (see `of`)."""

    problem: Problem
    members: tuple[int, ...]
    leader: int
    weights: tuple[float, ...]
    facts: Facts

    @staticmethod
    def of(facts: Facts, names: Sequence[str], equal: bool = False) -> Team:
        """The team of these devices, the first of which leads; shares in proportion to their speeds, or equal."""
        problem = facts.problem
        source, sink = source_and_sink(problem)
        devices = [device for device in problem.platform.devices if device.name in {*names, *source, *sink}]
        platform = replace(problem.platform, devices=tuple(devices))
        members = tuple(i for i, device in enumerate(devices) if device.name in names)
        return Team(
            replace(problem, platform=platform, source=source, sink=sink),
            members,
            next(i for i in members if devices[i].name == names[0]),
            tuple(1.0 if equal else facts.speeds[devices[i].name] for i in members),
            facts,
        )

    @property
    def layers(self) -> LayerGraph:
        return self.problem.layers

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The members' names."""
        return tuple(self.problem.platform.devices[i].name for i in self.members)

    @property
    def maps(self) -> Mapping[str, RowMap]:
        return self.facts.maps

    @cached_property
    def lines(self) -> Lines:
        return lines(self.problem)

    def indices(self, names: Sequence[str]) -> list[int]:
        """Platform indices of devices by name."""
        order = [device.name for device in self.problem.platform.devices]
        return [order.index(name) for name in names]

    def spread(self, values: Sequence[Region | None]) -> list[Region | None]:
        """A value for each member → one for each device of the platform."""
        spread: list[Region | None] = [None] * len(self.problem.platform.devices)
        for i, value in zip(self.members, values, strict=True):
            spread[i] = value
        return spread

    def alone(self, region: Region, indices: Sequence[int]) -> list[Region | None]:
        """The same region on these devices of the platform."""
        return [region if i in indices else None for i in range(len(self.problem.platform.devices))]

    def axis(self, layer: Layer, form: Form) -> int | None:
        """The output axis that `rows` or `channels` cut; None where this layer has none."""
        return height_axis(self.layers, layer) if form == "rows" else named_axis(self.layers, layer, "channel")

    def shares(self, layer: Layer, form: Form) -> list[Region | None]:
        """Each member's region of the layer's output in `rows` or `channels`; None for an empty one."""
        axis = self.axis(layer, form)
        assert axis is not None
        whole = full(output_shape(self.layers, layer))
        if form == "rows":
            cuts = self.maps[layer.name].shares(self.weights)
        else:
            cuts = cut_axis(self.layers, layer, axis, self.weights)
        return [with_interval(whole, axis, cut) if cut[0] < cut[1] else None for cut in cuts]

    @remembered
    def held(self, tensor: str, form: Form) -> Boxes:
        """Where a tensor lies."""
        shape = self.layers.tensors[tensor].shape
        assert shape is not None
        if form == "source":
            return Boxes.of(shape, self.alone(full(shape), self.indices(self.problem.source)))
        if form == "whole":
            return Boxes.of(shape, self.alone(full(shape), [self.leader]))
        if form == "everywhere":
            return Boxes.of(shape, self.alone(full(shape), self.members))
        return Boxes.of(shape, self.spread(self.shares(self.layers.producer[tensor], form)))

    def needs(self, layer: Layer, shares: Sequence[Share | None]) -> dict[str, Boxes]:
        """Tensor → what each member must hold of it for its share (None: it has none)."""
        count = len(self.problem.platform.devices)
        wanted: dict[str, list[Region | None]] = {}
        for index, share in zip(self.members, shares, strict=True):
            if share is not None:
                for key, need in share_task(self.layers, layer, share).needs.items():
                    wanted.setdefault(key.tensor, [None] * count)[index] = need
        return {name: Boxes.of(self.layers.tensors[name].shape or (), regions) for name, regions in wanted.items()}

    def seconds(self, layer: Layer, shares: Sequence[Share | None]) -> Floats:
        """(n,) seconds that each member computes on its share."""
        total = np.zeros(len(self.problem.platform.devices))
        known: dict[tuple[int, object, object], float] = {}
        for index, share in zip(self.members, shares, strict=True):
            if share is not None:
                device = self.problem.platform.devices[index]
                kind = self.facts.classes[device.name]
                size = None if share.region is None else shape_of(share.region)
                key = (kind, size, share.reduce and share.reduce[1] - share.reduce[0])
                if key not in known:
                    known[key] = self.problem.cost.seconds(self.layers, layer, share, device)
                total[index] = known[key]
        return total

    def row_seconds(self, layer: Layer, counts: Sequence[int]) -> Floats:
        """(k,) seconds of the members for these counts of rows."""
        devices = self.problem.platform.devices
        return np.array([self.facts.rows(layer, devices[i])[n] for i, n in zip(self.members, counts, strict=True)])

    def ranges(self, layer: Layer) -> tuple[Interval, ...]:
        """The range of the reduction axis for each member: where the layer before it is cut by channels, the features
        that each member then holds (FUSE); else in proportion to the weights."""
        length = reduction(self.layers, layer)
        assert length is not None
        before = self.layers.producer.get(layer.inputs[0])
        axis = None if before is None else self.axis(before, "channels")
        if before is not None and axis is not None and output_shape(self.layers, before)[axis] == length:
            return cut_axis(self.layers, before, axis, self.weights)
        return shares(length, self.weights)
