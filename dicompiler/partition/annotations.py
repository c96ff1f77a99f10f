"""Metadata of placed models: device, lane, part and region of each node; sources and sinks.

Only this module reads and writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

import onnx

from dicompiler.ir.onnx.model import Model
from dicompiler.ir.tasks import TaskId

DEVICE_KEY, LANE_KEY, REGION_KEY, ORIGIN_KEY = (
    "dicompiler.device",
    "dicompiler.lane",
    "dicompiler.region",
    "dicompiler.origin",
)
PART_KEY = "dicompiler.part"  # "layer/index" of a node's part
SOURCE_KEY, SINKS_KEY = "dicompiler.source", "dicompiler.sinks"
_KEYS = {DEVICE_KEY, LANE_KEY, REGION_KEY, ORIGIN_KEY, PART_KEY, SOURCE_KEY, SINKS_KEY}


class NodeAnnotation(NamedTuple):
    """Metadata of a node.

    Attributes:
        device: Device on which it runs.
        origin: The model's node or the tensor for which it was made.
        region: Region that it computes, as text; '' in layers that stay whole.
        part: Part to which it belongs; None if it belongs to no part.
        lane: Lane of the device.
    """

    device: str
    origin: str = ""
    region: str = ""
    part: TaskId | None = None
    lane: int = 0


def write_annotation(node: onnx.NodeProto, annotation: NodeAnnotation) -> None:
    """Add an annotation to a node's metadata."""
    device, origin, region, part, lane = annotation
    optional = {REGION_KEY: region, PART_KEY: part and "{}/{}".format(*part), LANE_KEY: lane and str(lane)}
    for key, value in {DEVICE_KEY: device, ORIGIN_KEY: origin, **{k: v for k, v in optional.items() if v}}.items():
        node.metadata_props.add(key=key, value=value)


def read_annotation(node: onnx.NodeProto) -> NodeAnnotation:
    """Return the annotation of a node.

    Args:
        node: A node of a placed model.

    Returns:
        The annotation.

    Raises:
        KeyError: The node has no device.
    """
    texts = {entry.key: entry.value for entry in node.metadata_props}
    lane = int(texts.get(LANE_KEY, "0"))
    return NodeAnnotation(
        texts[DEVICE_KEY], texts.get(ORIGIN_KEY, ""), texts.get(REGION_KEY, ""), read_part(node), lane
    )


def read_part(node: onnx.NodeProto) -> TaskId | None:
    """Return the part to which a node belongs.

    Args:
        node: A node.

    Returns:
        Layer name and index of the part; None if it belongs to no part, or has no device.
    """
    text = next((entry.value for entry in node.metadata_props if entry.key == PART_KEY), "")
    layer, slash, index = text.rpartition("/")
    return (layer, int(index)) if slash else None


def remove_annotations(model: Model) -> Model:
    """Return a model without annotations that shares its weights.

    Args:
        model: A placed model.

    Returns:
        The new model.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    for message in (proto, *proto.graph.node):
        kept = [entry for entry in message.metadata_props if entry.key not in _KEYS]
        del message.metadata_props[:]
        message.metadata_props.extend(kept)
    return Model(proto, model.weights)


def write_source_and_sinks(model: onnx.ModelProto, source: tuple[str, ...], copies: Mapping[str, str]) -> None:
    """Store the sources, and the outputs that are copies for further sinks, in a model's metadata.

    `copies` maps each copy to the original output.
    """
    for key, value in ((SOURCE_KEY, json.dumps(source)), (SINKS_KEY, json.dumps(copies, sort_keys=True))):
        model.metadata_props.add(key=key, value=value)


def read_source_and_sinks(model: onnx.ModelProto) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the sources and the copies as `write_source_and_sinks` takes them."""
    texts = {entry.key: entry.value for entry in model.metadata_props}
    return tuple(json.loads(texts[SOURCE_KEY])), json.loads(texts[SINKS_KEY])
