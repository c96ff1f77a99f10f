"""Placed models: a placed graph (nodes with devices) as an ONNX model with metadata.

    PlacedGraph ──write_placed_model──► placed Model ──read_placed_model──► PlacedGraph

The metadata has the device, lane, part and region of each node, and the sources and sinks of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.graph_structure import tensors_read
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import MIN_WEIGHT_BYTES, Weight, make_placeholder
from dicompiler.ir.program import TensorSpec
from dicompiler.ir.recurrent_states import read_state_pieces, write_state_pieces
from dicompiler.ir.regions import region_shape
from dicompiler.ir.routing import TaskId
from dicompiler.partition.placed_graph import (
    Constant,
    NodePlacement,
    PlacedGraph,
    PlacedNode,
    PlacedTensor,
    WeightSlice,
)
from dicompiler.partition.routing import format_region

DEFAULT_OPSET = 13
"""Version of the standard operators in placed (partitioned) models, if the original model states none."""
DEVICE_KEY, LANE_KEY = "dicompiler.device", "dicompiler.lane"
REGION_KEY, ORIGIN_KEY = "dicompiler.region", "dicompiler.origin"
PART_KEY = "dicompiler.part"
"""Metadata key of the part (a layer's share on one device) to which a node belongs; the value is "LAYER/INDEX"."""
SOURCE_KEY, OUTPUT_COPIES_KEY = "dicompiler.source", "dicompiler.sinks"
_KEYS = {DEVICE_KEY, LANE_KEY, REGION_KEY, ORIGIN_KEY, PART_KEY, SOURCE_KEY, OUTPUT_COPIES_KEY}


class NodeAnnotation(NamedTuple):
    """Metadata of a node of a placed (partitioned) model.

    Attributes:
        device: Device that runs the node.
        origin: Name of the model's node or tensor for which the node was added.
        region: Region that the node computes, as text; "" in a layer that stays whole.
        part: Layer and index of the part to which the node belongs; None if it belongs to no part.
        lane: Number of a group of the device's parts. The device computes one group (lane) after another.
    """

    device: str
    origin: str = ""
    region: str = ""
    part: TaskId | None = None
    lane: int = 0


def write_annotation(node: onnx.NodeProto, annotation: NodeAnnotation) -> None:
    device, origin, region, part, lane = annotation
    optional = {REGION_KEY: region, PART_KEY: part and "{}/{}".format(*part), LANE_KEY: lane and str(lane)}
    for key, value in {DEVICE_KEY: device, ORIGIN_KEY: origin, **{k: v for k, v in optional.items() if v}}.items():
        node.metadata_props.add(key=key, value=value)


def read_annotation(node: onnx.NodeProto) -> NodeAnnotation:
    """Return the metadata (device, part, region, …) of a node of a placed (partitioned) model.

    Raises:
        KeyError: The node has no device.
    """
    texts = {entry.key: entry.value for entry in node.metadata_props}
    lane = int(texts.get(LANE_KEY, "0"))
    origin, region = texts.get(ORIGIN_KEY, ""), texts.get(REGION_KEY, "")
    return NodeAnnotation(texts[DEVICE_KEY], origin, region, read_part(node), lane)


def check_not_placed(model: Model) -> None:
    """Raise DicompilerError if the model is a placed (partitioned) model, which cannot be split again."""
    for node in model.proto.graph.node:
        device = next((entry.value for entry in node.metadata_props if entry.key == DEVICE_KEY), None)
        if device is not None:
            raise DicompilerError(
                f"{model.display_name}: the model is already split (node {node.name!r} is on device {device!r}): give "
                "the original model, with the plan that 'dicompiler opt --save-plan' writes"
            )


def read_part(node: onnx.NodeProto) -> TaskId | None:
    """Return the part of a layer (its share on one device) to which a node belongs.

    Args:
        node: Node of a placed (partitioned) model.

    Returns:
        Layer name, and index of the part in the layer's list of parts. None if the node belongs to no part.
    """
    text = next((entry.value for entry in node.metadata_props if entry.key == PART_KEY), "")
    layer, slash, index = text.rpartition("/")
    return (layer, int(index)) if slash else None


def remove_annotations(model: Model) -> Model:
    """Return a copy of a placed (partitioned) model without the metadata of the partition pass; weights are shared.

    Args:
        model: A placed model.

    Returns:
        The copy.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    for message in (proto, *proto.graph.node):
        kept = [entry for entry in message.metadata_props if entry.key not in _KEYS]
        del message.metadata_props[:]
        message.metadata_props.extend(kept)
    return Model(proto, model.weights)


def write_source_and_copies(model: onnx.ModelProto, source: tuple[str, ...], copies: Mapping[str, str]) -> None:
    """Store the source devices (those that have the model's inputs) and the copied outputs in a model's metadata.

    `copies` maps each output that is a copy for a further sink (a device that receives outputs) to the original output.
    """
    for key, value in ((SOURCE_KEY, json.dumps(source)), (OUTPUT_COPIES_KEY, json.dumps(copies, sort_keys=True))):
        model.metadata_props.add(key=key, value=value)


def read_source_and_copies(model: onnx.ModelProto) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the source devices, and the original output of each output that is a copy for another sink.

    Sources are the devices that have the model's inputs, and sinks the devices that receive its outputs.
    """
    texts = {entry.key: entry.value for entry in model.metadata_props}
    return tuple(json.loads(texts[SOURCE_KEY])), json.loads(texts[OUTPUT_COPIES_KEY])


def write_placed_model(model: Model, placed: PlacedGraph) -> Model:
    """Return a placed graph (nodes with devices) as an ONNX model, with devices and regions in the metadata of nodes.

    Everything but the nodes is copied from `model`: header, inputs, and the initializers that are read.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    # Slices, concatenations and sums are standard operators, so the model must state an opset of the standard domain.
    if not any(entry.domain in ("", "ai.onnx") for entry in proto.opset_import):
        proto.opset_import.append(helper.make_opsetid("", DEFAULT_OPSET))
    graph = proto.graph
    del graph.node[:], graph.value_info[:], graph.output[:], graph.initializer[:]
    graph.node.extend(_node_proto(node) for node in placed.nodes)
    written_states = (piece.written_name for piece in placed.state_pieces)
    graph.output.extend(_value_info(placed, name) for name in dict.fromkeys((*placed.model_outputs, *written_states)))
    if placed.states:
        states = [(state.name, state.dtype, state.shape or ()) for state in placed.states]
        kept = [value for value in graph.input if value.name not in [name for name, *_ in states]]
        del graph.input[:]
        graph.input.extend((*kept, *(_value_info(placed, piece.read_name) for piece in placed.state_pieces)))
        write_state_pieces(proto, placed.state_pieces, states)
    declared = {v.name for v in (*graph.input, *graph.output)}
    graph.value_info.extend(_value_info(placed, name) for name in placed.infos if name not in declared)
    whole = [tensor for tensor in model.proto.graph.initializer if tensor.name in placed.used_names]
    graph.initializer.extend(whole)
    weights = {tensor.name: model.weights[tensor.name] for tensor in whole if tensor.name in model.weights}
    for name, constant in placed.constants.items():
        tensor, weight = _initializer(model, name, constant)
        graph.initializer.append(tensor)
        if weight is not None:
            weights[name] = weight
    copies = {name: output for name, output in placed.model_outputs.items() if name != output}
    write_source_and_copies(proto, placed.source, copies)
    return Model(proto, weights)


def _node_proto(node: PlacedNode) -> onnx.NodeProto:
    proto = onnx.NodeProto()
    if node.template is not None:
        proto.CopyFrom(node.template)
    proto.name, proto.op_type = node.name, node.op or proto.op_type
    proto.input[:], proto.output[:] = node.inputs, node.outputs
    if node.attributes:
        kept = [attribute for attribute in proto.attribute if attribute.name not in node.attributes]
        kept += [helper.make_attribute(k, v) for k, v in node.attributes.items() if v is not None]
        del proto.attribute[:]
        proto.attribute.extend(kept)
    place = node.placement
    region = "" if node.region is None else format_region(node.region)
    write_annotation(proto, NodeAnnotation(place.device, node.origin, region, place.part, place.lane))
    return proto


def _value_info(placed: PlacedGraph, name: str) -> onnx.ValueInfoProto:
    info = placed.infos[name]
    if isinstance(info, PlacedTensor):
        return helper.make_tensor_value_info(name, info.dtype, region_shape(info.region))
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(info)
    copy.name = name
    return copy


def _initializer(model: Model, name: str, constant: Constant) -> tuple[onnx.TensorProto, Weight | None]:
    """Return the initializer of a constant, and its data if the initializer is a placeholder without data, else None.

    Large regions of weights get a placeholder, so that their data is not copied.
    """
    if not isinstance(constant, WeightSlice):
        array = np.array(constant, np.int64) if isinstance(constant, tuple) else constant
        return onnx.numpy_helper.from_array(array, name), None
    stored = model.weights.get(constant.weight)
    whole = Weight.from_array(model.array(constant.weight)) if stored is None else stored
    weight = whole.take_region(constant.region)
    if weight.nbytes < MIN_WEIGHT_BYTES:
        return onnx.numpy_helper.from_array(weight.array(), name), None
    return make_placeholder(name, weight), weight


def read_placed_model(model: Model) -> PlacedGraph:
    """Return the placed graph (nodes with devices) of a model that `write_placed_model` has written."""
    graph = model.proto.graph
    source, copies = read_source_and_copies(model.proto)
    pieces, states = read_state_pieces(model.proto)
    kept = {name for piece in pieces for name in (piece.read_name, piece.written_name)}
    constants = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    nodes = []
    for node in graph.node:
        annotation = read_annotation(node)
        place = NodePlacement(annotation.device, annotation.lane, part=annotation.part)
        nodes.append(
            PlacedNode(place, annotation.origin, tuple(tensors_read(node)), tuple(node.output), op=node.op_type)
        )
    return PlacedGraph(
        nodes,
        {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)},
        tuple(v.name for v in graph.input if v.name not in constants and v.name not in kept),
        source,
        {v.name: copies.get(v.name, v.name) for v in graph.output if v.name not in kept},
        state_pieces=pieces,
        states=tuple(TensorSpec(*state) for state in states),
    )
