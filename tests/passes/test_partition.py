"""The rewrite: what the placed model looks like, beyond computing the same (tests/test_random_plans.py)."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import pytest
from support.layer_graphs import rules

from dicompiler.ir.compilation import Compilation
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Part, Plan
from dicompiler.partition.annotations import DEVICE, ORIGIN, REGION
from dicompiler.partition.segmentation import cut
from dicompiler.verify.executor import Executor, run_model
from dicompiler_passes.form_layers import form_layers
from dicompiler_passes.partition import Partition

TEXT = """
<ir_version: 8, opset_import: ["" : %d]>
net (float[1, 4, 8, 6] x) => (float[1, 4, 8, 6] y) {
   [conv1] t = Conv <pads = [1, 1, 1, 1]> (x, w)
   [relu] u = Relu (t)
   [conv2] y = Conv (u, v)
}
"""
WHOLE = {"conv1": (Part("a"),), "conv2": (Part("a"),)}


def network(opset: int = 13) -> Model:
    proto = onnx.parser.parse_model(TEXT % opset)
    rng = np.random.default_rng(0)
    for name, shape in (("w", (4, 4, 3, 3)), ("v", (4, 4, 1, 1))):
        values = rng.integers(-2, 3, shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    proto.graph.node[0].doc_string = "the first"
    return Model.load(onnx.shape_inference.infer_shapes(proto))


def place(model: Model, plan: Plan) -> Compilation:
    return Partition().run(Compilation(model=model, layers=form_layers(model, rules()), plan=plan))


def rows(device: str, start: int, stop: int) -> Part:
    return Part(device, ((0, 1), (0, 4), (start, stop), (0, 6)))


def marks(node: onnx.NodeProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in node.metadata_props}


def test_whole_layers_keep_their_nodes_as_they_are() -> None:
    model = network()
    placed = place(model, Plan(WHOLE, ("a",), ("a",))).model
    for before, after in zip(model.proto.graph.node, placed.proto.graph.node, strict=True):
        bare = onnx.NodeProto()
        bare.CopyFrom(after)
        del bare.metadata_props[:]
        assert bare == before
        assert marks(after)[DEVICE] == "a"
    assert placed.weights["w"] is model.weights["w"] if "w" in model.weights else True


def test_every_node_says_its_device_its_region_and_where_it_comes_from() -> None:
    halves = (rows("a", 0, 4), rows("b", 4, 8))
    placed = place(network(), Plan({"conv1": halves, "conv2": halves}, ("a",), ("a",))).model
    found = {(marks(n)[ORIGIN], marks(n)[DEVICE], marks(n)[REGION]) for n in placed.proto.graph.node}
    assert ("conv1", "a", "[0:1, 0:4, 0:4, 0:6]") in found
    assert ("conv2", "b", "[0:1, 0:4, 4:8, 0:6]") in found
    assert [n.doc_string for n in placed.proto.graph.node if n.op_type == "Conv"].count("the first") == 2


def test_one_slice_serves_all_who_receive_the_same_box() -> None:
    plan = Plan(
        {"conv1": (rows("a", 0, 8),), "conv2": (rows("b", 0, 4), rows("c", 0, 4), rows("a", 4, 8))}, ("a",), ("b", "c")
    )
    placed = place(network(), plan)
    slices = [n for n in placed.model.proto.graph.node if n.op_type == "Slice" and marks(n)[ORIGIN] == "u"]
    assert [marks(n)[REGION] for n in slices].count("[0:1, 0:4, 0:4, 0:6]") == 1


@pytest.mark.parametrize("opset", [7, 9, 10, 11, 13, 17, 21])
def test_slices_are_written_as_the_opset_wants_them(opset: int) -> None:
    halves = (rows("a", 0, 4), rows("b", 4, 8))
    sums = (Part("a", None, (0, 2)), Part("b", None, (2, 4)), Part("b"))
    model = network(opset)
    placed = place(model, Plan({"conv1": halves, "conv2": sums}, ("b",), ("a",)))
    placed.model.check("test")
    inputs = {"x": np.random.default_rng(1).integers(-4, 5, (1, 4, 8, 6)).astype(np.float32)}
    execution = Executor(cut(placed.model, ("a", "b"))).run(inputs)
    assert np.array_equal(execution.outputs["y"], run_model(model, inputs)["y"])


def test_every_sink_gets_every_output_and_the_first_bears_its_name() -> None:
    placed = place(network(), Plan(WHOLE, ("a",), ("b", "a", "c")))
    assert [v.name for v in placed.model.proto.graph.output] == ["y", "y@a_1", "y@c"]
    program = cut(placed.model, ("a", "b", "c"))
    inputs = {"x": np.ones((1, 4, 8, 6), np.float32)}
    delivered = Executor(program).run(inputs).delivered
    assert set(delivered) == {"a", "b", "c"}
    assert all(np.array_equal(o["y"], delivered["b"]["y"]) for o in delivered.values())
    assert [value.name for value in program.outputs] == ["y"]


def test_cut_weights_are_just_the_part() -> None:
    lop = (Part("a", ((0, 1), (0, 1), (0, 8), (0, 6))), Part("b", ((0, 1), (1, 4), (0, 8), (0, 6))))
    placed = place(network(), Plan({**WHOLE, "conv1": lop}, ("a",), ("a",))).model
    shapes = {name: shape for name, (_, shape) in placed.initializers().items() if name.startswith("w")}
    assert shapes == {"w[0:1, 0:4, 0:3, 0:3]": (1, 4, 3, 3), "w[1:4, 0:4, 0:3, 0:3]": (3, 4, 3, 3)}
    assert np.array_equal(placed.array("w[1:4, 0:4, 0:3, 0:3]"), network().array("w")[1:4])


def test_the_same_bytes_whatever_the_hash_seed() -> None:
    script = (
        "import hashlib, test_partition as t;"
        "halves = (t.rows('a', 0, 4), t.rows('b', 4, 8));"
        "sums = (t.Part('a', None, (0, 2)), t.Part('b', None, (2, 4)), t.Part('b'));"
        "placed = t.place(t.network(), t.Plan({'conv1': halves, 'conv2': sums}, ('b', 'c'), ('a', 'c')));"
        "print(hashlib.sha256(placed.model.to_bytes()).hexdigest())"
    )
    import os
    from pathlib import Path

    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, *sys.path])
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(digests) == 1
