"""Table rows on several devices: partial lookups add up to the lookup in the whole table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import numpy_helper, parser
from support.operator_cases import OPSETS, RuleCase, check_cut, integers

import dicompiler
from dicompiler.base.errors import DicompilerError
from dicompiler.cost.runtime_overhead import RuntimeCosts
from dicompiler.driver.prepare import load_problem
from dicompiler.driver.rule_check import form_layers, run_split
from dicompiler.ir.operator_rule import TABLE_LOOKUP_NODE_COUNT
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.platform import Platform
from dicompiler.search.problem import plan_workload
from dicompiler_strategies.tables.choice_footprints import build_footprint
from dicompiler_strategies.tables.choices import Choice

ROWS = (Part("a", None, (0, 1)), Part("b", None, (1, 3)), Part("c", None, (3, 4)), Part("a"))
TABLE = np.array([[1, -0.0], [np.nan, 0.0], [np.inf, -np.inf], [-0.0, 5]], np.float32)


def looked_up(numbers: list[int]) -> NDArray[Any]:
    case = RuleCase("Gather", (TABLE, np.array([0, 1, 2, 3, -1, -4])), {}, graph_inputs=(1,))
    model = case.model()
    return run_split(model, form_layers(model), ROWS, {"x1": np.array(numbers)})


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_row_ranges_add_up(data: st.DataObject) -> None:
    """Tables have every rank and type, and indices of both types include negative ones."""
    draw = data.draw
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    count = draw(st.lists(st.integers(1, 4), max_size=2))
    opset = draw(st.sampled_from(OPSETS))
    low = -shape[0] if opset >= 11 else 0
    numbers = np.random.default_rng(draw(st.integers(0, 99))).integers(low, shape[0], count)
    table = integers(draw, *shape).astype(draw(st.sampled_from((np.float32, np.float64, np.float16, np.int64))))
    kind = draw(st.sampled_from((np.int32, np.int64)))
    check_cut(RuleCase("Gather", (table, np.asarray(numbers).astype(kind)), {}, opset, (1,)), draw)


def test_nan_and_infinity_of_one_device_do_not_spread() -> None:
    """Values are never multiplied by 0, so NaN and infinity stay at their places."""
    np.testing.assert_array_equal(looked_up([0, 1, 2, 3, -1, -4]), TABLE[[0, 1, 2, 3, -1, -4]])


@pytest.mark.parametrize("number", [4, -5, 2**40])
def test_rejects_index_without_row(number: int) -> None:
    wrong = f"rows of x0 that x1 numbers: 0 to 3, here 0 to 0' .*: indices element out of data bounds, idx={number} "
    with pytest.raises(DicompilerError, match=wrong):
        looked_up([0, 1, number, 3, 1, 0])


def embedding() -> onnx.ModelProto:
    """Return a lookup of one value for each of 4000 items, which can be cut by rows only."""
    text = "g (int64[2, 8] items) => (float[2, 8] y) { found = Gather (table, items)  y = Sigmoid (found) }"
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["": 13]> {text}')
    values = np.random.default_rng(0).standard_normal(4_000).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(values, "table"))
    return proto


@pytest.mark.parametrize("target", ["sockets", "mpi"])
def test_devices_store_only_their_rows(target: str, tmp_path: Path) -> None:
    platform = Platform.load("rpi4x2")
    result = dicompiler.compile(embedding(), platform, objective="memory", target=target, output=tmp_path / "out")
    assert result.plan is not None and result.program is not None
    reduced = [part.reduce for parts in result.plan.layers.values() for part in parts if part.reduce]
    assert reduced == [(0, 2000), (2000, 4000)]
    assert max(weight.nbytes for weight in result.program.weights.values()) == 8_000
    for device in result.program.devices:
        names = [node.name for segment in device.segments for node in segment.model.graph.node]
        assert (
            sum("?" in name for name in names) == TABLE_LOOKUP_NODE_COUNT - 1
        )  # All nodes except the last one, which computes the layer's output, have "?" in their names.
    verified = result.verify()
    assert verified.passed, verified
    wrong, told = (
        {"items": np.full((2, 8), 4_000)},
        r"^input 'items': the number 4000 at \[0, 0\] is not the index of a row of 'table', which has ",
    )
    with pytest.raises(DicompilerError, match=told):
        dicompiler.run(tmp_path / "out", wrong)
    if target == "sockets":
        with pytest.raises(DicompilerError, match=told), dicompiler.connect(tmp_path / "out") as session:
            session.infer(wrong)


def test_predicts_nodes_around_lookups() -> None:
    """The simulator and the tables of strategies count them like slices."""
    platform = Platform.load("rpi4x2")
    free = replace(load_problem(embedding(), platform), runtime_costs={})
    problem = replace(free, runtime_costs=dict.fromkeys(("pi01", "pi02"), RuntimeCosts(per_copy=1.0)))
    rows = tuple(Part(name, None, own) for name, own in (("pi01", (0, 2_000)), ("pi02", (2_000, 4_000))))
    choice = (*rows, Part("pi01"))
    plan = Plan({"found": choice}, ("pi01",), ("pi01",))
    took = [plan_workload(one, plan)[1].task_seconds for one in (problem, free)]
    assert {task: took[0][task] - took[1][task] for task in took[0]} == pytest.approx(
        {("found", 0): TABLE_LOOKUP_NODE_COUNT, ("found", 1): TABLE_LOOKUP_NODE_COUNT, ("found", 2): 0}
    )
    (layer,) = problem.layers.layers
    partial = [build_footprint(one, layer, [Choice("lip", "rows", choice)]).partial_seconds for one in (problem, free)]
    np.testing.assert_allclose(partial[0] - partial[1], [[TABLE_LOOKUP_NODE_COUNT, TABLE_LOOKUP_NODE_COUNT]])
