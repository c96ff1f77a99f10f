"""Row maps: the input rows that a layer reads for given output rows, derived from the operator rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dicompiler.plugin_api import CostModel, Device, Interval, Layer, LayerGraph, LayerShare
from dicompiler.plugin_api.regions import (
    TensorKey,
    full_region,
    make_share_task,
    named_axes,
    output_shape,
    split_proportionally,
    with_interval,
)
from dicompiler.plugin_api.utilities import memoized
from dicompiler_strategies.tables.choice_footprints import Floats
from dicompiler_strategies.tables.choices import find_cuttable_axis

RowIntervals = Sequence[Interval]
"""An interval of rows [start, stop) for each device that computes a part of a layer; (0, 0) for no rows."""
_WINDOW_OPERATORS = ("Conv", "MaxPool", "AveragePool")


class SingleRows:
    """Cache of the rows that a layer computes and reads for a single output row.

    Attributes:
        height: Number of output rows.
        axis: Height axis of the output.
    """

    def __init__(self, layers: LayerGraph, layer: Layer, axis: int) -> None:
        self.layers, self.layer, self.axis = layers, layer, axis
        self.whole = full_region(output_shape(layers, layer))
        self.height = self.whole[axis][1]
        self._known: dict[int, tuple[Interval, Mapping[str, Interval]]] = {}

    def __call__(self, row: int) -> tuple[Interval, Mapping[str, Interval]]:
        """Return the rows to compute for output row `row`, and the rows that the layer then reads of each input."""
        if row not in self._known:
            share = LayerShare(with_interval(self.whole, self.axis, (row, row + 1)))
            task, labels = make_share_task(self.layers, self.layer, share), named_axes(self.layers)
            region = task.outputs[TensorKey(self.layer.output)]
            assert region is not None
            heights = {key.tensor: labels.get(key.tensor, {}).get("height") for key in task.needs}
            reads = {
                key.tensor: need[at] for key, need in task.needs.items() if (at := heights[key.tensor]) is not None
            }
            self._known[row] = region[self.axis], reads
        return self._known[row]


@dataclass(frozen=True, eq=False)
class RowMap:
    """For given output rows of a layer, the rows that the layer must compute and the input rows that it reads.

    Intervals are [first, last).

    Attributes:
        axis: Height axis of the output.
        single: The computed and read rows for single output rows. Layers of equal structure share this cache.
        needs: For each input tensor, its name in the results of `single`; None if the tensor is always read whole.
    """

    axis: int
    single: SingleRows
    needs: Mapping[str, str | None]

    @property
    def height(self) -> int:
        return self.single.height

    def proportional_rows(self, weights: Sequence[float]) -> tuple[Interval, ...]:
        """Return consecutive intervals of output rows in proportion to `weights`.

        If a layer computes rows only in groups, boundaries are moved to the nearer end of the group.
        """
        ends = []
        for _, end in split_proportionally(self.height, weights):
            if 0 < end < self.height:
                low, high = self.single(end)[0]
                end = low if end - low <= high - end else high
            ends.append(end)
        return tuple(zip((0, *ends), ends, strict=False))

    def align_rows(self, rows: RowIntervals) -> RowIntervals:
        """Return the intervals of rows that the layer must compute if the intervals `rows` are requested.

        They are larger than `rows` if the layer can compute rows only in groups.
        """
        row = self.single
        return [(row(start)[0][0], row(stop - 1)[0][1]) if start < stop else (0, 0) for start, stop in rows]

    def read_rows(self, tensor: str, rows: RowIntervals) -> RowIntervals | None:
        """Return, for each interval of output rows, the rows of the input `tensor` that it reads; None for all rows."""
        name, row = self.needs[tensor], self.single
        if name is None:
            return None
        ends = [(row(start)[1].get(name), row(stop - 1)[1].get(name)) for start, stop in rows if start < stop]
        if any(first is None or last is None for first, last in ends):
            return None
        found = iter([(first[0], last[1]) for first, last in ends if first is not None and last is not None])
        return [next(found) if start < stop else (0, 0) for start, stop in rows]


def bounding_rows(a: RowIntervals, b: RowIntervals) -> RowIntervals:
    """Return, for each device, the smallest interval that contains its intervals in `a` and `b`."""
    return [
        q if p[0] >= p[1] else p if q[0] >= q[1] else (min(p[0], q[0]), max(p[1], q[1]))
        for p, q in zip(a, b, strict=True)
    ]


def row_counts(rows: RowIntervals) -> list[int]:
    return [stop - start for start, stop in rows]


def find_height_axis(layers: LayerGraph, layer: Layer) -> int | None:
    """Return the axis of a layer's output that height tiles split; None if there is none.

    After a Flatten, one axis has both rows and channels. It does not count as a height axis.
    """
    axis = find_cuttable_axis(layers, layer, "height")
    return None if axis == named_axes(layers).get(layer.output, {}).get("channel") else axis


@memoized
def build_row_maps(layers: LayerGraph) -> Mapping[str, RowMap]:
    """Return, by layer name, the input rows that each layer with rows reads for given output rows."""
    known: dict[object, RowMap] = {}
    result = {}
    for layer in layers.layers:
        axis = find_height_axis(layers, layer)
        if axis is not None:
            key = _row_map_key(layers, layer)
            if key is None or key not in known:
                result[layer.name] = _build_row_map(layers, layer, axis)
                if key is not None:
                    known[key] = result[layer.name]
            else:
                (needs,) = known[key].needs.values()
                result[layer.name] = RowMap(axis, known[key].single, {layer.inputs[0]: needs})
    return result


def _row_map_key(layers: LayerGraph, layer: Layer) -> object | None:
    """Return a key that is equal for layers with equal row maps; None if the main node is not a convolution or pool.

    A row map tells which input rows a layer reads for given output rows.
    """
    anchor = layer.nodes[layer.anchor]
    plain = all(node is anchor or layers.rule_of(node).is_elementwise for node in layer.nodes)
    if anchor.op not in _WINDOW_OPERATORS or anchor.domain or len(layer.inputs) != 1 or not plain:
        return None
    attributes = tuple((name, str(value)) for name, value in sorted(anchor.attributes.items()) if name != "group")
    shapes = [tensor.shape or () for tensor in layers.operation_of(anchor).inputs if tensor is not None]
    return anchor.op, attributes, tuple(shape[2:] for shape in shapes)


def _build_row_map(layers: LayerGraph, layer: Layer, axis: int) -> RowMap:
    """Return the row map of a layer: the input rows that it reads for given output rows.

    An input tensor counts as read row by row if the first, the middle and the last output row each read some of its
    rows. All others count as read whole.
    """
    single = SingleRows(layers, layer, axis)
    probed = [single(row)[1] for row in dict.fromkeys((0, single.height // 2, single.height - 1))]
    return RowMap(axis, single, {name: name if all(name in r for r in probed) else None for name in layer.inputs})


def measure_row_seconds(layers: LayerGraph, layer: Layer, row_map: RowMap, cost: CostModel, device: Device) -> Floats:
    """Return the seconds that a device takes for 0, 1, … rows of a layer, shape (rows + 1,).

    The cost model is asked for up to six numbers of rows; the other values are interpolated.
    """
    height = row_map.height
    heights = sorted({1, -(-height // 16), -(-height // 8), -(-height // 4), -(-height // 2), height})
    whole = full_region(output_shape(layers, layer))
    shares = [LayerShare(with_interval(whole, row_map.axis, (0, count))) for count in heights]
    seconds = [cost.seconds(layers, layer, share, device) for share in shares]
    return np.asarray(np.interp(np.arange(height + 1), [0, *heights], [0.0, *seconds]), np.float64)
