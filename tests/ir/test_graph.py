"""Edits of a graph: each method, unchanged data, and the untouched original model."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from onnx import TensorProto, helper, numpy_helper

from dicompiler.ir.onnx.graph import GraphNode, ModelGraph, Variable
from dicompiler.ir.onnx.model import Model


def load(text: str, ir: int = 8, opset: int = 17, **weights: Any) -> Model:
    """Return a model from the ONNX text of its graph, with large weights by name."""
    proto = onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}]> {text}')
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    for index, node in enumerate(proto.graph.node):
        node.doc_string = f"about {index}"
        node.metadata_props.add(key="index", value=str(index))
    return Model.load(proto)


def chain() -> Model:
    """Return the model x → MatMul w → Add b → Relu → y."""
    return load(
        """g (float[3, 64] x) => (float[3, 64] y) <float[64] h, float[64] s>
        { h = MatMul (x, w)  s = Add (h, b)  y = Relu (s) }""",
        w=np.ones((64, 64), np.float32),
        b=np.ones(64, np.float32),
    )


def branched() -> Model:
    """Return an If whose branches capture tensors and an initializer, one of them with documentation inside."""
    model = load(
        """g (bool c, float[300] x) => (float[300] y) <float[1] k = {2}>
        { a = Relu (x)
          y = If (c) <
            then_branch = t () => (float[300] p) { q = Mul (a, k) p = Add (q, w) },
            else_branch = e () => (float[300] r) <float[1] m = {3}, float[1] spare = {4}> { r = Mul (a, m) }> }""",
        w=np.ones(300, np.float32),
    )
    model.proto.graph.node[1].attribute[0].g.node[0].doc_string = "inside"
    model.proto.graph.node[1].attribute[0].g.doc_string = "a branch"
    return model


def texts(model: Model) -> list[str]:
    """Return every node as "op(inputs) outputs"."""
    nodes = model.proto.graph.node
    return [f"{n.op_type}({', '.join(n.input)}) {', '.join(n.output)}" for n in nodes]


def test_edits_never_reach_the_original_model() -> None:
    model = branched()
    before, weights = model.proto.SerializeToString(), dict(model.weights)
    graph = model.graph()
    for tensor in list(graph.tensors().values()):
        tensor.name += "_renamed"
    for node in graph.nodes:
        node.name, node.attrs["note"] = f"{node.name}_renamed", 1
    graph.add_initializer("v", np.ones(1000, np.float32))
    graph.value_infos["output"].clear()
    graph.inputs[1].shape = [7]
    graph.import_domains[0].version = 18
    gs.export_onnx(graph)
    assert model.with_graph(graph).proto != model.proto
    assert model.proto.SerializeToString() == before
    assert dict(model.weights) == weights


def test_renamed_nodes_keep_documentation_and_metadata() -> None:
    model = chain()
    graph = model.graph()
    graph.nodes[0].name = "product"
    graph.nodes[1].outputs[0].name = "sum"
    graph.nodes[2].op = "Sigmoid"
    new = model.with_graph(graph)
    assert texts(new) == ["MatMul(x, w) h", "Add(h, b) sum", "Sigmoid(sum) y"]
    assert [node.name for node in new.proto.graph.node] == ["product", "s", "y"]
    assert [node.doc_string for node in new.proto.graph.node] == ["about 0", "about 1", "about 2"]
    assert [node.metadata_props[0].value for node in new.proto.graph.node] == ["0", "1", "2"]


def test_new_node_inherits_documentation_only_from_the_same_operator() -> None:
    model = chain()
    graph = model.graph()
    for index, op in ((1, "Add"), (2, "Sigmoid")):
        old = graph.nodes[index]
        inputs, outputs = list(old.inputs), list(old.outputs)
        graph.remove_nodes([old])
        graph.nodes.insert(index, gs.Node(op, old.name, inputs=inputs, outputs=outputs))
    new = model.with_graph(graph).proto.graph.node
    assert [node.doc_string for node in new] == ["about 0", "about 1", ""]


def test_edits_and_renames_do_not_copy_weights() -> None:
    model = chain()
    graph = model.graph()
    graph.nodes[0].inputs[1].name = "kernel"
    graph.nodes[2].op = "Sigmoid"
    new = model.with_graph(graph)
    assert new.weights["kernel"] is model.weights["w"]
    assert np.shares_memory(new.array("kernel"), model.array("w"))
    assert list(new.initializers()) == ["kernel", "b"]


def test_replace_uses_includes_control_flow_bodies() -> None:
    model = branched()
    graph = model.graph()
    graph.replace_uses(graph.nodes[0].outputs[0], graph.inputs[1])
    graph.prune()
    new = model.with_graph(graph)
    (node,) = new.proto.graph.node
    assert [list(a.g.node[0].input) for a in node.attribute] == [["x", "k"], ["x", "m"]]
    new.check("substituted")


def test_replace_uses_keeps_graph_outputs() -> None:
    model = load("g (float[3] x) => (float[3] a, float[3] y) { a = Identity (x) y = Relu (a) }")
    graph = model.graph()
    graph.replace_uses(graph.nodes[0].outputs[0], graph.inputs[0])
    assert texts(model.with_graph(graph)) == ["Identity(x) a", "Relu(x) y"]


def test_prune_keeps_captured_initializers() -> None:
    model = branched()
    model.proto.graph.node.insert(0, helper.make_node("Neg", ["x"], ["dead"], name="dead"))
    model.proto.graph.initializer.append(numpy_helper.from_array(np.float32([1]), "nobody"))
    graph = model.graph()
    assert list(model.with_graph(graph).initializers()) == ["k", "w", "nobody"]
    graph.prune()
    new = model.with_graph(graph)
    assert list(new.initializers()) == ["k", "w"]
    assert [node.op_type for node in new.proto.graph.node] == ["Relu", "If"]


def test_new_initializers_are_appended_in_order() -> None:
    model = chain()
    graph = model.graph()
    second, first = (
        graph.add_initializer("late", np.zeros(64, np.float32)),
        graph.add_initializer("large", np.ones((64, 64), np.float32)),
    )
    graph.nodes[0].inputs[1] = first
    graph.nodes[1].inputs[1] = second
    new = model.with_graph(graph)
    assert list(new.initializers()) == ["late", "large"]
    assert list(new.weights) == ["large"]
    new.check("put")


def test_make_constant_affects_all_readers_and_outputs() -> None:
    model = load("g (float[3] x) => (float[3] a, float[3] y) { a = Neg (x) y = Add (a, a) }")
    graph = model.graph()
    node = graph.nodes[0]
    graph.make_constant(node.outputs[0], np.float32([1, 2, 3]))
    graph.remove_nodes([node])
    new = model.with_graph(graph)
    assert texts(new) == ["Add(a, a) y"]
    np.testing.assert_array_equal(new.array("a"), [1, 2, 3])
    assert [value.name for value in new.proto.graph.output] == ["a", "y"]


def test_constant_becomes_a_variable_and_back() -> None:
    model = chain()
    graph = model.graph()
    bias = graph.nodes[1].inputs[1]
    bias.to_variable(np.float32, [64])
    graph.inputs.append(bias)
    new = model.with_graph(graph)
    assert [value.name for value in new.proto.graph.input] == ["x", "b"]
    assert list(new.initializers()) == ["w"]
    again = new.graph()
    tensor = again.inputs.pop()
    tensor.to_constant(np.ones(64, np.float32))
    assert dict(new.with_graph(again).initializers()) == dict(model.initializers())


def test_unused_names_avoid_tensors_of_bodies() -> None:
    graph = branched().graph()
    for name in ("x", "a", "k", "q", "r", "m", "spare", "y"):
        assert graph.unused_tensor_name(name) == f"{name}_1"
    assert [graph.unused_tensor_name("new"), graph.unused_tensor_name("new")] == ["new", "new_1"]
    assert graph.unused_node_name("a") == "a_1"


def test_changed_shape_keeps_documentation_and_denotations() -> None:
    model = load("g (float[n, 3] x) => (float[n, 3] y) { y = Relu (x) }")
    value = model.proto.graph.input[0]
    value.doc_string = "pictures"
    value.type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    graph = model.graph()
    graph.inputs[0].shape = [4, None, 3]
    new = model.with_graph(graph).proto.graph.input[0]
    dims = new.type.tensor_type.shape.dim
    assert (new.doc_string, new.type.tensor_type.elem_type) == ("pictures", TensorProto.FLOAT)
    assert [dim.dim_value for dim in dims] == [4, 0, 3]
    assert not dims[1].HasField("dim_value")
    assert dims[0].denotation == "DATA_BATCH"


@pytest.mark.parametrize("dtype", ["FLOAT8E4M3FNUZ", "BFLOAT16", "INT4", "STRING"])
def test_changed_shape_keeps_types_unknown_to_numpy(dtype: str) -> None:
    model = load("g (float[n] x) => (float[n] y) { y = Identity (x) }")
    kind = model.proto.graph.input[0].type.tensor_type
    kind.elem_type = TensorProto.DataType.Value(dtype)
    graph = model.graph()
    graph.inputs[0].shape = [4]
    new = model.with_graph(graph).proto.graph.input[0].type.tensor_type
    assert new.elem_type == kind.elem_type
    assert new.shape.dim[0].dim_value == 4


def test_values_that_are_not_tensors_survive_edits() -> None:
    model = load(
        """g (seq(float[2]) s, optional(float[2]) o, float[2] x) => (seq(float[2]) t, float[2] y)
        { t = SequenceInsert (s, x) y = Relu (x) }"""
    )
    graph = model.graph()
    graph.nodes[1].op = "Neg"
    graph.inputs[1].name = "maybe"
    new = model.with_graph(graph).proto.graph
    assert list(new.output) == list(model.proto.graph.output)
    assert new.input[0] == model.proto.graph.input[0]
    assert new.input[1].type == model.proto.graph.input[1].type


def test_initializer_that_is_also_an_input_is_not_constant() -> None:
    model = load("g (float[3] x, float[3] w) => (float[3] y) <float[3] w = {1, 2, 3}> { y = Add (x, w) }", ir=3)
    graph = model.graph()
    assert not graph.is_constant(graph.nodes[0].inputs[1])
    assert model.with_graph(graph).proto == model.proto
    graph.overridable_names.clear()
    assert graph.is_constant(graph.nodes[0].inputs[1])
    assert [value.name for value in model.with_graph(graph).proto.graph.input] == ["x"]


@pytest.mark.parametrize("make", [chain, branched])
def test_graphsurgeon_copies_lose_nothing(make: Any) -> None:
    model = make()
    graph = model.graph().copy()
    assert not isinstance(graph, ModelGraph)
    assert model.with_graph(graph).proto == model.proto
    assert dict(model.with_graph(graph).weights) == dict(model.weights)


def test_graphsurgeon_methods_work_on_the_graph() -> None:
    model = branched()
    graph = model.graph()
    graph.nodes.reverse()
    graph.nodes.append(gs.Node("Neg", "dead", inputs=[graph.inputs[1]], outputs=[gs.Variable("d", np.float32, [300])]))
    graph.cleanup().toposort()
    new = model.with_graph(graph)
    assert new.proto == model.proto
    wanted = gs.import_onnx(model.to_proto())
    assert [node.attrs.keys() for node in model.graph().nodes] == [node.attrs.keys() for node in wanted.nodes]
    assert [(t.dtype, t.shape) for t in model.graph().inputs] == [(t.dtype, t.shape) for t in wanted.inputs]


def test_copied_nodes_keep_attributes_and_documentation() -> None:
    model = load("g (float[2, 3] x) => (float[3, 2] y) { y = Transpose <perm = [1, 0]> (x) }")
    graph = model.graph()
    (node,) = graph.nodes
    assert isinstance(node, GraphNode)
    copy = node.copy(node.inputs, [Variable(graph.unused_tensor_name("y"))])
    copy.name = graph.unused_node_name(node.name)
    graph.insert_nodes([copy], before=node)
    first, second = model.with_graph(graph).proto.graph.node
    assert first.output == ["y_1"]
    assert first.name == "y_1"
    assert (first.attribute, first.doc_string) == (second.attribute, second.doc_string)


def test_exports_bodies_made_by_graphsurgeon(capsys: pytest.CaptureFixture[str]) -> None:
    model = load("g (bool c, float[3] x) => (float[3] y) { y = Relu (x) }")
    graph = model.graph()
    inner = [gs.Variable(name, np.float32, [3]) for name in ("p", "q")]
    bodies = [
        gs.Graph([gs.Node(op, op, inputs=[graph.inputs[1]], outputs=[out])], [], [out], name=op)
        for op, out in zip(("Neg", "Abs"), inner, strict=True)
    ]
    attributes = {"then_branch": bodies[0], "else_branch": bodies[1]}
    result = gs.Variable("z", np.float32, [3])
    graph.nodes.append(gs.Node("If", "choice", attributes, [graph.inputs[0]], [result]))
    graph.outputs.append(result)
    assert graph.unused_tensor_name("p") == "p_1"
    new = model.with_graph(graph)
    new.check("with a body")
    assert [a.g.node[0].op_type for a in new.proto.graph.node[1].attribute] == ["Neg", "Abs"]
    assert capsys.readouterr().out == ""
