"""Tiling: parts of layers along named axes (height, width, channel), for strategies and for passes that set plans.

A tensor's rank does not determine the positions of these axes. The names are therefore propagated from the model's
inputs through the operator rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from onnx import TensorProto

from dicompiler.base.errors import DicompilerError
from dicompiler.base.memoize import memoized
from dicompiler.ir.layers import Layer, LayerGraph, TensorKey
from dicompiler.ir.plan import LayerShare, Part, Plan
from dicompiler.ir.regions import Interval, Region, bounding_region, full_region, split_proportionally, with_interval
from dicompiler.partition.bounds_inference import (
    align_region,
    cuttable_axes,
    make_share_task,
    output_shape,
    reduction_length,
)

AxisLabel = Literal["height", "width", "channel"]
_INTEGER_DTYPES = (TensorProto.INT64, TensorProto.INT32)


def single_device_plan(layers: LayerGraph, device: str) -> Plan:
    """Return the plan with all layers on one device, which is also source and sink.

    Args:
        layers: The model's layers.
        device: Name of the device.

    Returns:
        The plan.
    """
    return Plan({layer.name: (Part(device),) for layer in layers.layers}, (device,), (device,))


@memoized
def named_axes(layers: LayerGraph) -> Mapping[str, Mapping[str, int]]:
    """Return the axes that are called height, width and channel, for each tensor.

    Model inputs have these axes:
    - rank 3 or more: N (the batch), channel, height, width;
    - rank 2, integers (tokens): N and height;
    - rank 2, other types: height and channel, or N and channel if there is only one row.
    An axis of a layer's output has the name of the input axis that is divided together with it.

    Args:
        layers: The model's layers.

    Returns:
        For each tensor, the index of each axis by its name.
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


