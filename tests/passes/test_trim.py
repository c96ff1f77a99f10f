"""The pass `trim`: unread elements are not computed, on one device as on several."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import onnx.parser
import pytest
from support import modern_networks as modern

import dicompiler
from dicompiler.base.errors import DicompilerError
from dicompiler.cost.op_counts import count_flops
from dicompiler.driver.prepare import load_problem, prepare
from dicompiler.ir.layers import LayerGraph
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Part
from dicompiler.ir.regions import Region
from dicompiler.partition.routing import route
from dicompiler.partition.tiling import single_device_plan
from dicompiler.plugin.pass_manager import PassManager, make_pipeline
from dicompiler.testing import check_plan, make_cluster
from dicompiler.verify.comparison import graph_inputs, random_inputs
from dicompiler.verify.executor import run_model

FIRST_ROW = """<ir_version: 8, opset_import: ["" : 17]>
g (float[1, 8, 4] x) => (float[1, 4] y)
<int64 row = {0}, float[4, 2] w = {1, 2, -1, 0, 3, 1, -2, 1}, float[2] b = {1, 2}> {
    q = MatMul (x, w)
    h = Add (q, b)
    s = Relu (h)
    t = Concat <axis = 2> (s, s)
    m = Add (t, x)
    y = Gather <axis = 1> (m, row)
}"""


QUERY = """<ir_version: 8, opset_import: ["" : 17]> g (float[1, 8, 16] x) => (float[1, 1, 16] y)
<int64[1] row = {2}> {
    n = MatMul (x, w)
    q = MatMul (n, w)
    k = MatMul (n, w)
    t = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul (q, t)
    z = MatMul (s, n)
    y = Gather <axis = 1> (z, row)
}"""


def first_row() -> Model:
    """Return a product of 8 rows, one of which is read."""
    return Model.load(onnx.parser.parse_model(FIRST_ROW))


def test_computes_only_read_rows() -> None:
    prepared = prepare(first_row())
    assert prepared.layers is not None and prepared.reference is not None
    assert [prepared.layers.tensors[name].shape for name in "sm"] == [(1, 1, 2), (1, 1, 4)]
    assert not any(node.metadata_props for node in prepared.model.proto.graph.node)
    given = random_inputs(graph_inputs(prepared.reference))
    expected, got = (run_model(model, given) for model in (prepared.reference, prepared.model))
    assert np.allclose(expected["y"], got["y"], atol=1e-6) and expected["y"].shape == got["y"].shape
    assert prepare(prepared.model).reference is None  # A second run finds nothing to trim, so there is no reference.


def test_slice_of_trim_takes_only_read_rows() -> None:
    """Other layers read the tensor in full, and several devices store rows of it. One query attends to all keys."""
    proto = onnx.parser.parse_model(QUERY)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(16, dtype=np.float32), "w"))
    problem = load_problem(proto, make_cluster("switch", 1, 1, 1))
    layers = problem.layers
    (sliced,) = layers.rule_bound_nodes
    assert layers.layer_by_name[sliced].inputs == ("n",) and layers.tensors["q"].shape == (1, 1, 16)
    parts = {layer.name: (Part("d1"),) for layer in layers.layers} | {sliced: (Part("d2"),)}
    parts["n"] = tuple(Part(f"d{i}", ((0, 1), (4 * i, 4 * i + 4), (0, 16))) for i in range(2))
    plan = problem.build_plan(parts | {layers.producer["q"].name: (Part("d2"),)})

    def received(there: LayerGraph) -> list[Region | None]:
        return [box.region for box in route(there, plan, problem.platform.host_of).received_boxes if box.device == "d2"]

    assert received(layers) == [((0, 1), (2, 3), (0, 16))]
    # Without rule_bound_nodes, d2 receives all rows, in one transfer from each of two devices.
    assert len(received(replace(layers, rule_bound_nodes=frozenset()))) == 2
    check_plan(problem, plan)


def test_computes_single_read_row_of_quantized_layer() -> None:
    """The reading layer begins with its own DequantizeLinear."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> n (float[1,16,8] x) => (float[1,1,8] y)
        <float s = {0.01}, uint8 z = {0}, int64[1] i = {0}> {
            q0 = QuantizeLinear (x, s, z) d0 = DequantizeLinear (q0, s, z) a = Softmax <axis = 2> (d0)
            q1 = QuantizeLinear (a, s, z) d1 = DequantizeLinear (q1, s, z) g = Gather <axis = 1> (d1, i)
            q2 = QuantizeLinear (g, s, z) y = DequantizeLinear (q2, s, z) }"""
    )
    prepared = prepare(Model.load(proto))
    assert prepared.layers is not None and prepared.reference is not None
    assert prepared.layers.tensors["q1"].shape == (1, 1, 8)
    given = random_inputs(graph_inputs(prepared.reference))
    expected, got = (run_model(model, given)["y"] for model in (prepared.reference, prepared.model))
    assert np.array_equal(expected, got)


def test_keeps_model_if_everything_is_read() -> None:
    model = Model.load(modern.MODERN["yolo"]())  # The Slices of this network together read the whole tensor.
    passes = make_pipeline("normalise,infer-shapes,form-layers")
    before = PassManager(passes).run(PipelineState(model=model))
    assert PassManager(make_pipeline("trim")).run(before) is before


def test_rejects_existing_plan() -> None:
    formed = PassManager(make_pipeline("normalise,infer-shapes,form-layers")).run(PipelineState(model=first_row()))
    assert formed.layers is not None
    with pytest.raises(DicompilerError, match="the layers have a plan already"):
        PassManager(make_pipeline("trim")).run(replace(formed, plan=single_device_plan(formed.layers, "d0")))


@pytest.mark.slow
def test_trims_single_device_and_verifies_against_original(tmp_path: object, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    result = dicompiler.compile(modern.MODERN["vit"](), "rpi4x2", "modnn", output=f"{tmp_path}/out")
    assert "never read" not in caplog.text
    assert result.reference is not None and result.single_device_metrics is not None and result.layers is not None
    work = sum(count_flops(result.layers, layer) for layer in result.layers.layers)
    assert sum(entry.flops for entry in result.single_device_metrics.devices) == work
    assert len(result.reference.proto.graph.node) < len(prepare(result.reference).model.proto.graph.node)
    assert result.verify().passed
