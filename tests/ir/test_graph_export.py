"""Models round-trip through the editable graph without losing data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from support.onnx_models import body_model, rich_model, small

from dicompiler.ir.onnx.model import Model

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"


@pytest.mark.parametrize("make", [small, body_model, rich_model])
@pytest.mark.parametrize("touch", [False, True], ids=["untouched", "values read"])
def test_round_trip_through_the_graph_loses_nothing(make: Any, touch: bool) -> None:
    model = Model.load(make())
    graph = model.graph()
    if touch:
        for tensor in graph.tensors().values():
            if isinstance(tensor, gs.Constant) and tensor.name != "scarce":
                assert tensor.values is not None
    again = model.with_graph(graph)
    assert again.proto == model.proto
    assert dict(again.weights) == dict(model.weights)
    assert again.digest() == model.digest()


def test_light_models_round_trip_through_the_graph() -> None:
    files = sorted(LIGHT.glob("*.onnx"))
    assert len(files) == 9
    for file in files:
        model = Model.load(file)
        model.check(file.name)
        assert model.with_graph(model.graph()).proto == model.proto, file.name


def test_operator_models_of_onnx_round_trip_through_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(LIGHT.parent.glob("*/*/model.onnx"))
    assert len(files) > 100
    for file in files:
        original = onnx.load(file)
        model = Model.load(file)
        for node, named in zip(original.graph.node, model.proto.graph.node, strict=True):
            node.name = named.name
        assert model.to_proto() == original, file
        assert model.with_graph(model.graph()).proto == model.proto, file
    assert capsys.readouterr().out == ""


def test_edits_keep_everything_else() -> None:
    model = Model.load(rich_model())
    graph = model.graph()
    graph.nodes[0].outputs[0].name = "hidden"
    graph.tensors()["w"].name = "kernel"
    relu = gs.Node("Relu", "clip", inputs=[graph.outputs[0]], outputs=[gs.Variable("y2", np.float32, ["N", 8])])
    graph.nodes.append(relu)
    graph.outputs[0] = relu.outputs[0]
    del graph.nodes[2].attrs["bytes"]
    new = model.with_graph(graph)
    product, thing = new.proto.graph.node[0], new.proto.graph.node[2]
    assert (list(product.input), list(product.output)) == (["x", "kernel"], ["hidden"])
    assert product.doc_string == "a node"
    assert product.metadata_props[0].value == "pi01"
    assert product.overload == "v2"
    assert [a.name for a in thing.attribute] == ["hollow", "mode", "texts", "kind", "f", "table"]
    assert [v.name for v in new.proto.graph.output] == ["y2", "z"]
    assert new.weights["kernel"] is model.weights["w"]
    assert "w" not in new.weights
    assert "w" in model.weights


def test_renames_in_the_graph_do_not_reach_the_model() -> None:
    proto = small()
    before = proto.SerializeToString()
    model = Model.load(proto)
    skeleton = model.proto.SerializeToString()
    graph = model.graph()
    for tensor in graph.tensors().values():
        tensor.name += "_renamed"
    gs.export_onnx(graph)
    model.with_graph(graph)
    assert model.proto.SerializeToString() == skeleton
    assert proto.SerializeToString() == before


def test_constants_captured_by_a_body_stay_in_the_outer_graph() -> None:
    model = Model.load(body_model())
    graph = model.graph()
    graph.nodes[0].attrs["note"] = 1  # A changed node is written again; unchanged protobuf messages are only copied.
    new = model.with_graph(graph).proto
    assert [t.name for t in new.graph.initializer] == ["k", "w"]
    assert not new.graph.node[1].attribute[0].g.initializer
    graph.tensors()["a"].name = "renamed"
    branches = [a.g for a in model.with_graph(graph).proto.graph.node[1].attribute]
    assert [b.node[0].input[0] for b in branches] == ["renamed", "renamed"]


def test_new_constants_become_weights_when_large_and_stay_inline_when_small() -> None:
    model = Model.load(small())
    graph = model.graph()
    graph.nodes[1].inputs[1] = gs.Constant("b2", np.zeros((100, 8), np.float32)[:1])
    graph.nodes[0].inputs[1] = gs.Constant("w2", np.ones((64, 8), np.float32))
    new = model.with_graph(graph)
    assert set(new.weights) == {"w2"}
    assert sorted(new.initializers()) == ["b2", "w2"]
    np.testing.assert_array_equal(new.array("w2"), np.ones((64, 8)))
