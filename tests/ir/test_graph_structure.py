"""Structure of models: the digest, and the readers of each tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from support.onnx_models import rich_model, small

from dicompiler.ir.onnx.graph_structure import (
    body_names,
    captured_names,
    control_flow_bodies,
    rename_captures,
    tensors_read,
)
from dicompiler.ir.onnx.model import Model


def test_digest_covers_only_the_structure() -> None:
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


def test_digest_ignores_documentation() -> None:
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
        "import sys, hashlib; from dicompiler.plugin_api import Model; m = Model.load(sys.argv[1]);"
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


NESTED = """<ir_version: 8, opset_import: ["": 17]>
g (bool c, float[2] x) => (float[2] y)
{ a = Relu (x)
  y = If (c) <
    then_branch = t () => (float[2] p) {
      q = Neg (a)
      p = If (c) <then_branch = i () => (float[2] u) { u = Add (q, x) },
                  else_branch = j () => (float[2] v) { v = Neg (q) }> },
    else_branch = e () => (float[2] a) { a = Abs (x) }> }"""


def nested() -> onnx.ModelProto:
    """Return an If within an If: one body captures the tensor a, another one defines its own a."""
    return onnx.parser.parse_model(NESTED)


def test_bodies_do_not_include_nested_bodies() -> None:
    relu, choice = nested().graph.node
    assert list(control_flow_bodies(relu)) == []
    assert [body.name for body in control_flow_bodies(choice)] == ["t", "e"]


def test_captures_are_read_but_not_computed_by_bodies() -> None:
    relu, choice = nested().graph.node
    assert captured_names(relu) == set()
    assert captured_names(choice) == {"a", "c", "x"}


def test_tensors_read_exclude_names_redefined_in_bodies() -> None:
    relu, choice = nested().graph.node
    assert list(tensors_read(relu)) == ["x"]
    assert set(tensors_read(choice)) == {"c", "x", "a"}
    assert set(body_names(choice)) > {"q", "u", "v", "p"}
    same = "() => (float[4] t) { t = Relu(x) }"
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[4] x, bool c) => (float[4] t) {{ t = If (c) <then_branch = a {same}, else_branch = b {same}> }}""")
    assert list(tensors_read(model.graph.node[0])) == ["c", "x"]


def test_renames_only_captured_names() -> None:
    choice = nested().graph.node[1]
    rename_captures(choice, {"a": "b", "x": "z", "q": "no"})
    then, other = control_flow_bodies(choice)
    assert list(then.node[0].input) == ["b"]
    assert [list(body.node[0].input) for body in control_flow_bodies(then.node[1])] == [["q", "z"], ["q"]]
    assert list(other.node[0].input) == ["z"]
    assert [value.name for value in other.output] == list(other.node[0].output) == ["a"]
    assert captured_names(choice) == {"b", "c", "z"}
