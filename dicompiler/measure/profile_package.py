"""What a profile measures: the layers of a network and pieces of them, each as an ONNX model of its own.

Compilation with layers → a directory: the models, tasks.json and profile_run.py, which makes the profile with numpy and
onnxruntime alone.   The pieces are cut by the partition pass and `cut`, as those of any plan.
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

import onnx

from dicompiler.base.errors import DicompilerError, RunError
from dicompiler.cost.op_counts import count_operations
from dicompiler.cost.profile import Cut, axis_cut, layer_kind, layer_signature, network_digest
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.onnx.graph_structure import tensors_read
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import dtype_name, is_placeholder
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import LayerShare, Part, Plan
from dicompiler.ir.program import Segment
from dicompiler.ir.regions import Interval, split_proportionally
from dicompiler.measure import runtime_benchmarks
from dicompiler.partition.bounds_inference import align_region, cuttable_axes, reduction_length
from dicompiler.partition.segmentation import build_program
from dicompiler.partition.tiling import AxisLabel, named_axes, tile_layer
from dicompiler.plugin.registry import registry
from dicompiler.target.target_base import Target

log = logging.getLogger("dicompiler")

SCRIPT_FILE, LINKS_FILE, RUNTIMES_FILE = "profile_run.py", "profile_links.py", "profile_runtimes.py"
SESSIONS_FILE, TASKS_FILE = "profile_sessions.py", "tasks.json"
PIECES_DIRECTORY, RUNTIME_DIRECTORY = "pieces", "runtime"
TASKS_FORMAT = "dicompiler.profile-tasks/1"
CUT_LABELS: tuple[AxisLabel, ...] = ("height", "width", "channel")
DEFAULT_TILE_COUNTS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class LayerPiece:
    """Something to time: an ONNX model without large weights, and what of the layer it is (see cost.profile)."""

    cut: Cut
    size: int
    share: LayerShare
    model: onnx.ModelProto = field(repr=False)


def write_package(
    compilation: PipelineState,
    directory: Path,
    tiles: Sequence[int] = DEFAULT_TILE_COUNTS,
    device: str = "",
    targets: Sequence[Target] = (),
) -> None:
    """Writes the package of a prepared compilation into `directory`, which exists and is empty.

    tiles: into how many pieces height, width, channels and input channels are cut; of each cut one inner piece is
    timed.
    device: the platform's devices that the profile will hold for ('': the one that is called like the host on which it
    is measured). targets: those whose runtimes are measured; UsageError for one that cannot be. The same input gives
    the same bytes.
    """
    layers, model = compilation.layers, compilation.model
    assert layers is not None
    (directory / PIECES_DIRECTORY).mkdir()
    sources = {SCRIPT_FILE: "measure/profile_script.py", SESSIONS_FILE: "base/ort_session.py",
               LINKS_FILE: "measure/link_benchmark.py", RUNTIMES_FILE: "measure/runtime_costs_fit.py"}  # fmt: skip
    for name, source in sources.items():
        (directory / name).write_bytes(resources.files("dicompiler").joinpath(source).read_bytes())
    entries: dict[str, dict[str, Any]] = {}
    unmeasured = []
    for layer in layers.layers:
        name, why = layer_signature(layers, layer), _unmeasurable_reason(layers, layer)
        if why:
            unmeasured.append({"name": layer.name, "reason": why})
        elif name in entries:
            entries[name]["names"].append(layer.name)
        else:
            entries[name] = {"signature": name, "kind": layer_kind(layer), "names": [layer.name], "measurements": []}
            for number, piece in enumerate(layer_pieces(model, layers, layer, tiles)):
                file = f"{PIECES_DIRECTORY}/{len(entries):04d}-{number:02d}.onnx"
                entries[name]["measurements"].append(_write_piece(piece, layers, layer, directory, file))
    runtimes = []
    for target in targets:
        place = directory / RUNTIME_DIRECTORY / target.name
        place.mkdir(parents=True)
        runtimes.append(runtime_benchmarks.write_benchmarks(target, place))
    document = {
        "format": TASKS_FORMAT,
        "network": network_digest(layers),
        "device": device,
        "call": _write_model(empty_model(), directory, f"{PIECES_DIRECTORY}/call.onnx"),
        "whole": None if unmeasured else _write_model(model.proto, directory, f"{PIECES_DIRECTORY}/network.onnx"),
        "runtimes": runtimes,
        "layers": list(entries.values()),
        "unmeasured": unmeasured,
    }
    (directory / TASKS_FILE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def run_package(
    directory: Path, output: Path, threads: int | None, repeat: int, progress: Callable[[str], None] | None = None
) -> None:
    """Runs a package's script here, as its user would on a device: `output` is the profile; `tell` hears of each layer.
    RunError says why not; what could not be measured is a warning."""
    command = [sys.executable, str(directory / SCRIPT_FILE), "-o", str(output), "--repeat", str(repeat), "--lines"]
    command += [] if threads is None else ["--threads", str(threads)]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if progress is not None:
                    progress(f"measuring layer {line.strip()}")
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    if process.returncode:
        raise RunError(f"profile: the measurement failed: {(lines or [f'exit code {process.returncode}'])[-1]}")
    for line in lines:
        if line.startswith(f"{SCRIPT_FILE}: "):
            log.warning("profile: %s", line.removeprefix(f"{SCRIPT_FILE}: "))


def check_package_path(output: Path) -> None:
    """DicompilerError where a package cannot be put, because something is there (an empty directory is nothing)."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DicompilerError(f"{output}: it exists: choose another place for the package")


