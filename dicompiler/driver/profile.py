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
from dicompiler.cost.counting import count
from dicompiler.cost.profile import Cut, axis_cut, kind_of, network_digest, signature
from dicompiler.driver import measuring
from dicompiler.ir.compilation import Compilation
from dicompiler.ir.layers import Layer, LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.structure import node_reads
from dicompiler.ir.onnx.weights import dtype_name, is_hollow
from dicompiler.ir.plan import Part, Plan, Share
from dicompiler.ir.program import Segment
from dicompiler.ir.regions import Interval, shares
from dicompiler.partition.bounds_inference import align, cuttable, reduction
from dicompiler.partition.segmentation import cut
from dicompiler.partition.tiling import Label, named_axes, tile
from dicompiler.plugin.registry import registry
from dicompiler.target.interface import Target

log = logging.getLogger("dicompiler")

SCRIPT, LINKS, RUNTIMES = "profile_run.py", "profile_links.py", "profile_runtimes.py"
SESSIONS, TASKS = "profile_sessions.py", "tasks.json"
PIECES, RUNTIME = "pieces", "runtime"
FORMAT = "dicompiler.profile-tasks/1"
LABELS: tuple[Label, ...] = ("height", "width", "channel")
TILES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Piece:
    """Something to time: an ONNX model without large weights, and what of the layer it is (see cost.profile)."""

    cut: Cut
    size: int
    share: Share
    model: onnx.ModelProto = field(repr=False)


