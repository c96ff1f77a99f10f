"""The engine ncnn: converted operators compared with onnxruntime, and artifacts whose segments ncnn computes."""

from __future__ import annotations

import platform
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
from onnx import numpy_helper
from support.budget import examples

import dicompiler
from dicompiler import networks
from dicompiler.base.schema import load_json
from dicompiler.cost.memory import program_memory
from dicompiler.driver.artifact import reopen_artifact, run, verify
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import load_plan
from dicompiler.target.engine import UnsupportedByEngine
from dicompiler.target.engine_check import allowed_difference, measure_difference
from dicompiler_targets.engines.ncnn import NcnnEngine
from dicompiler_targets.engines.ncnn_converter import CONVERTERS, convert_to_ncnn
from dicompiler_targets.sockets.artifact import SocketsArtifact
from dicompiler_targets.sockets.runtime.segments import check_packages
from dicompiler_targets.sockets.target import SocketsTarget

NCNN = NcnnEngine()
TOLERANCE = allowed_difference(NCNN)


def parsed(nodes: str, output: str, x: str = "1, 8, 9, 7", opset: int = 17, **constants: np.ndarray) -> onnx.ModelProto:
    """Return a model from `x`, a float input of shape `x`, to `y`, a float output of shape `output`."""
    text = f"""<ir_version: 8, opset_import: ["": {opset}]> g (float[{x}] x) => (float[{output}] y) {{ {nodes} }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return model


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def integers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def assert_same_as_onnxruntime(model: onnx.ModelProto) -> None:
    """Assert that ncnn computes what onnxruntime computes, and that it does not change its input."""
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    inputs = {"x": floats(*shape, seed=1)}
    before = inputs["x"].copy()
    assert measure_difference(NCNN, Model(model), convert_to_ncnn(model, {}), inputs)[0] < 1e-5
    assert not NCNN.unsupported_nodes(model, {})
    np.testing.assert_array_equal(inputs["x"], before)


OPERATORS = {
    "relu": parsed("y = Relu (x)", "1, 8, 9, 7"),
    "leaky_relu": parsed("y = LeakyRelu <alpha = 0.2> (x)", "1, 8, 9, 7"),
    "clip": parsed("y = Clip (x, lo, hi)", "1, 8, 9, 7", lo=np.float32(-0.5), hi=np.float32(0.25)),
    "clip_below": parsed("y = Clip (x, lo)", "1, 8, 9, 7", lo=np.float32(-0.5)),
    "sigmoid": parsed("y = Sigmoid (x)", "1, 8, 9, 7"),
    "tanh": parsed("y = Tanh (x)", "1, 8, 9, 7"),
    "hard_sigmoid": parsed("y = HardSigmoid <alpha = 0.3, beta = 0.4> (x)", "1, 8, 9, 7"),
    "hard_swish": parsed("y = HardSwish (x)", "1, 8, 9, 7"),
    "swish": parsed("s = Sigmoid (x) y = Mul (s, x)", "1, 8, 9, 7"),
    "gate_that_is_read_twice": parsed("s = Sigmoid (x) m = Mul (s, x) y = Add (m, s)", "1, 8, 9, 7"),
    "residual": parsed("r = Relu (x) s = Add (r, x) y = Relu (s)", "1, 8, 9, 7"),
    "add_scalar": parsed("y = Add (x, c)", "1, 8, 9, 7", c=np.float32(2)),
    "scalar_minus": parsed("y = Sub (c, x)", "1, 8, 9, 7", c=np.float32(2)),
    "scalar_divided_by": parsed("e = Abs0 (x) y = Div (c, e)".replace("Abs0", "Sigmoid"), "1, 8, 9, 7", c=floats(1)),
    "multiply_by_channels": parsed("y = Mul (x, c)", "1, 8, 9, 7", c=floats(1, 8, 1, 1)),
    "subtract_channels_without_batch": parsed("y = Sub (x, c)", "1, 8, 9, 7", c=floats(8, 1, 1)),
    "maximum": parsed("r = Tanh (x) y = Max (x, r)", "1, 8, 9, 7"),
    "batch_normalization": parsed(
        "y = BatchNormalization (x, s, b, m, v)", "1, 8, 9, 7", s=floats(8), b=floats(8), m=floats(8), v=floats(8) ** 2
    ),
    "folded_batch_normalization": parsed(
        "c = Conv (x, w) n = BatchNormalization (c, s, b, m, v) y = Relu (n)",
        "1, 4, 7, 5", w=floats(4, 8, 3, 3), s=floats(4), b=floats(4), m=floats(4), v=floats(4) ** 2,
    ),
    "folded_batch_normalization_with_bias": parsed(
        "c = Conv (x, w, o) y = BatchNormalization (c, s, b, m, v)",
        "1, 4, 7, 5", w=floats(4, 8, 3, 3), o=floats(4), s=floats(4), b=floats(4), m=floats(4), v=floats(4) ** 2,
    ),
    "convolution_that_is_read_twice": parsed(
        "c = Conv (x, w) r = Relu (c) y = Add (c, r)", "1, 4, 7, 5", w=floats(4, 8, 3, 3)
    ),
    "global_average": parsed("y = GlobalAveragePool (x)", "1, 8, 1, 1"),
    "global_maximum": parsed("y = GlobalMaxPool (x)", "1, 8, 1, 1"),
    "max_pool_with_ceil_mode": parsed(
        "y = MaxPool <kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1> (x)", "1, 8, 5, 4", "1, 8, 10, 8"
    ),
    "average_without_padding": parsed(
        "y = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 0, 1]> (x)", "1, 8, 8, 7"
    ),
    "average_with_padding": parsed(
        "y = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1], count_include_pad = 1> (x)", "1, 8, 9, 7"
    ),
    "classifier": parsed(
        "f = Flatten (x) g = Gemm <transB = 1> (f, w, b) y = Softmax (g)", "1, 5", w=floats(5, 504), b=floats(5)
    ),
    "matrix": parsed("y = MatMul (x, w)", "1, 5", "1, 30", w=floats(30, 5)),
    "lrn": parsed("y = LRN <size = 5, alpha = 0.1, beta = 0.6, bias = 2.0> (x)", "1, 8, 9, 7"),
    "pad": parsed(
        "y = Pad (x, p, v)", "1, 8, 12, 8", p=integers(0, 0, 2, 0, 0, 0, 1, 1), v=np.float32(0.5)
    ),
    "slices_and_concatenation": parsed(
        "a = Slice (x, s, e, axes) b = Slice (x, e, n, axes) y = Concat <axis = 1> (b, a)", "1, 8, 9, 7",
        s=integers(0), e=integers(3), n=integers(-1 + 9), axes=integers(1),
    ),
    "split": parsed("a, b = Split <axis = 2> (x, s) y = Concat <axis = 2> (b, a)", "1, 8, 9, 7", s=integers(4, 5)),
    "repeated_rows_and_columns": parsed(
        'y = Resize <mode = "nearest", nearest_mode = "floor", coordinate_transformation_mode = "asymmetric"> (x, , f)',
        "1, 8, 18, 21", f=np.array([1, 1, 2, 3], np.float32),
    ),
    "softmax_over_channels": parsed("y = Softmax <axis = 1> (x)", "1, 8, 9, 7"),
    "softmax_of_opset_11_over_all": parsed("y = Softmax (x)", "1, 8, 9, 7", opset=11),
    "softmax_of_opset_11_over_rows": parsed("y = Softmax <axis = 2> (x)", "1, 8, 9, 7", opset=11),
    "softmax_of_opset_11_over_columns": parsed("y = Softmax <axis = 3> (x)", "1, 8, 9, 7", opset=11),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_equals_onnxruntime(name: str) -> None:
    assert_same_as_onnxruntime(OPERATORS[name])


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_convolutions_and_pools_equal_onnxruntime(data: st.DataObject) -> None:
    """Kernels, strides, dilations, groups and padding of each side, as tiles with halos have them."""

    def pair(largest: int) -> list[int]:
        return [data.draw(st.integers(1, largest)) for _ in range(2)]

    kernel, strides, dilations = pair(4), pair(3), pair(2)
    pads = [data.draw(st.integers(0, size - 1)) for size in (*kernel, *kernel)]
    group, filters = data.draw(st.sampled_from([1, 2, 4, 16])), 16 * data.draw(st.integers(1, 2))
    size = [8 + data.draw(st.integers(0, 9)) for _ in range(2)]
    is_pool = data.draw(st.booleans())
    spans = [k if is_pool else (k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    out = [(size[i] + pads[i] + pads[i + 2] - spans[i]) // strides[i] + 1 for i in (0, 1)]
    common = f"kernel_shape = {kernel}, strides = {strides}, pads = {pads}"
    x = f"1, 16, {size[0]}, {size[1]}"
    if is_pool:
        operator = data.draw(st.sampled_from(["MaxPool", "AveragePool"]))
        model = parsed(f"y = {operator} <{common}> (x)", f"1, 16, {out[0]}, {out[1]}", x)
    else:
        node = f"c = Conv <{common}, dilations = {dilations}, group = {group}> (x, w, b) y = Relu (c)"
        weights = {"w": floats(filters, 16 // group, *kernel), "b": floats(filters)}
        model = parsed(node, f"1, {filters}, {out[0]}, {out[1]}", x, **weights)
    assert_same_as_onnxruntime(model)


@pytest.mark.parametrize(
    ("rows", "hints"), [(4, ["Input -23330=4,3,14,6,16", "Split -23330=8,0,0,0,0,3,14,4,16"]), (5, [])]
)
def test_ncnn_knows_the_shapes_of_small_inputs_of_winograd_convolutions(rows: int, hints: list[str]) -> None:
    """Only a convolution with few output positions gets them; ncnn then transforms its weights to fewer bytes."""
    weights = {name: floats(16, 16, 3, 3, seed=i) for i, name in enumerate("uvw")}
    nodes = """a = Conv <pads = [0, 1, 0, 1]> (x, u) b = Relu (a) c = Conv <pads = [1, 1, 1, 1]> (b, v)
        d = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (b, w) e = Resize <mode = "nearest", nearest_mode = "floor",
        coordinate_transformation_mode = "asymmetric"> (d, , f) g = Slice (e, z, n, two) y = Add (c, g)"""
    constants = {"f": np.array([1, 1, 2, 2], np.float32), "z": integers(0), "n": integers(rows), "two": integers(2)}
    model = parsed(nodes, f"1, 16, {rows}, 14", f"1, 16, {rows + 2}, 14", **weights, **constants)
    lines = convert_to_ncnn(model, {}).network.decode().splitlines()
    assert [f"{line.split()[0]} {line.split()[-1]}" for line in lines if "-23330=" in line] == hints
    assert_same_as_onnxruntime(model)


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        (parsed("y = Erf (x)", "1, 8, 9, 7"), "operator Erf"),
        (parsed("y = Relu (x)", "2, 8, 9, 7", "2, 8, 9, 7"), r"a tensor of shape \(2, 8, 9, 7\)"),
        (parsed("y = Identity (x)", "1, 8, 0, 7", "1, 8, 0, 7"), r"a tensor of shape \(1, 8, 0, 7\)"),
        (parsed("y = Concat <axis = 0> (x, x)", "2, 8, 9, 7"), "a tensor of shape"),
        (parsed("y = Gemm <alpha = 0.5> (x, w)", "1, 5", "1, 30", w=floats(30, 5)), "a Gemm that is not a vector"),
        (parsed("y = Max (x, x, x)", "1, 8, 9, 7"), "Max of one tensor or of more than two tensors"),
        (parsed("r = ReduceMax (x) y = Pad (x, p, r)", "1, 8, 10, 7", p=integers(0, 0, 1, 0, 0, 0, 0, 0)),
         "operator ReduceMax|a Pad with a computed value"),
        (parsed("y = Slice <starts = [0], ends = [4], axes = [1]> (x)", "1, 4, 9, 7", opset=9), "a Slice with"),
        (parsed("y = Slice (x, s, e, a, k)", "1, 4, 9, 7", s=integers(0), e=integers(8), a=integers(1), k=integers(2)),
         "a Slice with steps"),
        (parsed("y = AveragePool <kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1> (x)", "1, 8, 5, 4",
                "1, 8, 10, 8"), "an AveragePool whose windows reach beyond the padding"),
    ],
)  # fmt: skip
def test_names_the_node_that_ncnn_does_not_compute(model: onnx.ModelProto, cause: str) -> None:
    with pytest.raises(UnsupportedByEngine, match=cause):
        convert_to_ncnn(model, {})
    reasons = NCNN.unsupported_nodes(model, {})
    assert all(re.match(cause, reason) for reason in reasons.values())


def test_finds_networks_that_compute_something_else() -> None:
    model = parsed("c = Conv (x, w) y = Relu (c)", "1, 4, 7, 5", w=floats(4, 8, 3, 3))
    inputs, files = {"x": floats(1, 8, 9, 7)}, convert_to_ncnn(model, {})
    assert measure_difference(NCNN, Model(model), files, inputs)[0] < TOLERANCE
    weights = np.frombuffer(files.weights, np.float32).copy()
    weights[7] += 0.1
    assert measure_difference(NCNN, Model(model), replace(files, weights=weights.tobytes()), inputs)[0] > TOLERANCE
    without_relu = replace(files, network=files.network.replace(b" 9=1", b""))
    assert measure_difference(NCNN, Model(model), without_relu, inputs)[0] > TOLERANCE
    broken = measure_difference(NCNN, Model(model), replace(files, network=b"7767517\n"), inputs)
    assert broken == (float("inf"), "ncnn cannot load network")


def compile_network(directory: Path, name: str = "lenet", strategy: str = "modnn", engine: str = "ncnn") -> Path:
    dicompiler.compile(networks.build(name, 0), "rpi4x2", strategy, engine=engine, output=directory)
    return directory


def engines(directory: Path) -> list[bool]:
    """Return for each segment with a model whether ncnn computes it."""
    manifests = [load_json(path) for path in sorted(directory.glob("pi*/manifest.json"))]
    segments = [segment for manifest in manifests for segment in manifest["segments"] if "file" in segment]
    return [segment.get("engine", {}).get("name") == "ncnn" for segment in segments]


def test_tiles_are_computed_by_ncnn_and_verified(tmp_path: Path) -> None:
    directory = compile_network(tmp_path / "a")
    assert all(engines(directory)) and len(engines(directory)) > 2
    assert not list(directory.glob("pi*/*.onnx")) and not list(directory.glob("pi*/weights.bin"))
    assert [SocketsArtifact.load(directory).required_packages(f"pi0{i}")["ncnn"] for i in (1, 2)] == [(1, 0), (1, 0)]
    assert load_plan(directory / "plan.json").engines == {"pi01": "ncnn", "pi02": "ncnn"}
    verified = verify(directory)
    assert verified.passed and "allowed: 1e-04" in str(verified.checks)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_reduced_precision_rounds_more_within_its_tolerance(precision: Any, tmp_path: Path) -> None:
    model = networks.build("lenet", 0)
    dicompiler.compile(model, "rpi4x2", "modnn", engine="ncnn", precision=precision, output=tmp_path / "a")
    assert all(engines(tmp_path / "a"))
    found = verify(tmp_path / "a")
    limit = f"{NcnnEngine.precisions[precision]:.0e}"
    assert found.passed and f"allowed: {limit}" in str(found.checks), found.checks
    engine = NcnnEngine(precision=precision)
    inputs = {"input": floats(1, 1, 32, 32)}
    difference, reason = measure_difference(engine, Model(model), engine.convert(model, {}), inputs)
    assert not reason and TOLERANCE < difference < allowed_difference(engine) == NcnnEngine.precisions[precision]


def test_precision_that_the_processor_does_not_have_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = NcnnEngine(precision="fp16").convert(networks.build("lenet", 0), {})
    paths = tmp_path / "network", tmp_path / "weights"
    paths[1].write_bytes(files.weights)
    paths[0].write_bytes(files.network.replace(b"=fp16", b"=fp8"))
    with pytest.raises(ValueError, match="ncnn does not know the precision 'fp8': expected fp32, fp16 or bf16"):
        NCNN.load_network(*paths, threads=1)
    # On another kind of processor, none of the features are found that a precision needs.
    other = "x86_64" if platform.machine() == "aarch64" else "aarch64"
    monkeypatch.setattr(platform, "machine", lambda: other)
    paths[0].write_bytes(files.network)
    with pytest.raises(ValueError, match="the processor has no fp16: compile with --precision bf16 or fp32"):
        NCNN.load_network(*paths, threads=1)


def test_precision_has_no_effect_on_quantised_networks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = tmp_path / "samples.npz"
    np.savez(samples, input=floats(2, 1, 1, 32, 32))
    options = {"engine": "ncnn", "precision": "bf16", "quantize_samples": samples}
    with caplog.at_level("WARNING", "dicompiler"):
        dicompiler.compile(networks.build("lenet", 0), "rpi4x2", "single", output=tmp_path / "a", **options)
    assert re.search(r"computes 0 of \d+ segments, onnxruntime the others \(without reduced precision\)", caplog.text)
    assert verify(tmp_path / "a").passed


def test_frames_differ_from_those_of_onnxruntime_only_by_rounding(tmp_path: Path) -> None:
    inputs = {"input": floats(1, 1, 32, 32)}
    results = [
        run(compile_network(tmp_path / str(i), engine=engine), inputs, frames=3).outputs[-1]
        for i, engine in enumerate(("ncnn", "onnxruntime"))
    ]
    (found,), (expected,) = (result.values() for result in results)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_same_bytes_each_time(tmp_path: Path) -> None:
    first, second = (compile_network(tmp_path / name) for name in "ab")
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert any(file.suffix == ".net" for file in files)
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


ERF_TEXT = """<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 16, 16] x) => (float[1, 4, 16, 16] y)
{ c = Conv <pads = [1, 1, 1, 1]> (x, w)  e = Erf (c)  y = Conv <pads = [1, 1, 1, 1]> (e, w) }"""


def erf_between_convolutions() -> onnx.ModelProto:
    model = onnx.parser.parse_model(ERF_TEXT)
    model.graph.initializer.append(numpy_helper.from_array(floats(4, 4, 3, 3), "w"))
    return model


@pytest.mark.parametrize("strategy", ["single", "modnn"])
def test_segments_are_split_at_operators_that_ncnn_does_not_support(strategy: str, tmp_path: Path) -> None:
    result = dicompiler.compile(erf_between_convolutions(), "rpi4x2", strategy, engine="ncnn", output=tmp_path / "a")
    assert verify(tmp_path / "a").passed
    assert {*engines(tmp_path / "a")} == {True, False}
    if strategy == "single":
        assert engines(tmp_path / "a") == [True, False, True]
    segments = {device.device: [s.name for s in device.segments] for device in result.program.devices}
    reopened = reopen_artifact(tmp_path / "a")[0].program
    assert reopened is not None
    assert segments == {device.device: [s.name for s in device.segments] for device in reopened.devices}


@pytest.mark.parametrize(
    ("layers", "computed"),
    [("conv1", [True, False]), ("conv*", [True, False, True, False]), ("conv2", [False, True, False])],
)
def test_ncnn_computes_the_chosen_layers_only(layers: str, computed: list[bool], tmp_path: Path) -> None:
    engine = f"ncnn{{layers={layers}}}"
    directory = compile_network(tmp_path / "a", "lenet", "single", engine)
    assert engines(directory) == computed
    assert load_plan(directory / "plan.json").engines == {"pi01": engine}
    assert verify(directory).passed


def test_large_integer_constants_are_no_error() -> None:
    model = Model.load(parsed("s = Add (t, t) y = Relu (x)", "1, 8, 9, 7", t=np.arange(1 << 12)))
    assert model.weights.keys() == {"t"}
    assert NCNN.unsupported_nodes(model.proto, model.weights).keys() == {0}


def test_networks_that_ncnn_does_not_support_stay_with_onnxruntime(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "dicompiler"):
        error_function = parsed("y = Erf (x)", "1, 8, 9, 7")
        dicompiler.compile(error_function, "rpi4x2", "single", engine="ncnn", output=tmp_path / "b")
    assert caplog.messages[-1] == "ncnn computes 0 of 1 segments, onnxruntime the others, because of operator Erf (1×)"
    assert verify(tmp_path / "b").passed and engines(tmp_path / "b") == [False]


def test_operator_that_converts_wrongly_stays_with_onnxruntime(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert_to_tanh(converter: Any, node: onnx.NodeProto, _: Any) -> None:
        converter.add("TanH", node.input[:1], node.output[0])

    monkeypatch.setitem(CONVERTERS, "Sigmoid", convert_to_tanh)
    model = parsed("c = Conv (x, w) y = Sigmoid (c)", "1, 4, 7, 5", w=floats(4, 8, 3, 3))
    with caplog.at_level("WARNING", "dicompiler"):
        dicompiler.compile(model, "rpi4x1", "single", engine="ncnn", output=tmp_path / "a")
    assert engines(tmp_path / "a") == [False] and verify(tmp_path / "a").passed
    wrong = r"segment 'pi01_000': ncnn differs by [\d.]+ of the largest output: onnxruntime computes it"
    assert any(re.fullmatch(wrong, message) for message in caplog.messages)


def test_failure_plans_run_in_ncnn(tmp_path: Path) -> None:
    model = networks.build("lenet", 0)
    dicompiler.compile(model, "rpi4x2", "modnn", engine="ncnn", tolerate_failures=1, output=tmp_path / "a")
    assert verify(tmp_path / "a").passed


def test_missing_package_is_named_before_anything_is_written(tmp_path: Path) -> None:
    code = f"""import sys