def _unmeasurable_reason(layers: LayerGraph, layer: Layer) -> str:
    """Why a layer cannot be measured, '' where it can."""
    for name in (*layer.inputs, *layer.outputs):
        if layers.tensors[name].shape is None:
            return f"{name!r} has no static shape"
    return ""


def layer_pieces(model: Model, layers: LayerGraph, layer: Layer, tiles: Sequence[int]) -> Iterator[LayerPiece]:
    """The whole layer; for each cut and number of tiles an inner piece, none of a size twice; partial sums and their
    merger."""
    alone = _isolate_layer(model, layers, layer)
    yield LayerPiece("whole", 1, LayerShare(), alone.model.proto)
    seen: set[tuple[Cut, int]] = set()
    for parts, number, kind, share in _plan_cuts(layers, layer, tiles):
        size = share.merge_count if share.merge_count else _cut_size(kind, share)
        if (kind, size) not in seen:
            seen.add((kind, size))
            models = _compile_part(alone, layer, parts, parts[number].device)
            if len(models) == 1:  # what takes several calls is no single piece
                yield LayerPiece(kind, size, share, models[0])


def _cut_size(kind: Cut, share: LayerShare) -> int:
    interval: Interval | None = share.reduce
    if share.region is not None:
        interval = share.region[int(kind.rpartition(" ")[2])]
    assert interval is not None
    return interval[1] - interval[0]


def _plan_cuts(
    layers: LayerGraph, layer: Layer, tiles: Sequence[int]
) -> Iterator[tuple[tuple[Part, ...], int, Cut, LayerShare]]:
    """(the parts of a plan, the index of the one to time, its cut, what it is)."""
    labels, allowed = named_axes(layers).get(layer.output, {}), cuttable_axes(layers, layer)
    for label in CUT_LABELS:
        axis = labels.get(label)
        for count_ in tiles if axis in allowed else ():
            assert axis is not None
            parts = tile_layer(layers, layer, label, [1.0] * count_, [f"d{i}" for i in range(count_)])
            number = len(parts) // 2
            region = parts[number].region
            assert region is not None
            if len(parts) > 1:
                yield parts, number, axis_cut(axis), LayerShare(align_region(layers, layer, region))
    length = reduction_length(layers, layer)
    for count_ in tiles if length is not None else ():
        assert length is not None
        ranges = [one for one in split_proportionally(length, [1.0] * count_) if one[0] < one[1]]
        if len(ranges) > 1:
            partials = tuple(Part(f"d{i}", None, one) for i, one in enumerate(ranges))
            parts = (*partials, Part("merger"))
            yield parts, len(ranges) // 2, "reduce", LayerShare(None, ranges[len(ranges) // 2])
            yield parts, len(ranges), "merge", LayerShare(merge_count=len(ranges))


