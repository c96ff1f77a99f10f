"""Profile packages: directories with a script that measures the layers of a network on a device.

A package also has ONNX models of pieces of these layers, as the pass `partition` makes them, and a list of them,
tasks.json. The script needs numpy and onnxruntime only.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from onnx.helper import tensor_dtype_to_np_dtype

from dicompiler.base.errors import DicompilerError, RunError
from dicompiler.cost.layer_kinds import layer_kind
from dicompiler.cost.op_counts import count_operations
from dicompiler.cost.profile import Cut, axis_cut, layer_signature, network_digest
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.onnx.graph_structure import tensors_read
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import Weight, dtype_name, is_placeholder, raw_nbytes
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import LayerShare, Part, Plan
from dicompiler.ir.program import Segment
from dicompiler.ir.regions import Interval, Shape, split_proportionally
from dicompiler.measure import runtime_benchmarks
from dicompiler.partition.bounds_inference import align_region, cuttable_axes, reduction_length
from dicompiler.partition.segmentation import build_program
from dicompiler.partition.tiling import AxisLabel, named_axes, tile_layer
from dicompiler.plugin.registry import registry
from dicompiler.target.engine import NETWORK_MODULE_PREFIX, Engine, UnsupportedByEngine
from dicompiler.target.engine_check import output_shapes
from dicompiler.target.target_base import Target

log = logging.getLogger("dicompiler")

SCRIPT_FILE, TASKS_FILE = "profile_run.py", "tasks.json"
SHIPPED_MODULES = {
    SCRIPT_FILE: "measure/profile_script.py",
    "link_benchmark.py": "measure/link_benchmark.py",
    "runtime_costs_fit.py": "measure/runtime_costs_fit.py",
    "ort_session.py": "base/ort_session.py",
}
"""Modules of dicompiler that a profile package contains, by the name of the copy."""
PIECES_DIRECTORY, RUNTIME_DIRECTORY = "pieces", "runtime"
TRANSFER_SHAPES: Sequence[Shape] = (
    (1, 16, 7, 7), (1, 16, 15, 15), (1, 32, 19, 21), (1, 64, 27, 29), (1, 64, 39, 41), (1, 64, 55, 57), (1, 64, 79, 81),
    (1, 64, 111, 113), (1, 64, 137, 139), (1, 64, 173, 175), (1, 64, 221, 223),
)  # fmt: skip
"""Shapes of the tensors with which reading and returning a tensor is measured.

