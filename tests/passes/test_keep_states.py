"""The pass `keep-states`: pairs that become states, and messages about pairs that cannot."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from support.modern_transformers import bert_fused

from dicompiler import networks
from dicompiler.base.errors import DicompilerError, UsageError
from dicompiler.driver.compiler import compile
from dicompiler.driver.prepare import load_problem, prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import FailurePlan
from dicompiler.ir.platform import uniform_platform
from dicompiler.ir.recurrent_states import read_states
from dicompiler.verify.run_inputs import prepare_inputs

CELL = """<ir_version: 8, opset_import: ["" : 17]>
cell ({dtype}[1, 4] x, {before}[{past}] h, float[1, 4] other) => ({dtype}[1, 4] y, {dtype}[1, 4] hn, float[1, 2] part)
<int64[1] zero = {{0}}, int64[1] two = {{2}}, int64[1] one = {{1}}>
{{
    a = Slice(h, zero, two, one)
    b = Concat<axis=1>(a, a)
    c = Cast<to={number}>(b)
    hn = Add(x, c)
    y = Relu(hn)
    part = Slice(other, zero, two, one)
}}"""


def cell(dtype: str = "float", before: str = "float", past: str = "1, 4", number: int = 1) -> onnx.ModelProto:
    return onnx.parser.parse_model(CELL.format(dtype=dtype, before=before, past=past, number=number))


def pairs(model: Any, *state: str) -> Any:
    return read_states(prepare(Model.load(model), state=state).model.proto)


def decoder(**options: Any) -> onnx.ModelProto:
    given = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 2, "vocabulary": 20, "size": 1, "past": 4}
    return networks.build("llama_small", **given | options)


def test_usual_names_become_states_unless_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert pairs(cell(), "auto") == (("h", "hn"),)
    assert "1 states stay on their devices, such as hn → h (--state none: no states)" in caplog.text
    assert pairs(cell(), "none") == () and pairs(cell()) is None
    assert pairs(cell(), "other=y") == (("other", "y"),)
    static = pairs(decoder(static=True), "past_key_values.*=present.*")
    assert static == tuple((f"past_key_values.0.{kind}", f"present.0.{kind}") for kind in ("key", "value"))


def test_keeps_last_rows_of_growing_cache_with_mask() -> None:
    model = prepare(Model.load(decoder()), state="auto").model
    assert read_states(model.proto) == tuple(
        (f"past_key_values.0.{k}", f"present.0.{k}/kept") for k in ("key", "value")
    )
    shapes = {name: tensor.shape for name, tensor in model.tensors().items()}
    assert shapes["present.0.key/kept"] == shapes["past_key_values.0.key"] == (1, 2, 4, 8)
    unmasked = decoder()
    for value in unmasked.graph.input:
        value.name = value.name.replace("position_ids", "where")
    for node in unmasked.graph.node:
        node.input[:] = [name.replace("position_ids", "where") for name in node.input]
    words = (
        "state: input 'past_key_values.0.key' float (1, 2, 4, 8) and output 'present.0.key' float (1, 2, 5, 8): the "
        "output is longer by 1, and keeping its last 4 rows needs inputs for a mask over all 5 rows and for positions: "
        "export the model with attention_mask and position_ids, or with a cache of fixed size"
    )
    with pytest.raises(DicompilerError, match=f"^{re.escape(words)}$"):
        pairs(unmasked, "past_key_values.*=present.*")
    assert pairs(unmasked, "auto") == ()


@pytest.mark.parametrize(
    ("state", "model", "words"),
    [
        ("h", cell(), "state 'h' is not of the form past*=present*, with at most one * on each side"),
        ("g*=hn*", cell(), "state 'g*=hn*': the model has no input 'g*' (known: h, other, x)"),
        ("h=hm", cell(), "state 'h=hm': the model has no output 'hm' for input 'h' (known: hn, part, y)"),
        ("other=part", cell(), "state: input 'other' float (1, 4) and output 'part' float (1, 2) differ in shape: a "
         "state keeps its shape, or grows by a Concat of its old value and new rows"),
        ("h=hn", cell("double", number=11), "state: input 'h' float (1, 4) and output 'hn' double (1, 4) have "
         "different types: export them with the same type"),
    ],
)  # fmt: skip
def test_names_pairs_that_cannot_be_states(state: str, model: onnx.ModelProto, words: str) -> None:
    with pytest.raises(DicompilerError) as error:
        pairs(model, state)
    assert str(error.value) == words


def test_rejects_input_or_output_in_two_pairs() -> None:
    with pytest.raises(UsageError, match=r"^state: output 'y' is in two pairs: use it in one$"):
        pairs(cell(), "h=y", "other=y")
    with pytest.raises(UsageError, match=r"^state: 'none' cannot be combined with patterns: omit one of them$"):
        pairs(cell(), "none", "h=y")


def test_states_exclude_replicas() -> None:
    problem = load_problem(cell(), uniform_platform(2))
    plan = problem.single_device_plan("d0")
    for given, what in (
        (replace(plan, replicas=({}, {"d0": "d1"})), "replicas"),
        (replace(plan, failures=(FailurePlan(("d1",), plan),)), "failures"),
    ):
        with pytest.raises(DicompilerError, match=f"^plan: {what}: state 'h' is kept on its device, and"):
            problem.estimate(given)
    with pytest.raises(
        DicompilerError,
        match=r"^tolerate-failures: 1: state 'h' exists on one device only and would be lost with it: omit",
    ):
        compile(cell(), uniform_platform(2), tolerate_failures=1)
    with pytest.raises(UsageError, match=r"^state: target 'tflm' cannot keep states between frames: use no states"):
        compile(cell(), uniform_platform(1), state="h=hn", target="tflm")
    assert load_problem(cell(), uniform_platform(1), target="tflm").layers.states == ()


def test_names_index_beyond_table() -> None:
    model = prepare(Model.load(decoder(static=True)), state="auto").model
    given = {"input_ids": np.array([[20]]), "cache_position": np.array([1])}
    with pytest.raises(DicompilerError) as error:
        prepare_inputs(model, given)
    assert str(error.value) == (
        "input 'input_ids': the number 20 at [0, 0] is not the index of a row of 'embed_tokens.weight', "
        "which has 20 rows: give numbers from 0 to 19"
    )
    given = {"input_ids": np.array([[-1]]), "cache_position": np.array([4])}
    with pytest.raises(
        DicompilerError,
        match=r"^input 'cache_position': the number 4 at \[0\] is not the index of a row of 'past_key_values.0.key'",
    ):
        prepare_inputs(model, given)
    # In this model, the embedding tables are inputs of one fused operator, not of Gathers.
    fused = prepare(Model.load(bert_fused())).model
    ids = {name: np.zeros((1, 8), np.int32) for name in ("input_ids", "token_type_ids", "mask")}
    with pytest.raises(
        DicompilerError,
        match=r"^input 'token_type_ids': the number 2 at \[0, 3\] is not the index of a row of 'c2', which has 2 ",
    ):
        prepare_inputs(fused, {**ids, "token_type_ids": ids["mask"] + 2 * (np.arange(8) == 3).astype(np.int32)})
