"""Metadata of placed models: device, lane, part and region of each node, and the sources of the model.

Only this module reads and writes the metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

import onnx

from dicompiler.ir.onnx.model import Model
from dicompiler.ir.routing import TaskId

DEVICE_KEY, LANE_KEY = "dicompiler.device", "dicompiler.lane"
REGION_KEY, ORIGIN_KEY = "dicompiler.region", "dicompiler.origin"
PART_KEY = "dicompiler.part"
"""Metadata key of the part (a layer's share on one device) to which a node belongs; the value is "LAYER/INDEX"."""
SOURCE_KEY, SINKS_KEY = "dicompiler.source", "dicompiler.sinks"
_KEYS = {DEVICE_KEY, LANE_KEY, REGION_KEY, ORIGIN_KEY, PART_KEY, SOURCE_KEY, SINKS_KEY}


class NodeAnnotation(NamedTuple):
    """Metadata of a node.

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
    """Return the annotation of a node of a placed (partitioned) model; KeyError if the node has no device."""
    texts = {entry.key: entry.value for entry in node.metadata_props}
    lane = int(texts.get(LANE_KEY, "0"))
    origin, region = texts.get(ORIGIN_KEY, ""), texts.get(REGION_KEY, "")
    return NodeAnnotation(texts[DEVICE_KEY], origin, region, read_part(node), lane)


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
    """Store the source devices, and the outputs that are copies for further sinks, in a model's metadata.

    Sources are the devices that have the model's inputs, and sinks the devices that receive its outputs.
    `copies` gives the original output of each copy.
    """
    for key, value in ((SOURCE_KEY, json.dumps(source)), (SINKS_KEY, json.dumps(copies, sort_keys=True))):
        model.metadata_props.add(key=key, value=value)


def read_source_and_copies(model: onnx.ModelProto) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the source devices, and the original output of each output that is a copy for another sink.

    Sources are the devices that have the model's inputs, and sinks the devices that receive its outputs.
    """
    texts = {entry.key: entry.value for entry in model.metadata_props}
    return tuple(json.loads(texts[SOURCE_KEY])), json.loads(texts[SINKS_KEY])