Engines convert such tensors to their own layout, because the numbers of channels are multiples of 16. With odd heights
and widths, the channels of a pixel are not all stored in the same set of the cache.
"""
TASKS_FORMAT = "dicompiler.profile-tasks/3"
CUT_LABELS: tuple[AxisLabel, ...] = ("height", "width", "channel")
DEFAULT_TILE_COUNTS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class LayerPiece:
    """A piece of a layer that a profile measures.

    Attributes:
        cut: How the piece was cut from the layer: "whole" (not at all), "axis 2" (a range of this axis of the output),
            "reduce" (a partial sum over a range of the reduction axis) or "merge" (the addition of partial sums).
        size: Extent of the piece along the cut axis, or number of partial sums that it adds up.
        share: The region and the range of the reduction axis that the piece computes.
        model: The piece as an ONNX model without large weights.
    """

    cut: Cut
    size: int
    share: LayerShare
    model: onnx.ModelProto = field(repr=False)


def write_package(
    state: PipelineState,
    directory: Path,
    tiles: Sequence[int] = DEFAULT_TILE_COUNTS,
    device: str = "",
    targets: Sequence[Target] = (),
    engines: Sequence[Engine] = (),
) -> None:
    """Write the profile package of a model: a directory with a script that measures the model's layers on a device.

    Args:
        state: A pipeline state with the model and its layers.
        directory: An empty directory, to which the package is written.
        tiles: Numbers of tiles. Each axis is cut into each of these numbers of tiles, and one tile of each cut is
            measured.
        device: Name of the platform's devices that the profile is for. Default: the name of the host that measures.
        targets: Targets of which the runtimes are measured.
        engines: Engines other than onnxruntime that are measured too, if the device has them.

    Raises:
        UsageError: The runtime of a target cannot be measured.
    """
    layers, model = state.layers, state.model
    assert layers is not None
    (directory / PIECES_DIRECTORY).mkdir()
    _write_modules(directory, engines)
    entries, unmeasured = _write_layers(model, layers, directory, tiles, engines)
    runtimes = []
    for target in targets:
        target_directory = directory / RUNTIME_DIRECTORY / target.name
        target_directory.mkdir(parents=True)
        runtimes.append(runtime_benchmarks.write_benchmarks(target, target_directory))
    document = {
        "format": TASKS_FORMAT,
        "model_digest": network_digest(layers),
        "device": device,
        "call": _write_model(relu_model(), directory, f"{PIECES_DIRECTORY}/call.onnx", engines),
        "whole": None
        if unmeasured
        else _write_model(model.proto, directory, f"{PIECES_DIRECTORY}/network.onnx", engines),
        "transfers": [
            {
                "nbytes": raw_nbytes(onnx.TensorProto.FLOAT, shape),
                **_write_model(relu_model(shape), directory, f"{PIECES_DIRECTORY}/transfer-{number}.onnx", engines),
            }
            for number, shape in enumerate(TRANSFER_SHAPES if engines else ())
        ],
        "engines": [{"name": e.name, "packages": [package.name for package in e.packages]} for e in engines],
        "runtimes": runtimes,
        "layers": entries,
        "unmeasured": unmeasured,
    }
    (directory / TASKS_FILE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _write_modules(directory: Path, engines: Sequence[Engine]) -> None:
    for name, source in SHIPPED_MODULES.items():
        (directory / name).write_bytes(resources.files("dicompiler").joinpath(source).read_bytes())
    for engine in engines:
        if engine.network_source:
            (directory / f"{NETWORK_MODULE_PREFIX}{engine.name}.py").write_bytes(engine.network_source)


def _write_layers(
    model: Model, layers: LayerGraph, directory: Path, tiles: Sequence[int], engines: Sequence[Engine]
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Write pieces of all layers; return the entries of tasks.json for layers that can and cannot be measured."""
    entries: dict[str, dict[str, Any]] = {}
    unmeasured = []
    for layer in layers.layers:
        signature, reason = layer_signature(layers, layer), _unmeasurable_reason(layers, layer)
        if reason:
            unmeasured.append({"name": layer.name, "reason": reason})
        elif signature in entries:
            entries[signature]["names"].append(layer.name)
        else:
            entry: dict[str, Any] = {"signature": signature, "kind": layer_kind(layer), "names": [layer.name]}
            entries[signature] = entry
            prefix = f"{PIECES_DIRECTORY}/{len(entries):04d}"
            entry["measurements"] = [
                _write_piece(piece, layers, layer, directory, f"{prefix}-{number:02d}.onnx", engines)
                for number, piece in enumerate(layer_pieces(model, layers, layer, tiles))
            ]
    return list(entries.values()), unmeasured


def run_package(
    directory: Path, output: Path, threads: int | None, repeat: int, progress: Callable[[str], None] | None = None
) -> None:
    """Run the script of a profile package on this host. A warning is logged for each layer that cannot be measured.

    Args:
        directory: Directory of the profile package.
        output: File of the profile.
        threads: Number of threads that compute a piece of a layer. Default: all processors.
        repeat: Number of measurements of each piece.
        progress: Called with a message before each layer.

    Raises:
        RunError: The script failed.
    """
    command = [sys.executable, str(directory / SCRIPT_FILE), "-o", str(output), "--repeat", str(repeat), "--lines"]
    command += ["--end-with-stdin"] + ([] if threads is None else ["--threads", str(threads)])
    with tempfile.TemporaryFile("w+") as errors:
        # When this process is interrupted, the pipe to the script's stdin closes. The script then ends itself and the
        # programs that it has started.
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if progress is not None:
                    progress(f"measuring layer {line.strip()}")
            process.wait()
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    if process.returncode:
        raise RunError(f"profile: the measurement failed: {(lines or [f'exit code {process.returncode}'])[-1]}")
    for line in lines:
        if line.startswith(f"{SCRIPT_FILE}: "):
            log.warning("profile: %s", line.removeprefix(f"{SCRIPT_FILE}: "))


