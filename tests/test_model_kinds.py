"""Every kind of model that onnxruntime runs: split at random over three devices it computes the same as the whole.

The models are in ONNX text and in files written by PyTorch's exporters (tests/fixtures/torch). They run in process.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from support.generators import random_plan

from dicompiler.driver.compiler import compile
from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.loader import is_accepted_by_ort
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.platform import uniform_platform
from dicompiler.partition.lowering import lower
from dicompiler.verify.comparison import compare_value, graph_inputs, random_inputs
from dicompiler.verify.executor import ProgramExecutor, run_model

FIXTURES = Path(__file__).parent / "fixtures" / "torch"
FILES = sorted(path.name for path in FIXTURES.glob("*.onnx"))
SHAPES = {"residual_dynamic": ("x0=3x3x32x32",), "transformer_dynamic": ("x0=3x7",)}
DEVICES = ("d0", "d1", "d2")
NEWEST = next(version for version in range(64, 0, -1) if is_accepted_by_ort(10, version))
NEWEST_IR = next(version for version in range(64, 0, -1) if is_accepted_by_ort(version, 17))
Values = Mapping[str, NDArray[Any]]

CONVOLUTIONS = """
    h = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
    r = Relu (h)
    p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
    q = Conv <pads = [1, 1, 1, 1]> (p, w2)
    s = Sum (p, q)
    f = Flatten (s)
    y = Gemm <transB = 1> (f, w3, b3)
"""
SIZES = {"w1": (8, 3, 3, 3), "b1": (8,), "w2": (8, 8, 3, 3), "w3": (10, 128), "b3": (10,)}


def model_of(text: str, head: str = 'ir_version: 8, opset_import: ["": 17]', weights: Values | None = None) -> Model:
    """Return the model of a graph's text, with these initializers."""
    proto = onnx.parser.parse_model(f"<{head}> {text}")
    for name, array in (weights or {}).items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return Model.load(proto)


