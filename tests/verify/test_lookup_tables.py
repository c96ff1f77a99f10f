"""Checks of input values by a client: indices beyond the table that they index are rejected."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from support.modern_net import MS, Net

from dicompiler.base.errors import DicompilerError
from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.verify.executor import run_model
from dicompiler.verify.lookup_tables import check_indices, find_lookup_tables
from dicompiler.verify.run_inputs import prepare_inputs

ROWS, SHAPE = 10, (2, 6)
CONSTANTS: dict[str, Any] = {
    "three": 3, "zero": [0], "two": [2], "far": [9], "end": [-1], "axis": [1], "flat": [-1], "limit": ROWS - 1,
    "axis2": [2], "deep": [[[3]]], "byte": np.uint8(250), "half": np.float32(0.5), "even": np.float32(2**26),
}  # fmt: skip


def network(nodes: str) -> ModelProto:
    """Return a model in which `nodes` ("a = Op(x y) attribute=1; …") make the indices `at` of `ids` and `more`."""
    made = []
    for line in nodes.split(";"):
        output, _, call = line.strip().partition(" = ")
        op, _, rest = call.partition("(")
        names, _, words = rest.partition(")")
        made.append(helper.make_node(op, names.split(), [output]))
        # Attributes of the node, written as key=integer.
        for key, value in (word.split("=") for word in words.split()):
            made[-1].attribute.append(helper.make_attribute(key, int(value)))
    held = [numpy_helper.from_array(np.array(value), name) for name, value in CONSTANTS.items()]
    held.append(numpy_helper.from_array(np.ones((ROWS, 4), "f4"), "table"))
    given = [helper.make_tensor_value_info(name, TensorProto.INT64, SHAPE) for name in ("ids", "more")]
    made.append(helper.make_node("Gather", ["table", "at"], ["y"], "look"))
    made.append(helper.make_node("Identity", ["more"], ["z"]))
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    outputs.append(helper.make_tensor_value_info("z", TensorProto.INT64, None))
    graph = helper.make_graph(made, "g", given, outputs, held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    return onnx.shape_inference.infer_shapes(model)


class Engine:
    """onnxruntime with one model."""

    def __init__(self, model: ModelProto) -> None:
        options = ort.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 4, 1
        self._session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])

    def runs(self, ids: NDArray[Any]) -> bool:
        try:
            self._session.run(None, {"ids": ids, "more": np.zeros(SHAPE, np.int64)})
        except Exception:  # onnxruntime's errors have no common base class except Exception.
            return False
        return True


@pytest.mark.parametrize(
    ("nodes", "known"),
    [
        ("at = Identity(ids)", True),
        ("at = Add(ids three)", True),
        ("at = Sub(ids three)", True),
        ("a = Add(three ids); at = Cast(a) to=6", True),
        ("a = Slice(ids zero two axis); at = Add(a three)", True),
        ("a = Slice(ids two far axis); b = Slice(a zero end axis); at = Reshape(b flat)", True),
        ("at = Concat(more ids) axis=0", True),
        ("at = Min(ids limit)", False),
        ("at = Mul(ids three)", False),
        ("at = Add(ids more)", False),
        ("at = Sub(three ids)", False),
        ("a = Reshape(ids flat); at = Slice(a zero two)", False),
        ("at = Add(ids deep)", True),
        ("a = Add(ids deep); at = Slice(a zero two axis2)", False),
        ("a = Sub(ids deep); at = Slice(a zero axis axis)", False),
        ("a = Cast(ids) saturate=1 to=6; at = Cast(a) saturate=1 to=7", True),
        ("a = Cast(ids) saturate=1 to=2; at = Cast(a) to=7", False),
        ("a = Cast(ids) to=2; b = Add(a byte); at = Cast(b) to=7", False),
        ("a = Cast(ids) to=1; b = Add(a half); at = Cast(b) to=7", False),
        ("a = Cast(ids) to=1; b = Add(a even); c = Sub(b even); at = Cast(c) to=7", False),
    ],
)
def test_rejects_index_exactly_if_onnxruntime_does(nodes: str, known: bool) -> None:
    """Try numbers around both ends of the table everywhere. No valid number may be rejected."""
    model = network(nodes)
    loaded, engine = Model.load(model), Engine(model)
    assert bool(find_lookup_tables(loaded, ["ids"])) == known
    for number in (-14, -13, -11, -10, -7, 6, 7, 9, 10, 12, 13, 256 + 3, 2**32 + 3, 2**32 + 9):
        for place in np.ndindex(SHAPE):
            ids = np.full(SHAPE, 3)
            ids[place] = number
            refused = ""
            try:
                check_indices(loaded, {"ids": ids})
            except DicompilerError as error:
                refused = str(error)
            right = engine.runs(ids)
            assert not (refused and right)
            if known and not right:
                assert (
                    refused.startswith(f"input 'ids': the number {number} at [{place[0]}, {place[1]}]")
                    and "'table'" in refused
                )


def test_reports_offset() -> None:
    ids = np.zeros(SHAPE, np.int64)
    ids[1, 2] = 8
    with pytest.raises(DicompilerError) as caught:
        check_indices(Model.load(network("at = Add(ids three)")), {"ids": ids})
    assert str(caught.value) == (
        "input 'ids': the number 8 at [1, 2] (to which the model adds 3) is not the index of a row of 'table', "
        "which has 10 rows: give numbers from -3 to 6"
    )


def grouped(net: Net, more: int = 1, **attributes: int) -> str:
    """Return a GroupQueryAttention of one row behind a cache of six rows, with given positions."""
    shapes = {"q": (1, 1, 32), "k": (1, 1, 16), "v": (1, 1, 16), "pk": (1, 1, 6, 16), "pv": (1, 1, 6, 16)}
    inputs = [net.input(name, shape) for name, shape in shapes.items()]
    counts = {"num_heads": 2, "kv_num_heads": 1, **attributes}
    places = [net.const(np.full(1, 5 + more), np.int32), net.const(6 + more, np.int32)]
    if not attributes:
        places[0] = net.input("ids", (1,), TensorProto.INT32)
        return net.op("GroupQueryAttention", *inputs, *places, domain=MS, outputs=3, **counts)
    turns = [net.const(np.ones((ROWS, 8))) for _ in range(2)]
    last = net.input("ids", (1, 1), TensorProto.INT64)
    return net.op("GroupQueryAttention", *inputs, *places, *turns, last, domain=MS, outputs=3, **counts)


def scattered(net: Net, *shape: int) -> str:
    updates = net.const(np.ones((1, *(ROWS, 100)[shape[-1] :])))
    return net.op("ScatterND", net.const(np.ones((ROWS, 100))), net.input("ids", shape, TensorProto.INT64), updates)


def added(net: Net) -> str:
    """Return an Add with floats, so that the input is not used as an index."""
    return net.op("Add", net.input("ids", (2, 6)), net.const(np.inf))


@pytest.mark.parametrize(
    ("build", "known"),
    [
        (grouped, True),
        (partial(grouped, more=0), True),
        (lambda net: f"{grouped(net)} t0_1 t0_2", True),
        (partial(grouped, do_rotary=1), True),
        (partial(grouped, do_rotary=0), False),
        (lambda net: scattered(net, 1, 1), True),
        (lambda net: scattered(net, 1, 2), False),
        (added, False),
    ],
)
def test_rejects_cache_rows_and_positions_exactly_if_onnxruntime_does(build: Callable[[Net], str], known: bool) -> None:
    net = Net()
    model = prepare(Model.load(net.model(*build(net).split()))).model
    assert bool(find_lookup_tables(model, ["ids"])) == known
    for number in (-11, -10, -1, 0, 5, 6, 7, 9, 10, 50, 99):
        given: dict[str, Any] = dict(prepare_inputs(model))
        given["ids"] = np.full_like(given["ids"], number)
        refused = right = True
        with suppress(DicompilerError):
            check_indices(model, given)
            refused = False
        try:
            run_model(model, given)
        except DicompilerError:
            right = False
        assert not (refused and right) and (refused or right or not known), number


def test_random_positions_reach_added_cache_row() -> None:
    net = Net()
    model = prepare(Model.load(net.model(grouped(net)))).model
    assert {int(prepare_inputs(model, seed=seed)["ids"][0]) for seed in range(100)} == {*range(7)}


def test_random_first_position_leaves_room_for_all_rows() -> None:
    net = Net()
    places = [net.input("ids", (1,), TensorProto.INT64), *(net.const(np.ones((ROWS, 4))) for _ in range(2))]
    model = Model.load(net.model(net.op("RotaryEmbedding", net.input("x", (1, 2, 8, 8)), *places, domain=MS)))
    for seed in range(20):
        (turned,) = run_model(model, prepare_inputs(model, seed=seed)).values()
        assert turned.shape == (1, 2, 8, 8) and np.isfinite(turned).all()


def test_ignores_operators_of_other_domains() -> None:
    net = Net()
    net.op("Gather", net.const(np.ones((ROWS, 4))), net.input("ids", (1,), TensorProto.INT64), domain="other")
    assert not find_lookup_tables(Model.load(net.model("t0")), ["ids"])
