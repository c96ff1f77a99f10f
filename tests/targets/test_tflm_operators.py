"""Single operators as TFLite models: TFLite Micro and LiteRT compute the same as onnxruntime, or they are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.tflm_runs import compiled, difference, litert, micro

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.model import Model
from dicompiler.networks import LIGHT_NAMES
from dicompiler.verify.executor import run_model
from dicompiler_targets.tflm.lowering import LOWERINGS, LoweredModel, lower_segment

IMAGE = (1, 6, 8, 10)
F = np.float32


def model(
    op: str, shape: tuple[int, ...], constants: tuple[Any, ...], attributes: Mapping[str, Any], opset: int, inputs: int
) -> Model:
    """Return one node that reads `inputs` tensors of `shape`, and then the constants (None: omitted)."""
    given = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, shape) for i in range(inputs)]
    tensors = [numpy_helper.from_array(np.asarray(c), f"c{i}") for i, c in enumerate(constants) if c is not None]
    names = [*(v.name for v in given), *("" if c is None else f"c{i}" for i, c in enumerate(constants))]
    node = helper.make_node(op, names, ["y"], "node", **attributes)
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "g", given, [output], tensors)
    made = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", opset)])
    return Model.load(onnx.shape_inference.infer_shapes(made))


def lowered(source: Model) -> LoweredModel:
    program = compiled(source).program
    assert program is not None
    (segment,) = program.devices[0].segments
    return lower_segment(segment, program.weights)


def weights(*shape: int) -> Any:
    return np.random.default_rng(1).standard_normal(shape).astype(F)


def case(
    op: str, *constants: Any, shape: tuple[int, ...] = IMAGE, opset: int = 17, inputs: int = 1, **more: Any
) -> Any:
    text = " ".join(f"{key}={value}" for key, value in more.items())
    return pytest.param(op, shape, constants, more, opset, inputs, id=f"{op} {len(shape)}-D {opset} {text}"[:90])


NONE_THEN_SCALES = (None, np.asarray([1, 1, 2, 3], F))
CASES = [
    case("Conv", weights(5, 6, 3, 3), pads=[1, 1, 1, 1]),
    case("Conv", weights(5, 6, 3, 3), weights(5), pads=[0, 1, 2, 0], strides=[2, 1]),
    case("Conv", weights(5, 6, 3, 3), pads=[2, 2, 2, 2], dilations=[2, 2]),
    case("Conv", weights(6, 2, 3, 3), weights(6), group=3, auto_pad="SAME_UPPER", strides=[2, 2]),
    case("Conv", weights(6, 2, 3, 3), group=3, auto_pad="SAME_LOWER", strides=[2, 2]),
    case("Conv", weights(12, 1, 3, 3), weights(12), group=6, pads=[1, 1, 1, 1]),
    case("MaxPool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    case("MaxPool", kernel_shape=[3, 2], strides=[2, 2], pads=[0, 1, 1, 0], ceil_mode=1),
    case("AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    case("AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1),
    case("AveragePool", kernel_shape=[3, 3], pads=[2, 0, 1, 1], strides=[2, 2]),
    case("AveragePool", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1),
    case("GlobalAveragePool"), case("GlobalMaxPool"),
    case("Gemm", weights(7, 6), weights(7), shape=(3, 6), transB=1, alpha=0.5, beta=2.0),
    case("Gemm", weights(6, 7), weights(3, 7), shape=(3, 6)),
    case("MatMul", weights(6, 4), shape=(2, 5, 6)),
    case("MatMul", shape=(2, 6, 6), inputs=2),
    case("Add", weights(1, 6, 1, 1)), case("Add", weights(10)), case("Mul", weights(8, 1)), case("Div", F(3.0)),
    case("Sum", inputs=3), case("Max", inputs=3), case("Min", inputs=2), case("Sub", inputs=2, shape=(4, 5)),
    case("Relu"), case("Clip", F(-0.5), F(0.7)), case("Clip", F(0.0), F(6.0)), case("Clip", None, F(0.1)),
    case("Clip", shape=(2, 3), opset=9, min=-0.3, max=0.4), case("LeakyRelu", alpha=0.3),
    case("PRelu", weights(6, 1, 1)), case("Sigmoid"), case("Tanh"), case("HardSwish"), case("HardSigmoid", alpha=0.3),
    case("Exp"), case("Abs"), case("Neg"), case("Floor"), case("Ceil"), case("Sin"), case("Cos"), case("Identity"),
    case("BatchNormalization", *(abs(weights(6)) + i for i in range(4))),
    case("Softmax", axis=1), case("Softmax", axis=2), case("Softmax", axis=-1), case("Softmax", opset=11, axis=1),
    case("Softmax", shape=(3, 7)), case("LogSoftmax", axis=1),
    case("LRN", size=5), case("LRN", size=5, beta=0.5), case("LRN", size=3, beta=0.6, alpha=0.1, bias=2.0),
    case("ReduceMean", axes=[2, 3]), case("ReduceMean", axes=[1], keepdims=0), case("ReduceMax", axes=[3]),
    case("ReduceSum", np.asarray([1, 3])),
    case("Reshape", np.asarray([2, 3, -1])), case("Reshape", np.asarray([1, 3, 16, 10])), case("Flatten"),
    case("Flatten", axis=2), case("Transpose", perm=[0, 2, 3, 1]), case("Transpose", perm=[0, 3, 1, 2]),
    case("Transpose", perm=[2, 0, 1], shape=(3, 4, 5)), case("Squeeze", np.asarray([0])),
    case("Unsqueeze", np.asarray([0]), shape=(3, 4)),
    case("Concat", inputs=3, axis=1), case("Concat", inputs=2, axis=-1), case("Concat", inputs=2, axis=0, shape=(2, 3)),
    case("Slice", np.asarray([1, 2]), np.asarray([5, 100]), np.asarray([1, -1]), np.asarray([2, 3])),
    case("Slice", opset=9, starts=[1], ends=[3], axes=[2]),
    case("Pad", np.asarray([0, 0, 1, 2, 0, 1, 0, 0])), case("Pad", np.asarray([0, 0, 1, 2, 0, 1, 0, 0]), F(-1.5)),
    case("DepthToSpace", shape=(1, 8, 3, 4), blocksize=2), case("SpaceToDepth", blocksize=2),
    case("Resize", *NONE_THEN_SCALES, mode="nearest"),
    case("Resize", *NONE_THEN_SCALES, mode="nearest",
         coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
    case("Resize", *NONE_THEN_SCALES, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="ceil"),
    case("Resize", *NONE_THEN_SCALES, mode="linear"),
    case("Resize", *NONE_THEN_SCALES, mode="linear", coordinate_transformation_mode="asymmetric"),
    case("Resize", None, None, np.asarray([1, 6, 15, 19]), mode="linear",
         coordinate_transformation_mode="align_corners"),
    case("Conv", weights(5, 6, 3), weights(5), shape=(1, 6, 20), pads=[1, 2], strides=[2]),
    case("Conv", weights(6, 1, 3), shape=(2, 6, 20), group=6, dilations=[2]),
    case("MaxPool", shape=(1, 6, 20), kernel_shape=[3], strides=[2]),
    case("AveragePool", shape=(1, 6, 20), kernel_shape=[3], pads=[1, 1]), case("GlobalAveragePool", shape=(2, 6, 20)),
    case("ConvTranspose", weights(6, 5, 3, 3), weights(5), strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1]),
    case("ConvTranspose", weights(6, 5, 2, 2), strides=[2, 2]), case("ConvTranspose", weights(6, 5, 3, 4)),
    case("Elu"), case("Reciprocal", shape=(3, 5)), case("Pow", F(2)), case("Pow", F(3), shape=(4, 5)),
    case("ReduceMin", axes=[1, 3]), case("ReduceMin", axes=[2], keepdims=0, shape=(3, 4, 5)),
    case("Upsample", np.asarray([1, 1, 2, 2], F), opset=9, mode="nearest"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "shape", "constants", "attributes", "opset", "inputs"), CASES)
def test_operator_computes_the_same_as_onnxruntime(
    op: str, shape: tuple[int, ...], constants: tuple[Any, ...], attributes: Mapping[str, Any], opset: int, inputs: int
) -> None:
    source = model(op, shape, constants, attributes, opset, inputs)
    made = lowered(source)
    rng = np.random.default_rng(0)
    given = {f"x{i}": rng.standard_normal(shape).astype(F) for i in range(inputs)}
    reference = run_model(source, given)["y"]
    wire = [value.transpose(0, 2, 3, 1) if value.ndim == 4 else value for value in given.values()]
    ours = micro(made.data, wire, 1 << 20)
    assert difference(ours[0], litert(made.data, wire)[0]) <= 1e-5
    got = ours[0].transpose(0, 3, 1, 2) if reference.ndim == 4 else ours[0]
    assert got.shape == reference.shape
    assert difference(reference, got) <= 1e-5


REFUSED = [
    (("Erf",), "TFLite-micro has no operator for it"),
    (("Slice", np.asarray([-1]), np.asarray([-100]), np.asarray([1]), np.asarray([-1])), "a step is below 1"),
    (("Pad", np.asarray([0, 0, 1, 1, 0, 0, 1, 1])), "its mode is not constant, a pad is negative"),
    (("MaxPool",), "it has dilations: TFLite-micro has no such pool"),
    (("Resize", None, np.asarray([1, 1, 2, 2], F)), "it has mode 'cubic'"),
    (("Elu",), "alpha is not 1"),
    (("Pow", F(2.5)), "its exponent is not 2, 3, 0.5 or -0.5"),
    (("ConvTranspose", weights(6, 1, 3, 3)), "it has several groups"),
]
MORE = {
    "Pad": {"mode": "reflect"},
    "MaxPool": {"kernel_shape": [2, 2], "dilations": [2, 2]},
    "Resize": {"mode": "cubic"},
    "Elu": {"alpha": 0.5},
    "ConvTranspose": {"group": 6},
}


@pytest.mark.parametrize(("given", "cause"), REFUSED, ids=[given[0] for given, _ in REFUSED])
def test_what_cannot_be_expressed_is_one_line_with_node_operator_and_remedy(given: tuple[Any, ...], cause: str) -> None:
    op, *constants = given
    source = model(op, IMAGE, tuple(constants), MORE.get(op, {}), 17, 1)
    with pytest.raises(DicompilerError) as caught:
        lowered(source)
    text = str(caught.value)
    assert f"target tflm: node 'node' ({op}): {cause}" in text and text.count(": ") >= 3 and "\n" not in text


def test_tensor_of_rank_5_and_one_of_another_type_are_refused() -> None:
    with pytest.raises(DicompilerError, match="has rank 5: TFLite-micro supports up to 4"):
        lowered(model("Relu", (1, 2, 3, 4, 5), (), {}, 17, 1))
    text = '<ir_version: 8, opset_import: ["" : 17]> g (double[1,4] x) => (double[1,4] y) { y = Relu(x) }'
    source = Model.load(onnx.parser.parse_model(text))
    with pytest.raises(DicompilerError, match="is of type float64: take one of float32, int8"):
        lowered(source)


def test_batch_normalisation_bias_and_activation_go_into_the_convolution() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[1,2,4,4] x) => (float[1,3,4,4] y) <float[3,2,1,1] w = {1,2,3,4,5,6}, float[3,1,1] b = {1,2,3},
       float[3] s = {1,2,3}, float[3] t = {1,0,1}, float[3] m = {0,1,2}, float[3] v = {1,4,9}>
    { a = Conv(x, w)  c = Add(a, b)  d = BatchNormalization(c, s, t, m, v)  y = Relu(d) }"""
    source = Model.load(onnx.parser.parse_model(text))
    made = lowered(source)
    assert made.operators == ("CONV_2D",)
    x = np.random.default_rng(0).standard_normal((1, 2, 4, 4)).astype(F)
    (got,) = micro(made.data, [x.transpose(0, 2, 3, 1)], 1 << 16)
    assert difference(run_model(source, {"x": x})["y"], got.transpose(0, 3, 1, 2)) <= 1e-6


@pytest.mark.parametrize("name", LIGHT_NAMES)
def test_every_operator_of_the_nine_cnns_can_be_expressed(name: str) -> None:
    file = f"light_{'bvlc_' if name == 'alexnet' else ''}{name}.onnx"
    proto = onnx.load(Path(onnx.__file__).parent / "backend/test/data/light" / file)
    # onnx's test networks create their weights with ConstantOfShape, which the target need not support.
    found = {node.op_type for node in proto.graph.node} - {"ConstantOfShape"}
    assert found and found <= LOWERINGS.keys()
