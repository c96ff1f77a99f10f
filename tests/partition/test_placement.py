"""Placement: nodes are on their devices, shared tensors are made once, and each sink has an output."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.placing import WHOLE, marks, network, place, rows

from dicompiler.ir.plan import Part, Plan
from dicompiler.partition.placed_model import ORIGIN_KEY, REGION_KEY, read_annotation
from dicompiler.partition.segmentation import build_program
from dicompiler.verify.executor import ProgramExecutor


def test_receivers_of_the_same_box_share_a_slice() -> None:
    plan = Plan(
        {"conv1": (rows("a", 0, 8),), "conv2": (rows("b", 0, 4), rows("c", 0, 4), rows("a", 4, 8))}, ("a",), ("b", "c")
    )
    placed = place(network(), plan)
    slices = [n for n in placed.model.proto.graph.node if n.op_type == "Slice" and marks(n)[ORIGIN_KEY] == "u"]
    assert [marks(n)[REGION_KEY] for n in slices].count("[0:1, 0:4, 0:4, 0:6]") == 1


def test_every_sink_gets_every_output() -> None:
    placed = place(network(), Plan(WHOLE, ("a",), ("b", "a", "c")))
    assert [v.name for v in placed.model.proto.graph.output] == ["y", "y@a_1", "y@c"]
    program = build_program(placed.model, ("a", "b", "c"))
    inputs = {"x": np.ones((1, 4, 8, 6), np.float32)}
    delivered = ProgramExecutor(program).run(inputs).delivered
    assert set(delivered) == {"a", "b", "c"}
    assert all(np.array_equal(o["y"], delivered["b"]["y"]) for o in delivered.values())
    assert [value.name for value in program.outputs] == ["y"]


def test_parts_have_nodes_on_their_device_and_lane() -> None:
    own = (rows("a", 0, 4), replace(rows("b", 4, 8), lane=2))
    placed = place(network(), Plan({"conv1": own, "conv2": own}, ("a",), ("a",))).model
    found = [read_annotation(node) for node in placed.proto.graph.node if node.op_type in ("Conv", "Relu")]
    for device, lane, index in (("a", 0, 0), ("b", 2, 1)):
        mine = [(entry.origin, entry.part) for entry in found if (entry.device, entry.lane) == (device, lane)]
        assert mine == [("conv1", ("conv1", index)), ("relu", ("conv1", index)), ("conv2", ("conv2", index))]


def test_mergers_compute_the_absorbed_nodes() -> None:
    sums = (Part("a", None, (0, 1)), Part("b", None, (1, 4)), Part("b"))
    placed = place(network(), Plan({**WHOLE, "conv1": sums}, ("a",), ("a",))).model
    found = {read_annotation(node).part: [] for node in placed.proto.graph.node}
    for node in placed.proto.graph.node:
        found[read_annotation(node).part].append(node.op_type)
    assert [op for op in found["conv1", 0] if op != "Slice"] == ["Conv"]
    assert [op for op in found["conv1", 1] if op != "Slice"] == ["Conv"]
    assert found["conv1", 2] == ["Add", "Relu"]
