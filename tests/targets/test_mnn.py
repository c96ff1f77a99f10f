"""The engine MNN: converted operators compared with onnxruntime, and artifacts whose segments MNN computes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper, shape_inference
from support.budget import examples

import dicompiler
from dicompiler import networks
from dicompiler.base.errors import UsageError
from dicompiler.base.schema import load_json
from dicompiler.cost.memory import program_memory
from dicompiler.cost.profile import load_profile
from dicompiler.driver.artifact import run, verify
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import load_plan
from dicompiler.target.engine import EngineFiles, UnsupportedByEngine
from dicompiler.target.engine_check import allowed_difference, measure_difference
from dicompiler_targets.engines import mnn_operators
from dicompiler_targets.engines.mnn import MnnEngine
from dicompiler_targets.engines.mnn_converter import convert_to_mnn
from dicompiler_targets.sockets.artifact import SocketsArtifact
from dicompiler_targets.sockets.target import SocketsTarget

MNN = MnnEngine()
TOLERANCE = allowed_difference(MNN)
EXACT = 1e-5
"""Largest difference of operators that MNN does not compute by Winograd's algorithm, as a share of max|output|."""


def parsed(nodes: str, x: str = "1, 8, 9, 7", opset: int = 17, **constants: np.ndarray) -> onnx.ModelProto:
    """Return a model from `x`, a float input of shape `x`, to the float output `y`, whose shape is inferred."""
    text = f"""<ir_version: 8, opset_import: ["": {opset}]> g (float[{x}] x) => (float y) {{ {nodes} }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return shape_inference.infer_shapes(model, data_prop=True)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def integers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def assert_same_as_onnxruntime(model: onnx.ModelProto, allowed: float = EXACT) -> None:
    """Assert that MNN computes what onnxruntime computes, and that it does not change its input."""
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    inputs = {"x": floats(*shape, seed=1)}
    before = inputs["x"].copy()
    assert not MNN.unsupported_nodes(model, {})
    difference, reason = measure_difference(MNN, Model(model), convert_to_mnn(model, {}), inputs)
    assert difference < allowed, reason
    np.testing.assert_array_equal(inputs["x"], before)


STATISTICS = {"s": floats(8), "b": floats(8, seed=1), "m": floats(8, seed=2), "v": floats(8, seed=3) ** 2}
OPERATORS = {
    "clip": parsed("y = Clip (x, lo, hi)", lo=np.float32(-0.5), hi=np.float32(0.25)),
    "clip_below": parsed("y = Clip (x, lo)", lo=np.float32(-0.5)),
    "clip_above": parsed("y = Clip (x, , hi)", hi=np.float32(0.5)),
    "clip_of_opset_6": parsed("y = Clip <min = -0.5, max = 0.3> (x)", opset=6),
    "hard_sigmoid": parsed("y = HardSigmoid <alpha = 0.3, beta = 0.4> (x)"),
    "swish": parsed("s = Sigmoid (x) y = Mul (s, x)"),
    "gelu": parsed(
        "a = Div (x, q) b = Erf (a) c = Add (b, o) d = Mul (x, c) y = Mul (d, h)",
        q=np.float32(2**0.5), o=np.float32(1), h=np.float32(0.5),
    ),
    "prelu": parsed("y = PRelu (x, s)", s=floats(8, 1, 1)),
    "power": parsed("a = Abs (x) y = Pow (a, p)", p=np.float32(1.7)),
    "residual": parsed("r = Relu (x) s = Add (r, x) y = Relu (s)"),
    "scalar_minus": parsed("y = Sub (c, x)", c=np.float32(2)),
    "scalar_divided_by": parsed("e = Exp (x) y = Div (c, e)", c=np.float32(2)),
    "maximum_of_three": parsed("r = Tanh (x) s = Neg (x) y = Max (x, r, s)"),
    "squeeze_and_excitation": parsed("p = GlobalAveragePool (x) s = Sigmoid (p) y = Mul (x, s)"),
    "batch_normalization": parsed("y = BatchNormalization (x, s, b, m, v)", **STATISTICS),
    "folded_batch_normalization": parsed(
        "c = Conv (x, w) n = BatchNormalization (c, s, b, m, v) y = Relu (n)", w=floats(8, 8, 1, 1), **STATISTICS
    ),
    "layer_normalization": parsed("y = LayerNormalization (x, s, b)", s=floats(7), b=floats(7)),
    "instance_normalization": parsed("y = InstanceNormalization (x, s, b)", s=floats(8), b=floats(8)),
    "global_average": parsed("y = GlobalAveragePool (x)"),
    "global_maximum": parsed("y = GlobalMaxPool (x)"),
    "pool_without_strides": parsed("y = MaxPool <kernel_shape = [2, 2]> (x)"),
    "max_pool_with_ceil_mode": parsed(
        "y = MaxPool <kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1> (x)", "1, 8, 10, 8"
    ),
    "average_with_ceil_mode": parsed(
        "y = AveragePool <kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1> (x)", "1, 8, 10, 8"
    ),
    "classifier": parsed(
        "f = Flatten (x) g = Gemm <transB = 1> (f, w, b) y = Softmax (g)", w=floats(5, 504), b=floats(5)
    ),
    "scaled_gemm": parsed("y = Gemm <alpha = 0.5, beta = 2.0> (x, w, b)", "4, 30", w=floats(30, 5), b=floats(5)),
    "attention": parsed("t = Transpose <perm = [0, 1, 3, 2]> (x) m = MatMul (x, t) s = Softmax (m) y = MatMul (s, x)"),
    "lrn": parsed("y = LRN <size = 5, alpha = 0.1, beta = 0.6, bias = 2.0> (x)"),
    "padding": parsed("y = Pad (x, p, v)", p=integers(0, 0, 2, 0, 0, 0, 1, 1), v=np.float32(0.5)),
    "reflection": parsed('y = Pad <mode = "reflect"> (x, p)', p=integers(0, 0, 2, 1, 0, 0, 1, 3)),
    "edge": parsed('y = Pad <mode = "edge"> (x, p)', p=integers(0, 0, 2, 1, 0, 0, 1, 3)),
    "slice_of_opset_9": parsed("y = Slice <starts = [1], ends = [4], axes = [1]> (x)", opset=9),
    "equal_split": parsed("a, b = Split <axis = 1> (x) y = Concat <axis = 1> (b, a)"),
    "split_of_opset_11": parsed("a, b = Split <axis = 1, split = [3, 5]> (x) y = Concat <axis = 1> (b, a)", opset=11),
    "softmax_of_opset_11": parsed("y = Softmax <axis = 1> (x)", opset=11),
    "log_softmax": parsed("y = LogSoftmax (x)"),
    "log_softmax_of_opset_11": parsed("y = LogSoftmax <axis = 3> (x)", opset=11),
    "shuffled_channels": parsed(
        "a = Reshape (x, s) b = Transpose <perm = [0, 2, 1, 3, 4]> (a) y = Reshape (b, t)",
        s=integers(1, 2, 4, 9, 7), t=integers(1, 8, 9, 7),
    ),
    "squeeze_of_opset_11": parsed("p = GlobalAveragePool (x) y = Squeeze <axes = [2, 3]> (p)", opset=11),
    "identity": parsed("y = Identity (x)"),
    "dropout": parsed("y = Dropout (x)"),
    "mean_of_all": parsed("y = ReduceMean (x)"),
    "sum": parsed("y = ReduceSum <keepdims = 0> (x, a)", a=integers(-1, 1)),
    "pixel_shuffle": parsed('y = DepthToSpace <blocksize = 2, mode = "CRD"> (x)'),
    "space_to_depth": parsed("y = SpaceToDepth <blocksize = 2> (x)", "1, 8, 10, 6"),
    "several_frames": parsed("c = Conv (x, w) y = Relu (c)", "3, 8, 9, 7", w=floats(4, 8, 1, 1)),
}  # fmt: skip


def test_log_softmax_of_opset_11_over_several_axes_is_left_to_onnxruntime() -> None:
    assert MNN.unsupported_nodes(parsed("y = LogSoftmax (x)", opset=11), {}) == {0: "a LogSoftmax over several axes"}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_equals_onnxruntime(name: str) -> None:
    assert_same_as_onnxruntime(OPERATORS[name])


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_convolutions_and_pools_equal_onnxruntime(data: st.DataObject) -> None:
    """Kernels, strides, dilations, groups, batches and padding of each side, as tiles with halos have them."""

    def pair(largest: int) -> list[int]:
        return [data.draw(st.integers(1, largest)) for _ in range(2)]

    kind = data.draw(st.sampled_from(["Conv", "ConvTranspose", "MaxPool", "AveragePool"]))
    kernel, strides, dilations = pair(5), pair(3), pair(2)
    pads = [data.draw(st.integers(0, size - 1)) for size in (*kernel, *kernel)]
    channels = data.draw(st.sampled_from([1, 3, 4, 8, 16, 17]))
    group = data.draw(st.sampled_from([g for g in (1, 2, 4, channels) if channels % g == 0]))
    size = [9 + data.draw(st.integers(0, 14)) for _ in range(2)]
    x = f"{data.draw(st.integers(1, 2))}, {channels}, {size[0]}, {size[1]}"
    common = f"kernel_shape = {kernel}, strides = {strides}, pads = {pads}"
    if kind in ("MaxPool", "AveragePool"):
        assert_same_as_onnxruntime(parsed(f"y = {kind} <{common}> (x)", x))
        return
    per_group = data.draw(st.sampled_from([1, 2, 8]))
    shape = (per_group * group, channels // group) if kind == "Conv" else (channels, per_group)
    weights = {"w": floats(*shape, *kernel), "b": floats(per_group * group)}
    node = f"c = {kind} <{common}, dilations = {dilations}, group = {group}> (x, w, b) y = Relu (c)"
    assert_same_as_onnxruntime(parsed(node, x, **weights), TOLERANCE)


UNARY = ("Relu", "LeakyRelu", "Elu", "Selu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Softplus", "Softsign",
         "Exp", "Abs", "Neg", "Erf", "Identity", "Flatten", "ReduceMax", "ReduceMin", "LogSoftmax")  # fmt: skip


@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
def test_operators_on_tensors_of_each_rank_equal_onnxruntime(data: st.DataObject) -> None:
    """Tensors of 1 to 6 axes; those of 4 axes are also computed by a convolution, after which MNN groups channels."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6), label="shape")
    rank = len(shape)
    constants = dict[str, np.ndarray]()
    axis = data.draw(st.integers(-rank, rank - 1))
    kind = data.draw(st.sampled_from(["unary", "binary", "Concat", "Transpose", "Softmax", "ReduceMean", "Slice",
                                      "Split", "Reshape", "MatMul", "LayerNormalization"]))  # fmt: skip
    first = ""
    if rank == 4 and data.draw(st.booleans()):
        constants["k"], first = floats(shape[1], shape[1], 1, 1), "x0 = Conv (x, k) "
    x = "x0" if first else "x"
    if kind == "unary":
        text = f"y = {data.draw(st.sampled_from(UNARY))} ({x})"
    elif kind == "binary":
        other = [size if data.draw(st.booleans()) else 1 for size in shape]
        constants["c"] = 1 + floats(*other[data.draw(st.integers(0, rank - 1)) :]) ** 2
        text = f"y = {data.draw(st.sampled_from(['Add', 'Sub', 'Mul', 'Div', 'Max', 'Min']))} ({x}, c)"
    elif kind == "Concat":
        constants["c"] = floats(*(3 if i == axis % rank else size for i, size in enumerate(shape)))
        text = f"y = Concat <axis = {axis}> (c, {x})"
    elif kind == "Transpose":
        text = f"y = Transpose <perm = {data.draw(st.permutations(range(rank)))}> ({x})"
    elif kind in ("Softmax", "ReduceMean"):
        text = f"y = Softmax <axis = {axis}> ({x})" if kind == "Softmax" else f"y = ReduceMean <axes = [{axis}]> ({x})"
    elif kind == "Slice":
        start, step = data.draw(st.integers(0, shape[axis] - 1)), data.draw(st.integers(1, 2))
        constants |= {"s": integers(start), "e": integers(1 << 40), "a": integers(axis), "t": integers(step)}
        text = f"y = Slice ({x}, s, e, a, t)"
    elif kind == "Split":
        constants["s"] = integers(1, 2)
        shape[axis] = 3
        if first:
            constants["k"] = floats(shape[1], shape[1], 1, 1)
        text = f"a, b = Split <axis = {axis}> ({x}, s) t = Tanh (a) y = Concat <axis = {axis}> (b, t)"
    elif kind == "Reshape":
        constants["s"] = integers(*data.draw(st.permutations([-1, *shape[:2]])))
        text = f"y = Reshape ({x}, s)"
    elif kind == "MatMul" and rank > 1:
        constants["c"] = floats(shape[-1], data.draw(st.integers(1, 9)))
        text = f"y = MatMul ({x}, c)"
    else:
        axis = data.draw(st.integers(1, rank - 1)) if rank > 1 else 0
        constants |= {"s": floats(*shape[axis:]), "b": floats(*shape[axis:], seed=1)}
        text = f"y = LayerNormalization <axis = {axis}> ({x}, s, b)" if rank > 1 else f"y = Relu ({x})"
    assert_same_as_onnxruntime(parsed(first + text, ", ".join(map(str, shape)), **constants), 5e-5)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_enlargements_equal_onnxruntime(data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(["nearest", "linear"]))
    known = ["half_pixel", "pytorch_half_pixel", "asymmetric", *(["align_corners"] if mode == "linear" else [])]
    transformation, nearest = (
        data.draw(st.sampled_from(known)),
        data.draw(st.sampled_from(["floor", "round_prefer_floor"])),
    )
    shape = [1, 5, *(data.draw(st.integers(1, 12)) for _ in range(2))]
    if mode == "nearest":
        sizes = [size * data.draw(st.integers(1, 3)) for size in shape[2:]]
    else:
        sizes = [data.draw(st.integers(1, 30)) for _ in range(2)]
    options = f'mode = "{mode}", coordinate_transformation_mode = "{transformation}", nearest_mode = "{nearest}"'
    text = f"y = Resize <{options}> (x, , , s)"
    assert_same_as_onnxruntime(parsed(text, ", ".join(map(str, shape)), s=integers(*shape[:2], *sizes)))


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        (parsed("y = Mish (x)", opset=18), "operator Mish"),
        (parsed("y = Gelu (x)", opset=20), "operator Gelu"),
        (parsed("i = ArgMax <axis = 1> (x) y = Cast <to = 1> (i)"), "operator ArgMax"),
        (parsed("y = Identity (x)", "1, 8, 0, 7"), r"a tensor of shape \(1, 8, 0, 7\)"),
        (parsed("y = ReduceMean <keepdims = 0> (x)"), r"a tensor of shape \(\)"),
        (parsed("y = Conv (x, w)", "1, 8, 9", w=floats(4, 8, 3)), "a Conv that is not two-dimensional"),
        (parsed("y = Conv <auto_pad = \"SAME_LOWER\"> (x, w)", w=floats(4, 8, 2, 2)), "a Conv with auto_pad"),
        (parsed("y = ConvTranspose <strides = [2, 2], output_shape = [18, 14]> (x, w)", w=floats(8, 4, 3, 3)),
         "a ConvTranspose with output_shape"),
        (parsed("y = MaxPool <kernel_shape = [3, 3], dilations = [2, 2]> (x)"), "a MaxPool with auto_pad, dilations"),
        (parsed("y = AveragePool <kernel_shape = [3, 3], pads = [0, 0, 1, 1], count_include_pad = 1> (x)"),
         "an AveragePool that counts asymmetric padding"),
        (parsed("y = Gemm <transA = 1> (x, w)", "30, 4", w=floats(30, 5)), "a Gemm with transA"),
        (parsed("c = Conv (x, w) y = Sub (o, c)", w=floats(4, 8, 1, 1), o=floats(1, 1, 1, 1)),
         "Sub with a first operand of one element and several axes"),
        (parsed("y = Max (x)"), "Max of one tensor"),
        (parsed("y = Pad (x, p)", p=integers(0, 0, -1, 0, 0, 0, 1, 1)), "a Pad that does not add rows and columns"),
        (parsed("y = Slice (x, s, e, a, k)", s=integers(8), e=integers(0), a=integers(2), k=integers(-1)),
         "a Slice with negative steps"),
        (parsed("a, b, c = Split <axis = 1, num_outputs = 3> (x) y = Concat <axis = 1> (c, b, a)", opset=18),
         "a Split into pieces of unequal size"),
        (parsed("y = LayerNormalization <axis = 0> (x, s)", s=floats(1, 8, 9, 7)), "a LayerNormalization over all"),
        (parsed("y = PRelu (x, s)", s=floats(7)), "a PRelu without a constant slope for each channel"),
        (parsed('y = Resize <mode = "cubic"> (x, , f)', f=np.array([1, 1, 2, 2], np.float32)), "a cubic Resize"),
        (parsed("y = Dropout (x, r, t)", r=np.float32(0.5), t=np.array(True)), "a Dropout with training_mode"),
    ],
)  # fmt: skip
def test_names_the_node_that_mnn_does_not_compute(model: onnx.ModelProto, cause: str) -> None:
    with pytest.raises(UnsupportedByEngine, match=cause):
        convert_to_mnn(model, {})
    assert any(re.match(cause, reason) for reason in MNN.unsupported_nodes(model, {}).values())


