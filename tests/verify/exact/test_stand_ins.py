"""Stand-ins of rounding operators: integers of the operator's own shape, from the same inputs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from support.exact_models import from_text
from support.operator_cases import run_split

from dicompiler.ir.operator_rule import OperatorRule
from dicompiler.ir.plan import Part
from dicompiler.partition.operators import builtin_rules
from dicompiler.partition.operators.elementwise import elementwise
from dicompiler.plugin.registry import temporarily_registered
from dicompiler.verify.exact import DOMAIN, Relaxation, build_check_model, check_model, generic
from dicompiler.verify.exact.normalization import BODIES
from dicompiler.verify.executor import run_model
from dicompiler_passes.form_layers import form_layers

ELSEWHERE = {*BODIES, *generic.BODIES} - {"remainder", "mixed"}
STAND_INS = sorted(
    rule.op for rule in builtin_rules() if rule.stand_in and rule.stand_in not in ELSEWHERE and not rule.domain
)
ATTRIBUTES = {
    "AveragePool": "<kernel_shape = [3, 3], pads = [1, 0, 1, 0], strides = [2, 1]>",
    "LRN": "<size = 5>",
    "LpPool": "<kernel_shape = [3, 3]>",
    "ReduceMean": "<keepdims = 0>",
}


TWO = ("Div", "Pow", "Mean")


@pytest.mark.parametrize("opset", [7, 9, 12, 13, 17, 21])
@pytest.mark.parametrize("op", STAND_INS)
def test_stand_in_gives_integers_of_operator_shape(op: str, opset: int) -> None:
    if not onnx.defs.has(op, opset, ""):
        assert not onnx.defs.has(op, 7, "")
        return
    operands = "x, z" if op in TWO else "x"
    model = from_text(f"""<ir_version: 8, opset_import: ["": {opset}]>
        g (float[2, 6, 7, 8] x, float[2, 6, 7, 8] z) => (float[a, b, c, d] y) {{
          ["node"] y = {op} {ATTRIBUTES.get(op, "")} ({operands}) }}""")
    if op.startswith("Reduce"):
        del model.proto.graph.output[0].type.tensor_type.shape.dim[:]
    checked, inputs = check_model(model, 0)
    checked.check("the check model")
    assert (checked.proto.graph.node[0].op_type, checked.proto.graph.node[0].domain) == (op, DOMAIN)
    assert {entry.domain: entry.version for entry in checked.proto.opset_import} == {"": opset, DOMAIN: opset}
    result, original = (run_model(each, inputs)["y"] for each in (checked, model))
    assert np.array_equal(result, np.rint(result))
    assert result.shape == original.shape
    assert np.unique(result).size > 1 or result.size == 1 or op.startswith("Global")


def test_lrn_stand_in_counts_channels_of_window() -> None:
    for size in (3, 5, 7):
        model = from_text(f"""<ir_version: 8, opset_import: ["": 17]>
            g (float[1, 9, 4, 4] x) => (float[1, 9, 4, 4] y) {{ y = LRN <size = {size}> (x) }}""")
        checked, inputs = check_model(model, 3)
        x = inputs["x"]
        count = np.stack([(x[:, max(0, c - size // 2) : c + size // 2 + 1] != 0).sum(1) for c in range(9)], 1)
        assert np.array_equal(run_model(checked, inputs)["y"], x + np.floor(32 * np.sign(x) / (1 + count) + 0.5))


@pytest.mark.parametrize("opset", [9, 13, 17, 21])
def test_average_stand_in_sums_bounded_values(opset: int) -> None:
    """A sum shows misplaced padding, rows and columns that a maximum hides."""
    attributes = "kernel_shape = [3, 3], strides = [2, 2], pads = [1, 0, 0, 1]"
    model = from_text(f"""<ir_version: 8, opset_import: ["": {opset}]>
        g (float[1, 2, 6, 8] x) => (float[1, 2, 3, 4] y, float[1, 2, 1, 1] z) {{
          y = AveragePool <{attributes}> (x)  z = GlobalAveragePool (x) }}""")
    checked, inputs = check_model(model, 0)
    x = np.pad(inputs["x"] % 16, ((0, 0), (0, 0), (1, 0), (0, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))[:, :, ::2, ::2]
    results = run_model(checked, inputs)
    assert np.array_equal(results["y"], windows.sum((-1, -2)))
    assert np.array_equal(results["z"], (inputs["x"] % 16).sum((2, 3), keepdims=True))


@pytest.mark.parametrize(
    ("opset", "attributes", "maximum"),
    [(11, "ceil_mode = 1", True), (18, "ceil_mode = 1", False), (17, "count_include_pad = 1, ceil_mode = 0", False)],
)
def test_average_with_ceil_mode_before_opset_18_becomes_maximum(opset: int, attributes: str, maximum: bool) -> None:
    model = from_text(f"""<ir_version: 8, opset_import: ["": {opset}]>
        g (float[1, 1, 5, 5] x) => (float[a, b, c, d] y) {{
          y = AveragePool <kernel_shape = [3, 3], strides = [2, 2], {attributes}> (x) }}""")
    checked, inputs = check_model(model, 0)
    windows = np.lib.stride_tricks.sliding_window_view(inputs["x"], (3, 3), (2, 3))[:, :, ::2, ::2]
    expected = windows.max((-1, -2)) if maximum else (windows % 16).sum((-1, -2))
    assert np.array_equal(run_model(checked, inputs)["y"], expected)


@pytest.mark.parametrize(("opset", "axes"), [(11, (2, 3)), (13, (2,))])
def test_softmax_stand_in_reads_axes_of_softmax(opset: int, axes: tuple[int, ...]) -> None:
    model = from_text(f"""<ir_version: 8, opset_import: ["": {opset}]>
        g (float[2, 3, 4, 5] x) => (float[2, 3, 4, 5] y) {{ y = Softmax <axis = 2> (x) }}""")
    checked, inputs = check_model(model, 0)
    x = inputs["x"]
    bounded = x % 16
    assert np.array_equal(run_model(checked, inputs)["y"], bounded - bounded.sum(axes, keepdims=True) % 16)


def test_piece_of_stand_in_may_have_more_attributes() -> None:
    model = from_text("""<ir_version: 8, opset_import: ["": 17]>
        g (float[1, 2, 9, 9] x) => (float[a, b, c, d] y) { y = AveragePool <kernel_shape = [3, 3]> (x) }""")
    checked, inputs = check_model(model, 0)
    checked.proto.graph.node[0].attribute.append(helper.make_attribute("pads", [1, 0, 0, 0]))
    checked.proto.graph.node[0].attribute.append(helper.make_attribute("strides", [2, 1]))
    assert run_model(checked, inputs)["y"].shape == (1, 2, 4, 7)


def test_average_over_power_of_two_stays() -> None:
    def domain(attributes: str) -> str:
        model = from_text(f"""<ir_version: 8, opset_import: ["": 17]>
            g (float[1, 2, 8, 8] x) => (float[a, b, c, d] y) {{ y = AveragePool <{attributes}> (x) }}""")
        return str(check_model(model, 0)[0].proto.graph.node[0].domain)

    assert domain("kernel_shape = [2, 2]") == ""
    assert domain("kernel_shape = [2, 4], pads = [1, 1, 0, 0], count_include_pad = 1") == ""
    assert domain("kernel_shape = [2, 4], pads = [1, 1, 0, 0]") == DOMAIN
    assert domain("kernel_shape = [3, 3]") == DOMAIN
    assert domain("kernel_shape = [2, 2], ceil_mode = 1") == DOMAIN


@pytest.mark.parametrize("attribute", ["alpha = 1.5", "alpha = 0.0", ""])
def test_uses_stand_in_of_plugin_rule(attribute: str) -> None:
    model = from_text(
        f"""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        g (float[1, 4, 6, 6] x) => (float[1, 4, 6, 6] y) {{
          ["node"] y = com.microsoft.QuickGelu <{attribute}> (x) }}""".replace("<>", "")
    )
    rule = OperatorRule("QuickGelu", elementwise, "com.microsoft", is_elementwise=True, stand_in="Relu")
    with temporarily_registered(rule) as registered:
        checked, inputs = check_model(model, 0, registered.operator_rules)
        checked.check("the check model")
        assert checked.proto.graph.node[0].domain == f"{DOMAIN}.com.microsoft"
        expected = run_model(checked, inputs)["y"]
        assert np.array_equal(expected, np.maximum(inputs["x"], 0))
        layers = form_layers(checked, registered.operator_rules)
        parts = [Part(device, ((0, 1), (0, 4), rows, (0, 6))) for device, rows in (("a", (0, 2)), ("b", (2, 6)))]
        assert np.array_equal(run_split(checked, layers, parts, inputs), expected)


def test_calls_with_other_output_types_have_own_stand_ins() -> None:
    model = from_text("""<ir_version: 8, opset_import: ["": 17]> g (float[1, 4] x) => (float[1, 4] y, float16[1, 4] z) {
        a = Mul (x, x)
        y = Cast <to = 1> (a)
        z = Cast <to = 10> (a)
    }""")
    check = build_check_model(model, 0, relaxation=Relaxation(generic_ops=frozenset({("", "Cast")})))
    assert {name: str(one.dtype) for name, one in run_model(check.model, check.inputs).items()} == {
        "y": "float32", "z": "float16",
    }  # fmt: skip
