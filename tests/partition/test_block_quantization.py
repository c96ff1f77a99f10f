"""The wire type int8-block: sent bytes and received values, compared with numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.layer_graphs import formed

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.program import Program
from dicompiler.ir.wire_dtype import WireFormat
from dicompiler.partition.lowering import partition
from dicompiler.partition.segmentation import build_program
from dicompiler.partition.wire_casts import MAX_INT8_BLOCK, MAX_ROUNDING_ERROR
from dicompiler.verify.executor import ProgramExecutor

SCALES = {index: np.float32(2.0 ** ((index - 31.5) / 4) * (1 - 2.0**-10) / 127) for index in range(-128, 128)}
TYPES = {"float": np.float32, "double": np.float64, "float16": np.float16}
SHAPES = [(1,), (5,), (32,), (33,), (64,), (3, 11), (1, 1, 1024), (2, 4, 4, 3), (1, 31, 33)]


def encode(x: NDArray[Any]) -> NDArray[np.int8]:
    """Return the sent bytes: the values of all blocks, then the index of the scale of each block."""
    flat = x.astype(np.float32).reshape(-1)
    values, indices = [], []
    for block in np.split(flat, range(32, flat.size, 32)):
        with np.errstate(divide="ignore"):
            logarithm = np.log(np.abs(block).max()) / np.float32(math.log(2) / 4)
        index = int(np.clip(np.rint(logarithm) + 32, -128, 127))
        values.append(np.clip(np.rint(block / SCALES[index]), -128, 127))
        indices.append(index)
    return np.concatenate([*values, indices]).astype(np.int8)


def decode(sent: NDArray[np.int8], like: NDArray[Any]) -> NDArray[Any]:
    scales = np.repeat([SCALES[int(index)] for index in sent[like.size :]], 32)[: like.size]
    return (sent[: like.size] * scales).astype(like.dtype).reshape(like.shape)


def build(shape: tuple[int, ...], dtype: str = "float", opset: int = 17) -> Program:
    """Return the program of y = -x. Device p sends x to q, and q sends y to p."""
    kind = f"{dtype}[{', '.join(map(str, shape))}]"
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> g ({kind} x) => ({kind} y) {{ y = Neg (x) }}'
    )
    proto.graph.node[0].name = "y"
    for value in (*proto.graph.input, *proto.graph.output):
        # The parser of onnx writes no shape for rank 0, so an empty shape is added.
        value.type.tensor_type.shape.SetInParent()
    plan = Plan({"y": (Part("q"),)}, ("p",), ("p",), wire_format=WireFormat((("*", "int8-block"),)))
    placed = partition(PipelineState(model=Model.load(proto), layers=formed(proto), plan=plan))
    placed.model.check("partition")
    program = build_program(placed.model, ["p", "q"])
    assert placed.routing is not None
    assert placed.routing.total_bytes == sum(transfer.value.nbytes for transfer in program.transfers)
    return program


def check_transfers(program: Program, x: NDArray[Any]) -> NDArray[Any]:
    """Return y, after a check of all sent bytes."""
    result = ProgramExecutor(program).run({"x": x}, keep_values=True)
    expected = encode(x), encode(-decode(encode(x), x))
    for transfer, sent in zip(program.transfers, expected, strict=True):
        assert transfer.value.shape == (x.size + -(-x.size // 32),)
        np.testing.assert_array_equal(result.values[transfer.receiver][transfer.value.name], sent)
    y: NDArray[Any] = result.outputs["y"]
    np.testing.assert_array_equal(y, decode(expected[1], x))
    assert y.dtype == x.dtype
    return y


@pytest.mark.parametrize("opset", [13, 17, 18, 21])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_sends_and_receives_the_values_of_numpy(shape: tuple[int, ...], dtype: str, opset: int) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(TYPES[dtype])
    y = check_transfers(build(shape, dtype, opset), x)
    assert np.abs(y + x).max() <= 2.1 * MAX_ROUNDING_ERROR * np.abs(x).max()


@settings(deadline=None, max_examples=50, derandomize=True)
@given(data=st.data())
def test_rounds_to_a_share_of_the_largest_magnitude_in_each_block(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    magnitudes = 10.0 ** rng.uniform(-11, 7, -(-math.prod(shape) // 32))
    flat = rng.uniform(-1, 1, math.prod(shape)) * np.repeat(magnitudes, 32)[: math.prod(shape)]
    x = flat.astype(np.float32).reshape(shape)
    once = decode(encode(x), x).reshape(-1)
    for block, received in zip(*(np.split(v, range(32, x.size, 32)) for v in (x.reshape(-1), once)), strict=True):
        assert np.abs(received - block).max() <= MAX_ROUNDING_ERROR * np.abs(block).max() * (1 + 1e-5)
    check_transfers(build(shape), x)


def test_received_values_do_not_change_when_they_are_sent_on() -> None:
    x = np.random.default_rng(0).standard_normal(64_000).astype(np.float32)
    np.testing.assert_array_equal(-check_transfers(build(x.shape), x), decode(encode(x), x))


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [1, 5, 32, 33, 1000])
def test_nan_and_infinity_end_the_run(count: int, dtype: str, opset: int) -> None:
    """The error has the tensor and the remedy. onnxruntime's maximum ignores NaN at most positions of a block."""
    executor = ProgramExecutor(build((count,), dtype, opset))
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        for position in {0, 1 % count, count // 2, count - 1}:
            for others in (0.0, 1.0, -6e4):
                x = np.full((count,), others, TYPES[dtype])
                x[position] = value
                with pytest.raises(DicompilerError, match=r"tensor x contains NaN .*: add x=float32 to --wire-dtype"):
                    executor.run({"x": x})


@settings(deadline=None, max_examples=100, derandomize=True)
@given(data=st.data())
def test_finite_values_arrive_and_others_end_the_run(data: st.DataObject) -> None:
    """Values are ordinary, huge, subnormal, infinite or NaN."""
    count = data.draw(st.integers(1, 70))
    x = np.random.default_rng(data.draw(st.integers(0, 1 << 30))).normal(0, 10, count).astype(np.float32)
    largest = float(np.finfo(np.float32).max)
    unusual = st.floats(width=32) | st.sampled_from([1e-45, -1e-40, MAX_INT8_BLOCK, largest, -largest, np.inf, np.nan])
    for position in data.draw(st.lists(st.integers(0, count - 1), max_size=5)):
        x[position] = data.draw(unusual)
    program = build((count,))
    if np.isfinite(x).all():
        y = check_transfers(program, x)
        clipped = x.clip(-MAX_INT8_BLOCK, MAX_INT8_BLOCK)
        for block, received in zip(*(np.split(v, range(32, count, 32)) for v in (clipped, -y)), strict=True):
            most = max(np.abs(block).max(), 2.0**-40)
            assert np.abs(received - block).max() <= 2.1 * MAX_ROUNDING_ERROR * most
    else:
        with pytest.raises(DicompilerError, match="tensor x contains NaN or infinity"):
            ProgramExecutor(program).run({"x": x})


@pytest.mark.parametrize("value", [1e30, -3.4e38, 0.0, 1e-20])
def test_clips_huge_values_and_keeps_zeros(value: float) -> None:
    """An attention mask of zeros and the lowest number still masks after it was sent."""
    x = np.zeros((2, 32), np.float32)
    x[0, 7:9], x[1] = value, 1.0
    y = check_transfers(build(x.shape), x)
    expected = np.sign(value) * MAX_INT8_BLOCK if abs(value) > 1 else 0.0
    np.testing.assert_allclose(-y[0, 7:9], expected, rtol=0.01, atol=1e-12)
    np.testing.assert_allclose(-y[1], 1.0, rtol=0.01)
    assert not np.delete(y[0], [7, 8]).any()


def test_empty_tensors_are_sent_unchanged() -> None:
    program = build((0, 4))
    assert [(t.value.dtype, t.value.nbytes) for t in program.transfers] == [(onnx.TensorProto.FLOAT, 0)] * 2
    assert ProgramExecutor(program).run({"x": np.zeros((0, 4), np.float32)}).outputs["y"].shape == (0, 4)


def test_rank_0_is_one_block() -> None:
    check_transfers(build(()), np.array(1.7, np.float32))


def test_magnitudes_have_the_stated_limits() -> None:
    x = np.array([MAX_INT8_BLOCK, 2.0**-40, 1.0], np.float32)
    for value in x:
        assert abs(float(decode(encode(value.reshape(1)), value.reshape(1))[0]) - value) <= MAX_ROUNDING_ERROR * value
