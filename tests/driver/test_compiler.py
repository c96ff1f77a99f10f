"""Tests of compile(): devices without compute, memory limits, warnings of unknown costs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from dicompiler import networks
from dicompiler.analysis.compare import compare
from dicompiler.base.errors import DicompilerError
from dicompiler.driver.compiler import compile, plan, run_strategy
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.cluster import Device, Host, Network
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.platform import Platform
from dicompiler.plugin.registry import registry

TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[1, 4, 64, 64] x) => (float[1, 4, 64, 64] y) {
   [conv] t = Conv <pads = [1, 1, 1, 1]> (x, w)
   [pool] y = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (t)
}
"""
CAMERA = Platform(
    "camera",
    (Host("cam", 2**20), Host("pi01", 2**30)),
    (Device("cam", "cam", 0.0), Device("pi01", "pi01", 1e9)),
    Network("switch", 1e9),
)


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    proto = onnx.parser.parse_model(TEXT)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 4, 3, 3), np.float32), "w"))
    return proto


def test_first_device_without_compute_is_only_source_and_sink(model: onnx.ModelProto) -> None:
    hosts = tuple(replace(host, memory=2**30) for host in CAMERA.hosts)
    result = compile(model, replace(CAMERA, hosts=hosts))
    assert result.plan is not None and result.routing is not None
    assert (result.plan.source, result.plan.sink) == (("cam",), ("cam",))
    assert {task.device for task in result.routing.tasks} == {"pi01"}


def test_rejects_part_on_device_without_compute(model: onnx.ModelProto) -> None:
    plan = Plan({"conv": (Part("pi01"),), "pool": (Part("cam"),)}, ("cam",), ("cam",))
    with pytest.raises(DicompilerError, match=r"plan: layers\.pool\[0\]: device 'cam' has no compute: use another"):
        compile(model, CAMERA, plan=plan)


@pytest.mark.parametrize(
    ("small", "message"),
    [
        (Host("pi01", 1000), "host pi01 needs .*: move layers to other hosts, above all parts of layer 'conv' .576 B"),
        (
            Host("cam", 1000),
            "host cam needs .*: it computes no layer and only stores inputs or outputs: use another device",
        ),
    ],
)
def test_rejects_plan_that_exceeds_memory_of_a_host(model: onnx.ModelProto, small: Host, message: str) -> None:
    hosts = tuple(small if host.name == small.name else host for host in CAMERA.hosts)
    # This problem does not count the memory of a target's runtime.
    problem = load_problem(model, replace(CAMERA, hosts=hosts))
    with pytest.raises(DicompilerError, match=message):
        run_strategy(problem, registry().make("strategies", "modnn"))


def test_plan_counts_the_memory_of_the_runtime() -> None:
    """If the plan did not count this memory, `compile` would refuse the plan."""
    text = r"plan: host pi01 needs .* \(.* \+ [\d.]+ MB runtime of target 'sockets'\)"
    with pytest.raises(DicompilerError, match=text):
        plan(networks.build("lenet"), 'rpi4x2{memory="60 MiB"}', "single")
    assert plan(networks.build("lenet"), 'rpi4x2{memory="100 MiB"}', "single").plan is not None


def test_compare_counts_the_memory_of_the_runtime() -> None:
    """Each strategy reports the cause: no split helps, because the runtime alone does not fit."""
    compared = compare(networks.build("lenet"), 'rpi4x2{memory="40 MiB"}', "single,cpsat,auto{tries=0}")
    for result in compared.results:
        assert result.plan is None and result.error.startswith("plan: host pi01 needs "), result.error
        assert result.error.endswith("because the runtime alone does not fit")
    (result,) = compare(networks.build("lenet"), 'rpi4x2{memory="100 MiB"}', "single").results
    assert result.plan is not None and result.metrics is not None and result.metrics.memory < 2**20


def test_warns_of_layers_without_predicted_cost(caplog: pytest.LogCaptureFixture) -> None:
    proto = networks.build("lenet")
    name = proto.graph.output[0].name
    made = ("NonZero", [name], ["where"]), ("Transpose", ["where"], ["there"])
    proto.graph.node.extend(onnx.helper.make_node(*one, name=f"n{i}") for i, one in enumerate(made))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("there", onnx.TensorProto.INT64, None))
    with caplog.at_level("WARNING", "dicompiler"):
        compile(proto, "rpi4x2", "single")
    start = r"layer '\w+' \(\d+ nodes?\) stays whole, and predictions omit its work: the shape of '.+', "
    assert re.fullmatch(
        f"{start}the output of NonZero, is unknown: the shape depends on values: .*", caplog.messages[0]
    )
    caplog.clear()
    compile(networks.build("lenet"), "rpi4x2", "single")
    assert caplog.messages == []


def test_model_optimized_by_onnxruntime_has_the_same_prediction(tmp_path: Path) -> None:
    """Fused operators are unfused, so the layers and their possible splits are those of the original network."""
    onnx.save(networks.build("lenet"), tmp_path / "lenet.onnx")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(str(tmp_path / "lenet.onnx"), options)
    assert "FusedConv" in {node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node}
    before, after = (compile(tmp_path / name, "rpi4x2", "single") for name in ("lenet.onnx", "optimised.onnx"))
    kinds = [[[node.op for node in layer.nodes] for layer in one.layers.layers] for one in (before, after)]
    assert kinds[0] == kinds[1]
    assert before.metrics is not None and after.metrics is not None
    assert after.metrics.latency_s == pytest.approx(before.metrics.latency_s)
