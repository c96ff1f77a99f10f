"""Loading, saving and viewing models: nothing is lost, nothing is copied, and mistakes are one line."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper, numpy_helper

from dicompiler.base.errors import DicompilerError
from dicompiler.ir.onnx.model import HOLLOW, Model, Weight, hollow, is_hollow

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"


def parsed(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    """A model in ONNX text, and its large initializers."""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def small(**weights: np.ndarray) -> onnx.ModelProto:
    weights = weights or {"w": np.arange(64 * 8, dtype=np.float32).reshape(64, 8)}
    return parsed(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 64] x) => (float[N, 8] y)
        <float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}>
        { h = MatMul (x, w)  y = Add (h, b) }""",
        **weights,
    )


def external(directory: Path, **entries: str) -> Path:
    """`small()` with w in weights.bin; `entries` override the reference's."""
    model = small()
    array = numpy_helper.to_array(model.graph.initializer[1])
    (directory / "weights.bin").write_bytes(bytes(64) + array.tobytes())
    tensor = model.graph.initializer[1]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in ({"location": "weights.bin", "offset": "64", "length": "2048"} | entries).items():
        tensor.external_data.add(key=key, value=value)
    path = directory / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def body_model() -> onnx.ModelProto:
    """An If whose branches capture an outer tensor and outer initializers that nothing else reads."""
    model = parsed(
        """<ir_version: 8, opset_import: ["": 17]>
        g (bool c, float[300] x) => (float[300] y) <float[1] k = {2}>
        { a = Relu (x)
          y = If (c) <
            then_branch = t () => (float[300] p) { q = Mul (a, k) p = Add (q, w) },
            else_branch = e () => (float[300] r) <float[1] m = {3}, float[1] unread = {4}> { r = Mul (a, m) }> }""",
        w=np.ones(300, np.float32),
    )
    branch = model.graph.node[1].attribute[0].g
    branch.node[0].doc_string = "inside"
    return model


def rich_model() -> onnx.ModelProto:
    """One model with everything that graphsurgeon drops, changes or refuses."""
    model = parsed(
        """<ir_version: 11, opset_import: ["": 21, "local": 1, "other": 3], producer_name: "maker",
            producer_version: "7", domain: "org.example", model_version: 12, doc_string: "a model">
        g (float[N, 64] x, float[64, 8] w) => (float[N, 8] y, float[N, 8] z)
        <float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}>
        { h = MatMul (x, w)  y = Add (h, b)  u = other.Thing <hollow: ints = [], mode = "linear"> (y)
          z = local.twice (u) }
        <domain: "local", opset_import: ["": 21], doc_string: "doubles"> twice (v) => (d) { d = Add (v, v) }""",
        w=np.arange(512, dtype=np.float32).reshape(64, 8),
        unread=np.zeros(400, np.float32),
        half=np.ones(600, np.float32).astype(ml_dtypes.bfloat16),
        odd=np.ones(1100, np.float32).astype(ml_dtypes.float8_e4m3fnuz),
        nibbles=np.ones(3001, np.int8).astype(ml_dtypes.int4),
    )
    model.metadata_props.add(key="trained", value="yes")
    model.configuration.add(name="pair", num_devices=2)
    graph = model.graph
    graph.doc_string = "a graph"
    graph.metadata_props.add(key="g", value="1")
    graph.quantization_annotation.add(tensor_name="h").quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="b")
    graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, ["N", 8], doc_string="hidden"))
    graph.value_info[0].metadata_props.add(key="v", value="1")
    graph.output[0].type.tensor_type.shape.dim[1].denotation = "DATA_FEATURE"
    values = numpy_helper.from_array(np.float32([5, 6]), "scarce")
    indices = numpy_helper.from_array(np.int64([1, 3]), "")
    graph.sparse_initializer.add(values=values, indices=indices, dims=[2, 4])
    for name, op in (("half", "Cast"), ("odd", "Cast"), ("nibbles", "Cast"), ("scarce", "Identity")):
        attributes = {"to": TensorProto.FLOAT} if op == "Cast" else {}
        graph.node.append(helper.make_node(op, [name], [f"{name}_out"], name=f"of_{name}", **attributes))
    node = graph.node[0]
    node.name, node.doc_string, node.overload = "product", "a node", "v2"
    node.metadata_props.add(key="dicompiler.device", value="pi01")
    node.device_configurations.add(configuration_id="pair", pipeline_stage=1)
    thing = graph.node[2]
    thing.attribute.add(name="bytes", type=onnx.AttributeProto.STRING, s=b"\xff\xfe")
    thing.attribute.add(name="texts", type=onnx.AttributeProto.STRINGS, strings=[b"a", b"\xff"])
    thing.attribute.add(name="kind", type=onnx.AttributeProto.TYPE_PROTO).tp.tensor_type.elem_type = 1
    thing.attribute.add(name="f", type=onnx.AttributeProto.FLOAT, f=0.1, doc_string="a tenth")
    tensor = thing.attribute.add(name="table", type=onnx.AttributeProto.TENSOR)
    tensor.t.CopyFrom(helper.make_tensor("t", TensorProto.FLOAT, [2], [1, 2]))
    for node in graph.node:
        node.name = node.name or node.output[0]
    return model