def integers(sizes: Mapping[str, tuple[int, ...]], dtype: Any = np.float32, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Return seeded integers from -2 to 2, so that sums are exact in any order."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(-2, 3, shape).astype(dtype) for name, shape in sizes.items()}


def convolutions(head: str, dtype: str = "float", batch: int = 1) -> Model:
    text = f"g ({dtype}[{batch}, 3, 8, 8] x) => ({dtype}[{batch}, 10] y) {{ {CONVOLUTIONS} }}"
    return model_of(text, head, integers(SIZES, np.float16 if dtype == "float16" else np.float32))


def check_parts(
    model: Model, inputs: Values, shape: Sequence[str] = (), plans: int = 6, exact: bool = True
) -> PipelineState:
    """Assert that random plans over three devices compute the outputs of onnxruntime; return the last state."""
    prepared = prepare(model, shape)
    assert prepared.layers is not None
    reference = run_model(model, inputs)
    compiled = prepared
    for seed in range(plans):
        plan = random_plan(Random(seed), prepared.layers, DEVICES)
        compiled = lower(replace(prepared, plan=plan, platform=uniform_platform(3)))
        assert compiled.program is not None
        outputs = ProgramExecutor(compiled.program).run(inputs).outputs
        assert list(outputs) == list(reference)
        for name, value in reference.items():
            check = compare_value(name, value, outputs[name], exact)
            assert check.passed, (seed, check)
    return compiled


def whole(compiled: PipelineState) -> set[str]:
    """Return the operators in layers that stay whole."""
    assert compiled.layers is not None
    return {node.op for layer in compiled.layers.layers if layer.whole_reason for node in layer.nodes}


class TestExporters:
    """Models as written by both of PyTorch's exporters."""

    @pytest.mark.slow
    @pytest.mark.parametrize("file", FILES)
    def test_pytorch_models_compute_same_in_parts(self, file: str) -> None:
        model = Model.load(FIXTURES / file)
        shape = SHAPES.get(file.split(".")[0], ())
        inputs = random_inputs(graph_inputs(prepare(model, shape).model))
        compiled = check_parts(model, inputs, shape, 4, exact=False)
        assert compiled.layers is not None
        assert any(not layer.whole_reason for layer in compiled.layers.layers)

    @pytest.mark.parametrize("file", FILES)
    def test_second_preparation_changes_nothing(self, file: str) -> None:
        """An artifact contains the prepared model, and its plan is for the layers of that model."""
        once = prepare(Model.load(FIXTURES / file), SHAPES.get(file.split(".")[0], ()))
        twice = prepare(once.model)
        assert once.layers is not None and twice.layers is not None
        assert [layer.name for layer in once.layers.layers] == [layer.name for layer in twice.layers.layers]
        assert once.model.proto == twice.model.proto

    def test_recurrent_network_passes_both_checks(self, tmp_path: Path) -> None:
        model = FIXTURES / "recurrent.script.onnx"
        checks = compile(model, platform="rpi4x3", strategy="modnn", output=tmp_path / "out").verify().checks
        assert [(check.name, check.passed, check.applies) for check in checks[:1]] == [("exact", True, True)]
        assert len(checks) >= 3 and all(check.passed and check.applies for check in checks[1:])

    def test_there_are_files_of_both_exporters(self) -> None:
        names = {exporter: {f.split(".")[0] for f in FILES if exporter in f} for exporter in ("script", "dynamo")}
        assert names["script"] == names["dynamo"]
        assert len(names["script"]) >= 10
        assert all((FIXTURES / file).stat().st_size < 200_000 for file in FILES)


class TestVersions:
    """The opset is carried through, segments get the lowest IR version, and every accepted version compiles."""

    @pytest.mark.parametrize("opset", range(7, NEWEST + 1))
    def test_opset(self, opset: int) -> None:
        model = convolutions(f'ir_version: 8, opset_import: ["": {opset}]')
        compiled = check_parts(model, integers({"x": (1, 3, 8, 8)}), plans=4)
        assert compiled.program is not None
        segments = [s.model for device in compiled.program.devices for s in device.segments]
        assert {(e.domain, e.version) for s in segments for e in s.opset_import} == {("", opset)}
        # IR version 4 is the lowest one that supports everything in the segments.
        assert {s.ir_version for s in segments} == {4}

    @pytest.mark.parametrize("version", [3, 4, 7, NEWEST_IR])
    def test_ir_version(self, version: int) -> None:
        proto = onnx.ModelProto()
        proto.CopyFrom(convolutions(f'ir_version: {version}, opset_import: ["": 9]').to_proto())
        if version == 3:  # In IR version 3, every initializer must also be a graph input.
            for tensor in proto.graph.initializer:
                proto.graph.input.append(
                    onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
                )
        compiled = check_parts(Model.load(proto), integers({"x": (1, 3, 8, 8)}))
        assert compiled.model.proto.ir_version == max(version, 4)

    def test_initializers_that_are_inputs_keep_value(self) -> None:
        text = "g (float[1, 4, 6, 6] x, float[4, 4, 1, 1] w) => (float[1, 4, 6, 6] y) { y = Conv (x, w) }"
        model = model_of(text, weights=integers({"w": (4, 4, 1, 1)}))
        compiled = check_parts(model, integers({"x": (1, 4, 6, 6)}))
        assert [value.name for value in compiled.model.proto.graph.input] == ["x"]


class TestTypes:
    """Types other than float32, and batches."""

    def test_float16(self) -> None:
        model = convolutions('ir_version: 8, opset_import: ["": 17]', "float16")
        check_parts(model, integers({"x": (1, 3, 8, 8)}, np.float16), exact=False)

    def test_bfloat16_if_onnxruntime_supports_it(self) -> None:
        text = """g (bfloat16[1, 4, 6, 6] x) => (bfloat16[1, 9, 36] y) {
            a = Cast <to = 1> (x)
            v = Cast <to = 1> (w)
            c = Conv (a, v)
            d = Cast <to = 16> (c)
            e = Concat <axis = 1> (d, x)
            f = Reshape (e, shape)
            t = Transpose <perm = [0, 2, 1]> (f)
            n = Identity (t)
            g = Transpose <perm = [0, 2, 1]> (n)
            y = Slice (g, one, ten, one)
        }"""
        proto = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 19]> {text}')
        weight = np.random.default_rng(0).integers(-2, 3, (6, 4, 1, 1))
        proto.graph.initializer.append(onnx.helper.make_tensor("w", onnx.TensorProto.BFLOAT16, (6, 4, 1, 1), weight))
        for name, values in (("shape", [1, 10, 36]), ("one", [1]), ("ten", [10])):
            proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(values, np.int64), name))
        model = Model.load(proto)
        inputs = random_inputs(graph_inputs(prepare(model).model))
        check_parts(model, inputs, plans=10)

    def test_float64_and_integers(self) -> None:
        text = """g (double[2, 6] x, int32[2, 6] k) => (double[2, 5] y, int64[2] at, bool[2, 6] m) {
            y = MatMul (x, w)
            at = ArgMax <axis = 1, keepdims = 0> (x)
            n = Mul (k, k)
            m = Greater (n, k)
        }"""
        inputs = integers({"x": (2, 6)}, np.float64) | integers({"k": (2, 6)}, np.int32)
        check_parts(model_of(text, weights=integers({"w": (6, 5)}, np.float64)), inputs)

    def test_batch(self) -> None:
        model = convolutions('ir_version: 8, opset_import: ["": 13]', batch=5)
        check_parts(model, integers({"x": (5, 3, 8, 8)}), plans=10)

    def test_nan_and_infinity_are_at_same_places(self) -> None:
        text = """g (float[1, 2, 9, 9] x) => (float[1, 4, 9, 9] y, float[1, 4, 3, 3] m, float[1, 4] s) {
            y = Conv <pads = [1, 1, 1, 1]> (x, w)
            m = MaxPool <kernel_shape = [3, 3], strides = [3, 3]> (y)
            g = GlobalAveragePool (y)
            s = Flatten (g)
        }"""
        inputs = integers({"x": (1, 2, 9, 9)})
        inputs["x"][0, 0, 2, 3] = np.nan
        inputs["x"][0, 1, 5, 5], inputs["x"][0, 1, 7, 1] = np.inf, -np.inf
        check_parts(model_of(text, weights=integers({"w": (4, 2, 3, 3)})), inputs, plans=12, exact=False)

    def test_untyped_outputs_and_operators_newer_than_opset(self) -> None:
        """onnxruntime accepts both: its optimizer writes LayerNormalization into models of opset 12."""
        text = """g (float[2, 6, 8] x) => (float[2, 6, 4] y) {
            n = LayerNormalization <axis = -1> (x, scale, shift)
            y = MatMul (n, w)
        }"""
        head = 'ir_version: 8, opset_import: ["": 12]'
        model = model_of(text, head, integers({"scale": (8,), "shift": (8,), "w": (8, 4)}))
        model.proto.graph.output[0].ClearField("type")
        compiled = check_parts(model, integers({"x": (2, 6, 8)}), plans=4, exact=False)
        assert not whole(compiled)


