"""Quantised networks on microcontrollers: everything is in int8, and all splits give the same bits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from support import tflm_runs
from support.generators import random_plan
from support.splits import Case, splits
from support.tflm_runs import compiled, emitted

from dicompiler import networks
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.base.schema import load_json
from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.platform import uniform_platform
from dicompiler.partition.bounds_inference import reduction_length
from dicompiler.partition.lowering import lower
from dicompiler.plugin.pass_manager import PassManager, make_pipeline
from dicompiler.target.run_records import RunOptions
from dicompiler.verify.comparison import graph_inputs, random_inputs
from dicompiler.verify.executor import ProgramExecutor, run_model
from dicompiler_passes.quantise import take_int8
from dicompiler_targets.tflm.target import TflmTarget

NAMES = ("block", "tiny", "lenet")


def network(name: str) -> onnx.ModelProto:
    return tflm_runs.block() if name == "block" else networks.build(name)


def samples(path: Path, model: onnx.ModelProto, **changes: NDArray[Any]) -> Path:
    """A file of eight samples of the network's input."""
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    given = {"input": np.random.default_rng(0).standard_normal((8, *shape)).astype(np.float32)} | changes
    np.savez(path, **given)  # type: ignore[arg-type]  # its keywords are the arrays' names
    return path


def run_quantise(model: onnx.ModelProto, path: Path) -> Model:
    passes = make_pipeline(f"normalise,quantise{{samples={path}}},infer-shapes,form-layers")
    return PassManager(passes).run(PipelineState(model=Model.load(model))).model


@cache
def quantised(name: str) -> Model:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        return run_quantise(network(name), samples(Path(place) / "samples.npz", network(name)))