def _isolate_layer(model: Model, layers: LayerGraph, layer: Layer) -> PipelineState:
    """The layer as a network of its own: the same nodes, tensors and rules."""
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
    known = {value.name: value for value in (*source.graph.value_info, *source.graph.input, *source.graph.output)}
    graph.input.extend(_value_info(layers, name) for name in layer.inputs)
    graph.output.extend(_value_info(layers, name) for name in layer.outputs)
    inner = [name for node in nodes for name in node.output if name in known and name not in layer.outputs]
    graph.value_info.extend(known[name] for name in inner)
    graph.initializer.extend(tensor for tensor in source.graph.initializer if tensor.name in read)
    graph.sparse_initializer.extend(t for t in source.graph.sparse_initializer if t.values.name in read)
    weights = {name: weight for name, weight in model.weights.items() if name in read}
    alone = LayerGraph((layer,), layers.tensors, layer.inputs, layer.outputs, layers.rules)
    return PipelineState(model=Model(proto, MappingProxyType(weights)), layers=alone)


def _value_info(layers: LayerGraph, name: str) -> onnx.ValueInfoProto:
    tensor = layers.tensors[name]
    return onnx.helper.make_tensor_value_info(name, tensor.dtype, tensor.shape)


def _compile_part(alone: PipelineState, layer: Layer, parts: tuple[Part, ...], device: str) -> list[onnx.ModelProto]:
    """The segments that `device` runs where the layer's parts are spread so; inputs come and outputs go elsewhere, so
    that it holds nothing but the part."""
    plan = Plan({layer.name: parts}, ("source",), ("sink",))
    given = PipelineState(model=alone.model, layers=alone.layers, plan=plan)
    placed = registry().make("passes", "partition").run(given)
    program = build_program(placed.model, plan.devices)
    return [_strip_metadata(segment) for part in program.devices if part.device == device for segment in part.segments]


def _strip_metadata(segment: Segment) -> onnx.ModelProto:
    """The segment's model without the metadata of placing."""
    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    for node in model.graph.node:
        del node.metadata_props[:]
    return model


def _write_piece(piece: LayerPiece, layers: LayerGraph, layer: Layer, directory: Path, file: str) -> dict[str, Any]:
    """Writes the piece's model; the entry of tasks.json that tells how to time it and what it is."""
    counted = count_operations(layers, layer, *piece.share)
    sizes = {"cut": piece.cut, "size": piece.size, "flops": counted.flops, "moved": counted.moved_bytes}
    sizes |= {"weights": counted.weight_bytes, "read": counted.input_bytes}
    return {**sizes, **_write_model(piece.model, directory, file)}


def _write_model(model: onnx.ModelProto, directory: Path, file: str) -> dict[str, Any]:
    """Writes a model; what tasks.json must tell for it to be run."""
    (directory / file).write_bytes(model.SerializeToString(deterministic=True))
    hollows = [tensor for tensor in model.graph.initializer if is_placeholder(tensor)]
    return {
        "file": file,
        "inputs": [_value_entry(value) for value in model.graph.input],
        "constants": [_tensor_entry(t.name, t.data_type, t.dims) for t in hollows],
    }


def _value_entry(value: onnx.ValueInfoProto) -> Mapping[str, Any]:
    kind = value.type.tensor_type
    return _tensor_entry(value.name, kind.elem_type, [dim.dim_value for dim in kind.shape.dim])


def _tensor_entry(name: str, dtype: int, shape: Sequence[int]) -> Mapping[str, Any]:
    return {"name": name, "dtype": dtype_name(dtype), "number": dtype, "shape": list(shape)}


def empty_model() -> onnx.ModelProto:
    """A model that computes next to nothing: what a call of onnxruntime takes."""
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])],
        "call",
        [onnx.helper.make_tensor_value_info("x", kind, [1])],
        [onnx.helper.make_tensor_value_info("y", kind, [1])],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 14)], ir_version=8)
