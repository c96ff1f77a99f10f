"""Manifests: JSON with one entry per line that round-trips, with all data that a program sends."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from support.handmade import halo, unknown_shape

from dicompiler.base.errors import DicompilerError
from dicompiler.base.schema import validate
from dicompiler.ir.program import TensorSpec, Transfer
from dicompiler.target.manifest import describe_artifact, describe_transfer, describe_value, format_json

KEYS = st.text(max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | KEYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_document_reads_back_as_it_was_whatever_the_order_of_its_keys(document: dict[str, object]) -> None:
    text = format_json(document)
    assert json.loads(text) == document
    assert format_json(dict(reversed(list(document.items())))) == text


def test_each_entry_of_a_list_has_a_line() -> None:
    assert format_json({"b": [1, {"d": 2, "c": 3}], "a": []}) == (
        '{\n "a": [],\n "b": [\n  1,\n  {"c": 3, "d": 2}]\n}\n'
    )


def test_manifest_names_devices_and_all_transfers_of_all_roles_numbered_through() -> None:
    program, _, _ = halo()
    whole = replace(program, other_roles=(program,))
    document = describe_artifact(whole, "sockets", "0" * 64)
    validate(json.loads(format_json(document)), "artifact", "artifact.json")
    assert document["devices"] == ["a", "b", "c"]
    count = len(program.transfers)
    assert [entry["index"] for entry in document["transfers"]] == list(range(2 * count))
    for entry, transfer in zip(document["transfers"], [*program.transfers] * 2, strict=True):
        assert (entry["sender"], entry["receiver"]) == (transfer.sender, transfer.receiver)
        assert entry["bytes"] == transfer.value.nbytes
    assert [entry["name"] for entry in document["inputs"]] == ["x"]


def test_tensor_of_unknown_shape_may_be_input_or_output_but_is_not_sent() -> None:
    program, _, _ = unknown_shape()
    document = describe_value(program.inputs[0])
    assert (document["shape"], document["bytes"]) == (None, None)
    with pytest.raises(DicompilerError, match="tensor 'x': its size is not known before the run, so it"):
        describe_transfer(Transfer(0, "a", "b", program.inputs[0]))


def test_strings_and_other_values_are_inputs_and_outputs_but_are_not_sent() -> None:
    for dtype, named in ((TensorProto.STRING, "STRING"), (TensorProto.UNDEFINED, "NESTED")):
        value = TensorSpec("x", dtype, (2,))
        assert describe_value(value) == {"name": "x", "dtype": named, "shape": [2], "bytes": None}
        with pytest.raises(DicompilerError, match="tensor 'x': its size is not known before the run, so it"):
            describe_transfer(Transfer(0, "a", "b", value))


@pytest.mark.parametrize("dtype", [TensorProto.COMPLEX64, TensorProto.INT4])
def test_type_that_cannot_be_sent_is_named(dtype: int) -> None:
    kind = TensorProto.DataType.Name(dtype)
    with pytest.raises(DicompilerError, match=f"tensor 'x': values of type {kind} cannot be sent between devices"):
        describe_value(TensorSpec("x", dtype, (2,)))
