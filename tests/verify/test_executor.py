"""The in-process executor: handmade programs against the whole model, and rejected programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import parser
from support.handmade import HEAD, Made, failing, halo, integers, partial, unknown_shape, value

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.model import Model, Weight, make_placeholder
from dicompiler.ir.program import Program
from dicompiler.verify.executor import ProgramExecutor, check_inputs, from_ort, run_model, to_ort

MADE = {
    "halo": halo,
    "partial": partial,
    "partial of 3 rows": lambda: partial(rows=3),
    "bfloat16": lambda: partial("bfloat16"),
    "float16": lambda: partial("float16"),
    "int8": lambda: partial("int8"),
    "double": lambda: partial("double"),
    "bool": lambda: partial("bool"),
    "float8": lambda: partial("float8e4m3fn"),
    "unknown shape": unknown_shape,
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE.keys())
def test_program_computes_same_as_whole_model(made: Any) -> None:
    program, model, inputs = made()
    reference = run_model(model, inputs)["out"]
    execution = ProgramExecutor(program).run(inputs)
    assert execution.outputs["out"].dtype == reference.dtype
    assert np.array_equal(execution.outputs["out"], reference)
    assert len(np.unique(reference.astype(np.float32))) > 1


@pytest.mark.parametrize("made", MADE.values(), ids=MADE.keys())
def test_every_transfer_carries_the_predicted_bytes(made: Any) -> None:
    program, _, inputs = made()
    assert ProgramExecutor(program).run(inputs).sent == tuple(t.value.nbytes for t in program.transfers)


def test_every_sink_delivers() -> None:
    program, model, inputs = partial()
    execution = ProgramExecutor(program).run(inputs)
    assert set(execution.delivered) == {"a", "b"}
    for outputs in execution.delivered.values():
        assert np.array_equal(outputs["out"], run_model(model, inputs)["out"])


def test_sessions_serve_many_frames() -> None:
    program, model, inputs = halo()
    executor = ProgramExecutor(program)
    for seed in range(3):
        frame = {"x": integers(inputs["x"].shape, seed)}
        assert np.array_equal(executor.run(frame).outputs["out"], run_model(model, frame)["out"])


def test_returns_all_values_on_request() -> None:
    program, model, inputs = halo()
    assert ProgramExecutor(program).run(inputs).values == {}
    values = ProgramExecutor(program).run(inputs, keep_values=True).values
    inner = run_model(model, inputs, ["r", "z"])
    assert np.array_equal(np.concatenate([values["a"]["ra"], values["b"]["rb"]], 2), inner["r"])
    assert np.array_equal(np.concatenate([values["c"]["za"], values["c"]["zb"]], 2), inner["z"])


@pytest.mark.parametrize("level", ["none", "basic", "extended"])
def test_optimization_levels_give_same_bits(level: Any) -> None:
    program, model, inputs = halo()
    assert np.array_equal(ProgramExecutor(program, level).run(inputs).outputs["out"], run_model(model, inputs)["out"])


def changed(made: Made, index: int, **changes: Any) -> Program:
    """Return the program with one transfer's value changed."""
    transfers = list(made[0].transfers)
    predicted = dataclasses.replace(transfers[index].value, **changes)
    transfers[index] = dataclasses.replace(transfers[index], value=predicted)
    return dataclasses.replace(made[0], transfers=tuple(transfers))


@pytest.mark.parametrize("changes", [{"shape": (1, 4, 2, 16)}, {"dtype": onnx.TensorProto.INT32}], ids=str)
def test_rejects_transfer_that_differs_from_prediction(changes: Any) -> None:
    made = halo()
    with pytest.raises(DicompilerError, match=r"^transfer 2 \('rb_start' from 'b' to 'a'\): .* was predicted"):
        ProgramExecutor(changed(made, 2, **changes)).run(made[2])


def test_rejects_transfer_of_missing_tensor() -> None:
    made = halo()
    with pytest.raises(DicompilerError, match=r"^transfer 1 \('zb' .*the sender does not have the tensor yet$"):
        ProgramExecutor(changed(made, 1, name="zb")).run(made[2])


