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

DEVICE, LANE, REGION, ORIGIN = "dicompiler.device", "dicompiler.lane", "dicompiler.region", "dicompiler.origin"
PART = "dicompiler.part"  # layer/index of the part that a node belongs to
SOURCE, SINKS = "dicompiler.source", "dicompiler.sinks"
_KEYS = {DEVICE, LANE, REGION, ORIGIN, PART, SOURCE, SINKS}


class Annotation(NamedTuple):
    """What is said of a node: the device and the lane that it is on; the model's node or the tensor that it is made
    for; the region that it makes, as text ('': in layers that stay whole); the part that it belongs to, if to one."""

    device: str
    origin: str = ""
    region: str = ""
    part: TaskId | None = None
    lane: int = 0


def annotate(node: onnx.NodeProto, annotation: Annotation) -> None:
    """Adds the annotation to the node's metadata."""
    device, origin, region, part, lane = annotation
    optional = {REGION: region, PART: part and "{}/{}".format(*part), LANE: lane and str(lane)}
    for key, value in {DEVICE: device, ORIGIN: origin, **{k: v for k, v in optional.items() if v}}.items():
        node.metadata_props.add(key=key, value=value)


def annotation_of(node: onnx.NodeProto) -> Annotation:
    """What the node's metadata say. KeyError for a node that is on no device."""
    texts = {entry.key: entry.value for entry in node.metadata_props}
    lane = int(texts.get(LANE, "0"))
    return Annotation(texts[DEVICE], texts.get(ORIGIN, ""), texts.get(REGION, ""), part_of(node), lane)


def part_of(node: onnx.NodeProto) -> TaskId | None:
    """The part that the node belongs to; None where it belongs to none, or is on no device."""
    text = next((entry.value for entry in node.metadata_props if entry.key == PART), "")
    layer, slash, index = text.rpartition("/")
    return (layer, int(index)) if slash else None


def unannotated(model: Model) -> Model:
    """The model with no annotations, its weights shared."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    for held in (proto, *proto.graph.node):
        kept = [entry for entry in held.metadata_props if entry.key not in _KEYS]
        del held.metadata_props[:]
        held.metadata_props.extend(kept)
    return Model(proto, model.weights)


def annotate_ends(model: onnx.ModelProto, source: tuple[str, ...], copies: Mapping[str, str]) -> None:
    """Adds to the model's metadata which devices hold its inputs, and which of its outputs are copies for further
    sinks (output → the original's output that it is)."""
    for key, value in ((SOURCE, json.dumps(source)), (SINKS, json.dumps(copies, sort_keys=True))):
        model.metadata_props.add(key=key, value=value)


def ends_of(model: onnx.ModelProto) -> tuple[tuple[str, ...], dict[str, str]]:
    """(source, copies) as `annotate_ends` takes them."""
    texts = {entry.key: entry.value for entry in model.metadata_props}
    return tuple(json.loads(texts[SOURCE])), json.loads(texts[SINKS])
