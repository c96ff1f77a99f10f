"""Lengths of GroupQueryAttention's caches are part of the exact check: wrong lengths are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.layer_graphs import rules

from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.platform import Platform
from dicompiler.ir.program import Program
from dicompiler.partition.segmentation import build_program
from dicompiler.verify.comparison import Check, check_exact
from dicompiler_passes.partition import PartitionPass

BATCH, HEADS, SHARED, ROWS, SIZE = 4, 4, 2, 3, 8


def network() -> onnx.ModelProto:
    """Return a prompt of sequences of different lengths."""
    node = helper.make_node(
        "GroupQueryAttention", ["q", "k", "v", "", "", "last", "total"], ["y", "pk", "pv"], "attention",
        domain="com.microsoft", num_heads=HEADS, kv_num_heads=SHARED,
    )  # fmt: skip
    widths = {"q": HEADS * SIZE, "k": SHARED * SIZE, "v": SHARED * SIZE}
    given = [helper.make_tensor_value_info(x, TensorProto.FLOAT, (BATCH, ROWS, width)) for x, width in widths.items()]
    given.append(helper.make_tensor_value_info("last", TensorProto.INT32, (BATCH,)))
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, (BATCH, ROWS, HEADS * SIZE))
    graph = helper.make_graph([node], "g", given, [result])
    graph.initializer.append(numpy_helper.from_array(np.array(ROWS, np.int32), "total"))
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def check(axis: int, change: Callable[[onnx.ModelProto], None] = lambda _: None) -> Check:
    """Run the exact check in halves along an axis of the output, with changed placed models."""
    compilation = prepare(Model.load(network()))
    assert compilation.layers is not None
    (layer,) = compilation.layers.layers
    shape = (BATCH, ROWS, HEADS * SIZE)
    regions = [
        tuple((i * n // 2, (i + 1) * n // 2) if at == axis else (0, n) for at, n in enumerate(shape)) for i in (0, 1)
    ]
    parts = tuple(Part(f"pi0{i}", region) for i, region in enumerate(regions, 1))
    plan = Plan({layer.name: parts}, ("pi01",), ("pi01",))

    def program(variant: Model) -> Program:
        placed = PartitionPass().run(replace(prepare(variant), plan=plan, platform=Platform.load("rpi4x2"))).model
        proto = onnx.ModelProto()
        proto.CopyFrom(placed.proto)
        change(proto)
        return build_program(Model(proto, placed.weights), plan.devices)

    return check_exact(compilation.model, program, rules=rules(), layers=compilation.layers)


@pytest.mark.parametrize("axis", [0, 2])
def test_sequences_and_heads_are_exact(axis: int) -> None:
    found = check(axis)
    assert found.passed and found.applies and ", 1 of 1 layers" in found.detail, found.detail


def test_finds_lengths_of_other_sequences() -> None:
    def first_lengths(proto: onnx.ModelProto) -> None:
        values = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
        slices = [node for node in proto.graph.node if node.op_type == "Slice" and node.input[0].startswith("last")]
        assert slices
        for node in slices:
            for place, moved in ((1, 0), (2, BATCH // 2)):
                name = f"{node.name}.{place}"
                like = values[node.input[place]]
                proto.graph.initializer.append(numpy_helper.from_array(0 * like + moved, name))
                node.input[place] = name

    assert not check(0, first_lengths).passed