def test_inputs_that_no_node_reads_and_copied_outputs_are_refused() -> None:
    unread = parsed("y = Relu (x)")
    unread.graph.input.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [1, 2]))
    with pytest.raises(UnsupportedByEngine, match="an input that no node reads"):
        convert_to_mnn(unread, {})
    copied = parsed("y = Relu (x)")
    copied.graph.output.append(copied.graph.input[0])
    with pytest.raises(UnsupportedByEngine, match="an output that no node computes"):
        convert_to_mnn(copied, {})


def test_crash_of_mnn_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The converter's process forks for each model, so a crash ends neither this process nor later conversions."""
    monkeypatch.setitem(mnn_operators.OPERATOR_CHECKS, "Slice", lambda *_: None)
    numbers = {"s": integers(-1, 5), "e": integers(1 << 30, 2), "a": integers(1, 3), "k": integers(2, -1)}
    with pytest.raises(UnsupportedByEngine, match=r"an error of MNN \(.+\)"):
        convert_to_mnn(parsed("y = Slice (x, s, e, a, k)", "9, 7, 3, 8", **numbers), {})
    assert_same_as_onnxruntime(parsed("y = Relu (x)"))


def test_finds_networks_that_compute_something_else() -> None:
    model = parsed("c = Conv (x, w) y = Relu (c)", w=floats(4, 8, 3, 3))
    inputs, files = {"x": floats(1, 8, 9, 7)}, convert_to_mnn(model, {})
    assert measure_difference(MNN, Model(model), files, inputs)[0] < TOLERANCE
    weights = np.frombuffer(files.weights, np.float32).copy()
    weights[7] += 0.1
    assert measure_difference(MNN, Model(model), replace(files, weights=weights.tobytes()), inputs)[0] > TOLERANCE
    difference, reason = measure_difference(MNN, Model(model), replace(files, network=b"no network"), inputs)
    assert difference == float("inf") and reason.startswith("MNN cannot load network: ")


