"""Placed models keep nodes, and contain only the needed parts of weights."""

from __future__ import annotations

from dataclasses import replace as changed

import numpy as np
import onnx
from support.placing import WHOLE, marks, network, place

from dicompiler import networks
from dicompiler.driver.prepare import prepare
from dicompiler.ir.onnx.model import Model
from dicompiler.ir.plan import Part, Plan
from dicompiler.ir.regions import full_region, with_interval
from dicompiler.partition.bounds_inference import output_shape
from dicompiler.partition.lowering import partition
from dicompiler.partition.placed_model import DEVICE_KEY, read_source_and_copies
from dicompiler.partition.tiling import single_device_plan, split_axis


def test_whole_layers_keep_their_nodes() -> None:
    model = network()
    placed = place(model, Plan(WHOLE, ("a",), ("a",))).model
    for before, after in zip(model.proto.graph.node, placed.proto.graph.node, strict=True):
        bare = onnx.NodeProto()
        bare.CopyFrom(after)
        del bare.metadata_props[:]
        assert bare == before
        assert marks(after)[DEVICE_KEY] == "a"


def test_sliced_weights_contain_only_the_part() -> None:
    lop = (Part("a", ((0, 1), (0, 1), (0, 8), (0, 6))), Part("b", ((0, 1), (1, 4), (0, 8), (0, 6))))
    placed = place(network(), Plan({**WHOLE, "conv1": lop}, ("a",), ("a",))).model
    shapes = {name: shape for name, (_, shape) in placed.initializers().items() if name.startswith("w")}
    assert shapes == {"w[0:1, 0:4, 0:3, 0:3]": (1, 4, 3, 3), "w[1:4, 0:4, 0:3, 0:3]": (3, 4, 3, 3)}
    assert np.array_equal(placed.array("w[1:4, 0:4, 0:3, 0:3]"), network().array("w")[1:4])


def test_large_weights_and_their_slices_are_views() -> None:
    prepared = prepare(Model.load(networks.build("lenet", 0)))
    layers, model = prepared.layers, prepared.model
    assert layers is not None
    layer = next(layer for layer in layers.layers if layer.nodes[layer.anchor].op == "Gemm")
    whole = full_region(output_shape(layers, layer))
    cuts = split_axis(layers, layer, 1, (1.0, 1.0))
    plan = single_device_plan(layers, "a")
    parts = tuple(Part(device, with_interval(whole, 1, cut)) for device, cut in zip("ab", cuts, strict=True))
    placed = partition(changed(prepared, plan=changed(plan, layers={**plan.layers, layer.name: parts}))).model
    kept = {name for name in placed.weights if name in model.weights}
    assert kept and all(placed.weights[name] is model.weights[name] for name in kept)
    views = set(placed.weights) - kept
    assert len(views) == 2
    for name in views:
        original = model.array(name.partition("[")[0])
        assert np.shares_memory(placed.weights[name].array(), original)


def test_unread_initializers_are_dropped() -> None:
    halves = tuple(Part(d, ((0, 1), cut, (0, 8), (0, 6))) for d, cut in (("a", (0, 2)), ("b", (2, 4))))
    placed = place(network(), Plan({**WHOLE, "conv1": halves}, ("a",), ("a",))).model
    read = {name for node in placed.proto.graph.node for name in node.input}
    assert set(placed.initializers()) <= read
    assert "w" not in placed.initializers()


def test_sources_and_sinks_are_stored_in_metadata() -> None:
    placed = place(network(), Plan(WHOLE, ("a", "b"), ("a", "c"))).model
    assert read_source_and_copies(placed.proto) == (("a", "b"), {"y@c": "y"})
