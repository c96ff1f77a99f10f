"""The loader finds external data, names nodes, and rejects invalid models in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.onnx_models import external, message_of, small

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.loader import external_files
from dicompiler.ir.onnx.model import PLACEHOLDER_LOCATION, Model


def test_loads_small_external_data_into_the_skeleton(tmp_path: Path) -> None:
    model = small()
    (tmp_path / "m.bin").write_bytes(np.arange(8, dtype=np.float32).tobytes())
    model.graph.node.append(helper.make_node("Constant", [], ["c"], value=helper.make_tensor("", 1, [8], [0.0] * 8)))
    for tensor in (model.graph.initializer[0], model.graph.node[-1].attribute[0].t):
        tensor.ClearField("float_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="m.bin")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    loaded = Model.load(tmp_path / "m.onnx")
    np.testing.assert_array_equal(loaded.array("b"), np.arange(8))
    np.testing.assert_array_equal(numpy_helper.to_array(loaded.proto.graph.node[-1].attribute[0].t), np.arange(8))


def test_names_unnamed_nodes_and_numbers_duplicates() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[4] x) => (float[4] e)
        { [b] a = Relu (x)  b = Relu (a)  [b] c = Relu (b)  [b_1] d = Relu (c)  e = Relu (d) }"""
    )
    for source in (model, model.SerializeToString()):
        names = [node.name for node in Model.load(source).proto.graph.node]
        assert names == ["b", "b_2", "b_3", "b_1", "e"]
    assert model.graph.node[1].name == ""


def test_renames_tensors_with_reserved_names() -> None:
    """onnxruntime rejects a model if it wants to cast `a` to an existing name ("Duplicate definition of name")."""
    casts = "InsertedPrecisionFreeCast_"
    text = f"""<ir_version: 8, opset_import: ["": 17]> g (float16[8, 300] x, bool c) => (float16[8, 300] {casts}y)
    <float[300] {casts}w = {{{", ".join("1" * 300)}}}>
    {{
        a = Relu (x)
        [wide] {casts}a = Cast <to = 1> (a)
        Cast_a = Mul ({casts}a, {casts}w)
        b = If (c) <
            then_branch = t () => (float[8, 300] d) {{ d = Neg ({casts}a) }},
            else_branch = e () => (float[8, 300] d) {{ d = Add (Cast_a, {casts}a) }} >
        narrow = Cast <to = 10> (b)
        m = Mod <fmod = 1> (a, narrow)
        {casts}y = Identity (m)
    }}"""
    proto = onnx.parser.parse_model(text)
    loaded = Model.load(proto)
    assert [name for node in loaded.proto.graph.node for name in node.output if name.startswith(casts)] == [f"{casts}y"]
    assert loaded.proto.graph.node[1].output[0] == "Cast_a_1"
    np.testing.assert_array_equal(loaded.array("Cast_w"), np.ones(300, np.float32))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail, match="Duplicate definition"):
        onnxruntime.InferenceSession(proto.SerializeToString(), options)
    session = onnxruntime.InferenceSession(loaded.to_proto().SerializeToString(), options)
    x = np.linspace(1, 2, 2400, dtype=np.float16).reshape(8, 300)
    (result,) = session.run(None, {"x": x, "c": np.array(False)})
    np.testing.assert_array_equal(result, x)


def test_reports_a_missing_file(tmp_path: Path) -> None:
    message = message_of(tmp_path / "none.onnx")
    assert "none.onnx" in message
    assert "No such file" in message
    assert "cannot read" in message_of(tmp_path)


def test_rejects_data_of_the_wrong_length() -> None:
    model = small()
    model.graph.initializer[1].dims[0] = 63
    message = message_of(model)
    assert "'w'" in message
    assert "63x8" in message
    assert "2048" in message


def test_rejects_embedded_data_of_the_wrong_size() -> None:
    model = small()
    model.graph.initializer[0].dims[0] = 9
    assert "'b' is damaged" in message_of(model)


def test_rejects_names_and_repairs_documentation_that_are_not_utf8() -> None:
    data = small().SerializeToString()
    assert "not UTF-8" in message_of(data.replace(b"MatMul", b"MatM\xff\xfe"))
    model = small()
    model.doc_string = "DDDD"
    loaded = Model.load(model.SerializeToString().replace(b"DDDD", b"D\xff\xfeD"))
    assert loaded.proto.doc_string == "D\ufffd\ufffdD"
    assert loaded.with_graph(loaded.graph()).proto == loaded.proto


def test_rejects_duplicate_initializers() -> None:
    model = small()
    model.graph.initializer.append(model.graph.initializer[0])
    assert "'b'" in message_of(model)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"location": "none.bin"}, "none.bin"),
        ({"location": "../weights.bin"}, "model's directory"),
        ({"location": "/etc/passwd"}, "model's directory"),
        ({"location": ""}, "model's directory"),
        ({"location": PLACEHOLDER_LOCATION}, "no file"),
        ({"offset": "65"}, "2113"),
        ({"offset": "-1"}, "truncated"),
        ({"offset": "x"}, "invalid offset, length or type"),
        ({"length": "2047"}, "2047"),
    ],
)
def test_rejects_missing_or_invalid_external_data(entries: dict[str, str], expected: str, tmp_path: Path) -> None:
    message = message_of(external(tmp_path, **entries))
    assert "'w'" in message
    assert expected in message


def test_loads_links_into_one_directory(tmp_path: Path) -> None:
    """The Hugging Face cache has links to blobs instead of the files."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/1/onnx"
    for directory in (blobs, snapshot):
        directory.mkdir(parents=True)
    path = external(tmp_path)
    (data,) = external_files(path)
    for number, file in enumerate((path, data)):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../../blobs/{number}")
    assert Model.load(snapshot / path.name).weights
    assert external_files(snapshot / path.name) == (snapshot / data.name,)


def test_rejects_links_out_of_the_model_directory(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path = external(tmp_path / "model")
    (tmp_path / "model/weights.bin").rename(tmp_path / "elsewhere.bin")
    (tmp_path / "model/weights.bin").symlink_to(tmp_path / "elsewhere.bin")
    assert "link" in message_of(path)


def test_rejects_external_data_without_a_directory(tmp_path: Path) -> None:
    assert "path" in message_of(external(tmp_path).read_bytes())


@pytest.mark.parametrize(("ir", "opset", "what"), [(99, 17, "IR version 99"), (8, 99, "opset 99")])
def test_rejects_versions_that_onnxruntime_does_not_support(ir: int, opset: int, what: str) -> None:
    model = small()
    model.ir_version, model.opset_import[0].version = ir, opset
    message = message_of(model)
    assert what in message
    assert onnxruntime.__version__ in message
    limit = int(message.split("goes up to ")[1].split(":")[0])
    assert limit >= (10 if ir == 99 else 22)
    model.ir_version, model.opset_import[0].version = (limit, 17) if ir == 99 else (8, limit)
    assert Model.load(model).proto.ir_version == model.ir_version
    model.ir_version, model.opset_import[0].version = (limit + 1, 17) if ir == 99 else (8, limit + 1)
    assert str(limit + 1) in message_of(model)


def test_lists_external_files_once_in_order(tmp_path: Path) -> None:
    assert external_files(external(tmp_path)) == (tmp_path / "weights.bin",)
    inline = tmp_path / "inline.onnx"
    inline.write_bytes(small().SerializeToString())
    assert external_files(inline) == ()
    with pytest.raises(DicompilerError, match=r"external data of 'w'.*none\.bin"):
        external_files(external(tmp_path, location="none.bin"))
