"""Tiling: parts of layers along named axes (height, width, channel).

The names of axes are propagated from the model's inputs through the rules (a channel shuffle passes through five
axes), and never derived from a tensor's rank. Annotating passes and strategies build their parts with this module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from onnx import TensorProto

from dicompiler.base.errors import DicompilerError
from dicompiler.base.memoize import memoized
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.plan import LayerShare, Part, Plan
from dicompiler.ir.regions import Interval, Region, bounding_region, full_region, split_proportionally, with_interval
from dicompiler.ir.tasks import TensorKey
from dicompiler.partition.bounds_inference import (
    align_region,
    cuttable_axes,
    make_share_task,
    output_shape,
    reduction_length,
)

AxisLabel = Literal["height", "width", "channel"]
NamedAxes = Mapping[str, Mapping[str, int]]
_INTEGER_DTYPES = (TensorProto.INT64, TensorProto.INT32)


def single_device_plan(layers: LayerGraph, device: str) -> Plan:
    """Return the plan with all layers on one device, which is also source and sink.

    Args:
        layers: The layers.
        device: Name of the device.

    Returns:
        The plan.
    """
    return Plan({layer.name: (Part(device),) for layer in layers.layers}, (device,), (device,))


@memoized
def named_axes(layers: LayerGraph) -> NamedAxes:
    """Return the axis of each name (height, width, channel) by tensor.

    Inputs of rank 3 and more are read as N, C, H, W. Inputs of rank 2 are N, C (H, C if N is greater than 1), or N, H
    for integers (tokens). The axis along which weights are cut is the channel axis from there on.

    Args:
        layers: The layers.

    Returns:
        Axis by name, by tensor.
    """
    labelled: dict[str, Mapping[str, int]] = {}
    for name in layers.inputs:
        tensor = layers.tensors[name]
        rank, rows = len(tensor.shape or ()), {"height": 0} if (tensor.shape or (1,))[0] > 1 else {}
        names = ("height",) if rank == 2 and tensor.dtype in _INTEGER_DTYPES else ("channel", "height", "width")
        labelled[name] = (rows if rank == 2 else {}) | {n: axis for axis, n in enumerate(names, 1) if axis < rank}
    for layer in layers.layers:
        if not layer.whole_reason:
            labelled[layer.output] = _propagate_labels(layers, layer, labelled)
    return labelled


def _propagate_labels(layers: LayerGraph, layer: Layer, labelled: NamedAxes) -> dict[str, int]:
    """Return the names of a layer's output axes.

    They are those of the input axes that a cut of the output axis restricts.

    For an operator with weights, the axis that cuts the weights is the channel axis; another axis with that name
    becomes height.
    """
    shape = output_shape(layers, layer)
    labels: dict[str, int] = {}
    for axis in cuttable_axes(layers, layer):
        first, last = (
            make_share_task(layers, layer, LayerShare(with_interval(full_region(shape), axis, interval)))
            for interval in ((0, 1), (shape[axis] - 1, shape[axis]))
        )
        # Only axes on which the first and the last element read different regions are cut: a Slice never reads all.
        cut = {
            label
            for key in {**first.needs, **last.needs}
            for label, a in labelled.get(key.tensor, {}).items()
            if len({(task.needs[key][a] if key in task.needs else None) for task in (first, last)}) > 1
            and any(task.needs[key][a] != (0, _extent(layers, key, a)) for task in (first, last) if key in task.needs)
        }
        # The weights of a quantized layer are read by nodes before the anchor, which dequantize them.
        readers = layer.nodes[: layer.anchor + 1]
        weights = [
            (layers.tensors[name], need)
            for work in first.nodes
            if work.piece is not None and work.node in readers
            for name, need in zip(work.node.inputs, work.piece.needs, strict=True)
            if name and layers.tensors[name].is_constant and need is not None
        ]
        cuts_weights = any(need != full_region(tensor.shape or ()) for tensor, need in weights)
        if cuts_weights and (reduction_length(layers, layer) is not None or not cut):
            cut = {"channel"}
            if "channel" in labels:
                labels.setdefault("height", labels.pop("channel"))
        for label in sorted(cut):
            labels.setdefault(label, axis)
    # If a feature map is so small that every halo covers it, no cut is visible: keep the axis if the rank is kept.
    labels_of_inputs = (
        labelled.get(name, {}) for name in layer.inputs if len(layers.tensors[name].shape or ()) == len(shape)
    )
    for label, axis in (entry for axes_of in labels_of_inputs for entry in axes_of.items()):
        if label != "channel" and label not in labels and axis not in labels.values():
            labels[label] = axis
    return labels


def _extent(layers: LayerGraph, key: TensorKey, axis: int) -> int:
    return (layers.tensors[key.tensor].shape or ())[axis]


def labelled_axis(layers: LayerGraph, layer: Layer, label: AxisLabel) -> int:
    """Return the axis of a layer's output with a name.

    Args:
        layers: The layers.
        layer: The layer.
        label: `height`, `width` or `channel`.

    Returns:
        The axis.

    Raises:
        DicompilerError: The layer has no such axis that can be cut. The message lists those that can.
    """
    labels = named_axes(layers).get(layer.output, {})
    allowed = cuttable_axes(layers, layer)
    axis = labels.get(label)
    if axis is None or axis not in allowed:
        named = [name for name, a in labels.items() if a in allowed]
        why = layer.whole_reason or f"axes that can be split: {', '.join(named) or 'none'}"
        raise DicompilerError(f"layer {layer.name!r} cannot be split along {label}: {why}")
    return axis


def split_axis(layers: LayerGraph, layer: Layer, axis: int, weights: Sequence[float]) -> tuple[Interval, ...]:
    """Split an axis into intervals proportional to `weights`, aligned by the operator's rule.

    Args:
        layers: The layers.
        layer: The layer.
        axis: Axis of its output.
        weights: Weights of the intervals.

    Returns:
        One interval per weight. Intervals can be empty.
    """
    extent = output_shape(layers, layer)[axis]
    return align_cuts(layers, layer, axis, [end for _, end in split_proportionally(extent, weights)])


def align_cuts(layers: LayerGraph, layer: Layer, axis: int, ends: Sequence[int]) -> tuple[Interval, ...]:
    """Split an axis at `ends`, each moved to the nearest aligned position.

    There the rule computes no more than requested.

    Such positions are boundaries of groups, or of whole channels after a Flatten.

    Args:
        layers: The layers.
        layer: The layer.
        axis: Axis of its output.
        ends: Ends of the intervals in elements.

    Returns:
        The intervals.
    """
    moved = [_align_cut(layers, layer, axis, end) for end in ends]
    return tuple(zip((0, *moved), moved, strict=False))


@memoized
def _align_cut(layers: LayerGraph, layer: Layer, axis: int, end: int) -> int:
    whole = full_region(output_shape(layers, layer))
    if not 0 < end < whole[axis][1]:
        return end
    low, high = align_region(layers, layer, with_interval(whole, axis, (end, end + 1)))[axis]
    return low if end - low <= high - end else high


def tile_layer(
    layers: LayerGraph, layer: Layer, label: AxisLabel, weights: Sequence[float], devices: Sequence[str]
) -> tuple[Part, ...]:
    """Return parts of a layer along an axis, one per device, proportional to `weights`.

    layer ⇒ [d0: rows 0:3], [d1: rows 3:7]

    Args:
        layers: The layers.
        layer: The layer.
        label: `height`, `width` or `channel`.
        weights: Weights of the devices.
        devices: Names of the devices.

    Returns:
        The parts; devices with an empty interval get none.

    Raises:
        DicompilerError: The layer cannot be cut along this axis.
    """
    axis, whole = labelled_axis(layers, layer, label), full_region(output_shape(layers, layer))
    intervals = zip(devices, split_axis(layers, layer, axis, weights), strict=True)
    return tuple(
        Part(device, with_interval(whole, axis, (low, high))) for device, (low, high) in intervals if low < high
    )


def grid_tiles(layers: LayerGraph, layer: Layer, rows: int, columns: int) -> tuple[Region, ...]:
    """Return the tiles of a rows × columns grid over height and width, row by row, without empty ones.

    Args:
        layers: The layers.
        layer: The layer.
        rows: Number of rows of the grid.
        columns: Number of columns of the grid.

    Returns:
        Regions of the layer's output.
    """
    h, w = labelled_axis(layers, layer, "height"), labelled_axis(layers, layer, "width")
    both = (split_axis(layers, layer, axis, [1.0] * count) for axis, count in ((h, rows), (w, columns)))
    heights, widths = ([cut for cut in cuts if cut[0] < cut[1]] for cuts in both)
    whole = full_region(output_shape(layers, layer))
    return tuple(with_interval(with_interval(whole, h, height), w, width) for height in heights for width in widths)


def is_read_only_within(layers: LayerGraph, layer: Layer, names: Collection[str]) -> bool:
    """Return True if the layer's output is read, and only by layers with these names.

    Args:
        layers: The layers.
        layer: The layer.
        names: Names of layers.

    Returns:
        False for a model output, which is read outside.
    """
    readers = layers.consumers.get(layer.output, ())
    return bool(readers) and layer.output not in layers.outputs and all(reader.name in names for reader in readers)


def exit_layer(layers: LayerGraph, chosen: Sequence[Layer]) -> Layer:
    """Return the only layer of a set that is read outside of the set.

    A set with one exit is convex: a path that leaves it never returns.

    Args:
        layers: The layers.
        chosen: The set.

    Returns:
        The layer.

    Raises:
        DicompilerError: There are several exits.
    """
    names = {layer.name for layer in chosen}
    exits = [layer for layer in chosen if not is_read_only_within(layers, layer, names)]
    if len(exits) != 1:
        names_out = ", ".join(layer.name for layer in exits) or "none"
        raise DicompilerError(f"fused tiles need a set of layers with one exit: exits of this set: {names_out}")
    return exits[0]


def fused_regions(layers: LayerGraph, chosen: Sequence[Layer], tiles: Iterable[Region]) -> list[dict[str, Region]]:
    """Return the region of each layer that computes a tile of the exit, extended backwards by all halos.

    conv1 → conv2 (exit: rows 4:8) ⇒ conv2: rows 4:8, conv1: rows 3:9

    Args:
        layers: The layers.
        chosen: Layers with one exit.
        tiles: Regions of the exit's output.

    Returns:
        Region by layer name, for each tile.

    Raises:
        DicompilerError: The set has several exits, or contains a layer that cannot be divided.
    """
    last = exit_layer(layers, chosen)
    order = sorted(chosen, key=lambda layer: layers.position[layer.name], reverse=True)
    for layer in order:
        if layer.whole_reason:
            raise DicompilerError(f"layer {layer.name!r} cannot be in a fused tile: {layer.whole_reason}")
    result = []
    for region in tiles:
        demands: dict[str, Region] = {last.output: region}
        regions: dict[str, Region] = {}
        for layer in order:
            if layer.output in demands:
                task = make_share_task(layers, layer, LayerShare(demands[layer.output]))
                regions[layer.name] = task.outputs[TensorKey(layer.output)] or ()
                for key, need in task.needs.items():
                    demands[key.tensor] = bounding_region((demands.get(key.tensor), need)) or need
        result.append(regions)
    return result
