"""Stand-ins of attention are exact with masks, and wrong masks or causal flags of a part are found."""

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
from dicompiler.ir.regions import full_region
from dicompiler.partition.segmentation import build_program
from dicompiler.verify.comparison import Check, check_exact
from dicompiler_passes.partition import PartitionPass

BATCH, HEADS, ROWS, KEYS, SIZE = 2, 4, 6, 6, 8
MS = "com.microsoft"
Masked = tuple[str, str, tuple[int, ...], int, dict[str, int]]
MASKS: dict[str, Masked] = {
    "added, a row for each head": ("Attention", "mask", (BATCH, HEADS, ROWS, KEYS), TensorProto.FLOAT, {}),
    "added, the same for all": ("Attention", "mask", (ROWS, KEYS), TensorProto.FLOAT, {}),
    "boolean": ("Attention", "mask", (BATCH, 1, ROWS, KEYS), TensorProto.BOOL, {}),
    "three axes": ("Attention", "mask", (HEADS, ROWS, KEYS), TensorProto.BOOL, {}),
    "fewer keys": ("Attention", "mask", (BATCH, 1, ROWS, KEYS - 2), TensorProto.BOOL, {}),
    "of padding": ("MultiHeadAttention", "padding", (BATCH, KEYS), TensorProto.INT32, {}),
    "of rows": ("MultiHeadAttention", "padding", (BATCH, ROWS, KEYS), TensorProto.INT32, {}),
    "lengths": ("MultiHeadAttention", "padding", (BATCH,), TensorProto.INT32, {}),
    "a bias": ("MultiHeadAttention", "bias", (BATCH, HEADS, ROWS, KEYS), TensorProto.FLOAT, {}),
    "keys and values by heads": ("MultiHeadAttention", "", (), 0, {"keys": 4}),
    "causal": ("Attention", "", (), 0, {"is_causal": 1}),
    "causal, in blocks": ("MultiHeadAttention", "", (), 0, {"unidirectional": 1}),
}
CAUSAL = [name for name in MASKS if name.startswith("causal")]


def network(name: str) -> onnx.ModelProto:
    """Return a self-attention with the mask as an input."""
    op, place, shape, kind, given_attributes = MASKS[name]
    attributes = dict(given_attributes)
    apart = attributes.pop("keys", 3) == 4
    flat = op == "MultiHeadAttention"
    whole = (BATCH, ROWS, HEADS * SIZE) if flat else (BATCH, HEADS, ROWS, SIZE)
    inputs = ["q", "k", "v"]
    inputs += {"mask": ["mask"], "padding": ["", "mask"], "bias": ["", "", "mask"], "": []}[place]
    counts = {"num_heads": HEADS} if flat else {}
    node = helper.make_node(op, inputs, ["y"], "attention", domain=MS if flat else "", **counts, **attributes)
    shapes = {"q": whole, **dict.fromkeys("kv", (BATCH, HEADS, KEYS, SIZE) if apart else whole)}
    given = [helper.make_tensor_value_info(x, TensorProto.FLOAT, of) for x, of in shapes.items()]
    given += [helper.make_tensor_value_info("mask", kind, shape)] if shape else []
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, whole)
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(MS, 1)]
    return helper.make_model(helper.make_graph([node], "g", given, [result]), opset_imports=imports, ir_version=11)


def plan(layer: str, shape: tuple[int, ...], axis: int) -> Plan:
    """Return a plan with half of an axis of the attention's output on each of two devices."""
    whole, half = full_region(shape), shape[axis] // 2
    cuts = [(0, half), (half, shape[axis])]
    parts = tuple(
        Part(device, tuple(cut if i == axis else extent for i, extent in enumerate(whole)))
        for device, cut in zip(("pi01", "pi02"), cuts, strict=True)
    )
    return Plan(layers={layer: parts}, source=("pi01",), sink=("pi01",))


def check(name: str, axis: int, change: Callable[[onnx.ModelProto], None] = lambda _: None) -> Check:
    """Run the exact check of the network in halves along an axis, with changed placed models."""
    model = Model.load(network(name))
    compilation = prepare(model)
    assert compilation.layers is not None
    (layer,) = compilation.layers.layers
    shape = compilation.layers.tensors[layer.output].shape
    assert shape is not None
    how = plan(layer.name, shape, axis)

    def program(variant: Model) -> Program:
        made = replace(prepare(variant), plan=how, platform=Platform.load("rpi4x2"))
        placed = PartitionPass().run(made).model
        proto = onnx.ModelProto()
        proto.CopyFrom(placed.proto)
        change(proto)
        return build_program(Model(proto, placed.weights), how.devices)

    return check_exact(compilation.model, program, rules=rules(), layers=compilation.layers)


def axes(name: str) -> tuple[int, ...]:
    """Return batch and heads, and rows if the result does not depend on their numbers."""
    if name in CAUSAL:
        return (0, 2) if MASKS[name][0] == "MultiHeadAttention" else (0, 1)
    return (0, 1, 2)


@pytest.mark.parametrize("name", MASKS)
def test_every_cut_is_exact_and_checks_all_layers(name: str) -> None:
    for axis in axes(name):
        found = check(name, axis)
        assert found.passed and found.applies, found.detail
        assert ", 1 of 1 layers" in found.detail


def other_slices(proto: onnx.ModelProto) -> None:
    """Give a part the mask slice of the other part; without slices, reverse the mask."""
    slices = [node for node in proto.graph.node if node.op_type == "Slice" and node.input[0].startswith("mask")]
    assert slices
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in slices:
        starts, ends = (numpy_helper.to_array(constants[name]) for name in node.input[1:3])
        length = ends - starts
        moved = np.where(starts > 0, 0, ends)
        for place, values in ((1, moved), (2, moved + length)):
            name = f"{node.name}.{place}"
            proto.graph.initializer.append(numpy_helper.from_array(values, name))
            node.input[place] = name


def test_finds_mask_of_another_part() -> None:
    tried = 0
    for name, (_, _, shape, *_) in MASKS.items():
        for axis in axes(name):
            try:
                found = check(name, axis, other_slices)
            except AssertionError:
                # A failed assertion means that the mask is not cut along this axis, so there is nothing to test.
                continue
            assert shape and not found.passed, (name, axis)
            tried += 1
    assert tried >= 15


@pytest.mark.parametrize("name", CAUSAL)
def test_finds_part_without_causal_flag(name: str) -> None:
    def change(proto: onnx.ModelProto) -> None:
        node = next(node for node in proto.graph.node if "Attention" in node.op_type)
        for entry in node.attribute:
            if entry.name in ("is_causal", "unidirectional"):
                entry.i = 0

    for axis in axes(name):
        assert not check(name, axis, change).passed
