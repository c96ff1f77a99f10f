"""The check model keeps the graph, is exact in any order of sums, and is refused if it cannot be exact."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from support.exact_models import SMALL, from_text, network
from support.layer_graphs import rules

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.operator_rule import Operation, OperatorRule, Piece
from dicompiler.ir.regions import Interval, Region
from dicompiler.verify.exact import DOMAIN, NotExactError, build_check_model, check_model
from dicompiler.verify.exact.exactness_check import compute_all_tensors
from dicompiler.verify.executor import run_model
from dicompiler_passes.form_layers import form_layers


@pytest.mark.parametrize("name", SMALL)
def test_check_model_keeps_graph_except_domains(name: str) -> None:
    model = network(name)
    checked, inputs = check_model(model, 0)
    checked.check("the check model")
    for old, new in zip(model.proto.graph.node, checked.proto.graph.node, strict=True):
        assert (old.name, old.op_type, list(old.input), list(old.output)) == (
            new.name,
            new.op_type,
            list(new.input),
            list(new.output),
        )
        assert {a.name for a in old.attribute} <= {a.name for a in new.attribute}
        assert new.domain in (old.domain, DOMAIN)
    assert model.initializers() == checked.initializers()
    assert list(inputs) == [v.name for v in model.proto.graph.input if v.name not in model.initializers()]


@pytest.mark.parametrize("name", ["tiny", "lenet", "resnet18"])
def test_reference_evaluator_gives_same_bits(name: str) -> None:
    checked, inputs = check_model(network(name), 2)
    output = next(iter(run_model(checked, inputs).values()))
    (other,) = ReferenceEvaluator(checked.to_proto()).run(None, inputs)
    assert np.array_equal(output, other)


@pytest.mark.parametrize("name", ["quirks", "squeezenet", "mobilenet_v2"])
def test_optimization_levels_give_same_bits(name: str) -> None:
    checked, inputs = check_model(network(name), 0)
    plain = run_model(checked, inputs, optimization="none")["output"]
    for level in ("basic", "extended", "all"):
        assert np.array_equal(run_model(checked, inputs, optimization=level)["output"], plain)


def test_shared_constant_becomes_two() -> None:
    weight = np.random.default_rng(0).standard_normal((4, 4, 3, 3)).astype(np.float32)
    model = from_text(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 9, 9] x) => (float[1, 4, 5, 5] y) {
            ["a"] h = Conv (x, w)
            ["b"] y = Conv (h, w) }""",
        {"w": weight},
    )
    checked, inputs = check_model(model, 0)
    names = [node.input[1] for node in checked.proto.graph.node]
    assert names == ["w", "w@1.1"]
    assert not np.array_equal(checked.array(names[0]), checked.array(names[1]))
    assert run_model(checked, inputs)["y"].shape == (1, 4, 5, 5)


def text(body: str, shape: str = "float[1, 3, 5, 5]") -> Model:
    return from_text(f'<ir_version: 8, opset_import: ["": 17]> g ({shape} x) => ({shape} y) {{ {body} }}')


@pytest.mark.parametrize(
    "body",
    [
        "y = Shrink <bias = 0.3> (x)",
        "a = Mul (x, x) b = Mul (a, a) c = Mul (b, b) d = Mul (c, c) e = Mul (d, d) y = Mul (e, e)",
        "a = Exp (x) b = Exp (a) c = Mul (b, b) d = Erf (c) e = Mul (d, d) f = Mul (e, e) y = Mul (f, f)",
    ],
)
def test_bounds_rounding_and_growing_layers_without_exclusions(body: str) -> None:
    found = build_check_model(text(body), 0)
    output = run_model(found.model, found.inputs)["y"]
    assert not found.excluded
    assert np.array_equal(output, np.rint(output)) and np.unique(output).size > 2 and np.abs(output).max() < 2**24


def images(_: Operation, region: Region, __: Interval | None) -> Piece:
    """Return a rule piece that passes images through."""
    out = (region[0], (0, 3), (0, 5), (0, 5))
    return Piece(out, (out,))


