"""8-bit operators in TFLite Micro: equal to LiteRT, and at most one step different from onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from support.tflm_runs import compiled, play

from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.platform import uniform_platform
from dicompiler.partition.tiling import single_device_plan
from dicompiler.plugin.pass_manager import PassManager, make_pipeline
from dicompiler.verify.executor import run_model
from dicompiler_targets.tflm.lowering import lower_segment
from dicompiler_targets.tflm.reference_checks import LiteRtRuntime, MicroRuntime

IMAGE = (1, 6, 9, 10)
SCALES = ((0.05, -3, 0.02, 5), (0.05, -128, 0.031, -128), (0.05, 3, 0.05, 3))
"""Scale and zero point of the input, then of the output."""
NONE = np.zeros(0, np.float32)


def model(op: str, scales: tuple[float, int, float, int], shape: Any, constants: Any, attributes: Any) -> Model:
    """Return a node between a DequantizeLinear and a QuantizeLinear; int8 constants have a scale for each row."""
    values = dict(zip(("si", "zi", "so", "zo"), map(np.asarray, scales), strict=True))
    tensors = {n: v.astype(np.float32 if n[0] == "s" else np.int8) for n, v in values.items()}
    nodes, names = [helper.make_node("DequantizeLinear", ["x", "si", "zi"], ["d"], "d")], ["d"]
    for i, value in enumerate(constants):
        tensors[f"c{i}"], axis = value, 1 if op == "MatMul" else 0
        names.append(f"c{i}")
        if value.dtype == np.int8:
            tensors[f"c{i}s"] = np.random.default_rng(i).uniform(0.01, 0.02, value.shape[axis]).astype(np.float32)
            nodes.append(helper.make_node("DequantizeLinear", [f"c{i}", f"c{i}s"], [f"v{i}"], f"v{i}", axis=axis))
            names[-1] = f"v{i}"
    nodes.append(helper.make_node(op, names, ["o"], "node", **attributes))
    nodes.append(helper.make_node("QuantizeLinear", ["o", "so", "zo"], ["y"], "q"))
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.INT8, shape)],
        [helper.make_tensor_value_info("y", TensorProto.INT8, None)],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )  # fmt: skip
    made = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    return Model.load(onnx.shape_inference.infer_shapes(made))


def number(*shape: int) -> NDArray[np.int8]:
    return np.random.default_rng(1).integers(-127, 128, shape).astype(np.int8)


def case(op: str, *constants: Any, shape: tuple[int, ...] = IMAGE, **attributes: Any) -> Any:
    text = " ".join(f"{key}={value}" for key, value in attributes.items())
    return pytest.param(op, shape, constants, attributes, id=f"{op} {len(shape)}-D {text}"[:90])


ON_NUMBERS = [
    case("Conv", number(5, 6, 3, 3), pads=[1, 1, 1, 1]),
    case("Conv", number(12, 1, 3, 3), group=6, strides=[2, 1], pads=[0, 1, 1, 0]),
    case("Gemm", number(7, 6), shape=(3, 6), transB=1), case("MatMul", number(6, 7), shape=(2, 5, 6)),
    case("MaxPool", kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
    case("AveragePool", kernel_shape=[3, 3], strides=[2, 2]), case("AveragePool", kernel_shape=[9, 10]),
    case("AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    case("AveragePool", kernel_shape=[3, 3], pads=[2, 0, 1, 1], strides=[2, 2]),
    case("AveragePool", kernel_shape=[3, 2], pads=[1, 1, 1, 1], count_include_pad=1),
    case("AveragePool", kernel_shape=[2, 3], strides=[2, 2], ceil_mode=1),
    case("AveragePool", kernel_shape=[2, 3], strides=[2, 2], ceil_mode=1, pads=[1, 0, 0, 1], count_include_pad=1),
    case("GlobalAveragePool"), case("ReduceMean", axes=[2, 3]), case("ReduceMean", axes=[1], keepdims=0),
    case("Resize", NONE, np.asarray([1, 1, 2, 2], np.float32), mode="linear"),
    case("Resize", NONE, np.asarray([1, 1, 3, 2], np.float32), mode="nearest"),
]  # fmt: skip
IN_FLOATS = [
    case("Resize", NONE, np.asarray([1, 1, 3, 3], np.float32), mode="linear"),
    case("Resize", NONE, np.asarray([1, 1, 2, 2], np.float32), mode="linear",
         coordinate_transformation_mode="align_corners"),
    case("Relu"), case("Sigmoid"), case("LeakyRelu"), case("HardSwish"), case("Softmax"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "shape", "constants", "attributes"), [*ON_NUMBERS, *IN_FLOATS])
@pytest.mark.parametrize("scales", SCALES, ids=["finer", "both -128", "the same"])
def test_operator_equals_litert_and_is_within_one_step_of_onnxruntime(
    op: str, shape: Any, constants: Any, attributes: Any, scales: Any
) -> None:
    source = model(op, scales, shape, constants, attributes)
    program = compiled(source).program
    assert program is not None
    made = lower_segment(program.devices[0].segments[0], program.weights)
    inputs = {"x": np.random.default_rng(0).integers(-128, 128, shape).astype(np.int8)}
    ours, theirs = MicroRuntime(made).run(inputs)["y"], LiteRtRuntime(made).run(inputs)["y"]
    assert np.array_equal(ours, theirs)
    reference = run_model(source, inputs)["y"].astype(int)
    assert ours.shape == reference.shape and np.abs(ours - reference).max() <= 1
    assert len(np.unique(ours)) > 3
    in_floats = any(op == param.values[0] and attributes is param.values[3] for param in IN_FLOATS)
    in_floats |= attributes.get("mode") == "linear" and scales[:2] != scales[2:]
    assert ("DEQUANTIZE" in made.operators) == in_floats


def test_softmax_is_computed_in_integers_if_its_output_has_the_required_scale() -> None:
    source = model("Softmax", (0.1, 4, 1 / 256, -128), (3, 7), (), {"axis": 1})
    program = compiled(source).program
    assert program is not None
    made = lower_segment(program.devices[0].segments[0], program.weights)
    assert made.operators == ("SOFTMAX",)
    inputs = {"x": number(3, 7)}
    assert np.abs(MicroRuntime(made).run(inputs)["y"] - run_model(source, inputs)["y"].astype(int)).max() <= 1


@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize("scales", SCALES[::2], ids=["finer", "the same"])
@pytest.mark.parametrize("text", ["tile-height{layers=node parts=4}", "tile-grid{layers=node rows=3 columns=2}"])
def test_average_is_the_same_number_however_the_image_is_cut(text: str, scales: Any, include: int) -> None:
    attributes = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": include}
    source = model("AveragePool", scales, IMAGE, (), attributes)
    inputs = {"x": number(*IMAGE)}
    assert np.array_equal(*_cut_and_whole(source, text, inputs))


def _cut_and_whole(source: Model, text: str, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the outputs of the split and of the whole network in TFLite Micro."""
    base = replace(prepare(source), platform=uniform_platform(6))
    assert base.layers is not None
    annotated = PassManager(make_pipeline(f"normalise,infer-shapes,form-layers,{text}")).run(
        PipelineState(model=source, platform=uniform_platform(6))
    )
    assert annotated.plan is not None and any(len(parts) > 1 for parts in annotated.plan.layers.values())
    whole = replace(base, plan=single_device_plan(base.layers, "d0"))
    return play(annotated, inputs)["y"], play(whole, inputs)["y"]


def test_network_that_is_quantised_is_that_from_end_to_end() -> None:
    """A quantised float network computes only with 8-bit numbers: norms are in the weights, and averages are MEAN."""
    from support.tflm_runs import int8

    from dicompiler import networks

    for name, expected in (("autoencoder", {"CONV_2D", "RESHAPE"}), ("ds_cnn", {"CONV_2D", "DEPTHWISE_CONV_2D"})):
        program = compiled(int8(Model.load(networks.build(name)))).program
        assert program is not None
        made = lower_segment(program.devices[0].segments[0], program.weights)
        assert {"QUANTIZE", "DEQUANTIZE", *expected} <= set(made.operators)
        assert not {"MUL", "ADD", "AVERAGE_POOL_2D"} & set(made.operators)
