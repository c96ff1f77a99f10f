"""Row maps: which rows of its inputs a layer reads for given rows of its output, as tables; and what rows cost.

LayerGraph → RowMap for each layer that can be cut into height tiles. The tables come from the operator rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dicompiler.plugin_api import (
    CostModel,
    Device,
    Interval,
    Key,
    Layer,
    LayerGraph,
    Share,
    full,
    named_axes,
    output_shape,
    remembered,
    share_task,
    shares,
    with_interval,
)
from dicompiler_strategies.named_axis import named_axis
from dicompiler_strategies.tables.footprints import Floats

Rows = Sequence[Interval]  # an interval of rows for each device of a team; (0, 0): none
_WINDOWS = ("Conv", "MaxPool", "AveragePool")


@dataclass(frozen=True, eq=False)
class RowMap:
    """What the rules say of single rows r of a layer's output: (first row, row behind the last) for each.

    axis: the output's height axis; out: the rows that come out when r is asked for. needs: input tensor → the rows of
    it that r reads; None: a tensor without rows, which is read whole.
    """

    axis: int
    out: Sequence[Interval]
    needs: Mapping[str, Sequence[Interval] | None]

    @property
    def height(self) -> int:
        return len(self.out)

    def shares(self, weights: Sequence[float]) -> tuple[Interval, ...]:
        """The rows in proportion to `weights`, as `tiling.cut_axis` cuts them."""
        ends = []
        for _, end in shares(self.height, weights):
            if 0 < end < self.height:
                low, high = self.out[end]
                end = low if end - low <= high - end else high
            ends.append(end)
        return tuple(zip((0, *ends), ends, strict=False))

    def aligned(self, rows: Rows) -> Rows:
        """The rows that really come out for these intervals of rows; empty ones stay empty."""
        return _through(self.out, rows)

    def need(self, tensor: str, rows: Rows) -> Rows | None:
        """The rows of `tensor` that these intervals of rows read: for each the bounding interval; None: all of it."""
        table = self.needs[tensor]
        return None if table is None else _through(table, rows)


def _through(table: Sequence[Interval], rows: Rows) -> Rows:
    """Intervals through a table of single rows, whose ends never fall from row to row."""
    return [(table[start][0], table[stop - 1][1]) if start < stop else (0, 0) for start, stop in rows]


def union(a: Rows, b: Rows) -> Rows:
    """One by one the smallest interval that holds both; an empty one counts nothing."""
    return [
        q if p[0] >= p[1] else p if q[0] >= q[1] else (min(p[0], q[0]), max(p[1], q[1]))
        for p, q in zip(a, b, strict=True)
    ]


def lengths(rows: Rows) -> list[int]:
    """The number of rows of each interval."""
    return [stop - start for start, stop in rows]


def height_axis(layers: LayerGraph, layer: Layer) -> int | None:
    """The axis of the layer's output that height tiles cut; None where it has no rows of its own (a Flatten's output
    has rows and channels on one axis)."""
    axis = named_axis(layers, layer, "height")
    return None if axis == named_axes(layers).get(layer.output, {}).get("channel") else axis


@remembered
def row_maps(layers: LayerGraph) -> Mapping[str, RowMap]:
    """Layer name → its map, for every layer that has rows."""
    known: dict[object, RowMap] = {}
    result = {}
    for layer in layers.layers:
        axis = height_axis(layers, layer)
        if axis is not None:
            key = _likeness(layers, layer)
            if key is None or key not in known:
                result[layer.name] = _row_map(layers, layer, axis)
                if key is not None:
                    known[key] = result[layer.name]
            else:
                (needs,) = known[key].needs.values()
                result[layer.name] = RowMap(axis, known[key].out, {layer.inputs[0]: needs})
    return result


def _likeness(layers: LayerGraph, layer: Layer) -> object | None:
    """What the map of a window operator with one input depends on: layers that are alike in it share a map. None:
    another kind of layer, whose map is its own."""
    anchor = layer.nodes[layer.anchor]
    plain = all(node is anchor or layers.rule(node).elementwise for node in layer.nodes)
    if anchor.op not in _WINDOWS or anchor.domain or len(layer.inputs) != 1 or not plain:
        return None
    attributes = tuple((name, str(value)) for name, value in sorted(anchor.attributes.items()) if name != "group")
    shapes = [tensor.shape or () for tensor in layers.operation(anchor).inputs if tensor is not None]
    return anchor.op, attributes, tuple(shape[2:] for shape in shapes)


def _row_map(layers: LayerGraph, layer: Layer, axis: int) -> RowMap:
    """Asks the rules for every single row."""
    whole = full(output_shape(layers, layer))
    labels = named_axes(layers)
    out: list[tuple[int, int]] = []
    needs: dict[str, list[tuple[int, int]]] = {}
    for row in range(whole[axis][1]):
        task = share_task(layers, layer, Share(with_interval(whole, axis, (row, row + 1))))
        region = task.outputs[Key(layer.output)]
        assert region is not None
        out.append(region[axis])
        for key, need in task.needs.items():
            height = labels.get(key.tensor, {}).get("height")
            if height is not None:
                needs.setdefault(key.tensor, []).append(need[height])
    tables = {name: rows for name, rows in needs.items() if len(rows) == whole[axis][1]}
    return RowMap(axis, out, {name: tables.get(name) for name in layer.inputs})


def row_seconds(layers: LayerGraph, layer: Layer, row_map: RowMap, cost: CostModel, device: Device) -> Floats:
    """(rows + 1,): seconds that `device` takes for 0, 1, … rows of the layer.

    Asked of the cost model at up to six heights, linear between them: exact where its seconds are linear in the rows,
    as those of the analytic one are.
    """
    height = row_map.height
    heights = sorted({1, -(-height // 16), -(-height // 8), -(-height // 4), -(-height // 2), height})
    whole = full(output_shape(layers, layer))
    shares = [Share(with_interval(whole, row_map.axis, (0, count))) for count in heights]
    seconds = [cost.seconds(layers, layer, share, device) for share in shares]
    return np.asarray(np.interp(np.arange(height + 1), [0, *heights], [0.0, *seconds]), np.float64)
