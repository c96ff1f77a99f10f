"""Random networks with states, and the outputs that onnxruntime computes for consecutive frames."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from support.generators import integers, random_model, random_plan
from support.layer_graphs import rules

from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.recurrent_states import read_states, write_states
from dicompiler.verify.executor import run_model
from dicompiler_passes.form_layers import form_layers
from dicompiler_passes.partition import PartitionPass

FLOAT = onnx.TensorProto.FLOAT


def random_stateful(rng: Random, states: int = 2) -> Model:
    """Return a random network with states.

    Each state keeps a tensor of one frame, limited to -4 … 4, and adds it to another tensor in the next frame.
    """
    proto = onnx.shape_inference.infer_shapes(random_model(rng))
    graph, pairs = proto.graph, list[tuple[str, str]]()
    shapes = {
        value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for value in (*graph.value_info, *graph.output)
        if value.type.tensor_type.elem_type == FLOAT
    }
    inputs, attributes = ["low", "high"], dict[str, float]()
    if next(entry.version for entry in proto.opset_import if not entry.domain) < 11:
        inputs, attributes = [], {"min": -4.0, "max": 4.0}
    graph.initializer.extend(numpy_helper.from_array(np.float32(-4 if n == "low" else 4), n) for n in inputs)
    for number in range(states):
        made = [name for node in graph.node for name in node.output if shapes.get(name)]
        into = rng.choice(made)
        past, sums, present = f"past.{number}", f"sum.{number}", f"present.{number}"
        at = next(i for i, node in enumerate(graph.node) if into in node.output)
        for node in graph.node[at + 1 :]:
            node.input[:] = [sums if name == into else name for name in node.input]
        nodes = [*graph.node]
        nodes.insert(at + 1, helper.make_node("Add", [into, past], [sums], sums))
        shapes[sums] = shapes[into]
        kept = rng.choice([name for name in (*made, sums) if shapes[name] == shapes[into]])
        nodes.append(helper.make_node("Clip", [kept, *inputs], [present], present, **attributes))
        del graph.node[:]
        graph.node.extend(nodes)
        graph.input.append(helper.make_tensor_value_info(past, FLOAT, shapes[into]))
        graph.output.append(helper.make_tensor_value_info(present, FLOAT, shapes[into]))
        graph.value_info.append(helper.make_tensor_value_info(sums, FLOAT, shapes[into]))
        pairs.append((past, present))
    write_states(proto, pairs)
    return Model.load(proto)


def placed_states(rng: Random) -> PipelineState:
    """Return a random network with states, partitioned under a random plan."""
    model = random_stateful(rng)
    layers = form_layers(model, rules())
    placed = PartitionPass().run(PipelineState(model=model, layers=layers, plan=random_plan(rng, layers)))
    placed.model.check("partition")
    return replace(placed, reference=model)


def integer_frames(rng: Random, model: Model, count: int) -> list[dict[str, Any]]:
    """Return frames of random integers. The third one sets one state, and thereby resets the other states to zeros."""
    pasts = dict(read_states(model.proto) or ())
    frames = [integers(rng, model.proto) for _ in range(count)]
    given = {name: value for name, value in frames[2].items() if name == next(iter(pasts))}
    frames = [{name: value for name, value in frame.items() if name not in pasts} for frame in frames]
    frames[2] |= given
    return frames


def fed_back(model: Model, frames: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the outputs of consecutive frames in onnxruntime.

    States are zeros in the first frame. A frame that sets a state resets all states that it does not set.
    """
    shapes, made, kept = model.tensors(), list[dict[str, Any]](), dict[str, Any]()
    for frame in frames:
        pasts = [past for past, _ in read_states(model.proto) or ()]
        anew = not kept or any(past in frame for past in pasts)
        if anew:
            kept = {past: np.zeros(shapes[past].shape or (), np.float32) for past in pasts}
        outputs = run_model(model, {**kept, **frame})
        kept = {past: outputs.pop(present) for past, present in read_states(model.proto) or ()}
        made.append(outputs)
    return made
