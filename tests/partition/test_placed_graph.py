"""Placed graphs: names, shared constants, and slices for each opset."""

from __future__ import annotations

import numpy as np
import pytest
from support.placing import network, place, rows

from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.regions import full_region
from dicompiler.partition.placed_graph import ModelFacts, NodePlacement, PlacedGraphBuilder, WeightSlice
from dicompiler.partition.segmentation import build_program
from dicompiler.verify.executor import ProgramExecutor, run_model

AT = NodePlacement("a", 0, (0, 0, 0, 1))
WHOLE = full_region((1, 4, 8, 6))
TOP = ((0, 1), (0, 4), (0, 3), (0, 6))


@pytest.fixture
def draft() -> PlacedGraphBuilder:
    """Return an empty builder for a model with the tensors x, t, u, y, w and v."""
    return PlacedGraphBuilder(ModelFacts.from_model(network()))


def test_taken_names_get_a_number(draft: PlacedGraphBuilder) -> None:
    assert [draft.unique_tensor_name(name) for name in ("new", "new", "t", "w", "new_1")] == [
        "new",
        "new_1",
        "t_1",
        "w_1",
        "new_1_1",
    ]


def test_equal_constants_are_shared(draft: PlacedGraphBuilder) -> None:
    ones, twos = np.ones(2, np.float32), np.full(2, 2, np.float32)
    assert draft.add_constant((0, 3)) == draft.add_constant(np.array([0, 3]), "c") != draft.add_constant((3, 0))
    assert draft.add_constant(ones, "c") == draft.add_constant(ones.copy(), "c") != draft.add_constant(twos, "c")
    assert draft.add_constant(ones.astype(np.float16), "c") != draft.add_constant(ones, "c")
    assert len(draft.constants) == 5


def test_weight_slices_are_shared(draft: PlacedGraphBuilder) -> None:
    region = ((1, 3), (0, 4), (0, 3), (0, 3))
    name = draft.add_constant(WeightSlice("w", region))
    assert draft.add_constant(WeightSlice("w", region)) == name
    assert draft.constants == {name: WeightSlice("w", region)}


def test_full_slices_add_no_node(draft: PlacedGraphBuilder) -> None:
    held = draft.declare("t", 1, WHOLE)
    assert draft.add_slice(held, WHOLE, AT) is held
    assert draft.nodes == []
    assert draft.add_slice(held, TOP, AT).region == TOP
    assert [node.op for node in draft.nodes] == ["Slice"]


def test_concatenated_pieces_cover_their_union(draft: PlacedGraphBuilder) -> None:
    bottom = ((0, 1), (0, 4), (3, 8), (0, 6))
    pieces = [draft.declare("top", 1, TOP), draft.declare("bottom", 1, bottom)]
    assert draft.add_concat(pieces, 2, AT, "both").region == WHOLE


@pytest.mark.parametrize(("terms", "ops"), [(1, ["Identity"]), (2, ["Add"]), (4, ["Add"] * 3)])
def test_partial_sums_are_added_in_order(draft: PlacedGraphBuilder, terms: int, ops: list[str]) -> None:
    held = [draft.declare(f"p{index}", 1, WHOLE) for index in range(terms)]
    assert draft.add_merge(held, "Add", AT, "sum").name == "sum"
    assert [node.op for node in draft.nodes] == ops
    read = [name for node in draft.nodes for name in node.inputs if name.startswith("p")]
    assert read == [entry.name for entry in held]


def test_keeps_only_live_nodes_in_step_order(draft: PlacedGraphBuilder) -> None:
    x = draft.declare("x", 1, WHOLE)
    late = NodePlacement("a", 0, (1, 0, 0, 1))
    middle = draft.unique_tensor_name("middle")
    draft.add_identity(draft.declare(middle, 1, WHOLE), late, "y", "y")
    draft.add_identity(x, AT, draft.unique_tensor_name("nobody"), "x")
    draft.add_identity(x, AT, middle, "x")
    graph = draft.build((), {}, ("a",))
    assert [node.outputs for node in graph.nodes] == [(middle,), ("y",)]
    assert graph.model_outputs == {"y": "y"}
    assert {"x", middle} <= graph.used_names


@pytest.mark.parametrize("opset", [7, 9, 10, 11, 13, 17, 21])
def test_slices_match_the_opset(opset: int) -> None:
    halves = (rows("a", 0, 4), rows("b", 4, 8))
    sums = (Part("a", None, (0, 2)), Part("b", None, (2, 4)), Part("b"))
    model = network(opset)
    placed = place(model, Plan({"conv1": halves, "conv2": sums}, ("b",), ("a",)))
    placed.model.check("test")
    inputs = {"x": np.random.default_rng(1).integers(-4, 5, (1, 4, 8, 6)).astype(np.float32)}
    execution = ProgramExecutor(build_program(placed.model, ("a", "b"))).run(inputs)
    assert np.array_equal(execution.outputs["y"], run_model(model, inputs)["y"])
