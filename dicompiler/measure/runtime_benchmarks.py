"""Benchmark programs for a target's runtime: programs that do little but call submodels, send messages and copy.

`runtime_costs_fit` derives the runtime's costs from their frame times.
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
from dicompiler.target.manifest import write_digests_and_checksum
from dicompiler.target.target_base import Target

PLAYER_FILE = "play.py"
DEVICE_NAMES = ("d0", "d1")
BENCHMARK_PLATFORM = Platform(
    "two processes",
    tuple(Host(name, 1 << 30) for name in DEVICE_NAMES),
    tuple(Device(name, name, 1e9) for name in DEVICE_NAMES),
    Network("switch", 1e9),
)
WORK_SHAPE, SMALL_SHAPE = (1, 1, 16, 512), (1, 1, 4, 1024)
LARGE_SHAPE, HUGE_SHAPE = (1, 4, 1024, 64), (1, 4, 4096, 256)
BENCHMARKS: Mapping[str, tuple[str, Shape, int, int]] = {
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
"""(kind, shape of tensors, number of layers in a step, number of steps) of each program, by its name.

A program runs its steps one after another. The kind states how the steps are separated:
- nothing: all steps are one call of a submodel.
- calls: each step is a call of its own.
- messages: the steps are calls on two devices in turn, with a message between them.
- copies: every other step is computed in two halves, which are cut and joined by copies.
"""


def write_benchmarks(target: Target, directory: Path) -> dict[str, Any]:
    """Write the benchmark programs of a target, and the target's program that runs and times them (the player).

    Returns:
        The target's entry in tasks.json.

    Raises:
        UsageError: The target has no player.
    """
    files = target.benchmark_player
    if PLAYER_FILE not in files:
        raise UsageError(f"profile: target {target.name!r} has no benchmark programs: omit it from --target")
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return benchmarks_entry(target, {name: emit_benchmark(target, name, directory / name) for name in BENCHMARKS})


def benchmarks_entry(target: Target, programs: Mapping[str, PipelineState]) -> dict[str, Any]:
    """Return a target's entry in tasks.json, which describes its benchmark programs."""
    stated = target.runtime_costs
    waking = stated.latency / ((stated.latency + stated.receive) or 1.0)
    counts = {name: _frame_counts(compilation) for name, compilation in programs.items()}
    return {"target": target.name, "header_share": stated.header_share, "waking": waking, "programs": counts}


def emit_benchmark(target: Target, name: str, directory: Path) -> PipelineState:
    """Write the artifact of the benchmark program `name` to a new directory, and return its compilation."""
    compilation = _compile_benchmark(*BENCHMARKS[name])
    directory.mkdir()
    target.emit(compilation, directory)
    write_digests_and_checksum(directory)
    return compilation


def _compile_benchmark(kind: str, shape: Shape, layers_per_step: int, steps: int) -> PipelineState:
    prepared = prepare(Model.load(_chain_model(shape, steps * layers_per_step)))
    assert prepared.layers is not None
    parts = _chain_parts(prepared.layers, kind, layers_per_step)
    plan = Plan(parts, (DEVICE_NAMES[0],), (DEVICE_NAMES[0],))
    compilation = PipelineState(prepared.model, prepared.layers, BENCHMARK_PLATFORM, plan)
    placed = registry().make("passes", "partition").run(compilation)
    program = build_program(placed.model, plan.devices)
    return PipelineState(placed.model, placed.layers, BENCHMARK_PLATFORM, plan, placed.routing, program=program)


def _chain_model(shape: Shape, length: int) -> onnx.ModelProto:
    """Return a chain of `length` layers between two layers that keep the network's input and output small."""
    weights = [numpy_helper.from_array(np.ones(shape, np.float32), "w")]
    if shape in (WORK_SHAPE, SMALL_SHAPE):
        weights.append(numpy_helper.from_array(np.full((shape[3], shape[3]), 1 / shape[3], np.float32), "m"))
    nodes = [helper.make_node("Add", ["x", "w"], ["t0"], "grow")]
    for i in range(length):
        names = [f"t{i + 1}"], f"step{i}"
        # A matrix product takes as long as a small layer, so that waiting devices sleep and their caches get cold.
        if shape == WORK_SHAPE or (shape == SMALL_SHAPE and i % 2):
            nodes.append(helper.make_node("MatMul", [f"t{i}", "m"], *names))
        else:
            nodes.append(helper.make_node("MaxPool", [f"t{i}"], *names, kernel_shape=[1, 1]))
    nodes.append(helper.make_node("GlobalMaxPool", [f"t{length}"], ["y"], "shrink"))
    graph_input = helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 1, 1, 1))
    graph_output = helper.make_tensor_value_info("y", TensorProto.FLOAT, (*shape[:2], 1, 1))
    graph = helper.make_graph(nodes, "chain", [graph_input], [graph_output], weights)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def _chain_parts(layers: LayerGraph, kind: str, layers_per_step: int) -> Mapping[str, tuple[Part, ...]]:
    parts: dict[str, tuple[Part, ...]] = {}
    for i, layer in enumerate(layers.layers):
        is_odd = i // layers_per_step % 2 == 1
        device = DEVICE_NAMES[1] if is_odd and kind == "messages" else DEVICE_NAMES[0]
        parts[layer.name] = (Part(device, None, lane=1 if is_odd and kind == "calls" else 0),)
        if kind == "copies" and is_odd and layer is not layers.layers[-1]:
            parts[layer.name] = tile_layer(layers, layer, "height", [1.0, 1.0], [DEVICE_NAMES[0], DEVICE_NAMES[0]])
    return parts


def _frame_counts(compilation: PipelineState) -> Mapping[str, int]:
    """Return the numbers of calls, messages, bytes sent, onnxruntime nodes and copied bytes in a frame."""
    program, routing = compilation.program, compilation.routing
    assert program is not None and routing is not None
    segments = [segment for device in program.devices for segment in device.segments]
    return {
        "calls": len(segments),
        "messages": len(program.transfers),
        "bytes": sum(transfer.value.nbytes for transfer in program.transfers),
        "nodes": sum(len(segment.model.graph.node) for segment in segments),
        "copied": sum(counts.nbytes for counts in count_copies(routing).values()),
    }