def write_package(
    compilation: Compilation,
    directory: Path,
    tiles: Sequence[int] = TILES,
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
    (directory / PIECES).mkdir()
    sources = {SCRIPT: "driver/profile_script.py", SESSIONS: "base/sessions.py"}
    for name, source in (sources | {own: f"driver/{own}" for own in (LINKS, RUNTIMES)}).items():
        (directory / name).write_bytes(resources.files("dicompiler").joinpath(source).read_bytes())
    entries: dict[str, dict[str, Any]] = {}
    unmeasured = []
    for layer in layers.layers:
        name, why = signature(layers, layer), _why_not(layers, layer)
        if why:
            unmeasured.append({"name": layer.name, "reason": why})
        elif name in entries:
            entries[name]["names"].append(layer.name)
        else:
            entries[name] = {"signature": name, "kind": kind_of(layer), "names": [layer.name], "measurements": []}
            for number, piece in enumerate(pieces(model, layers, layer, tiles)):
                file = f"{PIECES}/{len(entries):04d}-{number:02d}.onnx"
                entries[name]["measurements"].append(_write(piece, layers, layer, directory, file))
    runtimes = []
    for target in targets:
        place = directory / RUNTIME / target.name
        place.mkdir(parents=True)
        runtimes.append(measuring.write(target, place))
    document = {
        "format": FORMAT,
        "network": network_digest(layers),
        "device": device,
        "call": _runnable(empty_model(), directory, f"{PIECES}/call.onnx"),
        "whole": None if unmeasured else _runnable(model.proto, directory, f"{PIECES}/network.onnx"),
        "runtimes": runtimes,
        "layers": list(entries.values()),
        "unmeasured": unmeasured,
    }
    (directory / TASKS).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def run_package(
    directory: Path, output: Path, threads: int | None, repeat: int, tell: Callable[[str], None] | None = None
) -> None:
    """Runs a package's script here, as its user would on a device: `output` is the profile; `tell` hears of each layer.
    RunError says why not; what could not be measured is a warning."""
    command = [sys.executable, str(directory / SCRIPT), "-o", str(output), "--repeat", str(repeat), "--lines"]
    command += [] if threads is None else ["--threads", str(threads)]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if tell is not None:
                    tell(f"measuring layer {line.strip()}")
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    if process.returncode:
        raise RunError(f"profile: the measurement failed: {(lines or [f'exit code {process.returncode}'])[-1]}")
    for line in lines:
        if line.startswith(f"{SCRIPT}: "):
            log.warning("profile: %s", line.removeprefix(f"{SCRIPT}: "))


def check_place(output: Path) -> None:
    """DicompilerError where a package cannot be put, because something is there (an empty directory is nothing)."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DicompilerError(f"{output}: it exists: choose another place for the package")


def _why_not(layers: LayerGraph, layer: Layer) -> str:
    """Why a layer cannot be measured, '' where it can."""
    for name in (*layer.inputs, *layer.outputs):
        if layers.tensors[name].shape is None:
            return f"{name!r} has no static shape"
    return ""


def pieces(model: Model, layers: LayerGraph, layer: Layer, tiles: Sequence[int]) -> Iterator[Piece]:
    """The whole layer; for each cut and number of tiles an inner piece, none of a size twice; partial sums and their
    merger."""
    alone = _alone(model, layers, layer)
    yield Piece("whole", 1, Share(), alone.model.proto)
    seen: set[tuple[Cut, int]] = set()
    for parts, number, kind, share in _cuts(layers, layer, tiles):
        size = share.merge if share.merge else _size(kind, share)
        if (kind, size) not in seen:
            seen.add((kind, size))
            models = _compiled(alone, layer, parts, parts[number].device)
            if len(models) == 1:  # what takes several calls is no single piece
                yield Piece(kind, size, share, models[0])


def _size(kind: Cut, share: Share) -> int:
    interval: Interval | None = share.reduce
    if share.region is not None:
        interval = share.region[int(kind.rpartition(" ")[2])]
    assert interval is not None
    return interval[1] - interval[0]


def _cuts(layers: LayerGraph, layer: Layer, tiles: Sequence[int]) -> Iterator[tuple[tuple[Part, ...], int, Cut, Share]]:
    """(the parts of a plan, the index of the one to time, its cut, what it is)."""
    labels, allowed = named_axes(layers).get(layer.output, {}), cuttable(layers, layer)
    for label in LABELS:
        axis = labels.get(label)
        for count_ in tiles if axis in allowed else ():
            assert axis is not None
            parts = tile(layers, layer, label, [1.0] * count_, [f"d{i}" for i in range(count_)])
            number = len(parts) // 2
            region = parts[number].region
            assert region is not None
            if len(parts) > 1:
                yield parts, number, axis_cut(axis), Share(align(layers, layer, region))
    length = reduction(layers, layer)
    for count_ in tiles if length is not None else ():
        assert length is not None
        ranges = [one for one in shares(length, [1.0] * count_) if one[0] < one[1]]
        if len(ranges) > 1:
            partials = tuple(Part(f"d{i}", None, one) for i, one in enumerate(ranges))
            parts = (*partials, Part("merger"))
            yield parts, len(ranges) // 2, "reduce", Share(None, ranges[len(ranges) // 2])
            yield parts, len(ranges), "merge", Share(merge=len(ranges))


def _alone(model: Model, layers: LayerGraph, layer: Layer) -> Compilation:
    """The layer as a network of its own: the same nodes, tensors and rules."""
    names = {node.name for node in layer.nodes}
    states = dict.fromkeys(name for node in layer.nodes for name in node.inputs if name in layers.present)
    layer = replace(layer, inputs=(*layer.inputs, *states))
    source = model.proto
    nodes = [node for node in source.graph.node if node.name in names]
    read = {name for node in nodes for name in node_reads(node)}
    proto = onnx.ModelProto(ir_version=source.ir_version, opset_import=source.opset_import, functions=source.functions)
    graph = proto.graph
    graph.name = layer.name
    graph.node.extend(nodes)
    known = {value.name: value for value in (*source.graph.value_info, *source.graph.input, *source.graph.output)}
    graph.input.extend(_info(layers, name) for name in layer.inputs)
    graph.output.extend(_info(layers, name) for name in layer.outputs)
    inner = [name for node in nodes for name in node.output if name in known and name not in layer.outputs]
    graph.value_info.extend(known[name] for name in inner)
    graph.initializer.extend(tensor for tensor in source.graph.initializer if tensor.name in read)
    graph.sparse_initializer.extend(t for t in source.graph.sparse_initializer if t.values.name in read)
    weights = {name: weight for name, weight in model.weights.items() if name in read}
    alone = LayerGraph((layer,), layers.tensors, layer.inputs, layer.outputs, layers.rules)
    return Compilation(model=Model(proto, MappingProxyType(weights)), layers=alone)


def _info(layers: LayerGraph, name: str) -> onnx.ValueInfoProto:
    tensor = layers.tensors[name]
    return onnx.helper.make_tensor_value_info(name, tensor.dtype, tensor.shape)


def _compiled(alone: Compilation, layer: Layer, parts: tuple[Part, ...], device: str) -> list[onnx.ModelProto]:
    """The segments that `device` runs where the layer's parts are spread so; inputs come and outputs go elsewhere, so
    that it holds nothing but the part."""
    plan = Plan({layer.name: parts}, ("source",), ("sink",))
    given = Compilation(model=alone.model, layers=alone.layers, plan=plan)
    placed = registry().make("passes", "partition").run(given)
    program = cut(placed.model, plan.devices)
    return [_bare(segment) for part in program.devices if part.device == device for segment in part.segments]


def _bare(segment: Segment) -> onnx.ModelProto:
    """The segment's model without the metadata of placing."""
    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    for node in model.graph.node:
        del node.metadata_props[:]
    return model


def _write(piece: Piece, layers: LayerGraph, layer: Layer, directory: Path, file: str) -> dict[str, Any]:
    """Writes the piece's model; the entry of tasks.json that tells how to time it and what it is."""
    counted = count(layers, layer, *piece.share)
    sizes = {"cut": piece.cut, "size": piece.size, "flops": counted.flops, "moved": counted.moved}
    sizes |= {"weights": counted.weights, "read": counted.read}
    return {**sizes, **_runnable(piece.model, directory, file)}


def _runnable(model: onnx.ModelProto, directory: Path, file: str) -> dict[str, Any]:
    """Writes a model; what tasks.json must tell for it to be run."""
    (directory / file).write_bytes(model.SerializeToString(deterministic=True))
    hollows = [tensor for tensor in model.graph.initializer if is_hollow(tensor)]
    return {
        "file": file,
        "inputs": [_value(value) for value in model.graph.input],
        "constants": [_entry(t.name, t.data_type, t.dims) for t in hollows],
    }


def _value(value: onnx.ValueInfoProto) -> Mapping[str, Any]:
    kind = value.type.tensor_type
    return _entry(value.name, kind.elem_type, [dim.dim_value for dim in kind.shape.dim])


def _entry(name: str, dtype: int, shape: Sequence[int]) -> Mapping[str, Any]:
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
