"""Narrower wire types with real processes: sent bytes, deviations, and numbers that a type cannot represent."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from dicompiler import networks
from dicompiler.base.errors import DicompilerError, RunError, UsageError
from dicompiler.base.schema import load_json
from dicompiler.driver.artifact import reopen_artifact, run, verify, verify_run
from dicompiler.driver.compiler import compile
from dicompiler.driver.prepare import load_problem
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Part, load_plan
from dicompiler.verify.comparison import graph_inputs, random_inputs
from dicompiler_strategies.candidate_search import slice_sums
from dicompiler_strategies.transformer_heads import Heads

TYPES = {"float16": "FLOAT16", "bfloat16": "BFLOAT16", "int8": "INT8", "int8-block": "INT8"}
BYTES = {"float16": 2, "bfloat16": 2, "int8": 1, "int8-block": 33 / 32}
DECODER = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "vocabulary": 50, "size": 1, "past": 8}
LOUD = """<ir_version: 8, opset_import: ["": 17]> g (float[1, 1, 8, 8] x) => (float[1, 1, 8, 8] y)
<float[1, 1, 1, 1] w = {1}>
{ a = Conv (x, w)  b = MaxPool <kernel_shape = [1, 1]> (a)  y = Conv (b, w) }"""


@pytest.fixture(scope="module")
def lenet() -> onnx.ModelProto:
    return networks.build("lenet", 1)


def samples(model: onnx.ModelProto, path: Path, count: int = 16) -> Path:
    values = graph_inputs(Model.load(model))
    drawn = [random_inputs(values, seed) for seed in range(count)]
    np.savez(path, **{value.name: np.stack([one[value.name] for one in drawn]) for value in values})
    return path


def checks(directory: Path, inputs: Any = None) -> dict[str, Any]:
    return {check.name.split(" on ")[0]: check for check in verify(directory, inputs).checks}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sockets", "mpi"])
@pytest.mark.parametrize("wire", TYPES)
def test_real_programs_send_the_predicted_bytes_and_deviate_as_stated(
    lenet: onnx.ModelProto, target: str, wire: str, tmp_path: Path
) -> None:
    given = samples(lenet, tmp_path / "s.npz") if wire == "int8" else None
    wide = compile(lenet, "rpi4x3", "modnn")
    result = compile(
        lenet, "rpi4x3", "modnn", target=target, output=tmp_path / "out", wire_dtype=wire, wire_samples=given
    )

    found = checks(tmp_path / "out")

    assert all(check.passed for check in found.values()), found
    assert found["exact"].applies and f"{wire}: " in found["wire"].detail
    assert result.metrics is not None and wide.program is not None
    sizes = [transfer.value.nbytes // 4 for transfer in wide.program.transfers]
    assert result.metrics.total_bytes == sum(math.ceil(BYTES[wire] * size) for size in sizes) > 0
    assert f"{result.metrics.total_bytes} bytes a frame: as predicted" in found["bytes"].detail
    assert 1e-5 < float(found["output"].detail.split()[2]) < 0.03
    sent = load_json(tmp_path / "out" / "artifact.json")["transfers"]
    assert {transfer["dtype"] for transfer in sent} == {TYPES[wire]}
    assert load_plan(tmp_path / "out" / "plan.json") == result.plan
    again, _, _ = reopen_artifact(tmp_path / "out")
    assert again.metrics is not None and again.metrics.total_bytes == result.metrics.total_bytes


def test_saved_plan_reproduces_it_and_another_wire_can_be_chosen_for_it(lenet: onnx.ModelProto, tmp_path: Path) -> None:
    given = samples(lenet, tmp_path / "s.npz")
    plan = compile(lenet, "rpi4x2", "modnn", wire_dtype="int8,conv1=float32", wire_samples=given).plan
    assert plan is not None and plan.wire_format.ranges
    one, two = (compile(lenet, "rpi4x2", plan=plan, output=tmp_path / name, wire_dtype=wire).plan
                for name, wire in (("one", None), ("two", "float16")))  # fmt: skip
    assert one == plan
    assert two is not None and str(two.wire_format) == "float16" and two.layers == plan.layers
    assert checks(tmp_path / "one")["output"].passed


def loud(wire: str, place: Path, peak: float = 4.0, target: str = "sockets") -> Path:
    """Compile a network of three layers that pass on their input, on two devices."""
    model = onnx.parser.parse_model(LOUD)
    place.mkdir(exist_ok=True)
    np.savez(place / "s.npz", x=np.linspace(-1, peak, 64, dtype=np.float32).reshape(1, 1, 1, 8, 8))
    wide = compile(model, "rpi4x2", "single").plan
    assert wide is not None
    layers = dict(zip(wide.layers, ((Part(name),) for name in ("pi01", "pi02", "pi01")), strict=True))
    given = place / "s.npz" if wire == "int8" else None
    plan = replace(wide, layers=layers)
    compile(model, "rpi4x2", plan=plan, target=target, output=place / "out", wire_dtype=wire, wire_samples=given)
    return place / "out"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wire", "value", "held", "near", "words"),
    [
        ("float16", 7e4, False, False, "'a', from 'pi01' to 'pi02', holds 7e+04, above float16's largest 65504"),
        ("bfloat16", 7e4, True, True, "bfloat16: 2 transfers narrowed, largest value 7e+04"),
        ("float16", np.nan, True, True, "2 with NaN or infinity, which are sent as such"),
        ("float16", np.inf, True, True, "2 with NaN or infinity, which are sent as such"),
        ("int8-block", -3.4e38, True, False, "2 with values beyond 1.54e+07, which are clipped"),
        ("int8-block", 1e7, True, True, "int8-block: 2 transfers narrowed, largest value 1e+07"),
        ("int8", np.nan, False, False, "holds NaN or infinity, which int8 cannot represent: send it as float16"),
        ("int8", 4.01, True, True, "2 with values outside the samples' range, which are clipped"),
        ("int8", 5.0, True, False, "2 with values outside the samples' range, which are clipped"),
    ],
)
def test_reports_numbers_that_a_type_cannot_represent(
    wire: str, value: float, held: bool, near: bool, words: str, tmp_path: Path
) -> None:
    x = np.ones((1, 1, 8, 8), np.float32)
    x[0, 0, 3, 4] = value
    found = checks(loud(wire, tmp_path), {"x": x})
    assert found["wire"].passed == held and words in found["wire"].detail
    assert found["y"].passed == near
    remedy = "were clipped: compile with samples that cover these inputs (--wire-samples)"
    assert found["y"].detail.endswith(remedy) == ("samples' range" in words and not near)


def test_clipped_random_inputs_are_named_as_the_cause(tmp_path: Path) -> None:
    directory = loud("int8", tmp_path)
    remedy = (
        "values outside the samples' range were clipped, because the inputs were random: give inputs like your samp"
    )
    found = checks(directory)["y"], *verify_run(directory, run(directory)).checks
    assert [check.passed for check in found] == [False, False]
    assert all(remedy in check.detail for check in found)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sockets", "mpi"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_nan_and_infinity_in_int8_block_end_the_run(target: str, value: float, tmp_path: Path) -> None:
    """The error has the tensor and the remedy, and the remedy helps."""
    x = np.ones((1, 1, 8, 8), np.float32)
    x[0, 0, 3, 4] = value
    directory = loud("int8-block", tmp_path, target=target)
    error = r"device 'pi01'.*tensor a contains NaN or infinity, .*: add a=float32 to --wire-dtype"
    with pytest.raises(RunError, match=error):
        run(directory, {"x": x})
    remedied = loud("int8-block,a=float32,b=float32", tmp_path / "remedied", target=target)
    np.testing.assert_array_equal(run(remedied, {"x": x}).outputs[0]["y"], x)


def test_ranges_of_nan_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DicompilerError, match=r"from 'pi0.' to 'pi0.', holds NaN or infinity for these samples"):
        compile(
            onnx.parser.parse_model(LOUD.replace("MaxPool <kernel_shape = [1, 1]> (a)", "Sqrt(a)")),
            "rpi4x2",
            "modnn",
            wire_dtype="int8",
            wire_samples=samples(onnx.parser.parse_model(LOUD), tmp_path / "s.npz"),
        )


@pytest.mark.parametrize(
    ("wire", "given", "expected"),
    [
        ("int8", None, "wire: int8 needs the value range of each tensor"),
        ("float16", {"input": np.zeros((1, 1, 1, 32, 32), np.float32)}, "wire: samples are used for int8 only"),
        ("int8", {"inpt": np.zeros((1, 1, 1, 32, 32), np.float32)}, "the network has no input 'inpt' (did you mean"),
        ("int8", {}, "no samples of input 'input': give samples of every input"),
        ("int8", {"input": np.zeros((1, 1, 32, 32), np.float32)}, "samples of input 'input' have the shape"),
    ],
)
def test_samples_that_do_not_fit_are_refused(
    lenet: onnx.ModelProto, wire: str, given: Any, expected: str, tmp_path: Path
) -> None:
    place = None if given is None else tmp_path / "s.npz"
    if place is not None:
        np.savez(place, **given)
    with pytest.raises((DicompilerError, UsageError)) as caught:
        compile(lenet, "rpi4x2", "modnn", wire_dtype=wire, wire_samples=place, output=tmp_path / "out")
    assert expected in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_narrow_tensors_are_sent_unchanged_with_one_warning(
    lenet: onnx.ModelProto, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The network computes with 8-bit integers."""
    given = samples(lenet, tmp_path / "s.npz")
    with caplog.at_level(logging.WARNING):
        wide = compile(lenet, "rpi4x3", "modnn", quantize_samples=given)
        assert not [record for record in caplog.records if "wire" in record.getMessage()]
        result = compile(lenet, "rpi4x3", "modnn", quantize_samples=given, wire_dtype="float16")
    assert [record.getMessage() for record in caplog.records if "wire" in record.getMessage()] == [
        "wire: 6 of 7 sent tensors (such as 'flatten.out_QuantizeLinear_Output') "
        "cannot be converted to the requested type: they are sent unchanged"
    ]
    assert result.program is not None and wide.program is not None
    kinds = [{t.value.dtype for t in one.program.transfers} for one in (wide, result)]
    assert kinds == [{onnx.TensorProto.FLOAT, onnx.TensorProto.INT8}, {onnx.TensorProto.FLOAT16, onnx.TensorProto.INT8}]


