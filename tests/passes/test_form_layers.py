"""Formation of layers: nodes that become one layer, and layers that stay whole."""

from __future__ import annotations

import onnx
import pytest
from support.layer_graphs import formed, rules

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler_passes.form_layers import form_layers

HEAD = '<ir_version: 8, opset_import: ["" : 13]>\n'


def groups(graph: LayerGraph) -> dict[str, list[str]]:
    return {layer.name: [node.name for node in layer.nodes] for layer in graph.layers}


def test_convolution_absorbs_bias_normalization_and_activation() -> None:
    graph = formed(
        HEAD
        + """net (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y) {
            [conv] a = Conv (x, w)
            [bias] b = Add (a, c)
            [norm] d = BatchNormalization (b, s, s, s, s)
            [relu] y = Relu (d)
        }""",
        w=(4, 4, 1, 1),
        c=(4, 1, 1),
        s=(4,),
    )
    assert groups(graph) == {"conv": ["conv", "bias", "norm", "relu"]}
    assert graph.layers[0].inputs == ("x",)
    assert graph.layers[0].outputs == ("y",)


def test_residual_add_joins_layer_of_last_operand() -> None:
    graph = formed(
        HEAD
        + """net (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y) {
            [first] a = Conv (x, w)
            [second] b = Conv (a, w)
            [shortcut] c = Conv (x, w)
            [add] d = Add (b, c)
            [relu] y = Relu (d)
        }""",
        w=(4, 4, 1, 1),
    )
    assert groups(graph) == {"first": ["first"], "second": ["second"], "shortcut": ["shortcut", "add", "relu"]}
    assert graph.layer_by_name["shortcut"].inputs == ("x", "b")


def test_absorbs_x_times_sigmoid_x() -> None:
    graph = formed(
        HEAD
        + """net (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y) {
            [conv] a = Conv (x, w)
            [gate] b = Sigmoid (a)
            [mul] y = Mul (a, b)
        }""",
        w=(4, 4, 1, 1),
    )
    assert groups(graph) == {"conv": ["conv", "gate", "mul"]}


@pytest.mark.parametrize(
    ("rest", "why"),
    [
        (
            "b = Relu (a)\n [pool] y = GlobalMaxPool (a)\n [other] z = Neg (b)",
            "two readers, one of which cannot come along",
        ),
        ("b = Relu (a)\n y = Identity (b)\n [add] z = Add (a, b)", "two tensors would leave"),
    ],
)
def test_does_not_absorb_node_if_two_tensors_would_leave(rest: str, why: str) -> None:
    shape = "float[1, 4, 1, 1] y" if "GlobalMaxPool" in rest else "float[1, 4, 8, 8] y"
    graph = formed(
        HEAD
        + f"net (float[1, 4, 8, 8] x) => ({shape}, float[1, 4, 8, 8] z) {{ [conv] a = Conv (x, w)\n [relu] {rest} }}",
        w=(4, 4, 1, 1),
    )
    assert groups(graph)["conv"] == ["conv"], why


def test_shape_changing_broadcast_is_own_layer() -> None:
    graph = formed(
        HEAD
        + """net (float[1, 4, 8, 8] x, float[2, 4, 8, 8] z) => (float[2, 4, 8, 8] y) {
            [conv] a = Conv (x, w)
            [add] y = Add (a, z)
        }""",
        w=(4, 4, 1, 1),
    )
    assert list(groups(graph)) == ["conv", "add"]


def test_graph_output_ends_layer() -> None:
    graph = formed(
        HEAD
        + """net (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] a, float[1, 4, 8, 8] y) {
            [conv] a = Conv (x, w)
            [relu] y = Relu (a)
        }""",
        w=(4, 4, 1, 1),
    )
    assert list(groups(graph)) == ["conv", "relu"]


def test_operator_without_rule_is_whole_layer() -> None:
    graph = formed(
        HEAD + "net (float[1, 8] x) => (float[1, 8] y) <int64[8] n = {1, 1, 1, 1, 1, 1, 1, 1}> "
        "{ [turn] y = ReverseSequence (x, n) }",
    )
    assert graph.layers[0].whole_reason == "operator ReverseSequence has no rule"


def test_edge_without_static_shape_joins_nodes() -> None:
    graph = formed(
        HEAD
        + """net (float[8] x) => (int64[N, 1] y, float[8] z) {
            [sign] s = Relu (x)
            [some] t = NonZero (s)
            [turn] y = Transpose (t)
            [other] z = Exp (x)
        }"""
    )
    assert groups(graph) == {"turn": ["some", "turn"], "sign": ["sign"], "other": ["other"]}
    assert "static shape" in graph.layer_by_name["turn"].whole_reason


def test_elementwise_node_of_unknown_shape_is_own_layer() -> None:
    graph = formed(
        HEAD + "net (float[8] x) => (float[8] y, int64[N] z) "
        "{ [sign] y = Relu (x) n = Size (x) o = Constant <value_int = 0> () i = Constant <value_int = 1> () "
        "[places] p = Range (o, n, i) [far] z = Abs (p) }"
    )
    assert "static shape" in graph.layer_by_name["far"].whole_reason


def test_captured_tensors_join_control_flow() -> None:
    body = onnx.parser.parse_graph("body () => (float[8] r) { r = Neg (s) }")
    model = onnx.parser.parse_model(
        HEAD
        + """net (float[8] x, bool c) => (float[8] y) {
            [relu] s = Relu (x)
            [exp] e = Exp (s)
            [if] t = If (c)
            [add] y = Add (t, e)
        }"""
    )
    for name in ("then_branch", "else_branch"):
        model.graph.node[2].attribute.append(onnx.helper.make_attribute(name, body))
    graph = form_layers(Model.load(onnx.shape_inference.infer_shapes(model)), rules())
    together = next(layer for layer in graph.layers if len(layer.nodes) > 1)
    assert {"relu", "if"} <= {node.name for node in together.nodes}
    assert "x" in together.inputs
    assert "c" in together.inputs


def test_rejects_dynamic_input_with_remedy() -> None:
    text = HEAD + "net (float[N, 8] x) => (float[N, 8] y) { y = Relu (x) }"
    with pytest.raises(DicompilerError, match=r"input 'x' has no static shape: .*--shape x="):
        formed(text)


def test_rejects_output_without_node_with_remedy() -> None:
    text = HEAD + "net (float[1, 8] x) => (float[1, 8] x, float[1, 8] y) { y = Relu (x) }"
    with pytest.raises(DicompilerError, match="no node makes output 'x': run normalise before form-layers"):
        formed(text)


def test_layers_are_topological_with_late_shortcut() -> None:
    graph = formed(
        HEAD
        + """net (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y) {
            [main] a = Conv (x, w)
            [late] b = Conv (x, w)
            [later] c = Conv (b, w)
            [mul] y = Mul (c, a)
        }""",
        w=(4, 4, 1, 1),
    )
    seen = set(graph.inputs)
    for layer in graph.layers:
        assert set(layer.inputs) <= seen
        seen |= set(layer.outputs)