# --- round trips --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [small, body_model, rich_model])
def test_load_then_save_gives_the_same_message(make: Any, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("make", [small, body_model, rich_model])
@pytest.mark.parametrize("touch", [False, True], ids=["untouched", "values read"])
def test_the_graphsurgeon_view_loses_nothing(make: Any, touch: bool) -> None:
    model = Model.load(make())
    graph = model.graph()
    if touch:
        for tensor in graph.tensors().values():
            if isinstance(tensor, gs.Constant) and tensor.name != "scarce":
                assert tensor.values is not None
    again = model.with_graph(graph)
    assert again.proto == model.proto
    assert dict(again.weights) == dict(model.weights)
    assert again.digest() == model.digest()


def test_every_light_model_survives_the_graphsurgeon_view() -> None:
    files = sorted(LIGHT.glob("*.onnx"))
    assert len(files) == 9
    for file in files:
        model = Model.load(file)
        model.check(file.name)
        assert model.with_graph(model.graph()).proto == model.proto, file.name


def test_every_operator_model_of_the_onnx_package_survives_load_and_view(capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(LIGHT.parent.glob("*/*/model.onnx"))
    assert len(files) > 100
    for file in files:
        original = onnx.load(file)
        model = Model.load(file)
        for node, named in zip(original.graph.node, model.proto.graph.node, strict=True):
            node.name = named.name
        assert model.to_proto() == original, file
        assert model.with_graph(model.graph()).proto == model.proto, file
    assert capsys.readouterr().out == ""


def test_a_changed_graph_keeps_all_that_it_did_not_change() -> None:
    model = Model.load(rich_model())
    graph = model.graph()
    graph.nodes[0].outputs[0].name = "hidden"
    graph.tensors()["w"].name = "kernel"
    relu = gs.Node("Relu", "clip", inputs=[graph.outputs[0]], outputs=[gs.Variable("y2", np.float32, ["N", 8])])
    graph.nodes.append(relu)
    graph.outputs[0] = relu.outputs[0]
    del graph.nodes[2].attrs["bytes"]
    new = model.with_graph(graph)
    product, thing = new.proto.graph.node[0], new.proto.graph.node[2]
    assert (list(product.input), list(product.output)) == (["x", "kernel"], ["hidden"])
    assert product.doc_string == "a node"
    assert product.metadata_props[0].value == "pi01"
    assert product.overload == "v2"
    assert [a.name for a in thing.attribute] == ["hollow", "mode", "texts", "kind", "f", "table"]
    assert [v.name for v in new.proto.graph.output] == ["y2", "z"]
    assert new.weights["kernel"] is model.weights["w"]
    assert "w" not in new.weights
    assert "w" in model.weights


def test_renaming_in_the_view_does_not_reach_the_model() -> None:
    proto = small()
    before = proto.SerializeToString()
    model = Model.load(proto)
    skeleton = model.proto.SerializeToString()
    graph = model.graph()
    for tensor in graph.tensors().values():
        tensor.name += "_renamed"
    gs.export_onnx(graph)
    model.with_graph(graph)
    assert model.proto.SerializeToString() == skeleton
    assert proto.SerializeToString() == before


def test_a_constant_captured_only_by_a_body_stays_an_initializer_of_the_outer_graph() -> None:
    model = Model.load(body_model())
    graph = model.graph()
    graph.nodes[0].attrs["note"] = 1  # some change, so that nothing is passed through as a whole
    new = model.with_graph(graph).proto
    assert [t.name for t in new.graph.initializer] == ["k", "w"]
    assert not new.graph.node[1].attribute[0].g.initializer
    graph.tensors()["a"].name = "renamed"
    branches = [a.g for a in model.with_graph(graph).proto.graph.node[1].attribute]
    assert [b.node[0].input[0] for b in branches] == ["renamed", "renamed"]


def test_new_constants_become_weights_when_large_and_stay_inline_when_small() -> None:
    model = Model.load(small())
    graph = model.graph()
    graph.nodes[1].inputs[1] = gs.Constant("b2", np.zeros((100, 8), np.float32)[:1])
    graph.nodes[0].inputs[1] = gs.Constant("w2", np.ones((64, 8), np.float32))
    new = model.with_graph(graph)
    assert set(new.weights) == {"w2"}
    assert sorted(new.initializers()) == ["b2", "w2"]
    np.testing.assert_array_equal(new.array("w2"), np.ones((64, 8)))


# --- weights are views --------------------------------------------------------------------------------------------


def test_weights_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(small().SerializeToString())
    model = Model.load(path)
    (tensor,) = (t for t in model.proto.graph.initializer if is_hollow(t))
    assert tensor.name == "w"
    assert not tensor.raw_data
    assert tensor.external_data[0].value == HOLLOW
    assert type(model.weights["w"].data.obj).__name__ == "mmap"
    assert not model.array("w").flags.writeable
    values = model.graph().tensors()["w"].values
    assert np.shares_memory(values, model.array("w"))
    assert np.shares_memory(model.weights["w"].cut(((8, 16), (0, 8))).array(), model.array("w"))
    np.testing.assert_array_equal(model.array("b"), np.arange(1, 9))
    model.save(path)  # over the very file that is mapped
    np.testing.assert_array_equal(model.array("w"), Model.load(path).array("w"))


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
def test_a_weight_of_any_type_has_the_raw_bytes_that_onnx_gives_it(dtype: str, nbytes: int) -> None:
    array = (np.arange(15).reshape(3, 5) % 2).astype(getattr(ml_dtypes, dtype, None) or dtype)
    weight = Weight.of(array)
    tensor = numpy_helper.from_array(array)
    assert (weight.dtype, weight.shape) == (tensor.data_type, (3, 5))
    assert bytes(weight.data) == tensor.raw_data
    assert weight.nbytes == nbytes
    assert weight.array().dtype == array.dtype
    assert weight.array().tobytes() == array.tobytes()
    assert weight.cut(((1, 3), (2, 4))).array().tobytes() == array[1:3, 2:4].tobytes()


@settings(deadline=None)
@given(hnp.arrays(st.sampled_from(["<f4", ">f4", "<i8", "?"]), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0)))
def test_weight_of_an_array_gives_it_back(array: np.ndarray) -> None:
    for given_array in (array, array.T, np.asfortranarray(array)):
        back = Weight.of(given_array).array()
        assert back.shape == given_array.shape
        np.testing.assert_array_equal(back, given_array)


def test_sparse_initializers_are_known_by_their_dense_values() -> None:
    model = Model.load(rich_model())
    np.testing.assert_array_equal(model.array("scarce"), np.float32([[0, 5, 0, 6], [0, 0, 0, 0]]))
    assert model.initializers()["scarce"] == (TensorProto.FLOAT, (2, 4))
    constant = model.graph().tensors()["scarce"]
    assert constant.values.dtype == np.float32


# --- external data ------------------------------------------------------------------------------------------------


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


def test_small_external_data_and_that_of_attributes_comes_into_the_skeleton(tmp_path: Path) -> None:
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


def test_over_two_gigabytes_the_model_is_loaded_viewed_and_checked_but_not_serialised(tmp_path: Path) -> None:
    rows = 2**22  # 2**22 x 160 float32 = 2.5 GiB, as a hole in a sparse file
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


# --- names --------------------------------------------------------------------------------------------------------


def test_unnamed_nodes_take_their_first_outputs_name_and_namesakes_a_number() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[4] x) => (float[4] e)
        { [b] a = Relu (x)  b = Relu (a)  [b] c = Relu (b)  [b_1] d = Relu (c)  e = Relu (d) }"""
    )
    for source in (model, model.SerializeToString()):
        names = [node.name for node in Model.load(source).proto.graph.node]
        assert names == ["b", "b_2", "b_3", "b_1", "e"]
    assert model.graph.node[1].name == ""


# --- digest -------------------------------------------------------------------------------------------------------


def test_the_digest_is_of_the_structure_only() -> None:
    def digest(text: str = "Add", **weights: np.ndarray) -> str:
        model = small(**weights)
        model.graph.node[1].op_type = text
        return Model.load(model).digest()

    first = digest()
    assert len(first) == 64
    assert first == digest()
    assert first == digest(w=np.zeros((64, 8), np.float32))
    assert first != digest("Mul")
    assert first != digest(w=np.zeros((64, 9), np.float32))
    assert first != digest(w=np.zeros((64, 8), np.float64))


def test_the_digest_counts_attributes_shapes_and_names_and_not_documentation() -> None:
    reference = Model.load(rich_model()).digest()

    def changed(change: Any) -> str:
        model = rich_model()
        change(model)
        return Model.load(model).digest()

    assert reference != changed(lambda m: setattr(m.graph.node[2].attribute[1], "s", b"cubic"))
    assert reference != changed(lambda m: setattr(m.graph.node[0], "name", "other"))
    assert reference != changed(lambda m: setattr(m.opset_import[0], "version", 20))
    assert reference != changed(lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", 3))
    assert reference != changed(lambda m: setattr(m.functions[0].node[0], "op_type", "Mul"))
    assert reference == changed(lambda m: setattr(m, "doc_string", "other"))
    assert reference == changed(lambda m: setattr(m.graph.initializer[0], "doc_string", "other"))
    assert reference == changed(lambda m: m.graph.node[2].attribute.sort(key=lambda a: a.name))


def test_digest_and_bytes_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(rich_model().SerializeToString())
    code = (
        "import sys, hashlib; from dicompiler.ir.onnx.model import Model; m = Model.load(sys.argv[1]);"
        "print(m.digest(), hashlib.sha256(m.with_graph(m.graph()).to_bytes()).hexdigest())"
    )
    results = {
        subprocess.run(
            [sys.executable, "-c", code, tmp_path / "m.onnx"],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(results) == 1


# --- what is known of tensors -------------------------------------------------------------------------------------


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
    assert (tensors["x"].shape, tensors["x"].constant, tensors["x"].dtype) == ((1, 16), False, TensorProto.FLOAT)
    assert tensors["n"].shape is None
    assert tensors["h"].shape == (4, 4)
    assert tensors["s"].constant
    assert tensors["s"].value is not None
    assert tensors["s"].value.tolist() == [4, 4]
    assert tensors["f"].constant
    assert tensors["f"].value is not None
    assert tensors["f"].value.tolist() == [1.0]
    assert tensors["trained"].value is None
    assert tensors["big"].value is not None
    assert tensors["bigger"].value is None


def test_light_is_without_weights_and_legal() -> None:
    model = Model.load(rich_model())
    light = model.light()
    assert light.ByteSize() < 4000
    assert [t.name for t in light.graph.initializer] == ["b"]
    assert [v.name for v in light.graph.input] == ["x", "w", "unread", "half", "odd", "nibbles"]
    Model.load(small()).check("small")


# --- mistakes -----------------------------------------------------------------------------------------------------


def message_of(source: Any) -> str:
    with pytest.raises(DicompilerError) as caught:
        Model.load(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_file_names_it(tmp_path: Path) -> None:
    message = message_of(tmp_path / "none.onnx")
    assert "none.onnx" in message
    assert "No such file" in message
    assert "cannot read" in message_of(tmp_path)


def test_what_is_not_onnx_is_refused(tmp_path: Path) -> None:
    data = small().SerializeToString()
    for content in (b"", b"hello, world", b"\x00" * 64, b"\xff" * 64, b"\x08\x08", data[:-1], data[: len(data) // 2]):
        path = tmp_path / "m.onnx"
        path.write_bytes(content)
        assert "not an ONNX model" in message_of(path)
        assert "not an ONNX model" in message_of(content)


@settings(deadline=None)
@given(st.data())
def test_damaged_bytes_end_in_a_model_or_in_one_line(data: st.DataObject) -> None:
    content = bytearray(small().SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 120) | st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    try:
        Model.load(bytes(content))
    except DicompilerError as error:
        assert "\n" not in str(error)  # noqa: PT017  both ends are right, one of them must be one line


def test_data_of_the_wrong_length_is_refused() -> None:
    model = small()
    model.graph.initializer[1].dims[0] = 63
    message = message_of(model)
    assert "'w'" in message
    assert "63x8" in message
    assert "2048" in message


def test_data_inside_that_does_not_fit_its_shape_is_refused() -> None:
    model = small()
    model.graph.initializer[0].dims[0] = 9
    assert "'b' is damaged" in message_of(model)


def test_names_must_be_utf8_and_documentation_is_made_so() -> None:
    data = small().SerializeToString()
    assert "not UTF-8" in message_of(data.replace(b"MatMul", b"MatM\xff\xfe"))
    model = small()
    model.doc_string = "DDDD"
    loaded = Model.load(model.SerializeToString().replace(b"DDDD", b"D\xff\xfeD"))
    assert loaded.proto.doc_string == "D\ufffd\ufffdD"
    assert loaded.with_graph(loaded.graph()).proto == loaded.proto


def test_two_initializers_of_one_name_are_refused() -> None:
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
        ({"location": HOLLOW}, "no file"),
        ({"offset": "65"}, "2113"),
        ({"offset": "-1"}, "truncated"),
        ({"offset": "x"}, "no number"),
        ({"length": "2047"}, "2047"),
    ],
)
def test_external_data_that_is_missing_or_wrong_is_refused(
    entries: dict[str, str], expected: str, tmp_path: Path
) -> None:
    message = message_of(external(tmp_path, **entries))
    assert "'w'" in message
    assert expected in message


def test_external_data_must_not_leave_the_directory_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path = external(tmp_path / "model")
    (tmp_path / "model/weights.bin").rename(tmp_path / "elsewhere.bin")
    (tmp_path / "model/weights.bin").symlink_to(tmp_path / "elsewhere.bin")
    assert "link" in message_of(path)


def test_external_data_without_a_directory_is_refused(tmp_path: Path) -> None:
    assert "path" in message_of(external(tmp_path).read_bytes())


@pytest.mark.parametrize(("ir", "opset", "what"), [(99, 17, "IR version 99"), (8, 99, "opset 99")])
def test_a_version_that_onnxruntime_is_too_old_for_is_refused_with_its_limit(ir: int, opset: int, what: str) -> None:
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


def test_an_unknown_initializer_names_the_nearest() -> None:
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


def test_saving_where_there_is_no_directory_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DicompilerError, match="cannot write"):
        Model.load(small()).save(tmp_path / "none" / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_stub_is_the_tensor_of_a_weight_without_its_data() -> None:
    weight = Weight.of(np.ones((2, 3), np.float32))
    tensor = hollow("w", weight)
    assert is_hollow(tensor)
    assert (tensor.name, tensor.data_type, tuple(tensor.dims)) == ("w", weight.dtype, weight.shape)
    assert weight.nbytes == math.prod(tensor.dims) * 4
    assert not is_hollow(numpy_helper.from_array(np.ones(3)))
