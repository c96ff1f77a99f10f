"""The pass `infer-shapes`: given sizes reach every tensor, and shape computations become constants."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper

from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.pipeline_state import PipelineState
from dicompiler_passes.infer_shapes import InferShapes, parse_shapes
from dicompiler_passes.normalise import normalise

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"


def model(body: str, opset: int = 17) -> Model:
    text = f'<ir_version: 8, opset_import: ["": {opset}, "other": 1]> {body}'
    return Model.load(onnx.parser.parse_model(text))


def inferred(given_model: Model, *shape: str) -> Model:
    before = given_model.proto.SerializeToString()
    result = InferShapes(shape).run(PipelineState(given_model)).model
    result.check("inferred")
    assert given_model.proto.SerializeToString() == before
    assert InferShapes(shape).run(PipelineState(result)).model.proto == result.proto
    return result


def shapes(result: Model) -> dict[str, Any]:
    return {name: tensor.shape for name, tensor in result.tensors().items() if not tensor.is_constant}


def ops(result: Model) -> list[str]:
    return [node.op_type for node in result.proto.graph.node]


def same(before: Model, after: Model, **feeds: Any) -> None:
    results = []
    for source in (before, after):
        session = onnxruntime.InferenceSession(source.to_bytes(), providers=["CPUExecutionProvider"])
        results.append(session.run(None, feeds))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


DYNAMIC = """g (float[N, 3, H, W] x) => (float[N, C] y)
{ pooled = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x)
  shape = Shape (pooled)  zero = Constant <value = int64[1] {0}> ()  batch = Gather (shape, zero)
  rest = Constant <value = int64[1] {-1}> ()  to = Concat <axis = 0> (batch, rest)  flat = Reshape (pooled, to)
  y = Relu (flat) }"""


def test_infers_every_shape_of_static_models() -> None:
    result = inferred(model("g (float[1, 4] x) => (float[a, b] y) { h = Relu (x)  t = Transpose (h)  y = Neg (t) }"))
    assert shapes(result) == {"x": (1, 4), "h": (1, 4), "t": (4, 1), "y": (4, 1)}
    assert result.tensors()["h"].dtype == TensorProto.FLOAT


def test_binds_sizes_and_folds_shape_computations() -> None:
    original = model(DYNAMIC)
    result = inferred(original, "x=2x3x8x6")
    assert ops(result) == ["MaxPool", "Reshape", "Relu"]
    assert result.array("to").tolist() == [2, -1]
    assert list(result.initializers()) == ["to"]
    assert shapes(result) == {"x": (2, 3, 8, 6), "pooled": (2, 3, 4, 3), "flat": (2, 36), "y": (2, 36)}
    same(original, result, x=np.random.default_rng(1).random((2, 3, 8, 6), np.float32))


def test_named_dimension_has_one_size() -> None:
    text = (
        "g (float[N, 4] x, float[N, 4] z) => (float[N, 4] y) <float[N, 4] h> { h = other.Strange (x) y = Add (h, z) }"
    )
    assert shapes(inferred(model(text), "x=5x4")) == dict.fromkeys("xzhy", (5, 4))
    with pytest.raises(
        DicompilerError, match=r"dimension 0 \('N'\) is 6, but 5 in the model: give it as --shape z=5x4$"
    ):
        InferShapes(("x=5x4", "z=6x4")).run(PipelineState(model(text)))


def test_uses_shapes_of_file_behind_unknown_operators() -> None:
    text = """g (float[2, 4] x) => (float[9, 9] y) <float[2, 4] a, float[7, 7] h>
    { a = Relu (x)  h = other.Strange (a)  y = Relu (h) }"""
    assert shapes(inferred(model(text.replace("9, 9", "A, B")))) == {"x": (2, 4), "a": (2, 4), "h": (7, 7), "y": (7, 7)}


def test_inferred_shape_overrides_file() -> None:
    text = "g (float[N, 4] x) => (float[N, 4] y) <float[1, 4] h> { h = Relu (x)  y = Neg (h) }"
    assert shapes(inferred(model(text), "x=3x4")) == dict.fromkeys("xhy", (3, 4))


def test_follows_shapes_that_depend_on_shapes() -> None:
    original = model(
        """g (float[N] x) => (float[A] y)
        { s = Shape (x)  two = Constant <value = int64[1] {2}> ()  d = Mul (s, two)  r = ConstantOfShape (d)
          rs = Shape (r)  n = Size (x)  rsn = Add (rs, n)  e = Expand (one, rsn)  es = Shape (e)
          one = Constant <value = float[1] {1}> ()  q = ConstantOfShape (es)  qx = Concat <axis = 0> (q, x)
          y = Neg (qx) }""".replace("one = Constant <value = float[1] {1}> ()  q", "q").replace(
            "{ s =", "{ one = Constant <value = float[1] {1}> ()  s ="
        )
    )
    result = inferred(original, "x=3")
    assert ops(result) == ["Concat", "Neg"]
    assert shapes(result)["y"] == (12,)
    same(original, result, x=np.ones(3, np.float32))


@settings(deadline=None)
@given(st.integers(-5, 5) | st.none(), st.integers(-5, 5) | st.none())
def test_shape_uses_start_and_end_like_onnxruntime(start: int | None, end: int | None) -> None:
    given_attributes = [f"{k} = {v}" for k, v in (("start", start), ("end", end)) if v is not None]
    attributes = f"<{', '.join(given_attributes)}>" if given_attributes else ""
    original = model(f"g (float[N, 3, 5, 7] x) => (int64[K] y) {{ s = Shape {attributes} (x)  y = Identity (s) }}", 15)
    result = inferred(original, "x=2x3x5x7")
    assert ops(result) == ["Identity"]
    same(original, result, x=np.zeros((2, 3, 5, 7), np.float32))


def test_shape_output_is_made_by_node() -> None:
    original = model("g (float[N, 4] x) => (int64[2] s, int64 n) { s = Shape (x)  n = Size (x) }")
    result = inferred(original, "x=3x4")
    assert ops(result) == ["Identity", "Identity"]
    assert [v.name for v in result.proto.graph.output] == ["s", "n"]
    same(original, result, x=np.zeros((3, 4), np.float32))


def test_equal_split_becomes_slices_once_axis_is_known() -> None:
    original = normalise(model("g (float[2, N] x) => (float[2, A] y, float[2, B] z) { y, z = Split <axis = 1> (x) }"))
    assert ops(original) == ["Split"]
    result = inferred(original, "x=2x6")
    assert ops(result) == ["Slice", "Slice"]
    assert shapes(result) == {"x": (2, 6), "y": (2, 3), "z": (2, 3)}
    same(original, result, x=np.arange(12, dtype=np.float32).reshape(2, 6))


def test_data_dependent_shape_stays_unknown() -> None:
    result = inferred(model("g (float[4] x) => (int64[1, K] y) { n = NonZero (x)  y = Neg (n) }"))
    assert shapes(result)["n"] is None
    assert result.tensors()["n"].dtype == TensorProto.INT64


def test_range_gets_scalars() -> None:
    """onnxruntime loads the first model, because it does not look through If, but would reject a part of it."""
    before = model("""g (bool c, float[2] k) => (float[n] y) {
        stop = If (c) <then_branch = t () => (float[1] u) { u = Constant <value = float[1] {5}> () },
                       else_branch = e () => (float[1] v) { v = Constant <value = float[1] {3}> () }>
        zero, one = Split <axis = 0> (k)  y = Range (zero, stop, one) }""")
    del before.proto.graph.output[0].type.tensor_type.shape.dim[:]
    before.proto.graph.output[0].type.tensor_type.shape.dim.add(dim_param="n")
    after = inferred(before)
    (reader,) = [node for node in after.proto.graph.node if node.op_type == "Range"]
    assert all(shapes(after)[name] == () for name in reader.input)
    same(before, after, c=np.array(True), k=np.array([0, 2], np.float32))


def test_removes_node_if_only_its_shape_was_read() -> None:
    after = inferred(
        model("""g (float[2, 3] x) => (float[3, 2] y)
        { turned = Transpose (x)  shape = Shape (turned)  y = Reshape (x, shape) }""")
    )
    assert ops(after) == ["Reshape"]


def test_binds_inputs_of_unknown_rank_and_scalars() -> None:
    text = "g (float x, float[M] z) => (float[7] y) { y = Add (x, z) }"
    loaded = model(text)
    proto = onnx.ModelProto()
    proto.CopyFrom(loaded.proto)
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    assert shapes(inferred(Model(proto), "x=", "z=3")) == {"x": (), "z": (3,), "y": (3,)}
    assert shapes(inferred(Model(proto), "x=2x1", "z=3"))["y"] == (2, 3)
    with pytest.raises(DicompilerError, match=r"input 'x' has no shape: give it as --shape x=1x3x224x224"):
        InferShapes(("z=3",)).run(PipelineState(Model(proto)))


def test_ignores_non_tensor_inputs() -> None:
    loaded = model("g (seq(float[3]) s) => (float[K] y) { y = ConcatFromSequence <axis = 0> (s) }")
    result = inferred(loaded)
    assert ops(result) == ["ConcatFromSequence"]
    with pytest.raises(DicompilerError, match="not a tensor"):
        InferShapes(("s=3",)).run(PipelineState(loaded))


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(LIGHT.glob("*.onnx")), ids=lambda file: file.stem)
def test_infers_every_shape_of_light_models(file: Path) -> None:
    result = inferred(normalise(Model.load(file)))
    tensors = result.tensors()
    for node in result.proto.graph.node:
        for name in (*node.input, *node.output):
            assert tensors[name].shape is not None


# --- wrong sizes that the pass rejects ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "kind", "expected"),
    [
        ((), DicompilerError, "dimension 0 ('N') of input 'image' is open: give it as --shape image=1x3x224x224"),
        (("image=1x3x8",), UsageError, "give it as --shape image=1x3x224x224"),
        (("imag=1x3x8x8",), UsageError, "no input 'imag' (did you mean 'image'?)"),
        (("image=1x3x8",), UsageError, "4 dimensions"),
        (("image=1x4x8x8",), UsageError, "dimension 1 is 4, but 3 in the model"),
        (("image",), UsageError, "form"),
        (("image=1x3xHxW",), UsageError, "form"),
        (("image=1,3",), UsageError, "form"),
        (("image=-1x3x8x8",), UsageError, "form"),
        (("=1",), UsageError, "form"),
        (("image=1x3x8x8", "image=1x3x8x8"), UsageError, "already"),
    ],
)
def test_mistakes_are_one_line_with_remedy(shape: tuple[str, ...], kind: type[DicompilerError], expected: str) -> None:
    loaded = model("g (float[N, 3, H, W] image) => (float[N, 3, H, W] y) { y = Relu (image) }")
    with pytest.raises(DicompilerError) as caught:
        InferShapes(shape).run(PipelineState(loaded))
    assert type(caught.value) is kind
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unnamed_and_negative_dimensions_are_open() -> None:
    for body in ("float[?, 3]", "float[-1, 3]"):
        try:
            loaded = model(f"g ({body} x) => (float[A, B] y) {{ y = Relu (x) }}")
        except onnx.parser.ParseError:
            loaded = model("g (float[N, 3] x) => (float[A, B] y) { y = Relu (x) }")
            loaded.proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
        with pytest.raises(DicompilerError, match=r"dimension 0 of input 'x' is open: give it as --shape x=1x3$"):
            InferShapes().run(PipelineState(loaded))
        assert shapes(inferred(loaded, "x=2x3"))["y"] == (2, 3)


def test_rejects_contradictory_shapes() -> None:
    loaded = model("g (float[N, 3] x) => (float[4] y) <float[4, 3] w> { y = MatMul (x, x) }")
    with pytest.raises(DicompilerError, match=r"do not fit the model.*Incompatible dimensions") as caught:
        InferShapes(("x=2x3",)).run(PipelineState(loaded))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (
            "com.microsoft.MultiHeadAttention <num_heads = 3> (x, x, x)",
            "its 3 heads do not divide the 16 columns of its output",
        ),
        (
            "Attention <q_num_heads = 4, kv_num_heads = 3> (x, x, x)",
            "4 query heads cannot be divided evenly among 3 heads of keys and values",
        ),
    ],
)
def test_rejects_unfitting_heads(node: str, words: str) -> None:
    head = '<ir_version: 11, opset_import: ["": 23, "com.microsoft": 1]>'
    text = f"{head} g (float[1, 4, 16] x) => (float[1, 4, 16] y) {{ y = {node} }}"
    with pytest.raises(DicompilerError, match=f"Attention 'y': {words}.*: correct the model$"):
        InferShapes().run(PipelineState(Model.load(onnx.parser.parse_model(text))))


SHORT = "its weights {} have the shape \\({}\\), but 4 units need \\({}\\)"


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ("Gather <axis = 2> (x, at)", "'at' has the index 7, but 'x' has 5 elements along axis 2"),
        ("Gather <axis = -1> (x, below)", "'below' has the index -6, but 'x' has 5 elements along axis -1"),
        ("GatherElements <axis = 1> (x, cells)", "'cells' has the index 4, but 'x' has 4 elements along axis 1"),
        ("Conv (x, w)", r"its kernel spans \[6\] elements, but its padded input has only \[5\]"),
        (
            "Conv <pads = [1, 1], dilations = [2], strides = [5]> (x, w)",
            r"its kernel spans \[11\] elements, but .* has only \[7\]",
        ),
        ("LSTM <hidden_size = 4> (x, u, r)", SHORT.format("W", "1, 12, 5", "1, 16, 5")),
        ("GRU <hidden_size = 4> (x, u, r)", SHORT.format("R", "1, 16, 4", "1, 12, 4")),
        ('RNN <hidden_size = 4, direction = "bidirectional"> (x, u, r)', SHORT.format("W", "1, 12, 5", "2, 4, 5")),
    ],
)
def test_rejects_unfitting_indices_kernels_and_weights(node: str, words: str) -> None:
    text = f"""<ir_version: 8, opset_import: ["": 17]> g (float[1, 4, 5] x) => (float y)
      <int64[2] at = {{0, 7}}, int64[1] below = {{-6}}, int64[1, 1, 2] cells = {{0, 4}}> {{ y = {node} }}"""
    proto = onnx.parser.parse_model(text)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    for name, shape in {"w": (2, 4, 6), "u": (1, 12, 5), "r": (1, 16, 4)}.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    kind = re.escape(node.split()[0])
    with pytest.raises(DicompilerError, match=f"{kind} 'y': {words}: correct the model$"):
        InferShapes().run(PipelineState(Model.load(proto)))


def test_parse_shapes_splits_at_the_last_equals_sign() -> None:
    assert parse_shapes(("a=b=1x2", "c=", "d=7")) == {"a=b": (1, 2), "c": (), "d": (7,)}
