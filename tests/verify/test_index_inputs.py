"""Random inputs that a network accepts: value limits follow from the operators that read an input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import dicompiler
from dicompiler.base.errors import DicompilerError
from dicompiler.cli import main
from dicompiler.ir.onnx.model import Model
from dicompiler.verify.index_inputs import ValueLimit, find_value_limits
from dicompiler.verify.run_inputs import hint_on_input_error, prepare_inputs

TABLES = {"words": 5, "kinds": 2, "places": 8, "wide": 16}
NUMBERS = {"first": [0], "two": [2], "shape": [1, 8], "nine": 9, "depth": 3}


def network(inputs: dict[str, str], nodes: str) -> Model:
    """Return a model of inputs (name → type and shape) and nodes ("y = Op(a, b) attribute=1; …").

    Tables have rows of 4 numbers.
    """
    rng, made = np.random.default_rng(0), []
    for line in nodes.split(";"):
        output, _, call = line.strip().partition(" = ")
        op, _, rest = call.partition("(")
        names, _, more = rest.partition(")")
        attributes = {key: int(value) for key, value in (word.split("=") for word in more.split())}
        domain = "com.microsoft" if op == "EmbedLayerNormalization" else ""
        made.append(helper.make_node(op, names.split(), output.split(), op + output, domain=domain, **attributes))
    held = [numpy_helper.from_array(rng.standard_normal((n, 4)).astype("f4"), name) for name, n in TABLES.items()]
    held += [numpy_helper.from_array(np.array(value), name) for name, value in NUMBERS.items()]
    held += [numpy_helper.from_array(np.array(value, "f4"), name) for name, value in (("one", 1), ("ends", [0, 1]))]
    held += [numpy_helper.from_array(np.ones(4, "f4"), "scale")]
    read = {name for node in made for name in node.input}
    given = []
    for name, text in inputs.items():
        kind, *dims = text.split()
        given.append(helper.make_tensor_value_info(name, getattr(TensorProto, kind), [int(dim) for dim in dims]))
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(made, "g", given, [result], [one for one in held if one.name in read])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return Model.load(onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets, ir_version=8)))


BERT = (
    {"ids": "FLOAT 8", "kind": "INT64 1 8", "at": "INT64 8", "mask": "INT64 1 8", "free": "FLOAT 1 8 4"},
    "i = Reshape(ids shape); c = Cast(i) to=7; w = Gather(words c); k = Gather(kinds kind); u = Unsqueeze(at first);"
    "p = Gather(places u); m = Unsqueeze(mask two); n = Cast(m) to=1; o = Sub(one n); s = Add(w k); t = Add(s p);"
    "v = Mul(t o); y = Add(v free)",
)


@pytest.mark.parametrize(
    ("inputs", "nodes", "found"),
    [
        (*BERT, {"ids": 5, "kind": 2, "at": 8, "mask": 2}),
        ({"a": "INT64 8 1"}, "y = GatherND(words a)", {"a": 5}),
        ({"a": "INT64 2 3 1", "b": "FLOAT 2 8 4"}, "y = GatherND(b a) batch_dims=1", {"a": 8}),
        ({"a": "INT64 8", "b": "FLOAT 3 8 4"}, "y = ReverseSequence(b a) time_axis=0", {"a": 3}),
        ({"a": "INT64 8"}, "w = Gather(words a); k = Gather(kinds a); y = Add(w k)", {"a": 2}),
        ({"a": "INT64 8"}, "y = Gather(words a) axis=1", {"a": 4}),
        ({"a": "INT32 5 2"}, "y = GatherElements(words a) axis=1", {"a": 4}),
        ({"a": "INT64 8"}, "y = OneHot(a depth ends)", {"a": 3}),
        ({"a": "INT64 8", "b": "INT64 8"}, "c = Concat(a b) axis=0; y = Gather(kinds c)", {"a": 2, "b": 2}),
        ({"a": "INT64 8"}, "b c = Split(a) axis=0; y = Gather(kinds c)", {"a": 2}),
        ({"a": "INT64 8"}, "b = Mul(a nine); y = Gather(kinds b)", {}),
        ({"a": "FLOAT 5 4", "b": "INT64 5"}, "c = Sub(a one); d = Add(c words); y = Gather(d b)", {"b": 5}),
        ({"shape_of": "FLOAT 8 4"}, "y = Relu(shape_of)", {}),
        ({"a": "FLOAT 8 4 2", "b": "INT64 2"}, "y = Reshape(a b)", {"b": (8, 8)}),
        ({"a": "FLOAT 8 4 2", "b": "INT64 4"}, "y = Reshape(a b)", {"b": (8, 4, 2, 1)}),
        (
            {"i": "INT32 1 8", "s": "INT32 1 8", "m": "INT32 1 8", "p": "INT32 1 8"},
            "y mi = EmbedLayerNormalization(i s words places kinds scale scale m p)",
            {"i": 5, "s": 2, "m": 2, "p": 8},
        ),
    ],
)
def test_value_limits_follow_from_readers(inputs: dict[str, str], nodes: str, found: dict[str, ValueLimit]) -> None:
    model = network(inputs, nodes)
    assert find_value_limits(model) == found
    given = prepare_inputs(model)
    for name, count in found.items():
        if isinstance(count, tuple):
            assert tuple(given[name]) == count
            continue
        assert given[name].min() >= 0 and given[name].max() < count and np.all(given[name] % 1 == 0)
        assert given[name].shape == tuple(map(int, inputs[name].split()[1:]))
    assert all(np.array_equal(array, prepare_inputs(model)[name]) for name, array in given.items())


def test_random_tokens_cover_vocabulary() -> None:
    given = prepare_inputs(network({"a": "INT64 500"}, "y = Gather(wide a)"))
    assert {*given["a"].tolist()} == {*range(16)}


def test_verifies_network_with_token_lookup(tmp_path: Path) -> None:
    compiled = dicompiler.compile(network(*BERT), "rpi4x2", "modnn", output=tmp_path / "out")
    checks = {check.name: check for check in compiled.verify().checks}
    assert all(check.passed for check in checks.values()) and checks["exact"].applies
    dicompiler.run(tmp_path / "out")


def test_error_lists_the_inputs_to_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = network({"ids": "INT64 8"}, "b = Mul(ids nine); y = Gather(kinds b)")
    compiled = dicompiler.compile(model, "rpi4x2", "single", output=tmp_path / "out")
    advice = "the inputs were random: give inputs that the network accepts (--inputs X.npz with ids)"
    for command in ("run", "verify"):
        assert main([command, str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("dicompiler: error: ") and error.endswith(advice)
    checks = compiled.verify({"ids": np.zeros(8, "int64")}).checks
    assert all(check.passed and check.applies for check in checks)
    with pytest.raises(DicompilerError) as caught:
        compiled.verify({"ids": np.ones(8, "int64")})
    assert "inputs were random" not in str(caught.value)


@pytest.mark.parametrize(
    ("message", "is_hinted"),
    [
        ("device 'a': segment 'a0': onnxruntime cannot run it: indices element out of data bounds", True),
        ("segment 'a0': onnxruntime cannot load it: no implementation of Add", False),
        (
            "target 'mpi': onnxruntime's C++ headers are missing: run python3 -m dicompiler_targets.mpi.fetch_headers",
            False,
        ),
        ("cmake: /tmp/onnxruntime-build: command not found", False),
        ("segment 'a0': onnxruntime cannot run it: std::bad_alloc", False),
    ],
)
def test_only_errors_of_running_a_frame_advise_other_inputs(message: str, is_hinted: bool) -> None:
    model = Model.load(network({"ids": "INT64 8"}, "y = Gather(kinds ids)"))
    with pytest.raises(DicompilerError) as caught, hint_on_input_error(model, None):
        raise DicompilerError(message)
    assert str(caught.value).startswith(message)
    assert ("inputs were random" in str(caught.value)) == is_hinted
