"""Networks with random operators: one device draws, and independent outputs are compared and exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import dicompiler
from dicompiler.base.errors import DicompilerError
from dicompiler.cli import main
from dicompiler.driver.prepare import load_problem, prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.program import Program
from dicompiler.ir.random_ops import random_layers, random_tensors
from dicompiler.partition.routing import route_on_platform
from dicompiler.plugin.registry import registry
from dicompiler.verify.comparison import check_exact
from dicompiler.verify.comparison import compare_type_only as compared_drawn
from dicompiler.verify.exact import exactness_check

HEAD = '<ir_version: 8, opset_import: ["" : 17]>'
CONV = "Conv <pads = [1, 1, 1, 1]>"


def noisy() -> onnx.ModelProto:
    """Return two convolutions with noise between them, and one in parallel."""
    model = onnx.parser.parse_model(
        f"{HEAD} n (float[1,8,64,64] x) => (float[1,8,64,64] y, float[1,8,64,64] z) {{ a = {CONV} (x, w) "
        f"r = RandomNormalLike (a) s = Mul (r, a) b = {CONV} (s, w) y = Relu (b) z = {CONV} (a, w) }}"
    )
    weight = np.random.default_rng(0).standard_normal((8, 8, 3, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return model


def test_finds_random_layers_and_their_dependents() -> None:
    layers = prepare(Model.load(noisy())).layers
    assert layers is not None
    assert list(random_layers(layers)) == ["r"] and random_layers(layers)["r"].op == "RandomNormalLike"
    assert set(random_tensors(noisy())) & {"y", "z"} == {"y"}


def model(body: str, functions: str = "") -> onnx.ModelProto:
    opsets = '"" : 17, "my" : 1' if functions else '"" : 17'
    return onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{opsets}]> n {body} {functions}")


IF = (
    "z = Relu (x) y = If (c) <then_branch = g () => (float[4] a) { a = THEN }, "
    "else_branch = h () => (float[4] b) { b = Neg (x) }>"
)
NOISE = '<domain: "my", opset_import: ["" : 17]> Noise (a) => (b) { r = RandomNormalLike (a) b = Add (a, r) }'
SIGNS = "(bool c, float[4] x) => (float[4] y, float[4] z)"


@pytest.mark.parametrize(
    ("proto", "random"),
    [
        (model(f"{SIGNS} {{ {IF.replace('THEN', 'RandomUniformLike (x)')} }}"), {"y"}),
        (model(f"{SIGNS} <bool t = {{1}}, float r = {{0.5}}> {{ {IF.replace('THEN', 'Dropout (x, r, t)')} }}"), {"y"}),
        (model(f"{SIGNS} <bool t = {{0}}, float r = {{0.5}}> {{ z = Relu (x) y = Dropout (z, r, t) }}"), set()),
        (model(f"{SIGNS} {{ z = Relu (x) y = my.Noise (z) }}", NOISE), {"y"}),
        (model(f"{SIGNS} {{ z = Relu (x) r = RandomNormalLike (z) n = NonZero (r) y = GatherND (z, n) }}"), {"y"}),
    ],
    ids=["in a body", "a Dropout in a body", "a Dropout that does not", "in a function", "where things are"],
)
def test_finds_random_nodes_in_bodies_and_functions(proto: onnx.ModelProto, random: set[str]) -> None:
    assert set(random_tensors(proto)) & {"y", "z"} == random
    if "GatherND" not in str(proto):
        layers = prepare(Model.load(proto)).layers
        assert layers is not None
        assert bool(random_layers(layers)) == bool(random)


def test_states_depend_on_random_numbers_of_earlier_frames(tmp_path: Path) -> None:
    proto = model(
        "(float[4] x, float[4] past_h) => (float[4] y, float[4] present_h, float[4] z) { y = Add (x, past_h) "
        "r = RandomNormalLike (x) present_h = Add (past_h, r) z = Neg (x) }"
    )
    result = dicompiler.compile(proto, "rpi4x2", "single", state="past*=present*", output=tmp_path / "out")
    checks = result.verify().checks
    assert all(check.passed for check in checks)
    assert {check.name[0] for check in checks if not check.applies} == {"y"}


def test_random_layers_have_no_partial_sums(tmp_path: Path) -> None:
    proto = model(
        "(float[1,4096] x) => (float[1,1] y) <bool t = {1}, float r = {0.5}> "
        "{ h = MatMul (x, v) g = Relu (h) a = MatMul (g, w) b = Dropout (a, r, t) y = Relu (b) }"
    )
    random = np.random.default_rng(0)
    for name, shape in (("v", (4096, 4096)), ("w", (4096, 1))):
        proto.graph.initializer.append(numpy_helper.from_array(random.random(shape, np.float32), name))
    result = dicompiler.compile(proto, "rpi4x3", "dp", output=tmp_path / "out")
    assert result.plan is not None and len(result.plan.layers["a"]) == 1
    assert result.verify().passed


def test_verify_each_ignores_random_outputs(tmp_path: Path) -> None:
    Model.load(noisy()).save(tmp_path / "n.onnx")
    steps = ("-p", "normalise,infer-shapes", "--verify-each", "-o", str(tmp_path / "o.onnx"))
    assert main(["opt", str(tmp_path / "n.onnx"), *steps]) == 0


@pytest.mark.parametrize("spec", ["modnn", "stahl", "dp", "auto{tries=2}", "gradient{restarts=2 iterations=20}"])
def test_strategies_keep_random_layers_on_one_device(spec: str, tmp_path: Path) -> None:
    result = dicompiler.compile(noisy(), platform="rpi4x3", strategy=spec, output=tmp_path / "out")
    assert result.plan is not None and len(result.plan.layers["r"]) == 1
    checks = {check.name.partition(" ")[0]: check for check in result.verify().checks}
    assert all(check.passed for check in checks.values())
    assert "3 of 4 layers; left out: RandomNormalLike 'r' draws random numbers" in checks["exact"].detail
    assert not checks["y"].applies and "only its type is compared" in checks["y"].detail
    assert checks["z"].applies and "differs by" in checks["z"].detail


def test_rejects_random_layer_on_two_devices() -> None:
    problem = load_problem(noisy(), "rpi4x3")
    twice = {layer.name: (Part("pi01"), Part("pi02")) for layer in problem.layers.layers}
    assert problem.build_plan(twice).layers["r"] == (Part("pi01"),)
    message = r"^plan: layers.r: RandomNormalLike draws different random numbers in each of its 2 parts: give the"
    with pytest.raises(DicompilerError, match=message):
        route_on_platform(problem.platform, problem.layers, Plan(twice, ("pi01",), ("pi01",)))


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (np.zeros(3, np.float64), "float64 (3,), but onnxruntime computes float32 (2,)"),
        (np.zeros((2, 1), np.float32), "float32 (2, 1), but onnxruntime computes float32 (2,)"),
        ([], "[], but onnxruntime computes"),
    ],
)
def test_random_outputs_must_have_equal_types(got: object, words: str) -> None:
    cause = random_tensors(noisy())["y"]
    check = compared_drawn("y", np.zeros(2, np.float32), got, cause)
    assert not check.passed and words in check.detail
    assert compared_drawn("y", np.zeros(2, np.float32), np.ones(3, np.float32), cause).passed


def test_check_does_not_apply_if_check_model_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of the network are sizes of tensors, and those of a check model can be huge."""
    model = Model.load(
        onnx.parser.parse_model(
            f"{HEAD} n (float[4] x, int64[1] k) => (float[4] y, int64[m] z) {{ y = Relu (x) "
            "many = Constant <value_int = 1000000000> () e = Mul (k, many) f = Squeeze (e) "
            "one = Constant <value_int = 1> () zero = Constant <value_int = 0> () z = Range (zero, f, one) }"
        )
    )
    monkeypatch.setattr(exactness_check, "available_memory", lambda: 2**30)
    layers = prepare(model).layers
    assert layers is not None

    def split(_: Model) -> Program:
        raise AssertionError("it is not run")

    check = check_exact(model, split, rules=registry().operator_rules, layers=layers)
    assert not check.applies and "Failed to allocate memory" in check.detail
