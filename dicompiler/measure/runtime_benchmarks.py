"""What measures a target's runtime on a host: small programs that do little but exchange, call and copy, and what plays
them there.

Target → a directory of artifacts and its player, and what profile_run.py must know to make costs of their times.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dicompiler.base.errors import UsageError
from dicompiler.cost.workload import count_copies
from dicompiler.driver.prepare import prepare
from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.regions import Shape
from dicompiler.partition.segmentation import build_program
from dicompiler.partition.tiling import tile_layer
from dicompiler.plugin.registry import registry
from dicompiler.target.integrity import write_integrity
from dicompiler.target.target_base import Target

PLAYER_FILE = "play.py"
DEVICE_NAMES = ("d0", "d1")
BENCHMARK_PLATFORM = Platform(
    "two processes",
    tuple(Host(name, 1 << 30) for name in DEVICE_NAMES),
    tuple(Device(name, name, 1e9) for name in DEVICE_NAMES),
    Network("switch", 1e9),
)
WORK_SHAPE, SMALL_SHAPE, LARGE_SHAPE, HUGE_SHAPE = (1, 1, 16, 512), (1, 1, 4, 1024), (1, 4, 1024, 64), (1, 4, 4096, 256)
BENCHMARKS: Mapping[
    str, tuple[str, Shape, int, int]
] = {  # name: what is between steps, the shape, layers a step, steps
    "one": ("nothing", WORK_SHAPE, 8, 4),
    "calls": ("calls", WORK_SHAPE, 8, 4),
    "messages": ("messages", WORK_SHAPE, 8, 4),
    "calls-large": ("calls", LARGE_SHAPE, 8, 4),
    "messages-large": ("messages", LARGE_SHAPE, 8, 4),
    "one-small": ("nothing", SMALL_SHAPE, 1, 32),
    "copies-small": ("copies", SMALL_SHAPE, 1, 32),
    "one-huge": ("nothing", HUGE_SHAPE, 1, 4),
    "copies-huge": ("copies", HUGE_SHAPE, 1, 4),
}
"""Each does its steps one after another: in one call; in one call, every other in halves; each a call; or each a call
on the other one of two devices, with a message between. Where there are calls and messages a step computes for about as
long as a small layer: who waits falls asleep, and caches get cold. What is copied is more than caches hold, as in
frames of a network, or little, between products that fill caches with something else."""


def write_benchmarks(target: Target, directory: Path) -> dict[str, Any]:
    """Writes into `directory`, which exists and is empty; the entry of tasks.json. The same bytes each time. UsageError
    for a target whose runtime cannot be measured."""
    files = target.benchmark_player
    if PLAYER_FILE not in files:
        raise UsageError(f"profile: what the runtime of target {target.name!r} costs cannot be measured")
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return benchmarks_entry(target, {name: emit_benchmark(target, name, directory / name) for name in BENCHMARKS})


def benchmarks_entry(target: Target, programs: Mapping[str, PipelineState]) -> dict[str, Any]:
    """What `profile_runtimes.costs` must know of the programs."""
    stated = target.runtime_costs
    waking = stated.latency / ((stated.latency + stated.receive) or 1.0)
    counts = {name: _frame_counts(compilation) for name, compilation in programs.items()}
    return {"target": target.name, "header_share": stated.header_share, "waking": waking, "programs": counts}


def emit_benchmark(target: Target, name: str, directory: Path) -> PipelineState:
    """Writes the artifact of one of PROGRAMS into `directory`, which does not exist."""
    compilation = _compile_benchmark(*BENCHMARKS[name])
    directory.mkdir()
    target.emit(compilation, directory)
    write_integrity(directory)
    return compilation


def _compile_benchmark(kind: str, shape: Shape, together: int, steps: int) -> PipelineState:
    prepared = prepare(Model.load(_chain_model(shape, steps * together)))
    assert prepared.layers is not None
    plan = Plan(_chain_parts(prepared.layers, kind, together), (DEVICE_NAMES[0],), (DEVICE_NAMES[0],))
    placed = (
        registry()
        .make("passes", "partition")
        .run(PipelineState(prepared.model, prepared.layers, BENCHMARK_PLATFORM, plan))
    )
    program = build_program(placed.model, plan.devices)
    return PipelineState(placed.model, placed.layers, BENCHMARK_PLATFORM, plan, placed.routing, program=program)


def _chain_model(shape: Shape, length: int) -> onnx.ModelProto:
    """A number in, so many layers, little out. The layers: products of matrices, or pools of one element, or where
    little is copied each after the other."""
    weights = [numpy_helper.from_array(np.ones(shape, np.float32), "w")]
    if shape in (WORK_SHAPE, SMALL_SHAPE):
        weights.append(numpy_helper.from_array(np.full((shape[3], shape[3]), 1 / shape[3], np.float32), "m"))
    nodes = [helper.make_node("Add", ["x", "w"], ["t0"], "grow")]
    for i in range(length):
        names = [f"t{i + 1}"], f"step{i}"
        if shape == WORK_SHAPE or (shape == SMALL_SHAPE and i % 2):
            nodes.append(helper.make_node("MatMul", [f"t{i}", "m"], *names))
        else:
            nodes.append(helper.make_node("MaxPool", [f"t{i}"], *names, kernel_shape=[1, 1]))
    nodes.append(helper.make_node("GlobalMaxPool", [f"t{length}"], ["y"], "shrink"))
    ends = [("x", (1, 1, 1, 1)), ("y", (*shape[:2], 1, 1))]
    given, made = (helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in ends)
    graph = helper.make_graph(nodes, "chain", [given], [made], weights)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def _chain_parts(layers: LayerGraph, kind: str, together: int) -> Mapping[str, tuple[Part, ...]]:
    found: dict[str, tuple[Part, ...]] = {}
    for i, layer in enumerate(layers.layers):
        other = i // together % 2
        found[layer.name] = (Part(DEVICE_NAMES[other * (kind == "messages")], None, lane=other * (kind == "calls")),)
        if kind == "copies" and other and layer is not layers.layers[-1]:
            found[layer.name] = tile_layer(layers, layer, "height", [1.0, 1.0], [DEVICE_NAMES[0], DEVICE_NAMES[0]])
    return found


def _frame_counts(compilation: PipelineState) -> Mapping[str, int]:
    """What a frame of it takes: calls, messages and their bytes, nodes of the engine, and bytes that slices and joins
    copy."""
    program, routing = compilation.program, compilation.routing
    assert program is not None and routing is not None
    segments = [segment for device in program.devices for segment in device.segments]
    return {
        "calls": len(segments),
        "messages": len(program.transfers),
        "bytes": sum(transfer.value.nbytes for transfer in program.transfers),
        "nodes": sum(len(segment.model.graph.node) for segment in segments),
        "copied": sum(one.nbytes for one in count_copies(routing).values()),
    }