sys.modules["ncnn"] = None
import dicompiler
from dicompiler import networks
dicompiler.compile(networks.build("lenet", 0), "rpi4x2", "modnn", engine="ncnn", output={str(tmp_path / "a")!r})
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert result.stderr.strip().endswith("the engine ncnn is not installed: run 'pip install ncnn'")
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_processes_stay_within_the_predicted_memory(name: str, tmp_path: Path) -> None:
    result = dicompiler.compile(networks.build(name, 0), "rpi4x1", "single", engine="ncnn", output=tmp_path / "a")
    assert result.program is not None
    (report,) = run(tmp_path / "a").reports
    counted, added = (
        program_memory(result.program)["pi01"],
        SocketsTarget().memory_overhead(result.program),
    )
    assert report.peak_memory_bytes <= 1.05 * (counted.total + added["pi01"])


def test_devices_name_a_package_that_is_missing_or_too_old() -> None:
    with pytest.raises(ValueError, match=r"numpy \S+ is too old, 99\.0 or newer is needed: run 'pip install --upgrade"):
        check_packages([{"name": "numpy", "min_version": "99.0"}])
    with pytest.raises(ValueError, match=r"the package no_such_package is not installed .*: run 'pip install no_such_"):
        check_packages([{"name": "no_such_package", "min_version": "1.0"}])
