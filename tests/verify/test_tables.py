"""What a client may refuse of an input's numbers: those that are no row of the table in which they end up."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.model import Model
from dicompiler.verify.tables import check_range, looked_up

ROWS, SHAPE = 10, (2, 6)
CONSTANTS = {"three": 3, "zero": [0], "two": [2], "far": [9], "end": [-1], "axis": [1], "flat": [-1], "limit": ROWS - 1}


def network(nodes: str) -> ModelProto:
    """`nodes` ("a = Op(x, y); …") make the tensor `at` of `ids` and `more`, by which rows are taken of a table."""
    made = []
    for line in nodes.split(";"):
        output, _, call = line.strip().partition(" = ")
        op, _, names = call.rstrip(")").partition("(")
        more = {"to": int(TensorProto.INT32)} if op == "Cast" else {"axis": 0} if op == "Concat" else {}
        made.append(helper.make_node(op, names.split(), [output], **more))
    held = [numpy_helper.from_array(np.array(value), name) for name, value in CONSTANTS.items()]
    held.append(numpy_helper.from_array(np.ones((ROWS, 4), "f4"), "table"))
    given = [helper.make_tensor_value_info(name, TensorProto.INT64, SHAPE) for name in ("ids", "more")]
    made.append(helper.make_node("Gather", ["table", "at"], ["y"], "look"))
    made.append(helper.make_node("Identity", ["more"], ["z"]))
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    outputs.append(helper.make_tensor_value_info("z", TensorProto.INT64, None))
    graph = helper.make_graph(made, "g", given, outputs, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class Engine:
    """onnxruntime, with one model."""

    def __init__(self, model: ModelProto) -> None:
        options = ort.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 4, 1
        self._session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])

    def runs(self, ids: NDArray[Any]) -> bool:
        try:
            self._session.run(None, {"ids": ids, "more": np.zeros(SHAPE, np.int64)})
        except Exception:  # onnxruntime's errors share no other base
            return False
        return True


@pytest.mark.parametrize(
    ("nodes", "known"),
    [
        ("at = Identity(ids)", True),
        ("at = Add(ids three)", True),
        ("at = Sub(ids three)", True),
        ("a = Add(three ids); at = Cast(a)", True),
        ("a = Slice(ids zero two axis); at = Add(a three)", True),
        ("a = Slice(ids two far axis); b = Slice(a zero end axis); at = Reshape(b flat)", True),
        ("at = Concat(more ids)", True),
        ("at = Min(ids limit)", False),
        ("at = Mul(ids three)", False),
        ("at = Add(ids more)", False),
        ("at = Sub(three ids)", False),
        ("a = Reshape(ids flat); at = Slice(a zero two)", False),
    ],
)
def test_a_number_is_refused_exactly_where_the_engine_would(nodes: str, known: bool) -> None:
    """At every place, for numbers about both ends of the table; nothing is refused that can be right."""
    model = network(nodes)
    loaded, engine = Model.load(model), Engine(model)
    assert bool(looked_up(loaded, ["ids"])) == known
    for number in (-14, -13, -11, -10, -7, 6, 7, 9, 10, 12, 13):
        for place in np.ndindex(SHAPE):
            ids = np.full(SHAPE, 3)
            ids[place] = number
            refused = ""
            try:
                check_range(loaded, {"ids": ids})
            except DicompilerError as error:
                refused = str(error)
            right = engine.runs(ids)
            assert not (refused and right)
            if known and not right:
                assert refused.startswith(f"input 'ids': {number} at [{place[0]}, {place[1]}]") and "'table'" in refused


def test_what_is_added_is_told() -> None:
    ids = np.zeros(SHAPE, np.int64)
    ids[1, 2] = 8
    with pytest.raises(DicompilerError) as caught:
        check_range(Model.load(network("at = Add(ids three)")), {"ids": ids})
    assert str(caught.value) == (
        "input 'ids': 8 at [1, 2], with 3 added to it, is no row of 'table', which has 10: give numbers from -3 to 6"
    )