def test_accurate_computation_has_small_rounding_errors(tmp_path: Path) -> None:
    model = parsed("y = Conv <pads = [1, 1, 1, 1]> (x, w)", "1, 64, 28, 28", w=floats(64, 64, 3, 3))
    inputs = {"x": floats(1, 64, 28, 28, seed=1)}
    accurate = MnnEngine(accurate=True)
    differences = [
        measure_difference(engine, Model(model), engine.convert(model, {}), inputs)[0] for engine in (MNN, accurate)
    ]
    assert differences[1] < EXACT < differences[0] < TOLERANCE
    directory = compile_network(tmp_path / "a", engine="mnn{accurate=true}")
    assert all(engines(directory)) and verify(directory).passed
    assert load_plan(directory / "plan.json").engines["pi01"] == "mnn{accurate=true}"


def test_network_without_weights_has_only_operators() -> None:
    """`profile` writes only the network and the length of the weights."""
    name, size = "w", (32, 8, 3, 3)
    files = [
        convert_to_mnn(parsed("y = Conv (x, w)", **{name: array}), {})
        for array in (floats(*size), np.zeros(size, np.float32))
    ]
    assert files[0].network == files[1].network and len(files[0].network) < 2000
    assert len(files[0].weights) == len(files[1].weights) >= 4 * 32 * 8 * 9


