"""ONNX files: weights are views, damaged files are rejected, large models use external data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper
from support.onnx_models import body_model, external, message_of, rich_model, small

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.model import PLACEHOLDER_LOCATION, Model, is_placeholder
from dicompiler.ir.onnx.protobuf_io import encode_varint


def test_weights_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(small().SerializeToString())
    model = Model.load(path)
    (tensor,) = (t for t in model.proto.graph.initializer if is_placeholder(t))
    assert tensor.name == "w"
    assert not tensor.raw_data
    assert tensor.external_data[0].value == PLACEHOLDER_LOCATION
    assert type(model.weights["w"].data.obj).__name__ == "mmap"
    assert not model.array("w").flags.writeable
    values = model.graph().tensors()["w"].values
    assert np.shares_memory(values, model.array("w"))
    assert np.shares_memory(model.weights["w"].take_region(((8, 16), (0, 8))).array(), model.array("w"))
    np.testing.assert_array_equal(model.array("b"), np.arange(1, 9))
    model.save(path)  # Saving overwrites the file that the model's arrays are mapped from.
    np.testing.assert_array_equal(model.array("w"), Model.load(path).array("w"))


def test_external_data_is_mapped_and_written_back_aligned(tmp_path: Path) -> None:
    model = Model.load(external(tmp_path))
    assert type(model.weights["w"].data.obj).__name__ == "mmap"
    inline = Model.load(small())
    np.testing.assert_array_equal(model.array("w"), inline.array("w"))
    assert model.to_bytes() == inline.to_bytes()
    (tmp_path / "out").mkdir()
    model.save(tmp_path / "out" / "m.onnx", external=True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["m.onnx", "m.onnx.data"]
    saved = onnx.load(tmp_path / "out" / "m.onnx", load_external_data=False)
    (entries,) = ({e.key: e.value for e in t.external_data} for t in saved.graph.initializer if t.external_data)
    assert entries["location"] == "m.onnx.data"
    assert int(entries["offset"]) % 64 == 0
    x = np.ones((3, 64), np.float32)
    sessions = [
        onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
        for source in (str(tmp_path / "out" / "m.onnx"), model.to_bytes())
    ]
    results = [session.run(None, {"x": x})[0] for session in sessions]
    np.testing.assert_array_equal(*results)


def test_models_over_two_gigabytes_load_and_check_but_do_not_serialize(tmp_path: Path) -> None:
    rows = 2**22  # A table of 2**22 × 160 float32 has 2.5 GiB, in a sparse file.
    model = small()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = rows
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 160
    del model.graph.initializer[:]
    model.graph.initializer.append(numpy_helper.from_array(np.ones(160, np.float32), "b"))
    tensor = model.graph.initializer.add(name="w", data_type=1, dims=[rows, 160], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="hole.bin")
    with (tmp_path / "hole.bin").open("wb") as file:
        file.truncate(rows * 160 * 4)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    loaded = Model.load(tmp_path / "m.onnx")
    loaded.check("m.onnx")
    assert loaded.with_graph(loaded.graph()).proto == loaded.proto
    assert loaded.array("w")[-1, -1] == 0
    for attempt in (loaded.to_proto, loaded.to_bytes, lambda: loaded.save(tmp_path / "x.onnx", external=False)):
        with pytest.raises(DicompilerError, match="2 GB"):
            attempt()
    assert not (tmp_path / "x.onnx").exists()


def test_rejects_files_that_are_not_onnx(tmp_path: Path) -> None:
    data = small().SerializeToString()
    for content in (b"", b"hello, world", b"\x00" * 64, b"\xff" * 64, b"\x08\x08", data[:-1], data[: len(data) // 2]):
        path = tmp_path / "m.onnx"
        path.write_bytes(content)
        assert "not an ONNX model" in message_of(path)
        assert "not an ONNX model" in message_of(content)


@settings(deadline=None)
@given(st.data())
def test_damaged_bytes_give_a_model_or_an_error_of_one_line(data: st.DataObject) -> None:
    content = bytearray(small().SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 120) | st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    try:
        Model.load(bytes(content))
    except DicompilerError as error:
        assert "\n" not in str(error)  # noqa: PT017  both ends are right, one of them must be one line


@pytest.mark.parametrize("make", [small, body_model, rich_model])
def test_models_with_external_weights_round_trip(make: Any, tmp_path: Path) -> None:
    model = Model.load(make())
    paths = model.save(tmp_path / "m.onnx", external=True)
    assert [path.name for path in paths] == ["m.onnx", "m.onnx.data"]
    again = Model.load(tmp_path / "m.onnx")
    assert again.to_bytes() == model.to_bytes()
    assert paths[0].stat().st_size < 6000


@given(st.integers(0, 2**63 - 1))
def test_varints_have_seven_bits_per_byte_lowest_first(value: int) -> None:
    encoded = encode_varint(value)
    assert sum((byte & 0x7F) << 7 * place for place, byte in enumerate(encoded)) == value
    assert [byte >> 7 for byte in encoded] == [1] * (len(encoded) - 1) + [0]
