"""Annotations of nodes and of placed models round-trip."""

from __future__ import annotations

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dicompiler.partition.placed_model import (
    NodeAnnotation,
    read_annotation,
    read_part,
    read_source_and_copies,
    write_annotation,
    write_source_and_copies,
)

NAMES = st.text("ab/é, \n\"'", min_size=1, max_size=6)
ANNOTATIONS = st.builds(
    NodeAnnotation,
    NAMES,
    st.just("") | NAMES,
    st.sampled_from(["", "[0:1, 2:5]"]),
    st.none() | st.tuples(NAMES, st.integers(0, 99)),
    st.integers(0, 9),
)


def written(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return the node after a round trip through a file."""
    return onnx.NodeProto.FromString(node.SerializeToString())


@given(ANNOTATIONS)
def test_annotations_round_trip(annotation: NodeAnnotation) -> None:
    node = onnx.helper.make_node("Relu", ["x"], ["y"], name="n")
    write_annotation(node, annotation)
    assert read_annotation(written(node)) == annotation
    assert read_part(written(node)) == annotation.part


@given(ANNOTATIONS)
def test_annotations_keep_other_metadata(annotation: NodeAnnotation) -> None:
    node = onnx.helper.make_node("Relu", ["x"], ["y"], name="n")
    node.metadata_props.add(key="trained", value="yes")
    before = written(node)
    write_annotation(node, annotation)
    assert node.metadata_props[0] == before.metadata_props[0]
    del node.metadata_props[:], before.metadata_props[:]
    assert node == before


def test_nodes_without_device_have_no_annotation() -> None:
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    assert read_part(node) is None
    with pytest.raises(KeyError):
        read_annotation(node)


@given(st.lists(NAMES, min_size=1, unique=True).map(tuple), st.dictionaries(NAMES, NAMES))
def test_sources_and_sinks_round_trip(source: tuple[str, ...], copies: dict[str, str]) -> None:
    model = onnx.ModelProto()
    write_source_and_copies(model, source, copies)
    assert read_source_and_copies(onnx.ModelProto.FromString(model.SerializeToString())) == (source, copies)