def check_package_path(output: Path) -> None:
    """Raise DicompilerError if the path of a new profile package exists and is not an empty directory."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DicompilerError(f"{output}: the path exists: choose another directory for the package")


def _unmeasurable_reason(layers: LayerGraph, layer: Layer) -> str:
    for name in (*layer.inputs, *layer.outputs):
        if layers.tensors[name].shape is None:
            return f"{name!r} has no static shape"
    return ""


def layer_pieces(model: Model, layers: LayerGraph, layer: Layer, tiles: Sequence[int]) -> Iterator[LayerPiece]:
    """Yield the pieces of a layer that a profile measures: the whole layer, then one tile of each cut.

    `tiles` has numbers of tiles. Each axis is cut into each of these numbers of tiles.
    """
    isolated = _isolate_layer(model, layers, layer)
    yield LayerPiece("whole", 1, LayerShare(), isolated.model.proto)
    seen: set[tuple[Cut, int]] = set()
    for parts, number, cut, share in _plan_cuts(layers, layer, tiles):
        size = share.merge_count if share.merge_count else _cut_size(cut, share)
        if (cut, size) not in seen:
            seen.add((cut, size))
            models = _compile_part(isolated, layer, parts, parts[number].device)
            # A part that is compiled to several models is omitted, because a piece is measured as one model.
            if len(models) == 1:
                yield LayerPiece(cut, size, share, models[0])


def _cut_size(cut: Cut, share: LayerShare) -> int:
    interval: Interval | None = share.reduce
    if share.region is not None:
        interval = share.region[int(cut.rpartition(" ")[2])]
    assert interval is not None
    return interval[1] - interval[0]


def _plan_cuts(
    layers: LayerGraph, layer: Layer, tiles: Sequence[int]
) -> Iterator[tuple[tuple[Part, ...], int, Cut, LayerShare]]:
    """Yield the cuts of a layer that a profile measures.

    Each cut is a tuple: all parts of the layer, the index of the measured part, the kind of the cut, and what this part
    computes.
    """
    axes, allowed = named_axes(layers).get(layer.output, {}), cuttable_axes(layers, layer)
    for label in CUT_LABELS:
        axis = axes.get(label)
        if axis is None or axis not in allowed:
            continue
        for tile_count in tiles:
            parts = tile_layer(layers, layer, label, [1.0] * tile_count, [f"d{i}" for i in range(tile_count)])
            number = len(parts) // 2
            region = parts[number].region
            assert region is not None
            if len(parts) > 1:
                yield parts, number, axis_cut(axis), LayerShare(align_region(layers, layer, region))
    length = reduction_length(layers, layer)
    if length is None:
        return
    for tile_count in tiles:
        intervals = split_proportionally(length, [1.0] * tile_count)
        ranges = [(start, stop) for start, stop in intervals if start < stop]
        if len(ranges) > 1:
            partials = tuple(Part(f"d{i}", None, interval) for i, interval in enumerate(ranges))
            parts = (*partials, Part("merger"))
            middle = len(ranges) // 2
            # Two pieces are measured: one partial sum, and the addition of all partial sums.
            yield parts, middle, "reduce", LayerShare(None, ranges[middle])
            yield parts, len(ranges), "merge", LayerShare(merge_count=len(ranges))


def _isolate_layer(model: Model, layers: LayerGraph, layer: Layer) -> PipelineState:
    """Return the state of a model that consists of one layer, with the same nodes, tensors and operator rules."""
    names = {node.name for node in layer.nodes}
    states = dict.fromkeys(name for node in layer.nodes for name in node.inputs if name in layers.state_output_of)
    layer = replace(layer, inputs=(*layer.inputs, *states))
    source = model.proto
    nodes = [node for node in source.graph.node if node.name in names]
    read = {name for node in nodes for name in tensors_read(node)}
    proto = onnx.ModelProto(ir_version=source.ir_version, opset_import=source.opset_import, functions=source.functions)
    graph = proto.graph
    graph.name = layer.name
    graph.node.extend(nodes)
    values = {value.name: value for value in (*source.graph.value_info, *source.graph.input, *source.graph.output)}
    graph.input.extend(_value_info(layers, name) for name in layer.inputs)
    graph.output.extend(_value_info(layers, name) for name in layer.outputs)
    inner = [name for node in nodes for name in node.output if name in values and name not in layer.outputs]
    graph.value_info.extend(values[name] for name in inner)
    graph.initializer.extend(tensor for tensor in source.graph.initializer if tensor.name in read)
    graph.sparse_initializer.extend(t for t in source.graph.sparse_initializer if t.values.name in read)
    weights = {name: weight for name, weight in model.weights.items() if name in read}
    isolated = LayerGraph((layer,), layers.tensors, layer.inputs, layer.outputs, layers.rules)
    return PipelineState(model=Model(proto, MappingProxyType(weights)), layers=isolated)


def _value_info(layers: LayerGraph, name: str) -> onnx.ValueInfoProto:
    tensor = layers.tensors[name]
    return onnx.helper.make_tensor_value_info(name, tensor.dtype, tensor.shape)


def _compile_part(isolated: PipelineState, layer: Layer, parts: tuple[Part, ...], device: str) -> list[onnx.ModelProto]:
    """Return the models that one device runs one after another to compute its part of a layer."""
    # Other devices have the inputs and receive the outputs, so the models contain only the part itself.
    plan = Plan({layer.name: parts}, ("source",), ("sink",))
    state = PipelineState(model=isolated.model, layers=isolated.layers, plan=plan)
    placed = registry().make("passes", "partition").run(state)
    program = build_program(placed.model, plan.devices)
    segments = [segment for own in program.devices if own.device == device for segment in own.segments]
    return [_strip_metadata(segment) for segment in segments]


def _strip_metadata(segment: Segment) -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    for node in model.graph.node:
        del node.metadata_props[:]
    return model


def _write_piece(
    piece: LayerPiece, layers: LayerGraph, layer: Layer, directory: Path, file: str, engines: Sequence[Engine]
) -> dict[str, Any]:
    """Write the ONNX model of a piece of a layer, and return its entry in tasks.json."""
    counts = count_operations(layers, layer, *piece.share)
    return {
        "cut": piece.cut,
        "size": piece.size,
        "flops": counts.flops,
        "moved_bytes": counts.moved_bytes,
        "weight_bytes": counts.weight_bytes,
        "input_bytes": counts.input_bytes,
        **_write_model(piece.model, directory, file, engines),
    }


def _write_model(model: onnx.ModelProto, directory: Path, file: str, engines: Sequence[Engine] = ()) -> dict[str, Any]:
    """Write a model as ONNX and in the formats of other engines; return the entries in tasks.json that name them."""
    (directory / file).write_bytes(model.SerializeToString(deterministic=True))
    constants = [tensor for tensor in model.graph.initializer if is_placeholder(tensor)]
    return {
        "file": file,
        "inputs": [_value_entry(value) for value in model.graph.input],
        "constants": [_tensor_entry(tensor.name, tensor.data_type, tensor.dims) for tensor in constants],
        "engines": {
            engine.name: entry
            for engine in engines
            if (entry := _write_network(engine, model, directory, f"{file}.{engine.name}")) is not None
        },
    }


def _write_network(engine: Engine, model: onnx.ModelProto, directory: Path, file: str) -> dict[str, Any] | None:
    """Write a model in the format of an engine; return its entry in tasks.json.

    Returns None if the engine does not support the model.
    """
    # The times of engines do not depend on the values of weights, so only the number of bytes is written.
    zeros = {
        tensor.name: Weight.from_array(np.zeros(tuple(tensor.dims), tensor_dtype_to_np_dtype(tensor.data_type)))
        for tensor in model.graph.initializer
        if is_placeholder(tensor)
    }
    try:
        files = engine.convert(model, zeros)
    except UnsupportedByEngine:
        return None
    if files is None:
        return None
    (directory / file).write_bytes(files.network)
    return {"file": file, "weight_nbytes": len(files.weights), "shapes": output_shapes(model.graph)}


def _value_entry(value: onnx.ValueInfoProto) -> Mapping[str, Any]:
    tensor_type = value.type.tensor_type
    return _tensor_entry(value.name, tensor_type.elem_type, [dim.dim_value for dim in tensor_type.shape.dim])


def _tensor_entry(name: str, dtype: int, shape: Sequence[int]) -> Mapping[str, Any]:
    return {"name": name, "dtype": dtype_name(dtype), "number": dtype, "shape": list(shape)}


def relu_model(shape: Shape = (1, 1)) -> onnx.ModelProto:
    """Return a model of one Relu, to measure how long an engine takes for a call that computes almost nothing.

    With a larger `shape` of its input and output, the engine mostly reads the input and returns the output.
    """
    dtype = onnx.TensorProto.FLOAT
    graph_input, graph_output = (onnx.helper.make_tensor_value_info(name, dtype, shape) for name in ("x", "y"))
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "call", [graph_input], [graph_output])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 14)], ir_version=8)