def test_names_do_not_change_the_files() -> None:
    texts = "c = Conv (x, w) y = Relu (c)", "other = Conv (x, kernel) y = Relu (other)"
    files = [
        convert_to_mnn(parsed(texts[i], **{name: floats(4, 8, 3, 3)}), {}) for i, name in enumerate(("w", "kernel"))
    ]
    assert files[0] == files[1]


def load(files: EngineFiles, directory: Path) -> Any:
    paths = directory / "network", directory / "weights"
    for path, content in zip(paths, (files.network, files.weights), strict=True):
        path.write_bytes(content)
    return MNN.load_network(*paths, threads=1)


def test_outputs_are_those_of_the_last_call_and_prints_are_discarded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    network = load(convert_to_mnn(parsed("y = Conv (x, w)", w=floats(4, 8, 1, 1)), {}), tmp_path)
    inputs = [floats(1, 8, 9, 7, seed=seed) for seed in (1, 2)]
    expected = [np.einsum("oi,bihw->bohw", floats(4, 8, 1, 1)[:, :, 0, 0], x) for x in inputs]
    for x, wanted in zip((*inputs, *inputs), (*expected, *expected), strict=True):
        np.testing.assert_allclose(network.run([x], [[1, 4, 9, 7]])[0], wanted, atol=1e-5)
    with pytest.raises(ValueError, match=r"output 0 has shape \(1, 4, 9, 7\) in MNN, but \(1, 4, 9, 8\) in the model"):
        network.run(inputs[:1], [[1, 4, 9, 8]])
    assert capfd.readouterr().out == ""