class TestSharing:
    """Several inputs and outputs, and weights that are used more than once."""

    def test_weight_of_two_layers_with_different_cuts(self) -> None:
        text = """g (float[1, 16, 8, 8] x) => (float[1, 16, 8, 8] y, float[16, 9] z) {
            a = Conv <pads = [1, 1, 1, 1]> (x, w)
            b = Relu (a)
            y = Conv <pads = [1, 1, 1, 1]> (b, w)
            k = ReduceSum <keepdims = 0> (w, axis)
            z = Reshape (k, shape)
        }"""
        weights = integers({"w": (16, 16, 3, 3)}) | {"axis": np.array([1]), "shape": np.array([16, 9])}
        check_parts(model_of(text, weights=weights), integers({"x": (1, 16, 8, 8)}), plans=10)

    def test_outputs_that_are_read_inputs_or_listed_twice(self) -> None:
        text = """g (float[1, 4, 5, 5] x, float[1, 4, 5, 5] k) => (float[1, 4, 5, 5] a, float[1, 4, 5, 5] x,
            float[1, 4, 5, 5] y) {
            a = Add (x, k)
            y = Mul (a, k)
        }"""
        model = model_of(text)
        inputs = integers({"x": (1, 4, 5, 5), "k": (1, 4, 5, 5)})
        prepared = prepare(model)
        assert prepared.layers is not None
        for seed in range(6):
            plan = random_plan(Random(seed), prepared.layers, DEVICES)
            program = lower(replace(prepared, plan=plan, platform=uniform_platform(3))).program
            assert program is not None
            first, second, third = ProgramExecutor(program).run(inputs).outputs.values()
            assert np.array_equal(first, inputs["x"] + inputs["k"])
            assert np.array_equal(second, inputs["x"])
            assert np.array_equal(third, first * inputs["k"])

    def test_unread_input_and_node(self) -> None:
        text = """g (float[1, 4, 5, 5] x, float[7] unread) => (float[1, 4, 5, 5] y) {
            dead = Exp (x)
            y = Relu (x)
        }"""
        check_parts(model_of(text), integers({"x": (1, 4, 5, 5), "unread": (7,)}))