def test_excludes_only_layer_without_stand_in_and_gives_reason() -> None:
    model = from_text("""<ir_version: 8, opset_import: ["": 17]>
        g (float[4, 3, 5, 5] x) => (float[4, 3, 5, 5] y) {
          a = Mul (x, x)  ["shares"] b = Softmax (a)  c = Sigmoid (x)  y = Add (b, c) }""")
    model = Model.load(onnx.shape_inference.infer_shapes(model.proto))
    known = {**rules(), ("", "Softmax"): OperatorRule("Softmax", images)}
    layers = form_layers(model, known)
    found = build_check_model(model, 0, known)
    assert list(found.excluded) == ["shares"]
    assert "made by Softmax 'shares', is not an integer" in found.excluded["shares"]
    values = compute_all_tensors(found.model, found.inputs)
    assert np.array_equal(values["b"], np.rint(values["b"])) and np.abs(values["b"]).max() <= 4
    assert len(np.unique(values["b"].reshape(4, -1), axis=0)) == 4, "images differ"
    assert np.array_equal(values["y"], values["b"] + values["c"])
    again = form_layers(found.model, known)
    assert [layer.nodes for layer in again.layers] != [] and again.layer_by_name.keys() == layers.layer_by_name.keys()


def test_checks_every_tap_behind_excluded_layer() -> None:
    """Convolution → excluded layer → convolution inside a network: no tap of either may be wrong."""
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[4, 3, 5, 5] x) => (float[4, 4, 5, 5] y) {
          a = Conv <pads = [1, 1, 1, 1]> (x, v)  square = Mul (a, a)
          ["shares"] b = Softmax (square)  c = Add (b, a)  ["last"] y = Conv <pads = [1, 1, 1, 1]> (c, w) }""")
    random = np.random.default_rng(0)
    for name, shape in {"v": (3, 3, 3, 3), "w": (4, 3, 3, 3)}.items():
        array = random.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    found = build_check_model(Model.load(proto), 0, {**rules(), ("", "Softmax"): OperatorRule("Softmax", images)})
    assert list(found.excluded) == ["shares"]
    right = run_model(found.model, found.inputs)["y"]
    for name in ("v", "w"):
        entry = next(entry for entry in found.model.proto.graph.initializer if entry.name == name)
        weight = onnx.numpy_helper.to_array(entry)
        for place in zip(*np.nonzero(weight), strict=True):
            wrong = weight.copy()
            wrong[place] = 0
            entry.CopyFrom(onnx.numpy_helper.from_array(wrong, name))
            assert not np.array_equal(run_model(found.model, found.inputs)["y"], right), (name, place)
        entry.CopyFrom(onnx.numpy_helper.from_array(weight, name))


def test_names_operator_that_onnxruntime_rejects() -> None:
    model = from_text("""<ir_version: 8, opset_import: ["": 17]>
        g (float[4, 6] x, int64[2] s) => (float[a, b] y) { two = Add (s, s)  ["shaped"] y = Reshape (x, two) }""")
    with pytest.raises(NotExactError, match=r"^exact check: .*Name:'shaped'") as caught:
        check_model(model, 0)
    assert "\n" not in str(caught.value)


def test_computed_indices_stay_in_range() -> None:
    model = from_text("""<ir_version: 8, opset_import: ["": 17]>
        g (float[4, 6] x, int64[5] i) => (float[5, 6] y) { far = Mul (i, i)  y = Gather (x, far) }""")
    checked, inputs = check_model(model, 3)
    assert (inputs["i"] ** 2).max() > 4
    assert np.array_equal(run_model(checked, inputs)["y"], inputs["x"][inputs["i"] ** 2 % 4])


def test_names_input_of_unknown_shape() -> None:
    model = from_text("""<ir_version: 8, opset_import: ["": 17]>
        g (float[n, 3] x) => (float[n, 3] y) { y = Relu (x) }""")
    with pytest.raises(DicompilerError, match="input 'x' has no static shape: give one"):
        check_model(model, 0)


def test_rejects_negative_seed() -> None:
    with pytest.raises(UsageError, match="seed is -1"):
        check_model(network("tiny"), -1)


def test_check_model_does_not_depend_on_the_process() -> None:
    program = (
        "import hashlib; from dicompiler import networks; from dicompiler.verify.exact import check_model\n"
        "from dicompiler.plugin_api import Model\n"
        "checked, inputs = check_model(Model.load(networks.build('quirks', 1)), 2)\n"
        "print(hashlib.sha256(checked.to_bytes() + inputs['input'].tobytes()).hexdigest())"
    )
    checked, inputs = check_model(network("quirks"), 2)
    here = hashlib.sha256(checked.to_bytes() + inputs["input"].tobytes()).hexdigest()
    for seed in ("1", "2"):
        path = os.pathsep.join(p for p in sys.path if p)
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout.strip() == here