def compile_network(directory: Path, name: str = "lenet", strategy: str = "modnn", engine: str = "mnn") -> Path:
    dicompiler.compile(networks.build(name, 0), "rpi4x2", strategy, engine=engine, output=directory)
    return directory


def engines(directory: Path) -> list[bool]:
    """Return for each segment with a model whether MNN computes it."""
    manifests = [load_json(path) for path in sorted(directory.glob("pi*/manifest.json"))]
    segments = [segment for manifest in manifests for segment in manifest["segments"] if "file" in segment]
    return [segment.get("engine", {}).get("name") == "mnn" for segment in segments]


def test_tiles_are_computed_by_mnn_and_verified(tmp_path: Path) -> None:
    directory = compile_network(tmp_path / "a")
    assert all(engines(directory)) and len(engines(directory)) > 2
    assert [SocketsArtifact.load(directory).required_packages(f"pi0{i}")["MNN"] for i in (1, 2)] == [(3, 6), (3, 6)]
    assert load_plan(directory / "plan.json").engines == {"pi01": "mnn", "pi02": "mnn"}
    verified = verify(directory)
    assert verified.passed and "allowed: 5e-03" in str(verified.checks)


def test_frames_differ_from_those_of_onnxruntime_only_by_rounding(tmp_path: Path) -> None:
    inputs = {"input": floats(1, 1, 32, 32)}
    results = [
        run(compile_network(tmp_path / str(i), engine=engine), inputs, frames=3).outputs[-1]
        for i, engine in enumerate(("mnn", "onnxruntime"))
    ]
    (found,), (expected,) = (result.values() for result in results)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_same_bytes_each_time(tmp_path: Path) -> None:
    first, second = (compile_network(tmp_path / name) for name in "ab")
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert any(file.suffix == ".net" for file in files)
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