class TestWhole:
    """Layers that are never cut: control flow, functions, unknown shapes, and operators of other domains."""

    def test_control_flow_with_captures(self) -> None:
        text = """g (float[1, 4, 6, 6] x, bool c) => (float[1, 4, 6, 6] y) {
            a = Conv (x, w)
            b = Relu (a)
            i = If (c) <
                then_branch = t () => (float[1, 4, 6, 6] u) { u = Mul (a, b) },
                else_branch = e () => (float[1, 4, 6, 6] v) { v = Conv (b, w) }
            >
            y = Conv (i, w)
        }"""
        model = model_of(text, weights=integers({"w": (4, 4, 1, 1)}))
        for condition in (True, False):
            inputs = integers({"x": (1, 4, 6, 6)}) | {"c": np.array(condition)}
            assert "If" in whole(check_parts(model, inputs))

    def test_loop(self) -> None:
        text = """g (float[1, 3] x, int64 n) => (float[1, 3] y, float[k, 1, 3] all) {
            s = Relu (x)
            go = Constant <value = bool {1}> ()
            e, all = Loop (n, go, s) <body = b (int64 i, bool c, float[1, 3] h) =>
                (bool d, float[1, 3] o, float[1, 3] each) {
                d = Identity (c)
                o = Add (h, x)
                each = Mul (h, x)
            }>
            y = Gemm <transB = 1> (e, w)
        }"""
        weights = integers({"w": (3, 3)})
        inputs = integers({"x": (1, 3)}) | {"n": np.array(3)}
        assert "Loop" in whole(check_parts(model_of(text, weights=weights), inputs))

    def test_functions_of_the_model(self) -> None:
        text = """g (float[1, 4, 6, 6] x) => (float[1, 4, 6, 6] y) {
                a = Conv (x, w)
                b = mine.twice (a)
                y = Conv (b, w)
            }
            <domain: "mine", opset_import: ["": 17]>
            twice (x) => (y) { y = Add (x, x) }
        """
        head = 'ir_version: 8, opset_import: ["": 17, "mine": 1]'
        model = model_of(text, head, integers({"w": (4, 4, 1, 1)}))
        assert "twice" in whole(check_parts(model, integers({"x": (1, 4, 6, 6)})))

    def test_operators_of_onnxruntime_domain(self) -> None:
        text = """g (float[2, 8] x) => (float[2, 8] y) {
            a = MatMul (x, w)
            b = com.microsoft.Trilu (a)
            y = MatMul (b, w)
        }"""
        head = 'ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]'
        model = model_of(text, head, integers({"w": (8, 8)}))
        assert "Trilu" in whole(check_parts(model, integers({"x": (2, 8)}), exact=False))

    def test_tensors_without_static_shape(self) -> None:
        text = """g (float[1, 4, 6, 6] x) => (float[k, 8] y, float[1, 4, 6, 6] z) {
            a = Conv (x, w)
            f = Flatten (a)
            at = NonZero (f)
            column = Gather <axis = 0> (at, one)
            picked = Gather <axis = 1> (f, column)
            t = Transpose (picked)
            y = MatMul (t, v)
            z = Relu (a)
        }"""
        weights = integers({"w": (4, 4, 1, 1), "v": (1, 8)}) | {"one": np.array(1)}
        compiled = check_parts(model_of(text, weights=weights), integers({"x": (1, 4, 6, 6)}), plans=10)
        assert compiled.layers is not None
        joined = [layer for layer in compiled.layers.layers if len(layer.nodes) > 1 and layer.whole_reason]
        assert {"NonZero", "MatMul"} <= {node.op for layer in joined for node in layer.nodes}


