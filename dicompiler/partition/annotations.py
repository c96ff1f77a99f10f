"""Annotations: what the metadata of a placed model say of its nodes and of the whole. Written and read here alone.

Annotation ⇄ metadata of a NodeProto;   source and sinks ⇄ metadata of a ModelProto
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
PART_KEY = "dicompiler.part"  # layer/index of the part that a node belongs to
SOURCE_KEY, SINKS_KEY = "dicompiler.source", "dicompiler.sinks"
_KEYS = {DEVICE_KEY, LANE_KEY, REGION_KEY, ORIGIN_KEY, PART_KEY, SOURCE_KEY, SINKS_KEY}


class NodeAnnotation(NamedTuple):
    """What is said of a node: the device and the lane that it is on; the model's node or the tensor that it is made
    for; the region that it makes, as text ('': in layers that stay whole); the part that it belongs to, if to one."""

    device: str
    origin: str = ""
    region: str = ""
    part: TaskId | None = None
    lane: int = 0


def write_annotation(node: onnx.NodeProto, annotation: NodeAnnotation) -> None:
    """Adds the annotation to the node's metadata."""
    device, origin, region, part, lane = annotation
    optional = {REGION_KEY: region, PART_KEY: part and "{}/{}".format(*part), LANE_KEY: lane and str(lane)}
    for key, value in {DEVICE_KEY: device, ORIGIN_KEY: origin, **{k: v for k, v in optional.items() if v}}.items():
        node.metadata_props.add(key=key, value=value)


def read_annotation(node: onnx.NodeProto) -> NodeAnnotation:
    """What the node's metadata say. KeyError for a node that is on no device."""
    texts = {entry.key: entry.value for entry in node.metadata_props}
    lane = int(texts.get(LANE_KEY, "0"))
    return NodeAnnotation(
        texts[DEVICE_KEY], texts.get(ORIGIN_KEY, ""), texts.get(REGION_KEY, ""), read_part(node), lane
    )


def read_part(node: onnx.NodeProto) -> TaskId | None:
    """The part that the node belongs to; None where it belongs to none, or is on no device."""
    text = next((entry.value for entry in node.metadata_props if entry.key == PART_KEY), "")
    layer, slash, index = text.rpartition("/")
    return (layer, int(index)) if slash else None


def remove_annotations(model: Model) -> Model:
    """The model with no annotations, its weights shared."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    for held in (proto, *proto.graph.node):
        kept = [entry for entry in held.metadata_props if entry.key not in _KEYS]
        del held.metadata_props[:]
        held.metadata_props.extend(kept)
    return Model(proto, model.weights)


def write_source_and_sinks(model: onnx.ModelProto, source: tuple[str, ...], copies: Mapping[str, str]) -> None:
    """Adds to the model's metadata which devices hold its inputs, and which of its outputs are copies for further
    sinks (output → the original's output that it is)."""
    for key, value in ((SOURCE_KEY, json.dumps(source)), (SINKS_KEY, json.dumps(copies, sort_keys=True))):
        model.metadata_props.add(key=key, value=value)


def read_source_and_sinks(model: onnx.ModelProto) -> tuple[tuple[str, ...], dict[str, str]]:
    """(source, copies) as `annotate_ends` takes them."""
    texts = {entry.key: entry.value for entry in model.metadata_props}
    return tuple(json.loads(texts[SOURCE_KEY])), json.loads(texts[SINKS_KEY])