def test_segments_are_split_at_operators_that_mnn_does_not_support(tmp_path: Path) -> None:
    text = "c = Conv <pads = [1, 1, 1, 1]> (x, w)  e = Mish (c)  y = Conv <pads = [1, 1, 1, 1]> (e, w)"
    model = parsed(text, "1, 8, 16, 16", opset=18, w=floats(8, 8, 3, 3))
    dicompiler.compile(model, "rpi4x1", "single", engine="mnn", output=tmp_path / "a")
    assert engines(tmp_path / "a") == [True, False, True] and verify(tmp_path / "a").passed


def test_mnn_computes_the_chosen_layers_only(tmp_path: Path) -> None:
    directory = compile_network(tmp_path / "a", "lenet", "single", "mnn{layers=conv*}")
    assert engines(directory) == [True, False, True, False] and verify(directory).passed


@pytest.mark.slow
def test_documents_on_stdout_have_no_prints_of_mnn(tmp_path: Path) -> None:
    """MNN prints to the file descriptor of stdout."""
    onnx.save(networks.build("lenet", 0), tmp_path / "lenet.onnx")
    for words in (
        (
            "compile",
            "lenet.onnx",
            "--platform",
            "rpi4x1",
            "--strategy",
            "single",
            "--engine",
            "mnn",
            "-o",
            "a",
            "--json",
        ),
        ("run", "a", "--json"),
        ("verify", "a", "--json"),
    ):
        command = [sys.executable, "-m", "dicompiler", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
        assert json.loads(done.stdout)


def test_missing_package_is_named_before_anything_is_written(tmp_path: Path) -> None:
    code = f"""import sys
sys.modules["MNN"] = None
import dicompiler
from dicompiler import networks
dicompiler.compile(networks.build("lenet", 0), "rpi4x2", "modnn", engine="mnn", output={str(tmp_path / "a")!r})
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert result.stderr.strip().endswith("the engine mnn is not installed: run 'pip install MNN'")
    assert not (tmp_path / "a").exists()


def test_target_mpi_refuses_mnn_and_names_ncnn(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"with onnxruntime and ncnn only, not with mnn: use --engine onnxruntime or ncnn"
    ):
        dicompiler.compile(
            networks.build("lenet", 0), "rpi4x2", "single", target="mpi", engine="mnn", output=tmp_path / "a"
        )


@pytest.mark.slow
def test_profile_measures_mnn_without_prints(tmp_path: Path) -> None:
    onnx.save(networks.build("lenet", 0), tmp_path / "lenet.onnx")
    options = ["--tiles", "1", "--repeat", "1", "--threads", "1", "--target", "none", "--json"]
    command = [sys.executable, "-m", "dicompiler", "profile", "lenet.onnx", "-o", "lenet.json", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout) and "device supports" not in done.stderr
    profile = load_profile(tmp_path / "lenet.json")
    measured = profile.engines["mnn"]
    assert measured.layers.keys() == profile.layers.keys() and measured.whole_model_s


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_processes_stay_within_the_predicted_memory(name: str, tmp_path: Path) -> None:
    result = dicompiler.compile(networks.build(name, 0), "rpi4x1", "single", engine="mnn", output=tmp_path / "a")
    assert result.program is not None
    (report,) = run(tmp_path / "a").reports
    added = SocketsTarget().memory_overhead(result.program)["pi01"]
    assert report.peak_memory_bytes <= 1.05 * (program_memory(result.program)["pi01"].total + added)