class TestLarge:
    """Models over 2 GB, which no protobuf message can hold."""

    def test_model_over_2_gb_with_external_data(self, tmp_path: Path) -> None:
        rows, width = 2**24 + 2**18, 32  # A table of 2.2 GB, in a file that is sparse except for the last row.
        with (tmp_path / "table.bin").open("wb") as file:
            file.truncate(rows * width * 4)
            file.seek((rows - 1) * width * 4)
            file.write(np.arange(width, dtype=np.float32).tobytes())
        text = """g (int64[3] at) => (float[3, 16] y) {
            found = Gather (table, at)
            y = Gemm <transB = 1> (found, w)
        }"""
        proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
        table = proto.graph.initializer.add(name="table", data_type=onnx.TensorProto.FLOAT, dims=(rows, width))
        table.data_location = onnx.TensorProto.EXTERNAL
        table.external_data.add(key="location", value="table.bin")
        weight = integers({"w": (16, 32)})["w"]
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
        path = tmp_path / "model.onnx"
        path.write_bytes(proto.SerializeToString())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        prepared = prepare(Model.load(path))
        assert prepared.layers is not None
        halves = (Part("d1", ((0, 3), (0, 8))), Part("d2", ((0, 3), (8, 16))))
        plan = Plan({"found": (Part("d0"),), "y": halves}, ("d0",), ("d1",))
        program = lower(replace(prepared, plan=plan, platform=uniform_platform(3))).program
        assert program is not None
        assert (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18
        )  # ru_maxrss is in KiB: memory grew by less than 256 MiB, so the table was not read into memory.
        assert max(weight.nbytes for weight in program.weights.values()) == rows * width * 4
        (lookup,) = program.devices[0].segments
        at = np.array([0, rows - 1, 5])
        (found,) = _run_mapped(lookup.model, tmp_path, {"at": at})
        assert np.array_equal(found, np.stack([np.zeros(width), np.arange(width), np.zeros(width)]))


def _run_mapped(segment: onnx.ModelProto, directory: Path, inputs: Values) -> list[NDArray[Any]]:
    """Run a segment with the single large weight in table.bin, which onnxruntime maps without a copy."""
    import onnxruntime

    proto = onnx.ModelProto()
    proto.CopyFrom(segment)
    for tensor in proto.graph.initializer:
        if tensor.name == "table":
            del tensor.external_data[:]
            tensor.external_data.add(key="location", value="table.bin")
    (directory / "segment.onnx").write_bytes(proto.SerializeToString())
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(directory / "segment.onnx", options, providers=["CPUExecutionProvider"])
    results: list[NDArray[Any]] = session.run(None, {name: inputs[name] for name in inputs})
    return results
