"""Wire formats: text, plans, and bytes that are sent."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.layer_graphs import formed

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.ir.onnx.weights import dtype_name
from dicompiler.ir.plan import Part, Plan, plan_from_json, plan_to_text
from dicompiler.ir.wire_dtype import (
    WireFormat,
    effective_wire_dtypes,
    int8_scale_and_zero_point,
    parse_wire_format,
    requested_wire_dtypes,
    sent_dtype,
    sent_nbytes,
    with_wire_dtypes,
)

NETWORK = """<ir_version: 8, opset_import: ["": 17]> g (float[1, 4] x) => (double[1, 4] wide, int64[1] top)
{ r = Relu (x)  s = Sigmoid (r)  wide = Cast <to = 11> (s)  top = ArgMax <axis = 1, keepdims = 0> (s) }"""
PLAN = Plan({"conv": (Part("a"),)}, ("a",), ("a",))


@pytest.mark.parametrize(
    ("given", "types"),
    [
        ("float16", (("*", "float16"),)),
        ("int8, conv1=float32", (("*", "int8"), ("conv1", "float32"))),
        ("a=b=bfloat16", (("a=b", "bfloat16"),)),
        ({"*": "float16", "b": "int8", "a": "float32"}, (("*", "float16"), ("a", "float32"), ("b", "int8"))),
    ],
)
def test_parses_text_and_mappings(given: Any, types: tuple[tuple[str, str], ...]) -> None:
    wire = parse_wire_format(given)
    assert wire is not None and wire.dtypes == types
    assert parse_wire_format(str(wire)) == wire


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("float8", "wire: unknown type 'float8' (did you mean 'float32'?): use one of"),
        ("", "wire: unknown type ''"),
        ("exact", "wire: unknown type 'exact'"),
        ("float16,int8", "wire: all layers have two types: give one type"),
        ("a=int8,a=float16", "wire: 'a' has two types: give one type"),
    ],
)
def test_rejects_unknown_types(given: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_wire_format(given)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    "wire",
    [
        WireFormat(),
        WireFormat((("*", "float16"),)),
        WireFormat((("*", "int8-block"), ("conv", "float16"))),
        WireFormat((("*", "int8"), ("conv", "float32")), {"x": (-1.5, 2.25), "t+0:4": (0.1, 1e-30)}),
    ],
)
def test_plans_round_trip_with_their_wire_format(wire: WireFormat) -> None:
    plan = replace(PLAN, wire_format=wire)
    assert plan_from_json(json.loads(plan_to_text(plan))) == plan
    assert ("wire_dtype" in json.loads(plan_to_text(plan))) == bool(wire.dtypes)


@pytest.mark.parametrize("wire", ["float8", "exact", {}, {"conv": "int4"}, 16])
def test_rejects_plans_with_unknown_wire_types(wire: Any) -> None:
    with pytest.raises(DicompilerError, match=r"my\.json: wire_dtype"):
        plan_from_json({**json.loads(plan_to_text(PLAN)), "wire_dtype": wire}, "my.json")


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("float16", {"x": "FLOAT16", "r": "FLOAT16", "wide": "FLOAT16", "top": "INT64"}),
        ("int8", {"x": "INT8", "r": "INT8", "wide": "DOUBLE", "top": "INT64"}),
        ("int8-block", {"x": "INT8", "r": "INT8", "wide": "INT8", "top": "INT64"}),
        ("bfloat16,x=float32", {"x": "FLOAT", "r": "BFLOAT16", "wide": "BFLOAT16"}),
    ],
)
def test_narrows_only_float_tensors(given: str, sent: dict[str, str]) -> None:
    wire = parse_wire_format(given)
    assert wire is not None
    layers = with_wire_dtypes(formed(NETWORK), wire.dtypes)
    assert {name: dtype_name(sent_dtype(layers, name)) for name in sent} == sent
    assert requested_wire_dtypes(layers).keys() >= effective_wire_dtypes(layers).keys()
    assert sent_nbytes(layers, "r", (1, 4)) == {"float16": 8, "int8": 4, "int8-block": 5}.get(given, 8)
    exact = with_wire_dtypes(formed(NETWORK), wire.with_exact_stand_ins.dtypes)
    assert dtype_name(sent_dtype(exact, "r")) == "FLOAT" and "r" in effective_wire_dtypes(exact)


def test_rejects_unknown_layer_names() -> None:
    with pytest.raises(UsageError, match=r"the network has no layer and no input 'Relu_9'"):
        with_wire_dtypes(formed(NETWORK), (("Relu_9", "float16"),))


@pytest.mark.parametrize("measured", [(-1.0, 3.0), (0.5, 2.0), (-3.0, -1.0), (0.0, 0.0), (-1e-42, 1e-42), (-2, 2)])
def test_int8_steps_cover_the_range_and_zero(measured: tuple[float, float]) -> None:
    scale, zero = int8_scale_and_zero_point(measured)
    assert scale > 0 and -128 <= zero <= 127
    for value in (*measured, 0.0):
        step = max(-128, min(127, round(value / scale) + zero))
        assert np.float32(scale) > 0
        assert abs((step - zero) * scale - value) <= scale / 2 * (1 + 1e-9)