def test_boards_accept_int8_and_refuse_operators_that_tflite_micro_lacks(
    lenet: onnx.ModelProto, tmp_path: Path
) -> None:
    given = samples(lenet, tmp_path / "s.npz")
    compile(lenet, "rpi4x2", "modnn", target="tflm", wire_dtype="int8", wire_samples=given, output=tmp_path / "out")
    assert checks(tmp_path / "out")["output"].passed
    with pytest.raises(DicompilerError, match=r"is of type float16: send it unchanged, or as int8 \(--wire-dtype\)"):
        compile(lenet, "rpi4x2", "modnn", target="tflm", wire_dtype="float16", output=tmp_path / "other")
    with pytest.raises(
        DicompilerError, match=r"its scale is computed .*: send it unchanged, or as int8 \(--wire-dtype\)"
    ):
        compile(lenet, "rpi4x2", "modnn", target="tflm", wire_dtype="int8-block", output=tmp_path / "other")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sockets", "mpi"])
def test_decoder_sends_partial_sums_with_a_scale_for_each_block(target: str, tmp_path: Path) -> None:
    """The caches stay on their devices in their own type."""
    model = networks.build("llama_small", 1, **DECODER)
    result = compile(
        model, "rpi4x2", "heads", objective="memory", target=target, wire_dtype="int8-block", output=tmp_path / "out"
    )
    found = checks(tmp_path / "out")
    assert all(check.passed for check in found.values()), found
    assert result.program is not None and result.routing is not None
    assert any(box.key.reduce is not None for box in result.routing.received_boxes)
    sent = {transfer.value.dtype for transfer in result.program.transfers}
    assert sent == {onnx.TensorProto.INT8, onnx.TensorProto.INT64}
    states = [state.value for device in result.program.devices for state in device.states]
    assert states and {state.dtype for state in states} == {onnx.TensorProto.FLOAT}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sockets", "mpi"])
def test_decoder_adds_up_partial_sums_in_slices(target: str, tmp_path: Path) -> None:
    """Three devices each add up one slice of the channels, and send it to the others."""
    model, wire = networks.build("llama_small", 1, **DECODER), "int8-block"
    problem = load_problem(model, "rpi4x3", objective="memory", target=target, wire_dtype=wire)
    whole = Heads(device_counts=(3,), waves=False).plan(problem)
    merged = {
        name: tuple(part for part in parts if part.reduce) + tuple(Part(d.name) for d in problem.platform.devices)
        for name, parts in whole.layers.items()
        if any(part.reduce for part in parts)
    }
    plan = slice_sums(problem.layers, replace(whole, layers={**whole.layers, **merged}))
    assert merged and all(len({part.region for part in plan.layers[name]}) == 4 for name in merged)
    compile(model, "rpi4x3", plan=plan, target=target, output=tmp_path / "out")
    found = checks(tmp_path / "out")
    assert all(check.passed for check in found.values()), found