def delivered(compilation: PipelineState, directory: Path) -> Mapping[str, NDArray[Any]]:
    """Return the outputs of an artifact for one frame, after a check that transfers are as long as predicted."""
    assert compilation.program is not None
    emitted(compilation, directory)
    result = TflmTarget().run(directory, [random_inputs(compilation.program.inputs)], RunOptions(timeout_s=60))
    sent = {index: count for report in result.reports for index, count in report.sent_bytes.items()}
    assert sent == {transfer.index: transfer.value.nbytes for transfer in compilation.program.transfers}
    return result.outputs[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_int8_parts_of_any_kind_are_bit_equal_to_the_whole_and_send_int8(name: str, tmp_path: Path) -> None:
    model = quantised(name)
    whole = delivered(compiled(model), tmp_path / "whole")["output"]
    base = prepare(model)
    assert base.layers is not None
    for seed in range(3):
        plan = random_plan(Random(seed), base.layers, ("d0", "d1", "d2"))
        compilation = lower(replace(base, plan=plan, platform=uniform_platform(3)))
        assert np.array_equal(delivered(compilation, tmp_path / str(seed))["output"], whole), seed
    compilation = compiled(model, "modnn", 2)
    assert np.array_equal(delivered(compilation, tmp_path / "rows")["output"], whole)
    assert compilation.program is not None
    inner = [t.value for t in compilation.program.transfers if not t.value.name.startswith("input[")]
    assert inner and all(value.dtype == onnx.TensorProto.INT8 for value in inner)


@pytest.mark.parametrize("name", NAMES)
def test_int8_model_is_litert_s_to_the_bit_but_one_and_near_onnxruntime_s(name: str, tmp_path: Path) -> None:
    model = quantised(name)
    compilation = compiled(model)
    assert compilation.program is not None
    ours = delivered(compilation, tmp_path / "out")["output"]
    inputs = random_inputs(compilation.program.inputs)
    data = next((tmp_path / "out").glob("*/*.tflite")).read_bytes()
    (theirs,) = tflm_runs.litert(data, [inputs["input"].transpose(0, 2, 3, 1)])
    step = float(model.array("output_scale"))
    assert np.abs(ours - theirs).max() <= 1.001 * step
    assert np.abs(ours - run_model(model, inputs)["output"]).max() <= 2.001 * step
    operators = load_json(next((tmp_path / "out").glob("*/manifest.json")))["operators"]
    assert {"QUANTIZE", "DEQUANTIZE", "CONV_2D"} <= set(operators)
    # Only LeNet is large enough: in smaller networks, the scales need as many bytes as the int8 weights save.
    if name == "lenet":
        assert len(data) < 0.3 * len(_float_model(name, tmp_path / "float"))


@pytest.mark.slow
def test_channel_shuffle_and_averages_at_the_border_are_bit_equal_in_tiles(tmp_path: Path) -> None:
    whole = delivered(compiled(quantised("quirks")), tmp_path / "whole")["output"]
    for devices in (2, 3):
        cut = delivered(compiled(quantised("quirks"), "modnn", devices), tmp_path / str(devices))["output"]
        assert np.array_equal(cut, whole)


def _float_model(name: str, directory: Path) -> bytes:
    emitted(compiled(network(name)), directory)
    return next(directory.glob("*/*.tflite")).read_bytes()


@pytest.mark.parametrize("name", ["tiny", "quirks", "resnet8"])
def test_parts_of_a_quantised_network_are_bit_equal_in_onnxruntime_too(name: str) -> None:
    case = Case.of(quantised(name), 2)
    found = list(splits(case.layers, ("height", "grid", "lop", "fused-grid"), 0, devices=2))
    assert len(found) == 4
    for one in found:
        program = lower(case.with_plan(case.plan(one))).program
        assert program is not None
        assert np.array_equal(ProgramExecutor(program).run(case.inputs).outputs["output"], case.reference["output"]), (
            one.kind
        )


def test_quantised_layer_holds_its_quantising_nodes_and_has_no_partial_sums() -> None:
    layers = prepare(quantised("block")).layers
    assert layers is not None
    convolutions = [layer for layer in layers.layers if layer.nodes[layer.anchor].op == "Conv"]
    assert len(convolutions) == 9
    for layer in convolutions:
        ops = [node.op for node in layer.nodes]
        assert ops == ["DequantizeLinear"] * 3 + ["Conv", "QuantizeLinear"]
        assert all(layers.tensors[name].dtype == onnx.TensorProto.INT8 for name in (*layer.inputs, layer.output))
        assert reduction_length(layers, layer) is None


@pytest.mark.parametrize("text", ["lip{layers=two.wide parts=2}", "fuse{layers=two.wide..two.narrow parts=2}"])
def test_partial_sums_of_a_quantised_layer_are_refused_with_the_reason(text: str) -> None:
    passes = make_pipeline(f"normalise,infer-shapes,form-layers,{text}")
    with pytest.raises(
        DicompilerError, match=r"cannot be split along input channels: it is quantized, and rounded partial sums"
    ):
        PassManager(passes).run(PipelineState(model=quantised("block")))


QLINEAR = """<ir_version: 8, opset_import: ["" : 17]> g (int8[1,4,3,3] x) => (int8[1,2,3,3] y)
<float s = {0.1}, int8 z = {0}, int8[2,4,1,1] w = {1,2,3,4,5,6,7,8}> { y = QLinearConv(x, s, z, w, s, z, s, z) }"""
INTEGERS = """<ir_version: 8, opset_import: ["" : 17]> g (uint8[1,4,3,3] x) => (int32[1,2,3,3] y)
<int8[2,4,1,1] w = {1,2,3,4,5,6,7,8}> { y = ConvInteger(x, w) }"""


def test_partial_sums_are_of_integers_in_32_bits_or_refused() -> None:
    passes = make_pipeline("normalise,infer-shapes,form-layers,lip{layers=y parts=2}")
    with pytest.raises(DicompilerError, match="'y' cannot be split along input channels: it is quantized"):
        PassManager(passes).run(PipelineState(model=Model.load(onnx.parser.parse_model(QLINEAR))))
    model = Model.load(onnx.parser.parse_model(INTEGERS))
    annotated = PassManager(passes).run(PipelineState(model=model, platform=uniform_platform(2)))
    program = lower(annotated).program
    assert program is not None
    inputs = {"x": np.random.default_rng(0).integers(0, 256, (1, 4, 3, 3)).astype(np.uint8)}
    assert np.array_equal(ProgramExecutor(program).run(inputs).outputs["y"], run_model(model, inputs)["y"])
    assert [t.value.dtype for t in program.transfers if "+" in t.value.name] == [onnx.TensorProto.INT32]


def test_layers_of_a_quantised_network_are_cut_by_output_channels_and_rows(tmp_path: Path) -> None:
    text = "lop{layers=one.wide parts=2},tile-height{layers=stem.deep parts=2},tile-grid{layers=one.deep}"
    passes = make_pipeline(f"normalise,infer-shapes,form-layers,{text}")
    annotated = PassManager(passes).run(PipelineState(model=quantised("block"), platform=uniform_platform(4)))
    whole = delivered(compiled(quantised("block")), tmp_path / "whole")["output"]
    assert np.array_equal(delivered(lower(annotated), tmp_path / "cut")["output"], whole)


def test_quantising_twice_gives_the_same_bytes() -> None:
    again = quantised.__wrapped__("lenet")
    assert again.to_bytes() == quantised("lenet").to_bytes()


# -- input that the target rejects


@pytest.mark.parametrize(
    ("changes", "cause"),
    [({"input": np.zeros((8, 1, 1, 28, 32), np.float32)}, r"have the shape \(8, 1, 1, 28, 32\): give the shape \(sam"),
     ({"input": np.zeros((0, 1, 1, 32, 32), np.float32)}, "have the shape"),
     ({"input": np.zeros((2, 1, 1, 32, 32))}, "are of type float64: give float32"),
     ({"imput": np.zeros(3)}, "the network has no input 'imput' \\(did you mean 'input'\\?\\)")],
)  # fmt: skip
def test_samples_that_do_not_fit_are_one_line(changes: dict[str, NDArray[Any]], cause: str, tmp_path: Path) -> None:
    path = samples(tmp_path / "samples.npz", network("lenet"), **changes)
    with pytest.raises(DicompilerError, match=cause) as caught:
        run_quantise(network("lenet"), path)
    assert "\n" not in str(caught.value)


def test_file_that_is_none_no_samples_and_a_quantised_network_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no arrays")
    with pytest.raises(DicompilerError, match=r"cannot be read: it is not an \.npz file"):
        run_quantise(network("lenet"), tmp_path / "text.npz")
    with pytest.raises(DicompilerError, match="cannot be read: No such file"):
        run_quantise(network("lenet"), tmp_path / "missing.npz")
    with pytest.raises(UsageError, match="no samples: give a file"):
        PassManager(make_pipeline("quantise")).run(PipelineState(model=Model.load(network("lenet"))))
    with pytest.raises(DicompilerError, match="quantized already"):
        run_quantise(quantised("lenet").to_proto(), samples(tmp_path / "samples.npz", network("lenet")))


def test_inputs_of_int8_are_those_of_the_network_with_its_own_quantising(tmp_path: Path) -> None:
    model = network("lenet")
    path = samples(tmp_path / "samples.npz", model)
    text = f"normalise,quantise{{samples={path} inputs=int8}}"
    taking = PassManager(make_pipeline(text)).run(PipelineState(model=Model.load(model))).model
    (value,) = taking.proto.graph.input
    found = re.fullmatch(r"value = (\S+) \* \(q - (-?\d+)\)", value.doc_string)
    assert found is not None
    given = random_inputs(graph_inputs(quantised("lenet")))["input"]
    whole = np.clip(np.rint(given / np.float32(found[1])) + int(found[2]), -128, 127).astype(np.int8)
    expected = run_model(quantised("lenet"), {"input": given})
    for name, output in run_model(taking, {"input": whole}).items():
        assert np.array_equal(output, expected[name])


def test_input_that_is_read_unquantised_cannot_be_int8() -> None:
    with pytest.raises(DicompilerError, match="input 'input' is also read in float32: omit inputs=int8"):
        take_int8(Model.load(network("lenet")))