def _propagate_labels(layers: LayerGraph, layer: Layer, labelled: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return the indices of the axes of a layer's output that are called height, width and channel, by name.

    An axis has the name of the input axis that is divided together with it.
    """
    shape = output_shape(layers, layer)
    labels: dict[str, int] = {}
    for axis in cuttable_axes(layers, layer):
        first, last = (
            make_share_task(layers, layer, LayerShare(with_interval(full_region(shape), axis, interval)))
            for interval in ((0, 1), (shape[axis] - 1, shape[axis]))
        )
        # An input axis is divided together with the output axis if the first and the last output element read different
        # regions of it.
        cut = {
            label
            for key in {**first.needs, **last.needs}
            for label, a in labelled.get(key.tensor, {}).items()
            if len({(task.needs[key][a] if key in task.needs else None) for task in (first, last)}) > 1
            and any(task.needs[key][a] != _full_axis(layers, key, a) for task in (first, last) if key in task.needs)
        }
        # Weights are inputs of the anchor (the layer's main operator) or, in a quantized layer, of the nodes before it,
        # which dequantize the weights.
        readers = layer.nodes[: layer.anchor + 1]
        weights = [
            (layers.tensors[name], need)
            for work in first.nodes
            if work.piece is not None and work.node in readers
            for name, need in zip(work.node.inputs, work.piece.needs, strict=True)
            if name and layers.tensors[name].is_constant and need is not None
        ]
        cuts_weights = any(need != full_region(tensor.shape or ()) for tensor, need in weights)
        # An axis is the channel axis if a part of it needs only a part of the weights. An earlier axis that is already
        # called "channel" is renamed to "height", unless there is a height already.
        if cuts_weights and (reduction_length(layers, layer) is not None or not cut):
            cut = {"channel"}
            if "channel" in labels:
                labels.setdefault("height", labels.pop("channel"))
        for label in sorted(cut):
            labels.setdefault(label, axis)
    # If a feature map is smaller than the halo (the rows and columns that a kernel reads around an element), every
    # output element reads all of it. Height and width then have the same positions as in an input of the same rank.
    for name in layer.inputs:
        has_same_rank = len(layers.tensors[name].shape or ()) == len(shape)
        for label, axis in labelled.get(name, {}).items() if has_same_rank else ():
            if label != "channel" and label not in labels and axis not in labels.values():
                labels[label] = axis
    return labels


def _full_axis(layers: LayerGraph, key: TensorKey, axis: int) -> Interval:
    return 0, (layers.tensors[key.tensor].shape or ())[axis]


def labelled_axis(layers: LayerGraph, layer: Layer, label: AxisLabel) -> int:
    """Return the axis of a layer's output that is called height, width or channel.

    Args:
        layers: The model's layers.
        layer: Layer with this axis in its output.
        label: `height`, `width` or `channel`.

    Returns:
        The axis.

    Raises:
        DicompilerError: The layer cannot be divided along this axis. The message lists the axes along which it can.
    """
    labels = named_axes(layers).get(layer.output, {})
    allowed = cuttable_axes(layers, layer)
    axis = labels.get(label)
    if axis is None or axis not in allowed:
        names = [name for name, a in labels.items() if a in allowed]
        reason = layer.whole_reason or f"axes that can be split: {', '.join(names) or 'none'}"
        raise DicompilerError(f"layer {layer.name!r} cannot be split along {label}: {reason}")
    return axis


def split_axis(layers: LayerGraph, layer: Layer, axis: int, weights: Sequence[float]) -> tuple[Interval, ...]:
    """Split an axis into intervals proportional to `weights`, at positions that the operator's rule allows.

    Args:
        layers: The model's layers.
        layer: Layer that is split.
        axis: Axis of the layer's output.
        weights: Relative lengths of the intervals.

    Returns:
        One interval per weight. Intervals can be empty.
    """
    extent = output_shape(layers, layer)[axis]
    return align_cuts(layers, layer, axis, [end for _, end in split_proportionally(extent, weights)])


def align_cuts(layers: LayerGraph, layer: Layer, axis: int, ends: Sequence[int]) -> tuple[Interval, ...]:
    """Split an axis at `ends`, each moved to the nearest position at which no element is computed twice.

    Such a position is, for example, a boundary between groups of channels.

    Args:
        layers: The model's layers.
        layer: Layer that is split.
        axis: Axis of the layer's output.
        ends: Ends of the intervals in elements, in ascending order.

    Returns:
        One interval per end.
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

    For example, seven rows become rows 0:3 on device d0 and rows 3:7 on device d1.

    Args:
        layers: The model's layers.
        layer: Layer that is split.
        label: `height`, `width` or `channel`.
        weights: Relative sizes of the parts, one per device.
        devices: Names of the devices.

    Returns:
        The parts; devices with an empty interval have none.

    Raises:
        DicompilerError: The layer cannot be divided along this axis.
    """
    axis, whole = labelled_axis(layers, layer, label), full_region(output_shape(layers, layer))
    shares = zip(devices, split_axis(layers, layer, axis, weights), strict=True)
    return tuple(Part(device, with_interval(whole, axis, cut)) for device, cut in shares if cut[0] < cut[1])


def grid_tiles(layers: LayerGraph, layer: Layer, rows: int, columns: int) -> tuple[Region, ...]:
    """Return the tiles of a grid over the height and width of a layer's output, row by row, without empty tiles.

    Args:
        layers: The model's layers.
        layer: Layer that is split.
        rows: Number of rows of the grid.
        columns: Number of columns of the grid.

    Returns:
        Regions of the layer's output.
    """
    h, w = labelled_axis(layers, layer, "height"), labelled_axis(layers, layer, "width")
    heights = [cut for cut in split_axis(layers, layer, h, [1.0] * rows) if cut[0] < cut[1]]
    widths = [cut for cut in split_axis(layers, layer, w, [1.0] * columns) if cut[0] < cut[1]]
    whole = full_region(output_shape(layers, layer))
    return tuple(with_interval(with_interval(whole, h, height), w, width) for height in heights for width in widths)


def is_read_only_within(layers: LayerGraph, layer: Layer, names: Collection[str]) -> bool:
    """Return True if a layer's output is read, and only by layers with names in `names`.

    Args:
        layers: The model's layers.
        layer: Layer that other layers may read.
        names: Names of layers.

    Returns:
        False if another layer or nothing reads the output, or if it is a model output. True otherwise.
    """
    readers = layers.consumers.get(layer.output, ())
    return bool(readers) and layer.output not in layers.outputs and all(reader.name in names for reader in readers)


def exit_layer(layers: LayerGraph, chosen: Sequence[Layer]) -> Layer:
    """Return the only layer of a set with an output that is read outside of the set.

    Args:
        layers: The model's layers.
        chosen: The set of layers.

    Returns:
        The layer.

    Raises:
        DicompilerError: The outputs of several layers, or of none, are read outside.
    """
    names = {layer.name for layer in chosen}
    exits = [layer for layer in chosen if not is_read_only_within(layers, layer, names)]
    if len(exits) != 1:
        names_out = ", ".join(layer.name for layer in exits) or "none"
        raise DicompilerError(
            "layers of a fused tile: exactly one of them must be read outside of the tile, but the outputs of "
            f"{names_out} are read outside: choose other layers"
        )
    return exits[0]


def fused_regions(layers: LayerGraph, chosen: Sequence[Layer], tiles: Iterable[Region]) -> list[dict[str, Region]]:
    """Return the regions that fused layers compute, halos included, for each tile of the last of these layers.

    For two 3×3 convolutions conv1 → conv2 and the rows 4:8 of conv2, conv1 computes the rows 3:9.

    Args:
        layers: The model's layers.
        chosen: The fused layers, of which only the last one has an output that other layers read.
        tiles: Regions of the last layer's output.

    Returns:
        Region by layer name, for each tile.

    Raises:
        DicompilerError: Several layers are read outside of the set, or a layer cannot be divided.
    """
    last = exit_layer(layers, chosen)
    order = sorted(chosen, key=lambda layer: layers.position[layer.name], reverse=True)
    for layer in order:
        if layer.whole_reason:
            raise DicompilerError(f"layer {layer.name!r} cannot be in a fused tile ({layer.whole_reason}): omit it")
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