def test_rejects_tensor_that_arrives_twice() -> None:
    program, _, inputs = halo()
    again = dataclasses.replace(program.transfers[3], index=4)
    twice = dataclasses.replace(program, transfers=(*program.transfers[:4], again))
    with pytest.raises(DicompilerError, match=r"^transfer 4 .*the receiver has the tensor already$"):
        ProgramExecutor(twice).run(inputs)


def test_rejects_segment_that_runs_too_early() -> None:
    program, _, inputs = halo()
    early = dataclasses.replace(program, segment_order=((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)))
    with pytest.raises(DicompilerError, match=r"^segment 'a2' of device 'a' reads 'rb_start' before it is available$"):
        ProgramExecutor(early).run(inputs)


def test_names_segment_that_cannot_run() -> None:
    program, _, inputs = failing()
    with pytest.raises(DicompilerError, match=r"^segment 'b0' of device 'b': onnxruntime cannot run it: .*out of data"):
        ProgramExecutor(program).run({"x": inputs["x"] * 9})


def test_names_segment_that_cannot_be_loaded() -> None:
    program, _, _ = failing()
    program.devices[1].segments[0].model.graph.node[0].op_type = "Gatherer"
    with pytest.raises(DicompilerError, match=r"^segment 'b0' of device 'b': onnxruntime cannot load it: .*Gatherer"):
        ProgramExecutor(program)


def test_inputs_are_checked() -> None:
    program, _, inputs = partial()
    with pytest.raises(DicompilerError, match=r"^input 'x2' is missing"):
        ProgramExecutor(program).run({"x": inputs["x"]})
    with pytest.raises(DicompilerError, match=r"^the network has no input 'x3' \(did you mean 'x'\?\)$"):
        ProgramExecutor(program).run(inputs | {"x3": inputs["x"]})
    with pytest.raises(DicompilerError, match=r"^input 'x' must be of type float32, not float64$"):
        ProgramExecutor(program).run(inputs | {"x": inputs["x"].astype(np.float64)})
    with pytest.raises(DicompilerError, match=r"^input 'x' must have the shape \(1, 16\), not \(16,\)$"):
        ProgramExecutor(program).run(inputs | {"x": inputs["x"][0]})


def test_inputs_need_not_be_contiguous() -> None:
    program, model, inputs = halo()
    turned = np.asfortranarray(inputs["x"])
    assert np.array_equal(ProgramExecutor(program).run({"x": turned}).outputs["out"], run_model(model, inputs)["out"])
    assert check_inputs([value("s")], {"s": np.float32(2)})["s"].shape == ()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2", "int4", "uint4", "int64", "bool"])
@pytest.mark.parametrize("shape", [(), (3, 5), (0, 2)], ids=str)
def test_arrays_round_trip_through_onnxruntime(name: str, shape: tuple[int, ...]) -> None:
    array = integers(shape, 1).astype(getattr(ml_dtypes, name, name))
    back = from_ort(to_ort(array))
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


@pytest.mark.parametrize("name", ["int4", "uint4", "float8_e4m3fn", "int8"])
def test_reads_weights_of_small_types(name: str) -> None:
    array = np.abs(integers((5, 7), 2)).astype(getattr(ml_dtypes, name, name))
    proto = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float x) => (float[5,7] y) { y = DequantizeLinear(w, x) }'
    )
    weight = Weight.from_array(array)
    proto.graph.initializer.append(make_placeholder("w", weight))
    result = run_model(Model(proto, {"w": weight}), {"x": np.float32(2)})
    assert np.array_equal(result["y"], array.astype(np.float32) * 2)


def test_returns_non_tensors_as_lists() -> None:
    text = "g (float[2,3] x) => (seq(float[3]) y) { y = SplitToSequence <axis = 0, keepdims = 0> (x) }"
    result = run_model(Model.load(parser.parse_model(HEAD + text)), {"x": np.ones((2, 3), np.float32)})
    assert [row.tolist() for row in result["y"]] == [[1, 1, 1], [1, 1, 1]]
