"""manual{mapping=…}: every name of the model file is accepted, and no other name."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from dicompiler import networks
from dicompiler.base.errors import DicompilerError
from dicompiler.driver import compiler
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Plan
from dicompiler.ir.platform import Platform
from dicompiler.search.problem import Problem
from dicompiler.testing import check_plan
from dicompiler_strategies.manual import Manual

KEYS = ("pi01_arm0123", "pi02_arm0123", "pi03_arm0123")

# normalise removes or changes these nodes: [unsqueeze] and the nodes that it reads are folded, [scale] and [relu] are
# absorbed, [split] becomes two Slices, [dead] is removed, and [constants] becomes an Identity with another name.
TEXT = """
<ir_version: 8, opset_import: ["" : 13]>
net (float[1, 4, 8, 8] x) => (float[1, 5] y, float[1, 2] constant)
<float[6, 4, 3, 3] w, float[6, 5] v>
{
   [const] c = Constant <value = float[6] {1.0, 2.0, 1.0, 1.0, 2.0, 1.0}> ()
   [axes] a = Constant <value = int64[2] {1, 2}> ()
   [unsqueeze] u = Unsqueeze (c, a)
   [split] l, r = Split <axis = 1> (x)
   [concat] j = Concat <axis = 1> (r, l)
   [conv] t = Conv <pads = [1, 1, 1, 1]> (j, w)
   [scale] m = Mul (t, u)
   [relu] n = Relu (m)
   [dead] d = Relu (t)
   [pool] p = GlobalMaxPool (n)
   [shape] z = Constant <value = int64[2] {1, 6}> ()
   [reshape] f = Reshape (p, z)
   [gemm] y = Gemm (f, v)
   [one] o = Constant <value = float[1, 2] {1.0, 2.0}> ()
   [constants] constant = Add (o, o)
}
"""
PLACED = {
    KEYS[0]: ["unsqueeze", "split", "concat", "shape"],
    KEYS[1]: ["conv", "scale", "relu", "dead"],
    KEYS[2]: ["const", "axes", "pool", "reshape", "gemm", "one", "constants"],
}


@pytest.fixture(scope="module")
def model() -> Model:
    proto = onnx.parser.parse_model(TEXT)
    for name, shape in (("w", (6, 4, 3, 3)), ("v", (6, 5))):
        values = np.random.default_rng(1).integers(-1, 2, shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return Model.load(proto)


def posed(model: Model | onnx.ModelProto) -> Problem:
    return load_problem(model, Platform.load("rpi4x4"))


def mapped(problem: Problem, mapping: Mapping[str, Sequence[str]], place: Path) -> Plan:
    place.write_text(json.dumps(mapping), encoding="utf-8")
    return Manual(mapping=str(place)).plan(problem)


def where(plan: Plan) -> dict[str, list[str]]:
    return {name: [part.device for part in parts] for name, parts in plan.layers.items()}


def in_thirds(names: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return the names under the three keys, in runs of equal length."""
    third = -(-len(names) // 3)
    return {key: names[i * third : (i + 1) * third] for i, key in enumerate(KEYS)}


def test_accepts_names_of_folded_fused_split_and_dead_nodes(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    problem = posed(model)
    with caplog.at_level(logging.WARNING, logger="dicompiler"):
        plan = mapped(problem, PLACED, tmp_path / "m.json")
    assert where(plan) == {
        "split_0": ["pi01"],
        "split_1": ["pi01"],
        "concat": ["pi01"],
        "conv": ["pi02"],
        "pool": ["pi03"],
        "reshape": ["pi03"],
        "gemm": ["pi03"],
        "constant": ["pi03"],
    }
    # The plan may assign a folded node to another device than the layer that absorbed it, without a warning.
    assert caplog.messages == []
    exact, *_ = check_plan(problem, plan)
    assert exact.applies, exact.detail


def test_names_of_removed_nodes_may_be_omitted(model: Model, tmp_path: Path) -> None:
    lost = ("unsqueeze", "shape", "scale", "relu", "dead", "const", "axes", "one")
    fewer = {key: [name for name in names if name not in lost] for key, names in PLACED.items()}
    assert mapped(posed(model), fewer, tmp_path / "m.json") == mapped(posed(model), PLACED, tmp_path / "m.json")


def test_named_slice_may_leave_its_split(model: Model, tmp_path: Path) -> None:
    placed = {**PLACED, KEYS[1]: [*PLACED[KEYS[1]], "split_1"]}
    homes = where(mapped(posed(model), placed, tmp_path / "m.json"))
    assert homes["split_0"] == ["pi01"] and homes["split_1"] == ["pi02"]


def test_missing_layer_is_named_as_in_the_file(model: Model, tmp_path: Path) -> None:
    placed = {**PLACED, KEYS[0]: ["concat"]}
    with pytest.raises(DicompilerError, match=r"m\.json: layer 'l' \(node 'split'\) is missing: add it to a device"):
        mapped(posed(model), placed, tmp_path / "m.json")


def test_rejects_unknown_name_with_the_nearest_one(model: Model, tmp_path: Path) -> None:
    placed = {**PLACED, KEYS[1]: [*PLACED[KEYS[1]], "unsquese"]}
    with pytest.raises(DicompilerError) as caught:
        mapped(posed(model), placed, tmp_path / "m.json")
    assert str(caught.value) == (
        f"{tmp_path / 'm.json'}: key {KEYS[1]!r}: unknown layer 'unsquese' (did you mean 'unsqueeze'?)"
    )


@pytest.mark.slow
def test_accepts_all_910_names_of_densenet(tmp_path: Path) -> None:
    problem = posed(networks.build("light/densenet121"))
    assert problem.file_graph is not None
    nodes = problem.file_graph.node
    assert len(nodes) == 910
    plan = mapped(problem, in_thirds([node.name for node in nodes]), tmp_path / "m.json")
    assert plan == mapped(problem, in_thirds([node.output[0] for node in nodes]), tmp_path / "m.json")
    assert plan.devices == ("pi01", "pi02", "pi03")
    assert problem.estimate(plan).total_bytes > 0


def test_accepts_all_names_of_a_quantised_network(tmp_path: Path) -> None:
    proto = networks.build("lenet")
    samples = np.random.default_rng(0).standard_normal((2, 1, 1, 32, 32)).astype(np.float32)
    np.savez(tmp_path / "samples.npz", input=samples)
    place = tmp_path / "m.json"
    place.write_text(json.dumps(in_thirds([node.name for node in proto.graph.node])), encoding="utf-8")
    manual = Manual(mapping=str(place))
    result = compiler.compile(proto, "rpi4x4", manual, quantize_samples=tmp_path / "samples.npz")
    assert result.plan is not None and result.layers is not None
    homes = where(result.plan)
    # A layer that the compiler added runs on the device of the layer that reads it.
    assert homes["input_QuantizeLinear"] == homes["conv1"] == ["pi01"]
    assert homes["fc5"] == ["pi03"]
    check_plan(Problem(result.layers, Platform.load("rpi4x4"), model=result.reference), result.plan)
