"""Weights have the bytes of ONNX, regions are views, and chunks are small."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import numpy_helper

from dicompiler.ir.onnx.model import Model
from dicompiler.ir.onnx.weights import CHUNK_BYTES, Weight, is_placeholder, make_placeholder, raw_nbytes

TYPES = (np.float32, np.float16, np.float64, np.int8, np.bool_, np.complex64, ml_dtypes.bfloat16, ml_dtypes.int4)


REGIONS = (
    ((0, 6), (0, 5), (0, 8)),
    ((2, 5), (0, 5), (0, 8)),
    ((0, 6), (1, 3), (0, 8)),
    ((1, 6), (0, 5), (2, 3)),
    ((3, 4), (2, 4), (5, 8)),
    ((0, 0), (0, 5), (0, 8)),
)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("region", REGIONS)
def test_take_region_matches_numpy_slicing(dtype: type, region: tuple[tuple[int, int], ...]) -> None:
    array = np.random.default_rng(0).integers(-2, 3, (6, 5, 8)).astype(dtype)
    expected = array[tuple(slice(*interval) for interval in region)]
    cut = Weight.from_array(array).take_region(region)
    assert cut.shape == expected.shape
    assert np.array_equal(cut.array(), expected)
    assert cut.array().dtype == expected.dtype
    assert bytes(cut.data) == bytes(Weight.from_array(expected).data) == b"".join(cut.chunks())
    assert cut.nbytes == len(cut.data) == raw_nbytes(cut.dtype, cut.shape)


def test_regions_of_regions_share_memory() -> None:
    array = np.arange(6 * 5 * 8, dtype=np.float32).reshape(6, 5, 8)
    cut = Weight.from_array(array).take_region(((1, 6), (1, 5), (0, 8))).take_region(((2, 4), (0, 3), (3, 7)))
    assert np.array_equal(cut.array(), array[3:5, 1:4, 3:7])
    assert np.shares_memory(cut.array(), array)


@pytest.mark.parametrize("shape", [(3, 2**19), (2**19, 3), (70, 5, 1000), (2, 3, 2**18)])
def test_chunks_are_small_for_any_shape(shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    weight = Weight.from_array(array)
    cuts = [
        weight,
        *(weight.take_region(tuple((0, extent - (axis == a)) for a, extent in enumerate(shape))) for axis in (0, 1)),
    ]
    for cut in cuts:
        chunks = [bytes(chunk) for chunk in cut.chunks()]
        assert max(map(len, chunks)) <= CHUNK_BYTES
        assert len(chunks) <= 2 * shape[0] + cut.nbytes // CHUNK_BYTES * 2 + 1
        assert b"".join(chunks) == cut.array().tobytes()


@pytest.mark.parametrize("external", [False, True])
def test_models_with_weight_regions_round_trip(tmp_path: Path, external: bool) -> None:
    array = np.random.default_rng(0).standard_normal((200, 300)).astype(np.float32)
    cut = Weight.from_array(array).take_region(((0, 200), (7, 260)))
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[1, 200] x) => (float[1, 253] y) { y = MatMul (x, w) }'
    )
    proto.graph.initializer.append(make_placeholder("w", cut))
    model = Model(proto, {"w": cut})
    model.save(tmp_path / "m.onnx", external)
    assert np.array_equal(Model.load(tmp_path / "m.onnx").array("w"), array[:, 7:260])
    onnx.checker.check_model(tmp_path / "m.onnx")
    assert np.array_equal(Model.load(model.to_bytes()).array("w"), array[:, 7:260])
    assert np.array_equal(onnx.numpy_helper.to_array(model.to_proto().graph.initializer[0]), array[:, 7:260])


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [
        ("float16", 30),
        ("bfloat16", 30),
        ("float8_e4m3fnuz", 15),
        ("int4", 8),
        ("uint4", 8),
        ("float64", 120),
        ("bool", 15),
        ("int64", 120),
        ("complex64", 120),
        ("float4_e2m1fn", 8),
        ("int2", 4),
    ],
)
def test_weights_of_any_type_have_the_raw_bytes_of_onnx(dtype: str, nbytes: int) -> None:
    array = (np.arange(15).reshape(3, 5) % 2).astype(getattr(ml_dtypes, dtype, None) or dtype)
    weight = Weight.from_array(array)
    tensor = numpy_helper.from_array(array)
    assert (weight.dtype, weight.shape) == (tensor.data_type, (3, 5))
    assert bytes(weight.data) == tensor.raw_data
    assert weight.nbytes == nbytes
    assert weight.array().dtype == array.dtype
    assert weight.array().tobytes() == array.tobytes()
    assert weight.take_region(((1, 3), (2, 4))).array().tobytes() == array[1:3, 2:4].tobytes()


@settings(deadline=None)
@given(hnp.arrays(st.sampled_from(["<f4", ">f4", "<i8", "?"]), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0)))
def test_arrays_round_trip_through_weights(array: np.ndarray) -> None:
    for given_array in (array, array.T, np.asfortranarray(array)):
        back = Weight.from_array(given_array).array()
        assert back.shape == given_array.shape
        np.testing.assert_array_equal(back, given_array)


def test_placeholder_has_no_data() -> None:
    weight = Weight.from_array(np.ones((2, 3), np.float32))
    tensor = make_placeholder("w", weight)
    assert is_placeholder(tensor)
    assert (tensor.name, tensor.data_type, tuple(tensor.dims)) == ("w", weight.dtype, weight.shape)
    assert weight.nbytes == math.prod(tensor.dims) * 4
    assert not is_placeholder(numpy_helper.from_array(np.ones(3)))
