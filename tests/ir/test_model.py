"""Models are loaded, saved and checked; errors have one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from support.onnx_models import body_model, parsed, rich_model, small

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.model import Model


@pytest.mark.parametrize("make", [small, body_model, rich_model])
def test_saving_a_loaded_model_gives_the_same_message(make: Any, tmp_path: Path) -> None:
    original = make()
    for node in original.graph.node:
        node.name = node.name or node.output[0]
    path = tmp_path / "m.onnx"
    path.write_bytes(original.SerializeToString())
    for source in (path, str(path), path.read_bytes(), original):
        Model.load(source).save(tmp_path / "again.onnx")
        assert onnx.ModelProto.FromString((tmp_path / "again.onnx").read_bytes()) == original
        assert Model.load(source).to_proto() == original
        assert Model.load(source).to_bytes() == (tmp_path / "again.onnx").read_bytes()


def test_sparse_initializers_have_dense_values() -> None:
    model = Model.load(rich_model())
    np.testing.assert_array_equal(model.array("scarce"), np.float32([[0, 5, 0, 6], [0, 0, 0, 0]]))
    assert model.initializers()["scarce"] == (TensorProto.FLOAT, (2, 4))
    constant = model.graph().tensors()["scarce"]
    assert constant.values.dtype == np.float32


def test_tensors_gives_types_shapes_and_small_values() -> None:
    model = parsed(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[1, 16] x, float[N] n) => (float[4, 4] y) <int64[2] s = {4, 4}, float[1] f = {1}, float[4, 4] h>
        { h = Reshape (x, s)  y = Relu (h) }""",
        big=np.arange(1024, dtype=np.int64),
        bigger=np.arange(1025, dtype=np.int64),
        trained=np.ones(9, np.float32),
    )
    tensors = Model.load(model).tensors()
    assert set(tensors) == {"x", "n", "y", "h", "s", "f", "big", "bigger", "trained"}
    assert (tensors["x"].shape, tensors["x"].is_constant, tensors["x"].dtype) == ((1, 16), False, TensorProto.FLOAT)
    assert tensors["n"].shape is None
    assert tensors["h"].shape == (4, 4)
    assert tensors["s"].is_constant
    assert tensors["s"].value is not None
    assert tensors["s"].value.tolist() == [4, 4]
    assert tensors["f"].is_constant
    assert tensors["f"].value is not None
    assert tensors["f"].value.tolist() == [1.0]
    assert tensors["trained"].value is None
    assert tensors["big"].value is not None
    assert tensors["bigger"].value is None


def test_copy_without_weights_is_valid() -> None:
    model = Model.load(rich_model())
    light = model.without_weights()
    assert light.ByteSize() < 4000
    assert [t.name for t in light.graph.initializer] == ["b"]
    assert [v.name for v in light.graph.input] == ["x", "w", "unread", "half", "odd", "nibbles"]
    Model.load(small()).check("small")


def test_suggests_the_nearest_initializer() -> None:
    with pytest.raises(DicompilerError, match="did you mean 'bias'"):
        Model.load(parsed(small_text(), bias=np.ones(400, np.float32))).array("bais")


def small_text() -> str:
    return '<ir_version: 8, opset_import: ["": 17]> g (float[400] x) => (float[400] y) { y = Add (x, bias) }'


def test_check_names_the_place_and_the_cause() -> None:
    model = Model.load(small())
    broken = onnx.ModelProto()
    broken.CopyFrom(model.proto)
    broken.graph.node[0].input[0] = "nowhere"
    with pytest.raises(DicompilerError, match=r"after pass 'x'.*nowhere") as caught:
        Model(broken, model.weights).check("after pass 'x'")
    assert "\n" not in str(caught.value)


def test_saving_to_a_missing_directory_fails_cleanly(tmp_path: Path) -> None:
    with pytest.raises(DicompilerError, match="cannot write"):
        Model.load(small()).save(tmp_path / "none" / "m.onnx")
    assert list(tmp_path.iterdir()) == []
